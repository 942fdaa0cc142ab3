"""Signs of an explosion: numbers that are not finite, and jumps that the error rate pays for."""

from dataclasses import dataclass

import numpy as np

from arcuate.doctor.curve import Log, Series, running_median
from arcuate.doctor.facts import Facts

MAGNITUDE = 10.0  # a jump of an order of magnitude
FLOOR = 0.1  # of the first loss: below it, an ordinary batch late in a good run is ten times another
PAID = 0.15  # the error rate afterwards, above its best before


@dataclass(frozen=True)
class Jump:
    step: int
    evidence: tuple[str, ...]


def broken_losses(log: Log) -> Jump | None:
    """A loss or an error rate that is not finite, or a guard that gave up on one."""
    told, steps = [], []
    for name, series in (
        ("training loss", log.train_loss),
        ("validation loss", log.val_loss),
        (log.error_name, log.per),
    ):
        broken = series.broken_steps
        if len(broken):
            told.append(f"{name} is not finite at {_times(series)} from step {int(broken[0]):,}")
            steps.append(int(broken[0]))
    if log.broken_steps:
        told.append(f"no step up to {log.broken_steps[0]:,} since the row before had a finite loss")
        steps.append(log.broken_steps[0])
    return Jump(min(steps), tuple(told)) if steps else None


def broken_gradients(log: Log) -> Jump | None:
    """Gradient norms that are not finite; a loss scaler meets a few of them in the best of runs."""
    broken = log.grad_norm.broken_steps
    if not len(broken):
        return None
    return Jump(
        int(broken[0]),
        (f"gradient norm is not finite at {_times(log.grad_norm)} from step {int(broken[0]):,}",),
    )


def _times(series: Series) -> str:
    return f"{len(series.broken_steps):,} of {len(series):,} points"


def first_jump(facts: Facts) -> Jump | None:
    """The first rise of an order of magnitude after which the error rate was worse than before it."""
    found = [
        jump
        for name, series in (("validation loss", facts.log.val_loss), ("training loss", facts.log.train_loss))
        if (jump := _loss_jump(name, series, facts)) is not None
    ]
    if (jump := _gradient_jump(facts)) is not None:
        found.append(jump)
    return min(found, key=lambda j: j.step) if found else None


def _loss_jump(name: str, series: Series, facts: Facts) -> Jump | None:
    series = series.finite.stretches()
    if len(series) < 5:
        return None
    level = running_median(series.values)
    lowest = np.minimum.accumulate(level)
    high = (level >= MAGNITUDE * lowest) & (level >= FLOOR * np.median(series.values[:3]))
    return _paid(name, series, level, lowest, high, facts)


def _gradient_jump(facts: Facts) -> Jump | None:
    """Gradients against their usual size so far; the first steps of a run are no measure."""
    series = facts.log.grad_norm.finite.stretches()
    if len(series) < 20:
        return None
    level = running_median(series.values)
    start = max(3, len(level) // 20)
    usual = np.array([np.median(level[start : max(i, start) + 1]) for i in range(len(level))])
    high = (level >= MAGNITUDE * usual) & (np.arange(len(level)) >= start)
    return _paid("gradient norm", series, level, usual, high, facts)


def _paid(
    name: str, series: Series, level: np.ndarray, before: np.ndarray, high: np.ndarray, facts: Facts
) -> Jump | None:
    """The first of the high points after which evaluations stayed worse than the best before."""
    evaluations, same = facts.evaluations, facts.evaluations.unit == series.unit
    for i in np.flatnonzero(high)[:50]:
        step = float(series.steps[i])
        ratio = level[i] / max(before[i], 1e-12)
        told = f"{name} jumped to {ratio:.0f} times its level at step {int(step):,}"
        if facts.n < 2 or not same:
            continue
        earlier = facts.smooth[evaluations.steps <= step]
        later = facts.smooth[evaluations.steps >= step][:3]
        if len(earlier) and len(later) and float(np.median(later)) > (1 + PAID) * float(earlier.min()):
            return Jump(
                int(step),
                (
                    told,
                    f"and {facts.log.error_name} was worse after it: {np.median(later):.3f}"
                    f" against {earlier.min():.3f} before",
                ),
            )
    return None
