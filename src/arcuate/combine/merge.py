"""The n-best lists of several decoders as one list per trial: each decoder has one vote, spread over its readings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from arcuate.combine.frames import refuse_other_trials
from arcuate.combine.lists import CandidateList
from arcuate.combine.risk import softmax
from arcuate.errors import UserError


def merge_lists(
    paths: Sequence[Path], decodings: Sequence[Sequence[CandidateList]], scale: float = 1.0
) -> list[CandidateList]:
    """Candidates of all decoders with the logarithm of their share as score; refuses decodings of other trials."""
    first = [found.id for found in decodings[0]]
    for path, lists in zip(paths[1:], decodings[1:], strict=True):
        refuse_other_trials(str(paths[0]), first, str(path), [found.id for found in lists])
    return [merge_trial(paths, found, scale) for found in zip(*decodings, strict=True)]


def merge_trial(paths: Sequence[Path], lists: Sequence[CandidateList], scale: float) -> CandidateList:
    said = {found.reference for found in lists if found.reference is not None}
    if len(said) > 1:
        raise UserError(
            f"{paths[0]} and the others disagree on what was to be said in trial {lists[0].id};"
            " they were not scored on the same data"
        )
    texts: list[str] = []
    shares: list[float] = []
    for found in lists:
        texts += found.texts
        spread = softmax(found.scores, scale) if found.scores else np.ones(len(found.texts))
        shares += (spread / spread.sum()).tolist() if len(spread) else []
    scores = tuple(float(np.log(max(share, 1e-300))) for share in shares)
    models = dict.fromkeys(found.lm for found in lists if found.lm is not None)
    read = [found.in_lm_text for found in lists if found.in_lm_text is not None]
    return replace(
        lists[0],
        texts=tuple(texts),
        scores=scores,
        reference=next(iter(said), None),
        in_lm_text=any(read) if read else None,
        lm=" / ".join(models) or None,
    )
