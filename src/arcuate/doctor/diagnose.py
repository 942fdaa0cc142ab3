"""From a path to a diagnosis: read, infer what was not told, apply the rules."""

from pathlib import Path

import numpy as np

from arcuate.doctor.causes import causes_of, suggestion_of
from arcuate.doctor.curve import Log, Series
from arcuate.doctor.diagnosis import VERDICTS, Diagnosis
from arcuate.doctor.facts import Facts
from arcuate.doctor.infer import Setting, infer
from arcuate.doctor.reading import Reading, read
from arcuate.doctor.reference import compare
from arcuate.doctor.rules import Finding, beside, findings
from arcuate.errors import UserError

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
