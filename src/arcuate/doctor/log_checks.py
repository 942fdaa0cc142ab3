"""Causes that the rows of an arcuate run show directly under any verdict: faults of the program or of its input.

They cannot be fixed by a setting of the recipe, so they have no settings.
"""

from collections.abc import Iterator

import numpy as np

from arcuate.doctor.measurements import Measurements
from arcuate.doctor.recipe_checks import CERTAIN, Cause
from arcuate.doctor.step_size import LARGE_STEP, StepSize
from arcuate.doctor.training_log import running_median

_OFF_SCHEDULE = 1.5  # ratio of the logged to the scheduled learning rate
_ABOVE_PEAK = 1.2  # ratio to the highest learning rate of the schedule
_SPIKE, _BACK = 1.3, 1.15  # multiples of the loss before: during a stretch of bad batches, and after it
_SINGLE_SPIKE = 8.0  # largest gradient norm / its median: one bad batch
_FEW_EPOCHS = 4.0  # passes through the data within which no model memorises them
_GAP = 1.8  # validation loss / training loss
_LIKELY, _POSSIBLE = 0.9, 0.5


def check_log(m: Measurements, step: StepSize) -> list[Cause]:
    return [*_off_schedule(m), *_bad_batches(m, step), *_repeated_data(m)]


def _off_schedule(m: Measurements) -> Iterator[Cause]:
    """The learning rate that was used against the schedule; reductions by the guard are expected."""
    lr, scheduled = m.log.lr, m.log.scheduled_lr
    if len(lr) < 5 or len(lr) != len(scheduled):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scheduled.values > 0, lr.values / scheduled.values, 1.0)
    off = np.flatnonzero((ratio > _OFF_SCHEDULE) & (lr.values > _ABOVE_PEAK * scheduled.values.max()))
    if len(off) < 2:
        return
    first = int(off[0])
    yield Cause(
        "the learning rate did not follow its schedule",
        f"from step {int(lr.steps[first]):,} it was {float(np.median(ratio[off])):.3g} times that of the recipe, up to"
        f" {float(lr.values[off].max()):.3g}",
        "find the code that changes the learning rate; the recipe itself needs no change",
        "learning_rate",
        score=CERTAIN,
    )


def _bad_batches(m: Measurements, step: StepSize) -> Iterator[Cause]:
    """A stretch of steps with a much higher loss, or a single huge gradient, at a usual learning rate."""
    peak = float(m.log.lr.finite.values.max()) if len(m.log.lr.finite) else 0.0
    loss = m.log.train_loss.finite
    if peak * step.damping > LARGE_STEP or len(loss) < 10:
        return
    remedy = "inspect the trials of these steps (guard.keep_batches=true saves them), and correct or exclude them"
    values = loss.values
    for start in range(3, len(values) - 2):
        before = float(np.median(values[max(0, start - 3) : start]))
        if values[start] < _SPIKE * before:
            continue
        back = next((i for i in range(start + 1, len(values)) if values[i] < _BACK * before), None)
        if back is not None:
            steps = f"{int(loss.steps[start - 1]):,} to {int(loss.steps[back - 1]):,}"
            because = (
                f"training loss rose from {before:.3g} to {values[start:back].max():.3g} at steps {steps} and fell"
            )
            yield Cause("damaged batches", f"{because} again, at a normal learning rate", remedy, "batches",
                        score=_LIKELY)  # fmt: skip
        return
    norms = m.log.grad_norm_max.finite
    late = norms.values[3:]
    if len(late) < 6:
        return
    usual = float(np.median(late))
    at = 3 + int(late.argmax())
    if norms.values[at] > _SINGLE_SPIKE * usual > 0 and (late > 0.5 * norms.values[at]).sum() <= 2:
        because = f"the gradient norm reached {norms.values[at] / usual:.0f} times its usual maximum once, before step"
        yield Cause("a damaged batch", f"{because} {int(norms.steps[at]):,}, and was normal before and after", remedy,
                    "batches", score=_POSSIBLE)  # fmt: skip


def _repeated_data(m: Measurements) -> Iterator[Cause]:
    """Training sentences memorised within a few passes through the data: only a part of them is used."""
    epochs, train, val = m.epochs, m.log.train_loss.finite, m.log.val_loss.finite
    if epochs is None or epochs > _FEW_EPOCHS or len(train) < 6 or not len(val):
        return
    end = float(running_median(train.values)[-1])
    if end > 0 and float(val.values[-1]) > _GAP * end:
        yield Cause(
            "the same few trials are used repeatedly",
            f"training loss is {end:.2g} and validation loss {val.values[-1]:.2g} after {epochs:.1f} passes through the"
            " data, in which a model cannot memorise them",
            "check the order of the batches: every trial should occur once per pass",
            "data_order",
            score=CERTAIN,
        )
