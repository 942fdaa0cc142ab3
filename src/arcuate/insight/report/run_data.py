"""The contents of a run folder, read once and validated for drawing; what is missing is None or empty."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from arcuate.config import parse_yaml, to_tree
from arcuate.data.alphabet import error_rate_name, recorded_classes, token_unit
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, score, score_text, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.experiments.recipe import run_recipe
from arcuate.files import finite_int, finite_number, read_json, read_jsonl, read_npz
from arcuate.insight.charts.curves import rows_by_step
from arcuate.run import WORDS_LABEL, Run

_SPLIT_ORDER = ("val", "test", "dev", "train")  # which results to show by default


@dataclass(frozen=True)
class Decoding:
    """One line of the results: a trial with its reference and hypothesis."""

    trial: str
    session: str
    block: str
    text: str | None
    reference: tuple[str, ...] | None
    hypothesis: tuple[str, ...]
    score: Score | None
    flags: tuple[str, ...] = ()

    @property
    def rate(self) -> float | None:
        return self.score.rate if self.score else None


@dataclass(frozen=True)
class Example:
    """One trial with its recording and log-probabilities."""

    trial: str
    bins: np.ndarray  # (T, C)
    log_probs: np.ndarray  # (F, V)


@dataclass(frozen=True)
class Summarised:
    """Results of one split with their summary, which has an error rate and its interval."""

    rate_key: ClassVar[str]

    split: str
    summary: Mapping[str, Any]

    @property
    def rate(self) -> float | None:
        return finite_number(self.summary.get(self.rate_key))

    @property
    def interval(self) -> tuple[float, float] | None:
        low, high = (finite_number(self.summary.get(f"{self.rate_key}_{end}")) for end in ("low", "high"))
        return (low, high) if low is not None and high is not None else None


@dataclass(frozen=True)
class Results(Summarised):
    rate_key = "per"

    decodings: tuple[Decoding, ...]
    examples: tuple[Example, ...]
    examples_problem: str | None = None

    @property
    def total(self) -> Score:
        return total(d.score for d in self.decodings if d.score)

    @property
    def n_trials(self) -> int:
        return finite_int(self.summary.get("n_trials")) or len(self.decodings)


@dataclass(frozen=True)
class DecodedText:
    """One line of the words that `arcuate decode` wrote."""

    trial: str
    reference: str | None
    text: str
    score: Score | None  # by words

    @property
    def rate(self) -> float | None:
        return self.score.rate if self.score else None


@dataclass(frozen=True)
class WordResults(Summarised):
    """The decoding to words of one split."""

    rate_key = "wer"

    texts: tuple[DecodedText, ...]


@dataclass(frozen=True)
class RunData:
    run: Run
    recipe_text: str
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    training: tuple[Mapping[str, Any], ...]  # log rows in order, one per step
    validation: Mapping[str, tuple[Mapping[str, Any], ...]]  # the same by split
    results: Results | None
    other_results: tuple[tuple[str, Mapping[str, Any]], ...]  # name, summary
    words: WordResults | None = None  # words of the same split as the results, if it was decoded

    def setting(self, path: str) -> Any:
        """A setting of the recipe by its dotted path; None if the recipe lacks it."""
        return lookup(self.recipe, path)

    @property
    def selected_on(self) -> str | None:
        """The split whose error rate selected the checkpoint."""
        split = self.results.summary.get("selected_on") if self.results else None
        split = split or self.environment.get("selected_on")
        return str(split) if split else None

    @property
    def classes(self) -> tuple[str, ...]:
        """The alphabet of the model."""
        return recorded_classes(self.environment)

    @property
    def unit(self) -> str:
        """What a token is called, such as phoneme."""
        return token_unit(self.classes)

    @property
    def rate_name(self) -> str:
        return f"{self.unit.capitalize()} error rate"

    @property
    def short_rate_name(self) -> str:
        return error_rate_name(self.classes)

    @property
    def sessions(self) -> tuple[str, ...]:
        """The sessions of the data in recording order."""
        sessions = lookup(self.environment, "data.sessions")
        return tuple(str(s) for s in sessions) if isinstance(sessions, list) else ()

    @property
    def simulated(self) -> bool:
        """Whether the run was trained on simulated data."""
        return lookup(self.environment, "data.simulated") is True

    @property
    def last_step(self) -> int | None:
        rows = (*self.training, *(row for rows in self.validation.values() for row in rows))
        return max((row["step"] for row in rows), default=None)

    @property
    def best(self) -> tuple[str, int, float] | None:
        """Split, step and error rate of the best validation in the log, on the selection split if it is known."""
        splits = [self.selected_on] if self.selected_on in self.validation else list(self.validation)
        rates = [
            (rate, finite_number(row.get("loss")) or 0.0, row["step"], split)  # ties go to the lower loss
            for split in splits
            if split is not None
            for row in self.validation[split]
            if (rate := finite_number(row.get("per"))) is not None
        ]
        if not rates:
            return None
        rate, _, step, split = min(rates)
        return split, step, rate

    @property
    def training_seconds(self) -> float | None:
        return training_seconds(self.training)


def lookup(tree: Any, path: str) -> Any:
    """The value at a dotted path in nested mappings; None if a part of the path is missing."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def training_seconds(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Training time: logged seconds per step, times the steps that each row covers."""
    spent, before = 0.0, 0
    for row in rows:
        seconds, step = finite_number(lookup(row, "cost.seconds_per_step")), finite_int(row.get("step"))
        if seconds is not None and step is not None:
            spent += seconds * max(step - before, 0)
            before = step
    return spent or None


def read_run_data(run: Run, split: str | None = None) -> RunData:
    text = run.recipe_file.read_text("utf-8", errors="replace") if run.recipe_file.is_file() else ""
    rows = run.metrics()
    shown = _choose_results(run, split)
    splits = sorted({str(row["split"]) for row in rows if row.get("split") and row["split"] != "train"})
    return RunData(
        run=run,
        recipe_text=text,
        recipe=_read_recipe(run, text),
        environment=run.environment() if run.environment_file.exists() else {},
        training=rows_by_step(row for row in rows if row.get("split") == "train"),
        validation={name: rows_by_step(r for r in rows if str(r.get("split")) == name) for name in splits},
        results=_read_results(run, shown) if shown else None,
        other_results=tuple(
            (name, read_json(summary))
            for name, summary in _result_summaries(run).items()
            if name != shown and summary.exists()
        ),
        words=_read_words(run, shown.partition(".")[0] if shown else None),
    )


def _read_recipe(run: Run, text: str) -> Mapping[str, Any]:
    """The recipe as a tree with current setting names; the unchanged file content if it does not validate."""
    try:
        return to_tree(run_recipe(run))
    except UserError:
        pass
    try:
        tree = parse_yaml(text)
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _result_summaries(run: Run) -> dict[str, Path]:
    """The phoneme results of the folder by name (split or split.label), with the paths of their summaries."""
    names = sorted(p.name.removesuffix(".jsonl") for p in (run.path / "results").glob("*.jsonl"))
    shown = [name for name in names if not name.startswith(".") and name.partition(".")[2] != WORDS_LABEL]
    return {name: run.path / "results" / f"{name}.json" for name in shown}


def _read_words(run: Run, split: str | None) -> WordResults | None:
    """The words of a split; without phoneme results, those of the first decoded split."""
    for name in _SPLIT_ORDER if split is None else (split,):
        file, summary = run.results_file(name, WORDS_LABEL), run.results_file(name, WORDS_LABEL, "json")
        if file.is_file():
            texts = tuple(_read_text(row) for row in read_jsonl(file))
            counts = total(t.score for t in texts if t.score)
            found = read_json(summary) if summary.is_file() else {"wer": counts.rate, "n_words": counts.length}
            return WordResults(name, found, texts)
    return None


def _read_text(row: Mapping[str, Any]) -> DecodedText:
    reference = str(row["reference"]) if isinstance(row.get("reference"), str) else None
    text = str(row.get("text") or "")
    return DecodedText(
        str(row.get("id", "")), reference, text, score_text(reference, text).words if reference is not None else None
    )


def _choose_results(run: Run, split: str | None) -> str | None:
    summaries = _result_summaries(run)
    if split is not None:
        if split not in summaries:
            raise UserError(
                f"{run.path} has no results on {split!r}; create them with: arcuate evaluate {run.path} --split {split}"
            )
        return split

    def rank(name: str) -> tuple[bool, int, str]:
        summary = summaries[name]
        unscored = summary.exists() and finite_number(read_json(summary).get("per")) is None
        return unscored, _SPLIT_ORDER.index(name) if name in _SPLIT_ORDER else len(_SPLIT_ORDER), name

    return min(summaries, key=rank, default=None)


def _read_results(run: Run, split: str) -> Results:
    decodings = tuple(_read_decoding(row) for row in read_jsonl(run.results_file(split)))
    summary_file = run.results_file(split, ending="json")
    summary = read_json(summary_file) if summary_file.exists() else _summarise(decodings)
    examples, problem = _read_examples(run.results_file(split, ending="npz"))
    return Results(split, summary, decodings, examples, problem)


def _read_decoding(row: Mapping[str, Any]) -> Decoding:
    reference = _strings(row["reference"]) if isinstance(row.get("reference"), list) else None
    hypothesis = _strings(row.get("hypothesis"))
    return Decoding(
        trial=str(row.get("trial", "")),
        session=str(row.get("session", "")),
        block=str(row.get("block", "")),
        text=str(row["text"]) if row.get("text") else None,
        reference=reference,
        hypothesis=hypothesis,
        score=score(reference, hypothesis) if reference is not None else None,
        flags=_strings(row.get("flags")),
    )


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


def _summarise(decodings: tuple[Decoding, ...]) -> dict[str, Any]:
    """The part of a summary that can be computed from the decodings."""
    scores = [d.score for d in decodings if d.score]
    low, high = bootstrap_interval(scores)
    return {"per": total(scores).rate, "per_low": low, "per_high": high, "n_trials": len(decodings)}


def _read_examples(path: Path) -> tuple[tuple[Example, ...], str | None]:
    """Example trials, or the reason why there are none."""
    if not path.exists():
        return (), None
    try:
        arrays = read_npz(path)
        return tuple(
            Example(str(trial), _matrix(arrays[f"bins_{i}"]), _matrix(arrays[f"log_probs_{i}"]))
            for i, trial in enumerate(arrays["trials"].reshape(-1)[:3])
        ), None
    except (OSError, ValueError, KeyError) as error:
        return (), f"{path.name} cannot be read: {error}"


def _matrix(array: np.ndarray) -> np.ndarray:
    if array.ndim != 2 or not array.size:
        raise ValueError(f"expected a non-empty array with two axes, got shape {array.shape}")
    return np.asarray(array, dtype=np.float64)
