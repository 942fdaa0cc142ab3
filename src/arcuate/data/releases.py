"""Facts about the public data sets: results published on them.

Error rates in percent as printed by their sources. PER is greedy and micro-averaged; a WER depends on the language
model, which is therefore part of the system's name.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedResult:
    """One published error rate."""

    system: str
    dataset: str  # b2t24 or b2t25
    split: str
    metric: str  # PER or WER
    percent: float
    streaming: bool  # whether the system decodes while speech is attempted
    source: str


_HOLDOUT, _VAL, _PRIVATE = "competition hold-out, 1,200 trials", "validation, 1,426 trials", "private test, Kaggle"
_TEST, _PART_OF_TEST = "test folder, 880 trials", "test folder, 600 trials of 15 sessions"
_PAPER = "Feghhi et al. 2025, arXiv 2507.02800"
_FILES = "result files of github.com/ebrahimfeghhi/transformers_with_dietcorp and /brainaudio"
_LIGHTBEAM = "result files of github.com/ebrahimfeghhi/brainaudio, arXiv 2603.14002"
_WILLETT = "Willett et al. 2023, notebook of github.com/fwillett/speechBCI"
_CARD = "Card et al. 2024, README of nejm-brain-to-text"

RESULTS = (
    PublishedResult("unidirectional GRU", "b2t24", _TEST, "PER", 21.75, True, _FILES),
    PublishedResult("bidirectional GRU", "b2t24", _TEST, "PER", 20.5, False, _FILES),
    PublishedResult("causal time-masked Transformer", "b2t24", _TEST, "PER", 15.91, True, _FILES),
    PublishedResult("unidirectional GRU, 3-gram", "b2t24", _PART_OF_TEST, "WER", 18.9, True, _WILLETT),
    PublishedResult("unidirectional GRU, 5-gram and OPT-6.7B", "b2t24", _PART_OF_TEST, "WER", 13.7, True, _WILLETT),
    PublishedResult("unidirectional GRU, 3-gram", "b2t24", _HOLDOUT, "WER", 15.25, True, _PAPER),
    PublishedResult("unidirectional GRU, 5-gram and OPT-6.7B", "b2t24", _HOLDOUT, "WER", 11.12, True, _PAPER),
    PublishedResult("causal Transformer, 3-gram", "b2t24", _HOLDOUT, "WER", 12.17, True, _PAPER),
    PublishedResult("causal Transformer, 5-gram and OPT-6.7B", "b2t24", _HOLDOUT, "WER", 8.18, True, _PAPER),
    PublishedResult("DCoND-LIFT, 10 models and GPT-3.5", "b2t24", _HOLDOUT, "WER", 5.77, False, _PAPER),
    PublishedResult(
        "10 bidirectional Transformers, LightBeam, Llama", "b2t24", _HOLDOUT, "WER", 5.01, False, _LIGHTBEAM
    ),
    PublishedResult("official GRU", "b2t25", _VAL, "PER", 10.1, True, _CARD),
    PublishedResult("causal time-masked Transformer", "b2t25", _VAL, "PER", 8.17, True, _LIGHTBEAM),
    PublishedResult("official GRU, 5-gram and OPT-6.7B", "b2t25", _PRIVATE, "WER", 7.00, True, _LIGHTBEAM),
    PublishedResult("official GRU, LightBeam", "b2t25", _PRIVATE, "WER", 6.47, True, _LIGHTBEAM),
    PublishedResult("causal Transformer, LightBeam", "b2t25", _PRIVATE, "WER", 4.59, True, _LIGHTBEAM),
    PublishedResult(
        "10 bidirectional Transformers, LightBeam, Llama", "b2t25", _PRIVATE, "WER", 2.36, False, _LIGHTBEAM
    ),
)


def published_results(layout: object, simulated: bool) -> tuple[PublishedResult, ...]:
    """Published results on a data set; none for simulated data, which resemble a release only in their files."""
    return () if simulated else tuple(r for r in RESULTS if r.dataset == layout)
