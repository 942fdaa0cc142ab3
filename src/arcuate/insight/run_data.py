"""A run folder, read once: what is missing is None or empty, and what cannot be read is listed as a problem."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from arcuate.config import Change
from arcuate.data.alphabet import error_rate_name, recorded_classes, token_unit
from arcuate.data.text import normalise_text
from arcuate.errors import UserError, check_regular
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.experiments.targets import TargetOutcome, judge_target
from arcuate.files import finite_int, finite_number, read_json, read_jsonl, read_npz
from arcuate.insight.charts.curves import rows_by_step
from arcuate.run import WORDS_LABEL, Run, split_parent, unfinished_reason

_MAX_LOG_BYTES = 2**31
_MAX_PROBLEM = 300  # characters; a recipe of another version may have a hundred unknown settings
SPLITS = ("val", "test", "dev", "train")  # which results to show by default
Row = Mapping[str, Any]
Diagnose = Callable[[Path], Any]  # `arcuate.doctor.diagnose`, passed in because the doctor is built on this package


class Best(NamedTuple):
    """The validation with the lowest error rate."""

    rate: float
    loss: float  # ties go to the lower loss
    step: int
    split: str


@dataclass(frozen=True)
class Verdict:
    """What a table of runs states of a diagnosis, without its curves."""

    primary: str
    secondary: tuple[str, ...] = ()
    since_step: int | None = None
    evidence: tuple[str, ...] = ()
    suggestion: str = ""


@dataclass(frozen=True)
class Parent:
    """The run or recipe that a run is compared with."""

    name: str
    kind: str  # "weights" (--from), "base" (ablation baseline), "run" (nearest earlier run) or "recipe" (packaged)
    changes: tuple[Change, ...]
    data: "RunData | None" = field(default=None, repr=False)


@dataclass(frozen=True)
class RunData:
    """A run: recipe, log, verdict, and the summaries of its results."""

    run: Run
    name: str  # relative to the listed folder
    recipe: Recipe | None = None
    environment: Row = field(default_factory=dict)
    rows: tuple[Row, ...] = field(default=(), repr=False)  # of metrics.jsonl, those before a rewind included
    incidents: tuple[Row, ...] = field(default=(), repr=False)
    summaries: Mapping[str, Row] = field(default_factory=dict, repr=False)  # of split[.label]
    unfinished: str | None = None  # why the training is not complete
    diagnosis: Verdict | None = None
    problems: tuple[str, ...] = ()
    parent: Parent | None = None

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The alphabet of the model."""
        return recorded_classes(self.environment)

    @property
    def unit(self) -> str:
        """What a token is called, such as phoneme."""
        return token_unit(self.classes)

    @property
    def rate_name(self) -> str:
        """PER, or CER for a run on characters."""
        return error_rate_name(self.classes)

    @property
    def rate_title(self) -> str:
        return f"{self.unit.capitalize()} error rate"

    @property
    def started(self) -> str:
        return str(self.environment.get("started") or "")

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
    def weights_from(self) -> Path | None:
        """The run whose weights initialised this one (`--from`)."""
        parent = self.environment.get("parent")
        return split_parent(str(parent))[0] if parent else None

    @property
    def revision(self) -> str | None:
        """The code version used for training: the commit, or the release if no commit is recorded."""
        revision = self.environment.get("revision") or self.environment.get("arcuate")
        return str(revision)[:12] if revision else None

    @property
    def ablation(self) -> Path | None:
        """The folder of the ablation that this run is part of: its runs are stored by arm and seed."""
        folder = self.run.path.resolve().parent.parent
        return folder if (folder / "experiment.json").is_file() else None

    @property
    def verdict(self) -> str:
        """The verdict of the doctor; a finished calibration is too short to be judged by its curve."""
        verdict = self.diagnosis.primary if self.diagnosis else ""
        is_calibrated = verdict == "too_short" and self.unfinished is None and self.run.calibration_file.is_file()
        return "calibrated" if is_calibrated else verdict

    # The log. `best` and `last_rate` are those of the split that selected the checkpoint, if it is known.

    @cached_property
    def training(self) -> tuple[Row, ...]:
        return rows_by_step(row for row in self.rows if row.get("split") == "train")

    @cached_property
    def validation(self) -> dict[str, tuple[Row, ...]]:
        """Validation rows by split."""
        names = sorted({s for row in self.rows if isinstance(s := row.get("split"), str)} - {"train"})
        found = {name: rows_by_step(row for row in self.rows if row.get("split") == name) for name in names}
        return {name: rows for name, rows in found.items() if rows}

    @property
    def selection_split(self) -> str | None:
        split = self.environment.get("selected_on")
        return split if isinstance(split, str) and split in self.validation else min(self.validation, default=None)

    @cached_property
    def validations(self) -> tuple[Row, ...]:
        """Every validation on the selection split, also of steps that a rewind undid: their checkpoint may be best."""
        split = self.selection_split
        return tuple(
            row for row in self.rows if split and row.get("split") == split and finite_int(row.get("step")) is not None
        )

    @cached_property
    def best(self) -> Best | None:
        return min(
            (
                Best(rate, finite_number(row.get("loss")) or 0.0, int(row["step"]), str(row["split"]))
                for row in self.validations
                if (rate := finite_number(row.get("per"))) is not None
            ),
            default=None,
        )

    @property
    def last_rate(self) -> float | None:
        return next((r for row in self.validations[::-1] if (r := finite_number(row.get("per"))) is not None), None)

    @property
    def last_step(self) -> int | None:
        return max((step for row in self.rows if (step := finite_int(row.get("step"))) is not None), default=None)

    @property
    def planned_steps(self) -> int | None:
        return self.recipe.train.steps if self.recipe else None

    @property
    def seconds(self) -> float | None:
        """Training time: logged seconds per step, times the steps that each row covers."""
        spent, before = 0.0, 0
        for row in self.training:
            seconds = finite_number(lookup(row, "cost.seconds_per_step"))
            if seconds is not None:
                spent += seconds * (row["step"] - before)
                before = row["step"]
        return spent or None

    # Results and target.

    @property
    def words(self) -> dict[str, Row]:
        """Summaries of the latest decoding to words by split."""
        found = {name.partition("."): summary for name, summary in self.summaries.items()}
        return {split: summary for (split, _, label), summary in found.items() if label == WORDS_LABEL}

    @property
    def results(self) -> dict[str, Row]:
        """Summaries of the evaluations by split[.label]."""
        return {name: s for name, s in self.summaries.items() if name.partition(".")[2] != WORDS_LABEL}

    @property
    def best_wer(self) -> tuple[float, str] | None:
        """WER of the decoded words and their split, else the lowest one in the log."""
        for split in ("val", "dev", "test"):
            if (wer := finite_number(self.words.get(split, {}).get("wer"))) is not None:
                return wer, split
        logged = [wer for row in self.validations if (wer := finite_number(row.get("wer"))) is not None]
        return (min(logged), "log") if logged else None

    @property
    def target(self) -> TargetOutcome | None:
        """Whether the run met the target that it states; words may have been decoded after training."""
        if self.recipe is None or not self.recipe.target.rates:
            return None
        rows = [*self.validations]
        for split, summary in self.words.items():
            step = finite_int(summary.get("step"))
            if step is not None and split == self.environment.get("selected_on", "val"):
                rates = [row.get("per") for row in self.validations if row["step"] == step]
                rows.append({"step": step, "wer": summary.get("wer"), "per": rates[-1] if rates else None})
        return judge_target(self.recipe.target, rows, self.unfinished is None, self.rate_name)


def read_run(run: Run, name: str | None = None, diagnose: Diagnose | None = None) -> RunData:
    """Read what can be read of a run and record what cannot as problems."""
    problems: list[str] = []

    def attempt(read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except (UserError, OSError) as error:
            problems.append(shorten(str(error) or type(error).__name__, _MAX_PROBLEM, placeholder=" …"))
            return default

    recipe = attempt(lambda: run_recipe(run), None)
    environment = attempt(run.environment, {})
    rows = attempt(run.metrics, None)
    if rows is None:
        rows = attempt(lambda: _intact_rows(run.metrics_file), [])
    found = attempt(lambda: diagnose(run.path), None) if diagnose is not None and rows else None
    verdict = found and Verdict(found.primary, found.secondary, found.since_step, found.evidence, found.suggestion)
    files = sorted(f for f in (run.path / "results").glob("*.json") if not f.name.startswith("."))
    summaries = {file.name.removesuffix(".json"): attempt(partial(read_json, file), {}) for file in files}
    has_incidents = run.incidents_file.exists()
    incidents = attempt(lambda: read_jsonl(run.incidents_file, growing=True), []) if has_incidents else []
    return RunData(
        run=run,
        name=name or run.name,
        recipe=recipe,
        environment=environment,
        rows=tuple(rows),
        incidents=tuple(incidents),
        summaries=summaries,
        unfinished=attempt(lambda: unfinished_reason(run), None),
        diagnosis=verdict,
        problems=tuple(dict.fromkeys(problems)),
    )


def _intact_rows(log: Path) -> list[Row]:
    """The rows of a damaged log that can be read."""
    check_regular(log, _MAX_LOG_BYTES)
    rows = []
    for line in log.read_text("utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def is_simulated(run: Run) -> bool:
    """Whether a run was trained on simulated data, from its environment.json alone."""
    try:
        return run.data().get("simulated") is True
    except UserError:  # no environment.json, or a damaged one
        return False


def lookup(tree: Any, path: str) -> Any:
    """The value at a dotted path in nested mappings; None if a part of the path is missing."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


# --- Results of single trials ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """One line of the results: a trial with its reference and hypothesis, as phonemes or as words."""

    trial: str
    text: str | None  # the sentence
    reference: tuple[str, ...] | None
    hypothesis: tuple[str, ...]
    session: str = ""
    block: str = ""
    flags: tuple[str, ...] = ()

    @cached_property
    def score(self) -> Score | None:
        return None if self.reference is None else score(self.reference, self.hypothesis)

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
class Results:
    """Results of one split: summary, single trials, and the recordings of a few of them."""

    name: str  # split[.label]
    summary: Row
    decodings: tuple[Decoding, ...]
    metric: str = "per"
    examples: tuple[Example, ...] = ()
    problem: str | None = None  # why there are no examples

    @property
    def split(self) -> str:
        return self.name.partition(".")[0]

    @property
    def rate(self) -> float | None:
        return finite_number(self.summary.get(self.metric))

    @property
    def interval(self) -> tuple[float | None, float | None]:
        low, high = (finite_number(self.summary.get(f"{self.metric}_{end}")) for end in ("low", "high"))
        return low, high

    @property
    def n_trials(self) -> int:
        return finite_int(self.summary.get("n_trials")) or len(self.decodings)


def read_results(data: RunData, split: str | None = None) -> Results | None:
    """The results on a split, by default the first scored one of `SPLITS`; None if there are none."""
    files = (data.run.path / "results").glob("*.jsonl")
    names = [n for p in files if (n := p.name.removesuffix(".jsonl")).partition(".")[2] != WORDS_LABEL]
    if split is not None and split not in names:
        command = f"arcuate evaluate {data.run.path} --split {split}"
        raise UserError(f"{data.run.path} has no results on {split!r}; create them with: {command}")

    def rank(name: str) -> tuple[bool, int, str]:
        unscored = name in data.summaries and finite_number(data.summaries[name].get("per")) is None
        return unscored, SPLITS.index(name) if name in SPLITS else len(SPLITS), name

    name = split or min((n for n in names if not n.startswith(".")), key=rank, default=None)
    if name is None:
        return None
    decodings = tuple(_read_decoding(row) for row in read_jsonl(data.run.results_file(name)))
    examples, problem = _read_examples(data.run.results_file(name, ending="npz"))
    return Results(name, data.summaries.get(name) or _summarise(decodings), decodings, "per", examples, problem)


def read_words(data: RunData, split: str | None) -> Results | None:
    """The words of a split; without one, those of the first decoded split."""
    for name in SPLITS if split is None else (split,):
        file = data.run.results_file(name, WORDS_LABEL)
        if file.is_file():
            decodings = tuple(_read_words(row) for row in read_jsonl(file))
            counts = total(d.score for d in decodings if d.score)
            summary = data.summaries.get(f"{name}.{WORDS_LABEL}") or {"wer": counts.rate, "n_words": counts.length}
            return Results(name, summary, decodings, "wer")
    return None


def _read_decoding(row: Row) -> Decoding:
    return Decoding(
        trial=str(row.get("trial", "")),
        text=str(row["text"]) if row.get("text") else None,
        reference=_strings(row["reference"]) if isinstance(row.get("reference"), list) else None,
        hypothesis=_strings(row.get("hypothesis")),
        session=str(row.get("session", "")),
        block=str(row.get("block", "")),
        flags=_strings(row.get("flags")),
    )


def _read_words(row: Row) -> Decoding:
    reference, text = row.get("reference"), str(row.get("text") or "")
    if not isinstance(reference, str):
        return Decoding(str(row.get("id", "")), None, None, tuple(text.split()))
    expected, decoded = (tuple(normalise_text(t).split()) for t in (reference, text))
    return Decoding(str(row.get("id", "")), reference, expected, decoded)


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


def _summarise(decodings: Iterable[Decoding]) -> dict[str, Any]:
    """The part of a summary that can be computed from the decodings."""
    scores = [d.score for d in decodings if d.score]
    low, high = bootstrap_interval(scores)
    return {"per": total(scores).rate, "per_low": low, "per_high": high}


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
