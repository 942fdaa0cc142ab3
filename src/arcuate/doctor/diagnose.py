"""`diagnose`: read a log, infer its data set and planned length, apply the rules and name likely causes."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.doctor.advice import find_causes, first_suggestion
from arcuate.doctor.causes import Cause
from arcuate.doctor.data_check import DataCheck, DataFault, check_data
from arcuate.doctor.formats import LogFile, read_logs
from arcuate.doctor.log_table import Series, TrainingLog
from arcuate.doctor.measurements import Measurements
from arcuate.doctor.remedy import Remedy, make_remedy
from arcuate.doctor.rules import apply_rules, secondary_verdicts
from arcuate.errors import UserError
from arcuate.files import PAGE, check_writable, fields_to_dict, write_text
from arcuate.progress import Progress, percent

# If several verdicts apply, the first of them in this order is the primary one.
VERDICTS = (
    "restarted", "exploded", "too_short", "collapsed", "degraded", "overfit", "plateaued", "unfinished", "healthy",
)  # fmt: skip
_DATASETS = ("b2t24", "b2t25")


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on one log; `runs` holds one diagnosis per run if a file contains several."""

    primary: str
    secondary: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    since_step: int | None = None  # first step the verdict applies to; after a restart, the last step before it
    best_per: float | None = None
    best_step: int | None = None
    last_per: float | None = None
    last_step: int | None = None
    causes: tuple[Cause, ...] = ()
    suggestion: str = ""
    data_faults: tuple[DataFault, ...] = ()  # faults in the training data, if the store was checked
    runs: tuple["Diagnosis", ...] = ()
    name: str = ""
    source: str = ""  # format of the file, in words
    dataset: str | None = None
    planned_steps: int | None = None
    unit: str = "steps"  # what the step counter counts
    inferences: tuple[str, ...] = ()  # what the file does not state, with the reason for each conclusion
    notes: tuple[str, ...] = ()  # remarks about how the file was read
    marks: tuple[tuple[int, str], ...] = field(default=(), repr=False)  # steps to mark in charts
    log: TrainingLog | None = field(default=None, repr=False, compare=False)  # the curves for the page

    @property
    def store(self) -> str | None:
        """The store that an arcuate run was trained on."""
        return self.log.store if self.log else None

    @property
    def error_name(self) -> str:
        """What the error rates are: PER, or CER of characters, or WER if the log has no other."""
        logs = [run.log for run in (self, *self.runs) if run.log]
        return logs[0].error_name if logs else "PER"

    @property
    def since(self) -> str:
        """`since_step` in words."""
        if self.since_step is None:
            return ""
        return f"{'after' if self.primary == 'restarted' else 'since'} step {self.since_step:,}"

    def fix(self) -> Remedy:
        """The changes of settings that this diagnosis suggests, with a reason for each."""
        return make_remedy(self)

    def plot(self) -> Any:
        """The error rate over its reference band as an Altair chart."""
        from arcuate.doctor.page import diagnosis_chart  # which imports this module
        from arcuate.insight.charts.base import for_notebook

        chart = diagnosis_chart(self.runs[0] if self.runs else self)
        if chart is None:
            raise UserError(f"{self.name} has no error rates to plot; validation rows of the log have none")
        return for_notebook(chart)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `runs` is present only if there are several, `log` never."""
        plain = fields_to_dict(self, "log", "runs")
        plain["marks"] = [{"step": step, "what": verdict} for step, verdict in self.marks]
        return plain | ({"runs": [run.to_dict() for run in self.runs]} if self.runs else {})


def diagnose(
    path: str | Path,
    *,
    dataset: str | None = None,
    planned_steps: int | None = None,
    html: str | Path | None = None,
    check_store: bool = False,
    check_labels: bool = False,
    data: str | Path | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose the run or runs in a run folder, a folder with a log, or a log file.

    `dataset` (b2t24 or b2t25) and `planned_steps` are inferred if they are not given. `html` is a page to write. For an
    arcuate run, `check_store` searches its store (`data`, if it was moved) for faults, and `check_labels` also decodes
    the training trials with the best checkpoint to find those with a wrong label.
    """
    check_writable(html, kind=PAGE)
    if dataset is not None and dataset not in _DATASETS:
        raise UserError(f"unknown data set {dataset!r}; choose {' or '.join(_DATASETS)}")
    file = read_logs(Path(path))
    checked = DataCheck()
    run = file.logs[0].run_path if len(file.logs) == 1 else None
    if run is None and (check_labels or data is not None):
        raise UserError(f"{path} is not an arcuate run folder: its data are unknown, so they cannot be checked")
    if (check_store or check_labels) and run is not None:
        checked = check_data(run, data=data, decode_training=check_labels, progress=progress)
        file = replace(file, logs=(replace(file.logs[0], n_train=checked.n_train),))
    runs = tuple(_diagnose_log(log, file, dataset, planned_steps) for log in file.logs)
    diagnosis = _with_faults(runs[0], checked) if len(runs) == 1 else _restarted(runs, file)
    if html is not None:
        from arcuate.doctor.page import diagnosis_page  # which imports this module

        write_text(Path(html), diagnosis_page(diagnosis))
    return diagnosis


def _with_faults(diagnosis: Diagnosis, checked: DataCheck) -> Diagnosis:
    """The diagnosis with severe faults in the data as its first causes, and all others as notes."""
    causes = tuple(
        Cause(
            "data",
            f"data: {fault.kind}",
            2.0,
            {"fault": fault.kind, "sentence": fault.sentence, "remedy": fault.remedy},
        )
        for fault in checked.faults
        if fault.severe
    )
    return replace(
        diagnosis,
        causes=(*causes, *diagnosis.causes),
        suggestion=causes[0].change if causes else diagnosis.suggestion,
        data_faults=checked.faults,
        notes=(*diagnosis.notes, *checked.notes, *(fault.sentence for fault in checked.faults if not fault.severe)),
    )


def _diagnose_log(log: TrainingLog, file: LogFile, dataset: str | None, planned_steps: int | None) -> Diagnosis:
    measurements, dataset, inferences = measure(log, dataset, planned_steps)
    lead, *rest = findings = apply_rules(measurements)
    per = log.per.finite
    best = int(per.values.argmin()) if len(per) else None
    last = float(log.per.values[-1]) if len(log.per) and np.isfinite(log.per.values[-1]) else None
    evidence = [e for f in findings for e in f.evidence]
    causes = find_causes(lead, measurements, rest)
    return Diagnosis(
        primary=lead.verdict,
        secondary=secondary_verdicts(lead, rest),
        evidence=tuple(dict.fromkeys([*evidence, *compare_with_official(log, dataset), *log.incidents])),
        since_step=lead.since,
        best_per=None if best is None else float(per.values[best]),
        best_step=None if best is None else int(per.steps[best]),
        last_per=last,
        last_step=log.last_step,
        causes=causes,
        suggestion=first_suggestion(lead, causes),
        name=log.name,
        source=file.source,
        dataset=dataset,
        planned_steps=measurements.planned,
        unit=log.judged.unit if len(log.judged) else log.train_loss.unit,
        inferences=inferences,
        notes=(*file.notes, *log.notes),
        marks=tuple((f.since, f.verdict) for f in findings if f.since is not None and not f.minor),
        log=log,
    )


def _restarted(runs: tuple[Diagnosis, ...], file: LogFile) -> Diagnosis:
    """The diagnosis of a file with several runs; best and last values are those of the first."""
    first = next((run for run in runs if run.best_per is not None), runs[0])
    verdicts = [run.primary for run in runs]
    shown = ", ".join(f"{n} {verdict.replace('_', ' ')}" for verdict, n in Counter(verdicts).items())
    return replace(
        first,
        primary="restarted",
        secondary=tuple(v for v in VERDICTS if v in verdicts and v != "restarted"),
        evidence=(f"the file contains {len(runs)} runs: {shown}", *_repeated_runs(file)),
        since_step=first.last_step,
        causes=(),
        suggestion="judge each run separately, and use a separate folder for every run (--run)",
        runs=runs,
        name=file.name,
        notes=file.notes,
        marks=(),
        log=None,
    )


def _repeated_runs(file: LogFile) -> tuple[str, ...]:
    """Consecutive runs with identical values."""
    repeated = []
    for i, log in enumerate(file.logs[1:], start=2):
        before = file.logs[i - 2].judged
        if len(log.judged) > 1 and np.array_equal(log.judged.values, before.values, equal_nan=True):
            repeated.append(f"run {i} is identical to run {i - 1}: the same log twice, or the same seed")
    return tuple(repeated[:3])


# Inference of what the file does not state: the data set and the planned length.

_BEST_OF_24 = 0.137  # lowest published error rate of a single decoder on '24
_ABOVE_ONE, _FAR_ABOVE_ONE = 1.02, 2.0  # initial error rates: many insertions on '25, hardly any on '24
_SUMMED_LOSS = 100.0  # an initial loss this high is a sum over phonemes, as the '25 trainer logs it
_COMPARABLE = 2500  # batches; a shorter run is at no level that published runs could be compared with
_MIN_SESSIONS = 20  # sessions in a log of a complete release; fewer are a part of it, or other data with such names
_DECAYED = 0.05  # fraction of the peak: a learning rate this low has reached the end of its schedule
_FINE_INTERVAL = 0.025  # fraction of the planned steps: the last evaluation may lie this far before the end
_USUAL_STEPS = tuple(1000 * n for n in (10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150))


def measure(
    log: TrainingLog, dataset: str | None = None, planned: int | None = None
) -> tuple[Measurements, str | None, tuple[str, ...]]:
    """The measurements of a log, its data set, and sentences about what was inferred.

    A data set that is only assumed gives the reference level, but no advice and no planned length depend on it.
    """
    inferences = []
    level_of = dataset
    if dataset is None:
        dataset, level_of, reason = _infer_dataset(log)
        inferences.append(reason)
    if planned is None:
        planned, reason = _infer_planned_steps(log, dataset, level_of)
        inferences.append(reason)
    reference = expected = None
    if level_of and log.error_name == "PER":
        reference = reference_level(level_of)
        if log.per.unit == "batches" and len(log.per):
            expected = expected_rate(level_of, float(log.per.steps[-1]))
    measurements = Measurements(log, reference, expected, planned, dataset)
    return measurements, dataset, tuple(reason for reason in inferences if reason)


def _infer_dataset(log: TrainingLog) -> tuple[str | None, str | None, str]:
    """The data set that the file states, the one whose level is assumed, and why."""
    if log.is_arcuate and not log.dataset:
        return None, None, "not a published data set, so there is no reference curve"
    if log.dataset and not 0 < log.n_named_sessions < _MIN_SESSIONS:
        return log.dataset, log.dataset, f"data set {log.dataset}: {log.dataset_because}"
    per = log.per.finite
    if not len(per):
        return None, None, ""
    unknown = "data set unknown, so no advice depends on it (--dataset states it)"
    if log.dataset:
        part = f"the names of {log.n_named_sessions} sessions are those of {log.dataset}, but not those of its release"
        return None, None, f"{unknown}: {part}"
    if per.unit in ("batches", "steps") and per.steps[-1] < _COMPARABLE:
        return None, None, f"{unknown}, and the run is too short for a comparison with published runs"
    assumed, reason = _resembles(log, per)
    return None, assumed, f"{unknown}; its error rates are compared with {assumed}: {reason}"


def _resembles(log: TrainingLog, per: Series) -> tuple[str, str]:
    """The release that a curve resembles: '24, the more lenient reference, unless the curve shows '25."""
    first_losses = [s.finite.values[0] for s in (log.val_loss, log.train_loss) if len(s.finite)]
    first_loss = max(first_losses, default=None)
    first_rate, best_rate = float(per.values[0]), float(per.values.min())
    summed = first_loss is None or first_loss > _SUMMED_LOSS
    if best_rate < _BEST_OF_24:
        return "b2t25", f"no published decoder reaches an error rate of {percent(best_rate)} on '24"
    if first_rate > (_ABOVE_ONE if summed else _FAR_ABOVE_ONE):
        return "b2t25", f"the initial error rate is {percent(first_rate)}, above 100 %"
    if first_loss is not None and summed:
        return "b2t25", f"an initial loss of {first_loss:.0f} is a sum over phonemes, as in its trainer"
    return "b2t24", "nothing in the curve indicates '25, so the more lenient reference is used"


def _infer_planned_steps(log: TrainingLog, dataset: str | None, level_of: str | None) -> tuple[int | None, str]:
    """The length stated by the file, else inferred from where the run stopped, else the official length."""
    if log.planned:
        return log.planned, f"planned steps {log.planned:,}: {log.planned_because}"
    last = log.last_step
    if last is None:
        return None, ""
    if log.reported_finished:
        last += (last + 1) % 1000 == 0
        return last, f"planned steps {last:,}: the log reports that training is complete"
    rates = log.lr.finite.values
    if len(rates) >= 5 and rates[-1] <= _DECAYED * rates.max():
        return last, f"planned steps {last:,}: the learning rate had reached the end of its schedule"
    if log.judged.unit != "batches":
        return None, ""
    if last >= 1000 and (last + 1) % 1000 == 0:
        return last + 1, f"planned steps {last + 1:,}: the last batch is {last:,}, one before a round number"
    spacing = float(np.median(np.diff(log.judged.steps))) if len(log.judged) > 1 else 0.0
    for n in _USUAL_STEPS:
        if last - 1 <= n <= last + spacing and spacing <= _FINE_INTERVAL * n:
            return n, f"planned steps {n:,}: the run stopped where a schedule of this length ends"
    if (official := dataset or level_of) is not None and last < OFFICIAL_STEPS[official]:
        steps = OFFICIAL_STEPS[official]
        return steps, f"planned steps {steps:,}: the official length on {official}"
    return None, ""


# Reference learning curves: aggregated over real healthy runs and packaged with their sources.

_OFFICIAL = {"b2t24": "b2t24-biGRU-official-10k", "b2t25": "b2t25-GRU-official-120k"}
_SLOWER = {"b2t24": "b2t24-uniGRU-1024-10k-30k"}  # a healthy model that learns more slowly
OFFICIAL_STEPS = {"b2t24": 10_000, "b2t25": 120_000}


@dataclass(frozen=True)
class Reference:
    """Mean and standard deviation of the error rate of healthy runs, by step."""

    dataset: str
    model: str
    unit: str
    source: str
    n_runs: int
    grid: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    def at(self, step: float) -> float | None:
        """The mean at a step; None outside the range of the curve."""
        inside = self.grid[0] <= step <= self.grid[-1]
        return float(np.interp(step, self.grid, self.mean)) if inside else None


@cache
def _packaged() -> dict[str, Any]:
    file = files("arcuate") / "doctor" / "reference_curves.json"
    return dict(json.loads(file.read_text("utf-8")))


@cache
def references() -> dict[str, Reference]:
    return {
        name: Reference(
            **{key: curve[key] for key in ("dataset", "model", "unit", "source", "n_runs")},
            grid=np.array(curve["grid"], dtype=float),
            mean=np.array(curve["mean"], dtype=float),  # null becomes NaN
            sd=np.nan_to_num(np.array(curve["sd"], dtype=float)),
        )
        for name, curve in _packaged()["curves"].items()
    }


def reference_level(dataset: str) -> float:
    """The final error rate of healthy runs on a data set, rounded."""
    return float(_packaged()["levels"][dataset])


def expected_rate(dataset: str, step: float) -> float | None:
    """The error rate of a healthy run at a batch, taken from the slowest healthy model."""
    tables = (_OFFICIAL, _SLOWER)
    rates = [references()[table[dataset]].at(step) for table in tables if dataset in table]
    return max((rate for rate in rates if rate is not None), default=None)


def matching_reference(log: TrainingLog, dataset: str | None) -> Reference | None:
    """The reference with the same axis: the official one for batches; None if steps are not comparable."""
    if dataset is None or log.error_name != "PER" or not len(log.per):
        return None
    if log.per.unit == "batches":
        return references()[_OFFICIAL[dataset]]
    if log.per.unit != "epochs":
        return None
    last = float(log.per.steps[-1])
    candidates = [r for r in references().values() if r.dataset == dataset and r.unit == "epochs"]
    return min(candidates, key=lambda r: abs(float(r.grid[-1]) - last), default=None)


def compare_with_official(log: TrainingLog, dataset: str | None) -> tuple[str, ...]:
    """A sentence that compares the run with the official model at the last common batch, if there is one."""
    per = log.per.finite
    if dataset is None or per.unit != "batches" or log.error_name != "PER":
        return ()
    reference = references()[_OFFICIAL[dataset]]
    inside = np.flatnonzero(per.steps <= reference.grid[-1])
    if not len(inside) or per.steps[inside[-1]] <= 0:
        return ()
    step = float(per.steps[inside[-1]])
    return (
        f"at batch {int(step):,} this run had PER {percent(float(per.values[inside[-1]]))}, the official {dataset}"
        f" model {percent(reference.at(step))} (mean of {reference.n_runs} runs)",
    )
