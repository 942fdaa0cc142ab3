"""What nobody told the doctor: which data set, how long the run was meant to be; each conclusion with its reason."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.causes import causes_of, suggestion_of
from arcuate.insight.doctor.curve import Log, Series
from arcuate.insight.doctor.diagnosis import VERDICTS, Diagnosis
from arcuate.insight.doctor.facts import Facts
from arcuate.insight.doctor.read import Reading, read
from arcuate.insight.doctor.reference import OFFICIAL_STEPS, compare, course, level
from arcuate.insight.doctor.rules import Finding, beside, findings

BELOW_24 = 0.137  # no published single decoder of '24 has a lower error rate
ABOVE_AT_START, FAR_ABOVE = 1.02, 2.0  # untrained decoders of '25 insert too much, those of '24 hardly do
SUMMED = 100.0  # a first loss this high is a sum over phonemes, as the '25 trainer logs it
DECAYED = 0.05  # of its highest: a learning rate this low has come to the end of its schedule
FINE = 0.025  # an evaluation interval below this share of the plan may be the last one of it
ROUND = (
    10_000,
    12_000,
    15_000,
    20_000,
    25_000,
    30_000,
    40_000,
    50_000,
    60_000,
    80_000,
    100_000,
    120_000,
    150_000,
)


@dataclass(frozen=True)
class Setting:
    """What a run is measured against."""

    dataset: str | None
    reference: float | None
    course: float | None
    planned: int | None
    inferences: tuple[str, ...]


def infer(log: Log, dataset: str | None, planned: int | None) -> Setting:
    told = []
    if dataset is None:
        dataset, why = infer_dataset(log)
        if why:
            told.append(why)
    if planned is None:
        planned, why = infer_plan(log, dataset)
        if why:
            told.append(why)
    usual = course(dataset, _last(log)) if dataset and log.per.unit == "batches" and len(log.per) else None
    measured = dataset is not None and log.error_name == "PER"
    return Setting(dataset, level(dataset) if dataset and measured else None, usual, planned, tuple(told))


def _last(log: Log) -> float:
    return float(log.per.steps[-1])


def infer_dataset(log: Log) -> tuple[str | None, str]:
    """By what the file says, else by the curve; the more lenient '24 where nothing speaks for '25."""
    if log.dataset:
        return log.dataset, f"data set {log.dataset}: {log.dataset_because}"
    per = log.per.finite
    if log.own or not len(per):
        return None, "no published data set: compared with nothing but itself" if log.own else ""
    first = [s.finite.values[0] for s in (log.val_loss, log.train_loss) if len(s.finite)]
    if per.values.min() < BELOW_24:
        return "b2t25", f"data set b2t25: an error rate of {per.values.min():.3f} is out of reach on '24"
    summed = not first or max(first) > SUMMED
    if per.values[0] > (ABOVE_AT_START if summed else FAR_ABOVE):
        return "b2t25", f"data set b2t25: the untrained error rate is {per.values[0]:.2f}, above 1"
    if first and max(first) > SUMMED:
        return (
            "b2t25",
            f"data set b2t25: a first loss of {max(first):.0f} is a sum over phonemes, as its trainer logs",
        )
    return (
        "b2t24",
        "data set b2t24: nothing in the curve speaks for '25, and '24 is the more lenient comparison",
    )


def infer_plan(log: Log, dataset: str | None) -> tuple[int | None, str]:
    """By what the file says, else by where the run stopped, else the official length."""
    if log.planned:
        return log.planned, f"planned steps {log.planned:,}: {log.planned_because}"
    last = log.last_step
    if last is None:
        return None, ""
    if log.said_finished:
        last += (last + 1) % 1000 == 0
        return last, f"planned steps {last:,}: the log says that training was complete"
    rates = log.lr.finite.values
    if len(rates) >= 5 and rates[-1] <= DECAYED * rates.max():
        return last, f"planned steps {last:,}: the learning rate had come to the end of its schedule"
    if log.judged.unit != "batches":
        return None, ""
    if last >= 1000 and (last + 1) % 1000 == 0:
        return last + 1, f"planned steps {last + 1:,}: the last batch is {last:,}, one before a round number"
    spacing = float(np.median(np.diff(log.judged.steps))) if len(log.judged) > 1 else 0.0
    due = next((n for n in ROUND if last - 1 <= n <= last + spacing and spacing <= FINE * n), None)
    if due is not None:
        return due, f"planned steps {due:,}: the run stopped where a schedule of this length ends"
    if dataset is not None and last < OFFICIAL_STEPS[dataset]:
        return OFFICIAL_STEPS[
            dataset
        ], f"planned steps {OFFICIAL_STEPS[dataset]:,}: the official length on {dataset}"
    return None, ""


# From a path to a diagnosis: read, infer what was not told, apply the rules.

DATASETS = ("b2t24", "b2t25")


def diagnose(
    path: Path, *, dataset: str | None = None, planned_steps: int | None = None, allow_pickle: bool = False
) -> Diagnosis:
    """What happened in the run or runs that a folder or a log file holds."""
    check_dataset(dataset)
    return judge_all(read(path, allow_pickle), dataset, planned_steps)


def check_dataset(dataset: str | None) -> None:
    if dataset is not None and dataset not in DATASETS:
        raise UserError(f"there is no data set {dataset!r}; choose {' or '.join(DATASETS)}")


def judge_all(reading: Reading, dataset: str | None = None, planned_steps: int | None = None) -> Diagnosis:
    runs = tuple(judge(log, reading, dataset, planned_steps) for log in reading.logs)
    return runs[0] if len(runs) == 1 else restarted(runs, reading)


def judge(log: Log, reading: Reading, dataset: str | None, planned_steps: int | None) -> Diagnosis:
    """One run on its own."""
    setting = infer(log, dataset, planned_steps)
    facts = facts_of(log, setting)
    found = findings(facts)
    compared = compare(log, setting.dataset)
    lead, rest = found[0], found[1:]
    per = log.per.finite
    best = int(per.values.argmin()) if len(per) else None
    told = [*lead.evidence, *(e for f in rest for e in f.evidence), *compared, *log.incidents]
    causes = causes_of(lead, facts)
    return Diagnosis(
        primary=lead.verdict,
        secondary=beside(lead, rest),
        evidence=tuple(dict.fromkeys(told)),
        since_step=lead.since,
        best_per=None if best is None else float(per.values[best]),
        best_step=None if best is None else int(per.steps[best]),
        last_per=last_value(log.per),
        last_step=log.last_step,
        causes=causes,
        suggestion=suggestion_of(lead, causes, facts),
        name=log.name,
        source=reading.source,
        dataset=setting.dataset,
        planned_steps=setting.planned,
        unit=log.judged.unit if len(log.judged) else log.train_loss.unit,
        inferences=setting.inferences,
        notes=(*reading.notes, *log.notes),
        marks=marks(found),
    )


def last_value(per: Series) -> float | None:
    """What the last evaluation said; None where it said nothing finite, whatever was said before."""
    return float(per.values[-1]) if len(per) and np.isfinite(per.values[-1]) else None


def facts_of(log: Log, setting: Setting) -> Facts:
    return Facts(log, setting.reference, setting.course, setting.planned)


def marks(found: list[Finding]) -> tuple[tuple[int, str], ...]:
    return tuple((f.since, f.verdict) for f in found if f.since is not None and not f.mild)


def restarted(runs: tuple[Diagnosis, ...], reading: Reading) -> Diagnosis:
    """Several runs in one file: each judged on its own; best and last are those of the first."""
    first = next((run for run in runs if run.best_per is not None), runs[0])
    verdicts = [run.primary for run in runs]
    others = tuple(v for v in VERDICTS if v in verdicts and v != "restarted")
    return Diagnosis(
        primary="restarted",
        secondary=others,
        evidence=(
            f"the file holds {len(runs)} runs: {', '.join(verdicts[:12])}{', …' * (len(runs) > 12)}",
            *repeats(reading),
        ),
        since_step=first.last_step,
        best_per=first.best_per,
        best_step=first.best_step,
        last_per=first.last_per,
        last_step=first.last_step,
        suggestion="judge each run on its own, and give every run a folder of its own (--run)",
        runs=runs,
        name=reading.name,
        source=reading.source,
        dataset=first.dataset,
        planned_steps=first.planned_steps,
        unit=first.unit,
        inferences=first.inferences,
        notes=reading.notes,
    )


def repeats(reading: Reading) -> tuple[str, ...]:
    """Runs that are the same number for number."""
    told = []
    for i, log in enumerate(reading.logs[1:], start=2):
        before = reading.logs[i - 2].judged
        if len(log.judged) > 1 and np.array_equal(log.judged.values, before.values, equal_nan=True):
            told.append(
                f"run {i} repeats run {i - 1} number for number: the same log twice, or the same seed"
            )
    return tuple(told[:3])
