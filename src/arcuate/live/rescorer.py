"""At the end of a sentence: its n-best readings scored anew with a causal language model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from arcuate.combine.lists import CandidateList
from arcuate.decode.hypothesis import Hypothesis
from arcuate.rescore.blend import Blend
from arcuate.rescore.causal import CausalModel, load_causal, score_sentences
from arcuate.rescore.nbest import NBest

N_BEST = 20
ALPHA = 0.5


@dataclass(frozen=True, eq=False)
class Rescorer:
    """A causal model, and how much it counts against the n-gram."""

    model: CausalModel
    alpha: float = ALPHA
    n_best: int = N_BEST

    def __call__(self, readings: Sequence[Hypothesis], lm_weight: float) -> list[Hypothesis]:
        """The readings by their new totals, best first, with the causal model's score as `llm`."""
        texts = [reading.text or "" for reading in readings]
        causal = score_sentences(self.model, texts)
        blend = Blend(1 / lm_weight if lm_weight > 1e-6 else 1.0, self.alpha)
        totals = blend(as_nbest(readings, texts), causal)
        scored = [
            replace(reading, scores={**reading.scores, "llm": float(llm)}, total=float(total))
            for reading, llm, total in zip(readings, causal, totals, strict=True)
        ]
        order = sorted(range(len(scored)), key=lambda i: (-round(float(totals[i]), 9), i))
        return [scored[i] for i in order]


def as_nbest(readings: Sequence[Hypothesis], texts: Sequence[str]) -> NBest:
    sound = [reading.scores["acoustic"] + reading.scores["bonus"] for reading in readings]
    ngram = [reading.scores["lm"] for reading in readings]
    return NBest(CandidateList("live", tuple(texts)), np.array(sound), np.array(ngram), {})


def load_rescorer(path: str | Path, alpha: float = ALPHA, n_best: int = N_BEST) -> Rescorer:
    return Rescorer(load_causal(Path(path)), alpha, n_best)
