"""Published results on the public data sets, to show beside a run on the same data.

Error rates in percent as printed by their sources. PER is greedy and micro-averaged; a WER depends on the language
model, which is therefore part of the system's name.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.files import read_json
from arcuate.insight.overlay import is_simulated
from arcuate.run import WORDS_LABEL, Run, RunLike, open_run

DATASETS = {"b2t24": "Brain-to-Text '24 (T12)", "b2t25": "Brain-to-Text '25 (T15)"}


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


@dataclass(frozen=True)
class PublishedComparison:
    """Error rates of a run, and the published ones on the same data set."""

    run: str
    dataset: str | None
    simulated: bool
    split: str
    rate_name: str  # PER, or CER for a run on characters
    per: float | None
    wer: float | None
    published: tuple[PublishedResult, ...]  # empty for simulated data
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "published": [asdict(result) for result in self.published]}


def published_results(layout: object, simulated: bool) -> tuple[PublishedResult, ...]:
    """Published results on a data set; none for simulated data, which resemble a release only in their files."""
    return () if simulated else tuple(r for r in RESULTS if r.dataset == layout)


def compare_published(run: RunLike, split: str = "val") -> PublishedComparison:
    """The results of a run beside the published ones on the same data set."""
    opened = run if isinstance(run, Run) else open_run(run)
    data = opened.data()
    dataset = data.get("layout") if data.get("layout") in DATASETS else None
    simulated = is_simulated(opened)
    if simulated:
        note = "the run was trained on simulated data, so published error rates are not comparable"
    elif dataset is None:
        note = "no results are known for the data set of this run"
    else:
        note = "compare equal splits only; a WER depends on the language model named with the system"
    per, wer = _rate(opened, split, None, "per"), _rate(opened, split, WORDS_LABEL, "wer")
    if per is None and wer is None:
        raise UserError(
            f"{opened.path} has no results on {split}; create them with: arcuate evaluate {opened.path} --split {split}"
        )
    shown, name = published_results(dataset, simulated), run_rate_name(opened)
    return PublishedComparison(str(opened.path), dataset, simulated, split, name, per, wer, shown, note)


def _rate(run: Run, split: str, label: str | None, key: str) -> float | None:
    file = Path(run.results_file(split, label, "json"))
    value = read_json(file).get(key) if file.is_file() else None
    return float(value) if isinstance(value, int | float) else None
