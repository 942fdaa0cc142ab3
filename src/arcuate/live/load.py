"""`load_decoder`: what `arcuate live` decodes with; a run may adapt online and rescore its sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.load import load
from arcuate.decoding.options import DecoderOptions
from arcuate.errors import UserError
from arcuate.exported.file import is_export
from arcuate.hub import local_path
from arcuate.progress import Progress
from arcuate.run import open_run

if TYPE_CHECKING:
    from arcuate.evaluation.causal import CausalModel

_CACHED_ROWS = 1 << 25  # of the lookahead, 12 bytes each: neither memory nor the time of a frame grows while decoding


@dataclass(frozen=True, eq=False)
class CausalRescorer:
    """Rescores n-best lists at the end of a sentence with a causal language model."""

    model: "CausalModel"
    alpha: float = 0.5  # weight of the causal model against the n-gram
    n_best: int = 20

    def __call__(self, n_best: Sequence[Hypothesis], lm_weight: float) -> list[Hypothesis]:
        """Sort hypotheses by their new total, best first, with the causal model's score as `llm`."""
        from arcuate.evaluation.causal import score_sentences
        from arcuate.evaluation.rescore import ScoreWeights, rank

        causal = score_sentences(self.model, [hypothesis.text or "" for hypothesis in n_best])
        weights = ScoreWeights(1 / lm_weight if lm_weight > 1e-6 else 1.0, self.alpha)
        rows = [
            (h.scores["acoustic"] + h.scores["bonus"], h.scores["lm"], llm, 0.0)
            for h, llm in zip(n_best, causal, strict=True)
        ]
        return rank(n_best, causal, np.array(rows).reshape(-1, 4) @ weights.by_source)


def load_decoder(
    path: str | Path, options: DecoderOptions, warm: bool = True, progress: Progress | None = None
) -> Decoder:
    """Load a run or an exported model for streaming.

    With `options.adapt` the session layer may be updated after each sentence, and the session may be new to the model.
    Drift is measured against the known sessions of `options.data` (default: the run's own store); their trials are
    decoded first, which `progress` reports.
    """
    path = local_path(path)
    if is_export(path):
        for name, is_given in (("adapt", options.adapt), ("llm", options.llm is not None)):
            if is_given:
                raise UserError(f"{path} is an exported model, which {name} cannot use; pass the run folder instead")
        decoder, adapter = load(path, options), None
    else:
        import torch

        torch.set_num_threads(1)  # one stream is bound by memory bandwidth; other cores serve the page
        decoder, adapter = load(path, options), None
        decoder.check_causal()
        if options.adapt:
            from arcuate.live.adaptation import load_adapter

            adapter = load_adapter(path, decoder, options.data, progress)
    if options.llm is not None and not decoder.decodes_words:
        raise UserError("rescoring needs words; choose a language model")
    rescorer = None
    if options.llm is not None:
        from arcuate.evaluation.causal import load_causal

        rescorer = CausalRescorer(load_causal(options.llm))
    if warm:
        decoder.warm_up(_CACHED_ROWS)
    return Decoder(decoder.model, decoder.search, options.session, adapter=adapter, rescorer=rescorer)


def find_model(path: str | Path) -> Path:
    """The folder of a run, or the exported file."""
    path = local_path(path)
    return path if is_export(path) else open_run(path).path
