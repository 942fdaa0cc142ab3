"""What nobody told the doctor: which data set, how long the run was meant to be; each conclusion with its reason."""

from dataclasses import dataclass

import numpy as np

from arcuate.doctor.curve import Log
from arcuate.doctor.reference import OFFICIAL_STEPS, course, level

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
