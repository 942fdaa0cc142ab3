"""`Measurements`: the quantities that rules and causes use, computed once from a log."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arcuate.doctor.log_table import Series, TrainingLog, running_median
from arcuate.progress import percent

_MIN_SMOOTHED = 9  # with fewer evaluations no smoothing is applied
_OUTLIER = 0.9  # an evaluation below this fraction of the smoothed minimum is real: noise is 1 to 2 %
_NEARLY_FINISHED = 0.95  # fraction of the planned steps that counts as finished
_MEMORISED = 0.002  # fraction of the initial training loss; smaller differences are noise between batches
CONSTANT_OUTPUT_PER = 0.8  # error rate that a constant output reaches
BLANK_PER = 0.93  # error rate of an output that is almost only blanks
RANDOM_PER = 0.7  # lowest error rate that the random output of an untrained model reaches
_FALLEN = 0.8  # fraction of the first fall of the loss after which a model is no longer untrained
_HIGH_START = 1.5  # first / lowest validation loss from which the log shows that first fall
_MIN_LOSS_DROP = 0.05  # a training loss that fell by less has not changed
_WARMUP_BATCHES = 500  # every recipe is still warming up before this batch
_AT_PLATEAU = 1.05  # multiple of the best error rate within which a run counts as flat


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

    # Evaluations.

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
    def _first_fall(self) -> float | None:
        """The step at which the validation loss ended its first fall, from the level of an untrained model.

        None if the log does not show that fall.
        """
        loss = self.log.val_loss.finite
        if self.loss_only or len(loss) < 4 or loss.unit != self.evaluations.unit or loss.values[0] <= 0:
            return None
        first, low = float(loss.values[0]), float(running_median(loss.values).min())
        if first < _HIGH_START * low or self.evaluations.values[0] < RANDOM_PER:
            return None
        return float(loss.steps[np.flatnonzero(loss.values <= first - _FALLEN * (first - low))[0]])

    @cached_property
    def first_fall_share(self) -> float | None:
        """Fraction of the run that the first fall of the loss took."""
        span = self.last_step - self.first_step if self.n > 1 else 0.0
        return None if self._first_fall is None or span <= 0 else (self._first_fall - self.first_step) / span

    @cached_property
    def trained(self) -> np.ndarray:
        """A mask of evaluations without those of an untrained model.

        Random output can have a lower error rate than blanks, so a high rate while the loss was still near its start
        is not something that the run had reached.
        """
        if self._first_fall is None:
            return np.ones(self.n, dtype=bool)
        mask = (self.evaluations.steps >= self._first_fall) | (self.evaluations.values < RANDOM_PER)
        return mask if mask.any() else np.ones(self.n, dtype=bool)

    @cached_property
    def _best_index(self) -> int:
        """The lowest evaluation near the smoothed minimum, or a lower one too far below it to be noise."""
        values = np.where(self.trained, self.evaluations.values, np.inf)
        smoothed = np.where(self.trained, self.smoothed, np.inf)
        smooth = int(smoothed.argmin())
        lowest, start = int(values.argmin()), max(0, smooth - 1)
        if values[lowest] < _OUTLIER * smoothed[smooth]:
            return lowest
        return start + int(values[start : smooth + 2].argmin())

    @cached_property
    def best(self) -> float:
        """The smoothed minimum, with which later evaluations are compared."""
        raw, smooth = self.best_raw, float(self.smoothed[self.trained].min())
        return raw if raw < _OUTLIER * smooth else smooth

    @property
    def best_raw(self) -> float:
        """The best evaluation without smoothing for display."""
        return float(self.evaluations.values[self._best_index])

    @cached_property
    def best_step(self) -> int:
        return int(self.evaluations.steps[self._best_index])

    @property
    def learnt(self) -> bool:
        """Whether the error rate ever left the level of a constant output, by more than its noise.

        A best that random output reaches, above which the loss still fell while the output became constant, is random.
        """
        left = self.n > 0 and not self.loss_only and self.best < CONSTANT_OUTPUT_PER * (1 - 3 * self.noise)
        loss = self.log.val_loss.finite
        if not left or self.best < RANDOM_PER or self.end < CONSTANT_OUTPUT_PER or len(loss) < 4:
            return left
        return float(np.interp(self.best_step, loss.steps, loss.values)) <= 1.05 * float(np.median(loss.values[-3:]))

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
    def flat_since(self) -> int:
        """The first evaluation within 5 % of the best."""
        near = np.flatnonzero(self.trained & (self.smoothed <= _AT_PLATEAU * self.best))
        return int(self.evaluations.steps[near[0]])

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
    def noise(self) -> float:
        """Relative noise of neighbouring evaluations in the second half."""
        return self._noise(self.evaluations)

    @cached_property
    def loss_noise(self) -> float:
        """The same for the validation loss."""
        return self._noise(self.log.val_loss.finite) if len(self.log.val_loss) else 0.0

    def _noise(self, series: Series) -> float:
        """Relative noise of neighbouring values in the second half.

        Second differences remove the trend: var(x[i-1] - 2 x[i] + x[i+1]) = 6 var(x) for independent noise. The median
        absolute deviation, times 1.4826, is a robust estimate of the standard deviation.
        """
        late = series.values[len(series) // 2 :]
        if len(late) < 5 or late.min() <= 0:
            return 0.0
        curvature = np.diff(np.log(late), 2)
        return float(1.4826 * np.median(np.abs(curvature)) / np.sqrt(6))

    # Losses.

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
    def late_val_loss(self) -> float | None:
        """Relative change of the validation loss over the last third; negative means that it fell."""
        loss = self.log.val_loss.finite
        if len(loss) < _MIN_SMOOTHED:
            return None
        level = running_median(loss.values)
        before = level[2 * len(level) // 3]
        return float(level[-1] / before - 1) if before > 0 else None

    @cached_property
    def chance_loss(self) -> float | None:
        """The validation loss of an output that does not depend on the input: where its first fall ended."""
        loss = self.log.val_loss.finite
        if self._first_fall is None:
            return None
        at = int(np.searchsorted(loss.steps, self._first_fall))
        blank = self.value_at(float(loss.steps[at])) >= CONSTANT_OUTPUT_PER
        return float(loss.values[at]) if blank else None

    @cached_property
    def val_of_chance(self) -> float | None:
        """The last validation loss / that of an output that does not depend on the input."""
        loss = self.log.val_loss.finite.values
        return None if self.chance_loss is None else float(np.median(loss[-3:])) / self.chance_loss

    @property
    def loss_gap(self) -> float | None:
        """Validation / training loss at the end; None unless the log starts before the model was trained."""
        return None if self._first_fall is None else self.split_ratio

    @cached_property
    def split_ratio(self) -> float | None:
        """Validation / training loss at the end; None unless both start at a similar level."""
        train, val = self.log.train_loss.finite, self.log.val_loss.finite
        if len(train) < 6 or len(val) < 4:
            return None
        late = float(np.median(train.values[-max(3, len(train) // 8) :]))
        similar = 0.4 <= float(val.values[0]) / max(float(train.values[:3].max()), 1e-9) <= 2.5
        return float(np.median(val.values[-3:])) / late if similar and late > 0 else None

    @cached_property
    def train_of_chance(self) -> float | None:
        """The last training loss / the loss of an output that does not depend on the input."""
        if self.loss_gap is None or self.val_of_chance is None:
            return None
        return self.val_of_chance / self.loss_gap

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

    # Progress through the plan.

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


# Signs of an explosion: non-finite values, and quantities that leave their level for good.

_DEPARTED = 10.0  # ratio to the level before that counts as a departure
_DATED = {"loss": 1.5, "norm": 3.0}  # ratio from which a departure is dated
_MIN_LOSS = 0.1  # fraction of the initial loss; late in a good run single batches differ by a factor of ten
_EXPLODED = 100.0  # ratio that is an explosion in a run that has not learnt anything
_DAMAGE = 0.15  # relative rise of the error rate after a departure
_STAYS_HIGH = 3.0  # last / lowest loss of a run that has not recovered
_MAX_SPIKES = 3


@dataclass(frozen=True)
class Instability:
    """A sign of an explosion: its onset, and the evidence."""

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
    """Gradient norms that are not finite, also in an error message that ended the run."""
    steps = log.grad_norm.non_finite_steps
    if len(steps):
        return Instability(int(steps[0]), (_non_finite_text("gradient norm", log.grad_norm),))
    if log.crashed_non_finite and log.last_step is not None:
        text = f"the run ended after step {log.last_step:,} because a gradient or loss was not finite"
        return Instability(log.last_step, (text,))
    return None


def _non_finite_text(name: str, series: Series) -> str:
    steps = series.non_finite_steps
    return f"{name} is not finite at {len(steps):,} of {len(series):,} points, from step {int(steps[0]):,}"


def loss_stays_high(m: Measurements) -> bool:
    """Whether a loss ended at several times its lowest level, which no over-confident but accurate model reaches."""
    for series in (m.log.train_loss.finite, m.log.val_loss.finite):
        level = running_median(series.values)
        if len(level) >= 5 and level[-1] >= _STAYS_HIGH * level.min() and level[-1] >= 0.5 * series.values[0]:
            return True
    return False


def first_departure(m: Measurements) -> Instability | None:
    """The first quantity that rises by an order of magnitude and stays there, if the run suffered from it."""
    log = m.log
    quantities = (
        ("validation loss", log.val_loss, "loss"),
        ("training loss", log.train_loss, "loss"),
        ("gradient norm", log.grad_norm, "norm"),
    )
    found = [d for name, series, kind in quantities if (d := _departure(name, series, kind, m)) is not None]
    return min(found, key=lambda d: d.step, default=None)


def _departure(name: str, series: Series, kind: str, m: Measurements) -> Instability | None:
    series = series.finite.downsample()
    if len(series) < 5 or m.n < 2 or m.evaluations.unit != series.unit:
        return None
    level = running_median(series.values)
    lowest = np.maximum(np.minimum.accumulate(level), 1e-12)
    if kind == "loss":
        usual = lowest
        high = (level >= _DEPARTED * usual) & (level >= _MIN_LOSS * np.median(series.values[:3]))
    else:
        start = max(3, len(level) // 20)
        medians = np.array([np.median(level[min(start, i) : i + 1]) for i in range(len(level))])
        usual = medians if m.learnt else lowest
        high = level >= _DEPARTED * usual
        high[: start if m.learnt else 1] = False
    for i in np.flatnonzero(high)[:50]:
        if (damage := _damage(m, float(series.steps[i]), level[i] / usual[i])) is not None:
            low = series.values < _DATED[kind] * usual[i]
            onset = int(np.flatnonzero(low[:i])[-1]) + 1 if low[:i].any() else 0
            peak = float(series.values[onset : i + 2].max())
            text = (
                f"{name} left its level of {usual[i]:.3g} at step {int(series.steps[onset]):,} and reached {peak:.3g}"
            )
            return Instability(int(series.steps[onset]), (text, damage))
    return None


def _damage(m: Measurements, step: float, ratio: float) -> str | None:
    """What the run lost after a step at which a quantity rose by `ratio`, as evidence; None if nothing."""
    steps = m.evaluations.steps
    earlier, later = m.smoothed[(steps <= step) & m.trained], m.smoothed[steps >= step][:3]
    if len(earlier) and len(later) and float(np.median(later)) > (1 + _DAMAGE) * float(earlier.min()):
        return (
            f"{m.log.error_name} was worse afterwards: {m.shown(float(np.median(later)))},"
            f" {m.shown(float(earlier.min()))} before"
        )
    if not m.loss_only and m.best >= RANDOM_PER and (ratio >= _EXPLODED or loss_stays_high(m)):
        return f"{m.log.error_name} never fell below {m.shown(m.best_raw)}"
    return None


def gradient_spikes(m: Measurements) -> tuple[str, ...]:
    """Single gradient norms far above those before and after them, as evidence."""
    series = m.log.grad_norm.finite
    if len(series) < 20:
        return ()
    around = running_median(series.values, 11)
    start = max(3, len(series) // 20)
    spikes = [i for i in range(start, len(series)) if series.values[i] >= _DEPARTED * around[i] > 0]
    if not spikes or len(spikes) > 0.1 * len(series):
        return ()
    listed = ", ".join(f"{int(series.steps[i]):,} ({series.values[i]:.3g})" for i in spikes[:_MAX_SPIKES])
    more = f" and {len(spikes) - _MAX_SPIKES} more" if len(spikes) > _MAX_SPIKES else ""
    return (f"the gradient norm rose for a moment to ten times its usual level or more at step {listed}{more}",)
