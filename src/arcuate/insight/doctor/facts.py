"""The few numbers that the rules look at, taken from a log once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arcuate.insight.doctor.curve import Log, Series, running_median

SMOOTHED_FROM = 9  # with fewer evaluations every one of them counts as it is
ALONE = 0.9  # of the lowest of three: an evaluation below it was real, for evaluations differ by 1 or 2 %
NEARLY = 0.95  # of the plan: a run that came so far has been seen to its end
LEARNT_BY_HEART = 0.002  # of the first training loss: differences below it are those between batches
SILENT = 0.8  # an error rate that a constant output reaches
STILL = 0.05  # a training loss that fell by less has not moved
WARMUP_BATCHES = 500  # evaluations before this batch lie in any recipe's warm-up


@dataclass(frozen=True)
class Facts:
    """One run and what it is measured against."""

    log: Log
    reference: float | None = None  # error rate that healthy runs on this data set end at
    course: float | None = None  # the official error rate at the last step, where steps can be compared
    planned: int | None = None

    @property
    def by_loss(self) -> bool:
        """Whether there is no error rate, so that only the shape of the loss can be judged."""
        return not len(self.log.per)

    @cached_property
    def evaluations(self) -> Series:
        return self.log.judged.finite

    @property
    def n(self) -> int:
        return len(self.evaluations)

    @cached_property
    def smooth(self) -> np.ndarray:
        values = self.evaluations.values
        return running_median(values) if self.n >= SMOOTHED_FROM else values

    @cached_property
    def _best_place(self) -> int:
        """The lowest evaluation beside its neighbours; one far below them counts alone, for it is no luck."""
        values, smooth = self.evaluations.values, int(self.smooth.argmin())
        raw, near = int(values.argmin()), max(0, smooth - 1)
        alone = values[raw] < ALONE * self.smooth[smooth]
        return raw if alone else near + int(values[near : smooth + 2].argmin())

    @cached_property
    def best(self) -> float:
        """What later evaluations are measured against."""
        seen = self.best_seen
        return seen if seen < ALONE * float(self.smooth.min()) else float(self.smooth.min())

    @property
    def best_seen(self) -> float:
        """The evaluation itself, for words."""
        return float(self.evaluations.values[self._best_place])

    @cached_property
    def best_step(self) -> int:
        return int(self.evaluations.steps[self._best_place])

    @cached_property
    def end(self) -> float:
        """Where the run ended: its last evaluation, or the middle of the last three where that one stands out high."""
        last = self.evaluations.values[-3:] if self.n >= SMOOTHED_FROM else self.evaluations.values[-1:]
        return float(min(np.median(last), last[-1]))

    @property
    def first_step(self) -> float:
        return float(self.evaluations.steps[0])

    @property
    def last_step(self) -> float:
        return float(self.evaluations.steps[-1])

    def step_at(self, share: float) -> float:
        return self.first_step + share * (self.last_step - self.first_step)

    def value_at(self, step: float) -> float:
        return float(np.interp(step, self.evaluations.steps, self.smooth))

    @cached_property
    def gain(self) -> float:
        """How much better the run became over its last third, as a share of the value before."""
        before = self.value_at(self.step_at(2 / 3))
        return (before - self.end) / before if before > 0 else 0.0

    @cached_property
    def late_gain(self) -> float:
        """The same over the last fifth: whether it was still getting better when it stopped."""
        before = self.value_at(self.step_at(4 / 5))
        return (before - self.end) / before if before > 0 else 0.0

    @cached_property
    def progress_share(self) -> float:
        """How much of all its progress a run made in its last third; needs no natural zero, so it suits a loss."""
        whole = float(self.smooth.max()) - self.best
        return (self.value_at(self.step_at(2 / 3)) - self.end) / whole if whole > 0 else 0.0

    @property
    def fallen_back(self) -> float:
        """How far above its best the run ended, as a share."""
        return self.end / self.best - 1 if self.best > 0 else 0.0

    @cached_property
    def frozen_since(self) -> int | None:
        """From where on evaluations were the same to the last digit, if that is a quarter of them and at least four."""
        values = self.evaluations.values
        if self.n < 5 or (np.ptp(values) == 0 and self.n < 8):
            return None
        changed = np.flatnonzero(values != values[-1])
        start = int(changed[-1]) + 1 if len(changed) else 0
        exact = abs(values[-1] * 1e4 - round(values[-1] * 1e4)) > 1e-6 or values[-1] == 1.0
        return int(self.evaluations.steps[start]) if self.n - start >= max(4, self.n // 4) and exact else None

    @property
    def level(self) -> float | None:
        """The best value in multiples of the reference."""
        return None if self.reference is None or self.by_loss else self.best / self.reference

    @cached_property
    def loss_rise(self) -> tuple[float, int] | None:
        """How far the validation loss ended above its lowest, and the step of the lowest."""
        loss = self.log.val_loss.finite
        if len(loss) < 5:
            return None
        smooth = running_median(loss.values) if len(loss) >= SMOOTHED_FROM else loss.values
        lowest = int(smooth.argmin())
        if smooth[lowest] <= 0:
            return None
        end = np.median(loss.values[-3:]) if len(loss) >= SMOOTHED_FROM else loss.values[-1]
        return float(end / smooth[lowest] - 1), int(loss.steps[lowest])

    @cached_property
    def train_trend(self) -> float | None:
        """Training loss at the end against that around the best evaluation: above 0 it rose."""
        train = self.log.train_loss.finite
        if len(train) < 6 or self.n < 2 or self.last_step <= self.first_step:
            return None
        span = train.steps[-1] - train.steps[0]
        share = (self.best_step - self.first_step) / (self.last_step - self.first_step)
        around = train.between(
            train.steps[0] + (share - 0.05) * span, train.steps[0] + (share + 0.05) * span
        ).values
        late = train.between(train.steps[0] + 0.9 * span, train.steps[-1]).values
        if not len(around) or not len(late) or np.median(around) <= 0:
            return None
        rose = float(np.median(late) - np.median(around))
        if 0 < rose < LEARNT_BY_HEART * float(train.values[:3].max()):
            return 0.0
        return rose / float(np.median(around))

    @property
    def by_heart(self) -> bool:
        """Whether hardly anything is left of the training loss."""
        train = self.log.train_loss.finite.values
        return len(train) >= 6 and bool(np.median(train[-3:]) < LEARNT_BY_HEART * train[:3].max())

    @cached_property
    def dead(self) -> tuple[float, float] | None:
        """Training loss at both ends of a run in which nothing moved: neither it, nor an error rate of nearly one."""
        train = self.log.train_loss.finite.values
        if self.by_loss or not self.n or len(train) < 10 or self.evaluations.values.min() < SILENT:
            return None
        third = len(train) // 3
        before, after = float(np.median(train[:third])), float(np.median(train[-third:]))
        return (before, after) if after > (1 - STILL) * before else None

    @cached_property
    def noise(self) -> float:
        """How much neighbouring evaluations of the last half differ by luck, as a share: what a bend alone would
        make is taken off by comparing each with the middle of its neighbours."""
        late = self.evaluations.between(self.step_at(1 / 2), self.last_step).values
        if len(late) < 5 or late.min() <= 0:
            return 0.0
        bends = np.diff(np.log(late), 2)
        return float(1.4826 * np.median(np.abs(bends)) / np.sqrt(6))

    @property
    def in_warmup(self) -> bool:
        """Whether everything seen lies in the warm-up: few batches, or a rate that has only risen."""
        rates = self.log.lr.finite.values
        rising = len(rates) >= 3 and bool((np.diff(rates) > 0).all())
        limit = min(WARMUP_BATCHES, self.planned / 4 if self.planned else WARMUP_BATCHES)
        few = self.evaluations.unit == "batches" and self.last_step <= limit
        return few or rising

    @property
    def finished(self) -> bool | None:
        """Whether the run reached its plan; None where no plan is known."""
        if self.log.said_finished:
            return True
        if self.planned is None or self.log.last_step is None:
            return None
        return self.log.last_step + self.spacing >= NEARLY * self.planned

    @property
    def spacing(self) -> float:
        """Steps from one evaluation to the next."""
        return float(np.median(np.diff(self.evaluations.steps))) if self.n > 1 else 0.0


# Signs of an explosion: numbers that are not finite, and jumps that the error rate pays for.

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
