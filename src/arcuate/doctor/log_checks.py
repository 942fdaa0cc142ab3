"""Causes that the rows of a log show directly under any verdict: faults of the program or of its input.

They cannot be fixed by a setting of the recipe, so they have no changes.
"""

from collections.abc import Iterator

import numpy as np

from arcuate.doctor.causes import CERTAIN, Cause
from arcuate.doctor.log_table import running_median
from arcuate.doctor.measurements import Measurements
from arcuate.doctor.updates import Updates
from arcuate.training.step_size import MAX_STEP

_OFF_SCHEDULE = 1.5  # ratio of the logged to the scheduled learning rate
_ABOVE_PEAK = 1.2  # ratio to the highest learning rate of the schedule
_SPIKE, _BACK = 1.3, 1.15  # multiples of the loss before: during a stretch of bad batches, and after it
_ABOVE_NOISE = 6.0  # multiple of the noise between rows that a stretch of bad batches exceeds
_SINGLE_SPIKE = 8.0  # largest gradient norm / its median: one bad batch
_FEW_EPOCHS = 4.0  # passes through the data within which no model memorises them
_GAP = 1.8  # validation loss / training loss
_LIKELY, _POSSIBLE = 0.9, 0.5


def check_log(m: Measurements, updates: Updates) -> list[Cause]:
    return [*_off_schedule(m), *_bad_batches(m, updates), *_repeated_data(m)]


def _off_schedule(m: Measurements) -> Iterator[Cause]:
    """The learning rate that was used against the schedule; reductions by the guard are expected."""
    lr, scheduled = m.log.lr, m.log.scheduled_lr
    if len(lr) < 5 or len(lr) != len(scheduled):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scheduled.values > 0, lr.values / scheduled.values, 1.0)
    off = np.flatnonzero((ratio > _OFF_SCHEDULE) & (lr.values > _ABOVE_PEAK * scheduled.values.max()))
    if len(off) >= 2:
        facts = {"step": int(lr.steps[off[0]]), "ratio": float(np.median(ratio[off]))}
        yield Cause("off_schedule", "learning_rate", CERTAIN, facts | {"highest": float(lr.values[off].max())})


def _bad_batches(m: Measurements, updates: Updates) -> Iterator[Cause]:
    """A stretch of steps with a much higher loss, or a single huge gradient, at a usual learning rate."""
    peak = float(m.log.lr.finite.values.max()) if len(m.log.lr.finite) else 0.0
    loss = m.log.train_loss.finite
    if peak * updates.damping > MAX_STEP or len(loss) < 10 or loss.values.min() <= 0:
        return
    values = loss.values
    # Rows of other trainers are single batches, whose losses differ; noise is estimated from second differences.
    noise = 1.4826 * float(np.median(np.abs(np.diff(np.log(values), 2)))) / np.sqrt(6)
    spike = max(_SPIKE, float(np.exp(min(_ABOVE_NOISE * noise, 5.0))))
    for start in range(3, len(values) - 2):
        before = float(np.median(values[max(0, start - 3) : start]))
        if values[start] < spike * before:
            continue
        back = next((i for i in range(start + 1, len(values)) if values[i] < _BACK * before), None)
        if back is not None and (m.log.is_arcuate or back - start >= 2):
            facts = {"before": before, "peak": float(values[start:back].max())}
            facts |= {"first": int(loss.steps[start - 1]), "last": int(loss.steps[back - 1])}
            yield Cause("damaged_batches", "batches", _LIKELY, facts)
        return
    norms = m.log.grad_norm_max.finite
    late = norms.values[3:]
    if len(late) < 6:
        return
    usual = float(np.median(late))
    at = 3 + int(late.argmax())
    if norms.values[at] > _SINGLE_SPIKE * usual > 0 and (late > 0.5 * norms.values[at]).sum() <= 2:
        facts = {"ratio": norms.values[at] / usual, "step": int(norms.steps[at])}
        yield Cause("damaged_batch", "batches", _POSSIBLE, facts)


def _repeated_data(m: Measurements) -> Iterator[Cause]:
    """Training sentences memorised within a few passes through the data: only a part of them is used."""
    epochs, train, val = m.epochs, m.log.train_loss.finite, m.log.val_loss.finite
    if epochs is None or epochs > _FEW_EPOCHS or len(train) < 6 or not len(val):
        return
    end = float(running_median(train.values)[-1])
    if end > 0 and float(val.values[-1]) > _GAP * end:
        facts = {"train": end, "val": float(val.values[-1]), "epochs": epochs}
        yield Cause("repeated_data", "data_order", CERTAIN, facts)
