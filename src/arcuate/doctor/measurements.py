"""`Measurements`: the quantities that the rules use, computed once from a log."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arcuate.doctor.training_log import Series, TrainingLog, running_median
from arcuate.progress import percent

_MIN_SMOOTHED = 9  # with fewer evaluations no smoothing is applied
_OUTLIER = 0.9  # an evaluation below this fraction of the smoothed minimum is real: noise is 1 to 2 %
_NEARLY_FINISHED = 0.95  # fraction of the planned steps that counts as finished
_MEMORISED = 0.002  # fraction of the initial training loss; smaller differences are noise between batches
CONSTANT_OUTPUT_PER = 0.8  # error rate that a constant output reaches
_MIN_LOSS_DROP = 0.05  # a training loss that fell by less has not changed
_WARMUP_BATCHES = 500  # every recipe is still warming up before this batch


@dataclass(frozen=True)
class Measurements:
    """One run with the values it is compared with."""

    log: TrainingLog
    reference: float | None = None  # final error rate of healthy runs on this data set
    expected: float | None = None  # official error rate at the last step, if steps are comparable
    planned: int | None = None
    dataset: str | None = None

    @property
    def epochs(self) -> float | None:
        """Passes through the training data; None if the number of training trials is unknown."""
        if self.log.n_trials_seen and self.log.n_train:
            return self.log.n_trials_seen / self.log.n_train
        return None

    def shown(self, value: float) -> str:
        """A value of the judged quantity: an error rate in per cent, or a loss."""
        return f"{value:.3f}" if self.loss_only else percent(float(value))

    @property
    def loss_only(self) -> bool:
        """Whether no error rate was logged, so that only the shape of the loss can be judged."""
        return not len(self.log.per)

    @cached_property
    def evaluations(self) -> Series:
        return self.log.judged.finite

    @property
    def n(self) -> int:
        return len(self.evaluations)

    @cached_property
    def smoothed(self) -> np.ndarray:
        values = self.evaluations.values
        return running_median(values) if self.n >= _MIN_SMOOTHED else values

    @cached_property
    def _best_index(self) -> int:
        """The lowest evaluation near the smoothed minimum, or a lower one too far below it to be noise."""
        values, smooth = self.evaluations.values, int(self.smoothed.argmin())
        lowest, start = int(values.argmin()), max(0, smooth - 1)
        if values[lowest] < _OUTLIER * self.smoothed[smooth]:
            return lowest
        return start + int(values[start : smooth + 2].argmin())

    @cached_property
    def best(self) -> float:
        """The smoothed minimum, with which later evaluations are compared."""
        raw, smooth = self.best_raw, float(self.smoothed.min())
        return raw if raw < _OUTLIER * smooth else smooth

    @property
    def best_raw(self) -> float:
        """The best evaluation without smoothing for display."""
        return float(self.evaluations.values[self._best_index])

    @cached_property
    def best_step(self) -> int:
        return int(self.evaluations.steps[self._best_index])

    @cached_property
    def end(self) -> float:
        """The last evaluation, or the median of the last three if that is lower."""
        last = self.evaluations.values[-3:] if self.n >= _MIN_SMOOTHED else self.evaluations.values[-1:]
        return float(min(np.median(last), last[-1]))

    @property
    def shown_end(self) -> str:
        """`end` for display; says so if it is not the last evaluation, which is shown beside it."""
        last = float(self.evaluations.values[-1])
        return self.shown(self.end) + ("" if self.end == last else " (median of the last three evaluations)")

    @property
    def first_step(self) -> float:
        return float(self.evaluations.steps[0])

    @property
    def last_step(self) -> float:
        return float(self.evaluations.steps[-1])

    def step_at(self, fraction: float) -> float:
        return self.first_step + fraction * (self.last_step - self.first_step)

    def value_at(self, step: float) -> float:
        return float(np.interp(step, self.evaluations.steps, self.smoothed))

    @cached_property
    def gain(self) -> float:
        """Relative improvement over the last third of the run."""
        return self._gain_since(2 / 3)

    @cached_property
    def late_gain(self) -> float:
        """Relative improvement over the last fifth: whether the run was still improving when it stopped."""
        return self._gain_since(4 / 5)

    def _gain_since(self, fraction: float) -> float:
        before = self.value_at(self.step_at(fraction))
        return (before - self.end) / before if before > 0 else 0.0

    @cached_property
    def late_progress(self) -> float:
        """The fraction of all progress made in the last third; unaffected by a constant offset of the loss."""
        total = float(self.smoothed.max()) - self.best
        return (self.value_at(self.step_at(2 / 3)) - self.end) / total if total > 0 else 0.0

    @property
    def regression(self) -> float:
        """How far above its best the run ended, relative to the best."""
        return self.end / self.best - 1 if self.best > 0 else 0.0

    @cached_property
    def frozen_since(self) -> int | None:
        """The step since which all evaluations are identical, if they are at least four and at least 25 % of all."""
        values = self.evaluations.values
        if self.n < 5 or (np.ptp(values) == 0 and self.n < 8):
            return None
        changed = np.flatnonzero(values != values[-1])
        start = int(changed[-1]) + 1 if len(changed) else 0
        exact = abs(values[-1] * 1e4 - round(values[-1] * 1e4)) > 1e-6 or values[-1] == 1.0
        return int(self.evaluations.steps[start]) if self.n - start >= max(4, self.n // 4) and exact else None

    @property
    def level(self) -> float | None:
        """The best value as a multiple of the reference."""
        return None if self.reference is None or self.loss_only else self.best / self.reference

    @cached_property
    def val_loss_rise(self) -> tuple[float, int] | None:
        """The rise of the validation loss above its minimum at the end, and the step of the minimum."""
        loss = self.log.val_loss.finite
        if len(loss) < 5:
            return None
        smooth = running_median(loss.values) if len(loss) >= _MIN_SMOOTHED else loss.values
        lowest = int(smooth.argmin())
        if smooth[lowest] <= 0:
            return None
        end = np.median(loss.values[-3:]) if len(loss) >= _MIN_SMOOTHED else loss.values[-1]
        return float(end / smooth[lowest] - 1), int(loss.steps[lowest])

    @cached_property
    def train_loss_trend(self) -> float | None:
        """Relative change of the training loss from the best evaluation to the end; positive means it rose."""
        train = self.log.train_loss.finite
        if len(train) < 6 or self.n < 2 or self.last_step <= self.first_step:
            return None
        first, span = train.steps[0], train.steps[-1] - train.steps[0]
        fraction = (self.best_step - self.first_step) / (self.last_step - self.first_step)
        around = train.between(first + (fraction - 0.05) * span, first + (fraction + 0.05) * span).values
        late = train.between(first + 0.9 * span, train.steps[-1]).values
        if not len(around) or not len(late) or np.median(around) <= 0:
            return None
        rise = float(np.median(late) - np.median(around))
        if 0 < rise < _MEMORISED * float(train.values[:3].max()):
            return 0.0
        return rise / float(np.median(around))

    @property
    def memorised(self) -> bool:
        """Whether the training loss has almost vanished."""
        train = self.log.train_loss.finite.values
        return len(train) >= 6 and bool(np.median(train[-3:]) < _MEMORISED * train[:3].max())

    @cached_property
    def stuck_train_loss(self) -> tuple[float, float] | None:
        """First and last training loss of a run in which neither the loss nor an error rate near 1 changed."""
        train = self.log.train_loss.finite.values
        if self.loss_only or not self.n or len(train) < 10:
            return None
        if self.evaluations.values.min() < CONSTANT_OUTPUT_PER:
            return None
        third = len(train) // 3
        before, after = float(np.median(train[:third])), float(np.median(train[-third:]))
        return (before, after) if after > (1 - _MIN_LOSS_DROP) * before else None

    @cached_property
    def noise(self) -> float:
        """Relative noise of neighbouring evaluations in the second half.

        Second differences remove the trend: var(x[i-1] - 2 x[i] + x[i+1]) = 6 var(x) for independent noise. The median
        absolute deviation, times 1.4826, is a robust estimate of the standard deviation.
        """
        late = self.evaluations.between(self.step_at(1 / 2), self.last_step).values
        if len(late) < 5 or late.min() <= 0:
            return 0.0
        curvature = np.diff(np.log(late), 2)
        return float(1.4826 * np.median(np.abs(curvature)) / np.sqrt(6))

    @property
    def in_warmup(self) -> bool:
        """Whether the run ended during warm-up: few batches, or a learning rate that has only increased."""
        rates = self.log.lr.finite.values
        increasing = len(rates) >= 3 and bool((np.diff(rates) > 0).all())
        limit = min(_WARMUP_BATCHES, self.planned / 4 if self.planned else _WARMUP_BATCHES)
        return increasing or (self.evaluations.unit == "batches" and self.last_step <= limit)

    @property
    def finished(self) -> bool | None:
        """Whether the run reached its planned length; None if that is unknown."""
        if self.log.reported_finished:
            return True
        if self.planned is None or self.log.last_step is None:
            return None
        return self.log.last_step + self.spacing >= _NEARLY_FINISHED * self.planned

    @property
    def spacing(self) -> float:
        """Steps between evaluations."""
        return float(np.median(np.diff(self.evaluations.steps))) if self.n > 1 else 0.0


# Signs of an explosion: non-finite values, and jumps after which the error rate is worse.

_JUMP = 10.0  # ratio that counts as a jump
_MIN_JUMP_LOSS = 0.1  # fraction of the initial loss; late in a good run single batches differ by a factor of ten
_DAMAGE = 0.15  # relative rise of the error rate after a jump


@dataclass(frozen=True)
class Instability:
    """A sign of an explosion: the first step that shows it, and the evidence."""

    step: int
    evidence: tuple[str, ...]


def non_finite_losses(log: TrainingLog) -> Instability | None:
    """A loss or error rate that is not finite, or a step that the guard stopped retrying."""
    evidence, steps = [], []
    quantities = (("training loss", log.train_loss), ("validation loss", log.val_loss), (log.error_name, log.per))
    for name, series in quantities:
        if len(series.non_finite_steps):
            evidence.append(_non_finite_text(name, series))
            steps.append(int(series.non_finite_steps[0]))
    if log.non_finite_steps:
        evidence.append(f"no finite loss in the logging interval up to step {log.non_finite_steps[0]:,}")
        steps.append(log.non_finite_steps[0])
    return Instability(min(steps), tuple(evidence)) if steps else None


def non_finite_gradients(log: TrainingLog) -> Instability | None:
    """Gradient norms that are not finite; with a loss scaler a few of them are normal."""
    steps = log.grad_norm.non_finite_steps
    return Instability(int(steps[0]), (_non_finite_text("gradient norm", log.grad_norm),)) if len(steps) else None


def _non_finite_text(name: str, series: Series) -> str:
    steps = series.non_finite_steps
    return f"{name} is not finite at {len(steps):,} of {len(series):,} points, from step {int(steps[0]):,}"


def first_jump(m: Measurements) -> Instability | None:
    """The first rise by an order of magnitude after which the error rate was worse."""
    jumps = (
        _loss_jump("validation loss", m.log.val_loss, m),
        _loss_jump("training loss", m.log.train_loss, m),
        _gradient_jump(m),
    )
    return min((jump for jump in jumps if jump is not None), key=lambda j: j.step, default=None)


def _loss_jump(name: str, series: Series, m: Measurements) -> Instability | None:
    series = series.finite.downsample()
    if len(series) < 5:
        return None
    level = running_median(series.values)
    lowest = np.minimum.accumulate(level)
    high = (level >= _JUMP * lowest) & (level >= _MIN_JUMP_LOSS * np.median(series.values[:3]))
    return _first_damaging(name, series, level / np.maximum(lowest, 1e-12), high, m)


def _gradient_jump(m: Measurements) -> Instability | None:
    """Gradient norms against their median so far, without the first steps of the run."""
    series = m.log.grad_norm.finite.downsample()
    if len(series) < 20:
        return None
    level = running_median(series.values)
    start = max(3, len(level) // 20)
    usual = np.array([np.median(level[start : max(i, start) + 1]) for i in range(len(level))])
    high = (level >= _JUMP * usual) & (np.arange(len(level)) >= start)
    return _first_damaging("gradient norm", series, level / np.maximum(usual, 1e-12), high, m)


def _first_damaging(
    name: str, series: Series, ratio: np.ndarray, high: np.ndarray, m: Measurements
) -> Instability | None:
    """The first of the high points after which evaluations were worse than the best before."""
    evaluations = m.evaluations
    if m.n < 2 or evaluations.unit != series.unit:
        return None
    for i in np.flatnonzero(high)[:50]:
        step = float(series.steps[i])
        earlier = m.smoothed[evaluations.steps <= step]
        later = m.smoothed[evaluations.steps >= step][:3]
        if len(earlier) and len(later) and float(np.median(later)) > (1 + _DAMAGE) * float(earlier.min()):
            evidence = (
                f"{name} jumped to {ratio[i]:.0f} times its level at step {int(step):,}",
                f"{m.log.error_name} was worse afterwards: {m.shown(float(np.median(later)))},"
                f" {m.shown(float(earlier.min()))} before",
            )
            return Instability(int(step), evidence)
    return None
