"""n-best lists with their scores by source, as the word search writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.combine.choose import n_words, word_errors
from arcuate.evaluation.combine.fit import Choice, cross_fit, fold_of
from arcuate.evaluation.combine.lists import CandidateList, finite_number, parse_list
from arcuate.files import read_jsonl


@dataclass(frozen=True, eq=False)
class NBest:
    """The readings of one trial: sound and n-gram in nat, one entry per text."""

    found: CandidateList
    acoustic: np.ndarray  # (n,) with the search's bonuses
    ngram: np.ndarray  # (n,)
    row: Mapping[str, Any]  # the line as it was read


def read_nbest(path: Path, limit: int | None = None) -> list[NBest]:
    """Lines with `nbest`, each entry with `text`, `acoustic` and `lm` (and `bonus`); the first `limit` entries."""
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} holds no lines; write it with: arcuate decode … --out {path}")
    seen: dict[str, int] = {}
    lists = []
    for number, row in enumerate(rows, start=1):
        where = f"{path} line {number}"
        if not isinstance(row.get("nbest"), list):
            raise UserError(f"{where} has no nbest list; write it with: arcuate decode … --out {path}")
        cut = {**row, "nbest": row["nbest"][:limit]}
        found = parse_list(cut, where, f"line {number}")
        if found.id in seen:
            raise UserError(
                f"{where}: trial {found.id!r} was on line {seen[found.id]} already; keep one of the two"
            )
        seen[found.id] = number
        lists.append(NBest(found, *_sources(cut["nbest"], where), cut))
    return lists


def _sources(entries: Sequence[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    sound, ngram = [], []
    for i, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or "acoustic" not in entry or "lm" not in entry:
            raise UserError(f"{where}: entry {i} of nbest needs acoustic and lm beside its text")
        bonus = finite_number(entry.get("bonus", 0.0), f"{where}: bonus of entry {i}")
        sound.append(finite_number(entry["acoustic"], f"{where}: acoustic of entry {i}") + bonus)
        ngram.append(finite_number(entry["lm"], f"{where}: lm of entry {i}"))
    return np.array(sound, dtype=np.float64), np.array(ngram, dtype=np.float64)


def search_balance(lists: Sequence[NBest]) -> float:
    """The weight of sound against one nat of n-gram that the search itself used, read off its scores."""
    ratios = [
        (score - sound) / ngram
        for nbest in lists
        if nbest.found.scores is not None
        for score, sound, ngram in zip(nbest.found.scores, nbest.acoustic, nbest.ngram, strict=True)
        if abs(ngram) > 1e-6
    ]
    weight = float(np.median(ratios)) if ratios else 0.0
    return 1 / weight if weight > 1e-6 else 1.0


# Sound, n-gram and causal model in one score, with weights that are given or fitted on other trials.


@dataclass(frozen=True)
class Blend:
    """The weights of a score; `scale` turns it into log-probabilities of the candidates."""

    acoustic: float
    alpha: float
    length: float = 0.0
    scale: float = 1.0

    def __call__(self, nbest: NBest, causal: np.ndarray) -> np.ndarray:
        """Scores of all entries: (n,)"""
        total = self.acoustic * nbest.acoustic + (1 - self.alpha) * nbest.ngram + self.alpha * causal
        return self.scale * (total + self.length * word_counts(nbest))


def word_counts(nbest: NBest) -> np.ndarray:
    return np.array([len(text.split()) for text in nbest.found.texts], dtype=np.float64)


def as_blend(weights: np.ndarray) -> Blend:
    """Weights of (acoustic, n-gram, causal, words) in the terms of the formula."""
    acoustic, ngram, causal, length = (float(w) for w in weights)
    scale = ngram + causal
    if scale <= 1e-9:  # neither language model was of use: the sound alone decides
        return Blend(1.0, 0.0, 0.0, max(acoustic, 1e-9))
    return Blend(acoustic / scale, causal / scale, length / scale, scale)


def fit_blends(
    lists: Sequence[NBest], causal: Sequence[np.ndarray], n_folds: int, start: Blend
) -> tuple[list[Blend], Blend]:
    """For each trial the blend fitted on the other folds (whole sessions), and the blend fitted on all."""
    choices = [_choice(nbest, scores) for nbest, scores in zip(lists, causal, strict=True)]
    folds = fold_of([nbest.found.session for nbest in lists], n_folds)
    prior = (start.acoustic, 1 - start.alpha, start.alpha, start.length)
    apart, whole = cross_fit(choices, folds, prior, free=[3])
    return [as_blend(weights) for weights in apart], as_blend(whole)


def _choice(nbest: NBest, causal: np.ndarray) -> Choice | None:
    reference = nbest.found.reference
    if reference is None or not nbest.found.texts:
        return None
    features = np.stack([nbest.acoustic, nbest.ngram, causal, word_counts(nbest)], axis=1)
    return Choice(features, word_errors(reference, nbest.found.texts), n_words(reference))


def best_text(nbest: NBest, scores: np.ndarray) -> str:
    """The highest score; of equals the one the search had put first."""
    return nbest.found.texts[int(np.argmax(np.round(scores, 9)))] if len(scores) else ""
