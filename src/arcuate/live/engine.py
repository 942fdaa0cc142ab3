"""`Engine`: the model, word search and rescorer that all streams share, without the state of any stream."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import boundary_index
from arcuate.decoding.class_order import word_order
from arcuate.decoding.config import DecodingConfig, read_decoding_config
from arcuate.decoding.delay import model_delay
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.joint import JointSearch, JointWordSearch, joint_search
from arcuate.decoding.transducer import require_transducer
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.causal import CausalModel, score_sentences
from arcuate.evaluation.rescore import ScoreWeights
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.live.adaptation import AdaptationSetup
from arcuate.models.interfaces import require_causal
from arcuate.models.layout import Head, Layout
from arcuate.models.model import Model, build_on_meta


@dataclass(frozen=True, eq=False)
class Rescorer:
    """Rescores n-best lists at the end of a sentence with a causal language model."""

    model: CausalModel
    alpha: float = 0.5  # weight of the causal model against the n-gram
    n_best: int = 20

    def __call__(self, nbest: Sequence[Hypothesis], lm_weight: float) -> list[Hypothesis]:
        """Sort hypotheses by their new total, best first, with the causal model's score as `llm`."""
        texts = [hypothesis.text or "" for hypothesis in nbest]
        causal = score_sentences(self.model, texts)
        acoustic = np.array([h.scores["acoustic"] + h.scores["bonus"] for h in nbest])
        ngram = np.array([h.scores["lm"] for h in nbest])
        weights = ScoreWeights(1 / lm_weight if lm_weight > 1e-6 else 1.0, self.alpha)
        totals = weights.interpolate(acoustic, ngram, causal)
        scored = [
            replace(hypothesis, scores={**hypothesis.scores, "llm": float(llm)}, total=float(total))
            for hypothesis, llm, total in zip(nbest, causal, totals, strict=True)
        ]
        order = sorted(range(len(scored)), key=lambda i: (-round(float(totals[i]), 9), i))
        return [scored[i] for i in order]


@dataclass(frozen=True, eq=False)
class Engine:
    """Weights, search and rescorer shared by all streams."""

    model: Model  # normalises as in training
    rolling_model: Model  # the same weights, normalising by past bins
    search: WordSearch | None  # None: decode phonemes
    rescorer: Rescorer | None
    layout: Layout
    lock: threading.Lock  # the search has only one set of work buffers
    head: Head = "ctc"
    joint: JointWordSearch | JointSearch | None = None  # search with the transducer, alone or combined with CTC
    adaptation: AdaptationSetup | None = None


def make_engine(
    model: Model, search: WordSearch | None, rescorer: Rescorer | None = None, head: Head = "ctc"
) -> Engine:
    """Prepare a model for streaming; it must be causal."""
    require_causal(model.config.settings.encoder.causal)
    model = model.eval().requires_grad_(False)
    per_block = model.config.settings.front_end.normalise == "block"
    return Engine(
        model,
        _with_rolling_normalisation(model) if per_block else model,
        search,
        rescorer,
        describe_layout(model),
        threading.Lock(),
        head,
        None if head == "ctc" else _joint_search(model, search, head),
    )


def _joint_search(model: Model, search: WordSearch | None, head: Head) -> JointWordSearch | JointSearch:
    """Search with the transducer for words, or for tokens without a word search."""
    transducer = require_transducer(model.transducer, "this model").for_search()
    if search is not None and model.config.classes != search.classes:  # the transducer's outputs cannot be reordered
        raise UserError(f"--head {head} needs a model whose classes are in the order of the word search; use ctc")
    return joint_search(transducer, head, search)


def _with_rolling_normalisation(model: Model) -> Model:
    """Return a copy that shares the weights of a model trained on block statistics and normalises causally."""
    settings = model.config.settings
    front_end = settings.front_end.model_copy(update={"normalise": "rolling"})
    config = model.config.model_copy(update={"settings": settings.model_copy(update={"front_end": front_end})})
    rolling = build_on_meta(config)
    rolling.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return rolling.eval()


def load_search(
    model: Model, lm: str, lexicon: str, decoding: DecodingConfig | str | Path | None = None, beam: int | None = None
) -> WordSearch:
    """Create the word search of `arcuate decode` over the classes of a model."""
    if not isinstance(decoding, DecodingConfig):
        decoding = DecodingConfig() if decoding is None else read_decoding_config(Path(decoding))[0]
    if beam is not None:
        decoding = decoding.model_copy(update={"beam": beam})
    classes = word_order(model.config.classes).classes
    words, ngram = open_lexicon(lexicon, classes), open_model(lm)
    if tuple(words.classes) != classes:
        raise UserError(f"the lexicon {lexicon} has different classes from the model; give one with the same classes")
    return build_word_search(words, ngram, decoding, boundary=boundary_index(classes))


def describe_layout(model: Model) -> Layout:
    """Layout of a causal model."""
    config, front_end = model.config, model.config.settings.front_end
    return Layout(
        config.classes,
        config.sessions,
        config.n_channels,
        front_end.patch.bins,
        front_end.patch.stride,
        model.front_end.right,
        front_end.normalise,
        front_end.log1p,
        front_end.rolling_bins,
        model_delay(model),
    )
