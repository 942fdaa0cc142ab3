"""The guard: checks the metrics of every optimizer step before the update, and never changes the model.

On a healthy run every verdict is `keep`, and training is bit-identical with and without the guard.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import Field

from arcuate.config import Settings
from arcuate.training.metrics import StepMetrics
from arcuate.training.schedule import MAX_STEPS


class SpikeSettings(Settings):
    """A loss that rises above its running statistics and stays there; a single spike is not a failure.

    A step is high if its loss exceeds the lowest running median by both `n_sd` and `ratio`.
    """

    renamed: ClassVar[Mapping[str, str]] = {"deviations": "n_sd"}

    window: int = Field(
        50, ge=20, le=100_000, description="Number of steps in the running statistics; high steps are left out."
    )
    warmup: int = Field(50, ge=0, le=MAX_STEPS, description="Number of steps before the first decision.")
    n_sd: float = Field(
        4.0, gt=1.0, le=1000.0, description="Minimum rise of log loss above its lowest median, in robust SDs."
    )
    ratio: float = Field(
        2.0, gt=1.0, le=1e6, description="Minimum ratio of a high step's loss to the lowest median loss so far."
    )
    patience: int = Field(20, ge=1, le=10_000, description="Number of consecutive high steps before a rewind.")


class StuckSettings(Settings):
    """A loss that stays at chance level: a learning rate too high from the start leaves weights that cannot learn.

    In the official recipes the output is all blanks for the first 500 to 1,600 steps, which is normal.
    """

    renamed: ClassVar[Mapping[str, str]] = {"cool": "lr_factor", "fall": "min_drop"}

    action: Literal["rewind", "warn", "stop", "ignore"] = Field("rewind", description="Action when stuck.")
    patience: int = Field(2000, ge=50, le=10_000_000, description="Number of steps without a drop before the action.")
    lr_factor: float = Field(
        0.15,
        gt=0.0,
        lt=1.0,
        description="Factor on all learning rates after a rewind: lower than after a spike, because a learning rate at"
        " which nothing is learnt is further from a workable one than a learning rate that diverges late.",
    )
    min_drop: float = Field(
        0.1, gt=0.0, lt=1.0, description="Smallest relative drop of the median loss that counts as progress."
    )


class CollapseSettings(Settings):
    """Blanks only, or the same output for every trial, after the model had left the all-blank solution."""

    renamed: ClassVar[Mapping[str, str]] = {"blank_share": "blank_fraction"}

    action: Literal["warn", "rewind", "stop", "ignore"] = Field("warn", description="Action on a collapse.")
    blank_fraction: float = Field(0.98, gt=0.5, le=1.0, description="Fraction of blank frames that counts as collapse.")
    n_distinct: int = Field(
        3, ge=0, le=40, description="Collapse also if a batch has at most this many distinct phonemes."
    )
    length_ratio: float = Field(
        0.1, ge=0.0, le=1.0, description="Collapse also if output length / target length is at most this."
    )
    patience: int = Field(50, ge=1, le=10_000, description="Number of consecutive steps before the action.")


class AdaptiveSettings(Settings):
    """Reduction of the learning rate while the mean gradient norm exceeds `threshold`; off without a threshold."""

    renamed: ClassVar[Mapping[str, str]] = {"floor": "min_lr", "max_times": "max_reductions"}

    threshold: float | None = Field(
        None, gt=0.0, le=1e9, description="Mean gradient norm above which the learning rate is reduced; null = off."
    )
    window: int = Field(100, ge=1, le=100_000, description="Number of steps in the mean.")
    factor: float = Field(0.8, gt=0.0, lt=1.0, description="Factor on all learning rates at a reduction.")
    min_lr: float = Field(0.0, ge=0.0, le=100.0, description="Lower bound on the reduced learning rate.")
    max_reductions: int = Field(5, ge=1, le=1000, description="Maximum number of reductions.")


class GuardSettings(Settings):
    """Responses to non-finite updates, divergence, stuck training and collapse."""

    renamed: ClassVar[Mapping[str, str]] = {"cool": "lr_factor"}

    enabled: bool = Field(True, description="Enable the guard.")
    max_skips: int = Field(10, ge=1, le=100_000, description="Number of consecutive non-finite steps before a rewind.")
    lr_factor: float = Field(0.3, gt=0.0, lt=1.0, description="Factor on all learning rates after a rewind.")
    max_rewinds: int = Field(5, ge=0, le=1000, description="Number of rewinds after which training stops.")
    keep_batches: bool = Field(False, description="Save the bins of non-finite steps to bad_steps/.")
    spike: SpikeSettings = SpikeSettings()
    stuck: StuckSettings = StuckSettings()
    collapse: CollapseSettings = CollapseSettings()
    adaptive: AdaptiveSettings = AdaptiveSettings()


Action = Literal["keep", "skip", "rewind", "reduce_lr", "warn", "stop"]


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why; `kind` is the rule that applied: non_finite, spike, stuck, …"""

    action: Action
    kind: str = ""
    reason: str = ""

    @property
    def applies_update(self) -> bool:
        return self.action in ("keep", "reduce_lr", "warn")


KEEP = Verdict("keep")

_RECENT = 20  # losses in the median of the last steps
_NEAR_LOWEST = 1.25  # a loss within this factor of the lowest median is healthy
_MAX_BLANK_FRACTION = 0.9  # upper limit on blank frames for having left the all-blank solution
_AT_CHANCE = 0.8  # normalised loss at or above which the output carries no information
_LEARNT = 0.65  # median normalised loss below which a model has learnt to decode

# Names of the state in checkpoints of earlier versions, and their names now.
_RENAMED_STATE = {
    "norms": "grad_norms",
    "lowest": "lowest_median",
    "fell_at": "dropped_at",
    "fell_to": "dropped_to",
    "spoke": "left_blank",
    "doubts": "normalised_losses",
    "learned": "has_learnt",
    "n_adapted": "n_reductions",
}


class Guard:
    """Running statistics of the steps so far, and the rules that judge the next one."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.losses: deque[float] = deque(maxlen=settings.spike.window)  # log loss of steps that were not high
        self.grad_norms: deque[float] = deque(maxlen=settings.adaptive.window)
        self.lowest_median: float | None = None  # of log loss so far
        self.spread = 0.0  # robust SD of log loss
        self.n_judged = 0
        self.dropped_at = 0  # value of n_judged when the median log loss last dropped
        self.dropped_to: float | None = None  # the median it dropped to
        self.n_skipped = 0  # consecutive
        self.n_high = 0  # consecutive
        self.n_collapsed = 0  # consecutive
        self.left_blank = False  # the model has left the all-blank solution at least once
        self.normalised_losses: deque[float] = deque(maxlen=_RECENT)
        self.has_learnt = False  # the normalised loss has fallen clearly below chance level
        self.warned = False
        self.n_reductions = 0
        self.n_rewinds = 0

    def judge(self, metrics: StepMetrics, lr: float) -> Verdict:
        """Judge one optimizer step; called once per step, before the update."""
        if not self.settings.enabled:
            return KEEP
        if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            return self._judge_nonfinite(metrics)
        self.n_skipped = 0
        self.n_judged += 1
        self.grad_norms.append(metrics.grad_norm)
        verdicts = (  # every rule is applied to every step, because each keeps its own statistics
            self._judge_spike(metrics),
            self._judge_stuck(metrics),
            self._judge_collapse(metrics),
            self._judge_grad_norm(lr),
        )
        return next((v for v in verdicts if v.action != "keep"), KEEP)

    @property
    def is_healthy(self) -> bool:
        """Whether a rewind may return to this step: no rule has fired, and the loss is near its lowest median."""
        is_bad = bool(self.n_high or self.n_skipped or (self.n_collapsed and self.left_blank))
        if is_bad or self.lowest_median is None:
            return not is_bad
        recent = median(list(self.losses)[-_RECENT:])
        return recent - self.lowest_median <= max(self.spread, math.log(_NEAR_LOWEST))

    @property
    def is_failing(self) -> bool:
        """Whether the last steps were high or not finite, but too few of them for a verdict."""
        return max(self.n_high, self.n_skipped) > 1

    def after_rewind(self, to_start: bool = False) -> None:
        """Reset the counters; the statistics stay, unless the run starts again from its first checkpoint."""
        self.n_rewinds += 1
        self.dropped_to = None
        if to_start:
            self.losses.clear()
            self.normalised_losses.clear()
            self.lowest_median, self.n_judged = None, 0
        self._reset_counters()
        self.grad_norms.clear()

    def start_stage(self) -> None:
        """Reset statistics and counters for a new stage; `left_blank` and `has_learnt` are kept."""
        self.losses.clear()
        self.grad_norms.clear()
        self.normalised_losses.clear()
        self.lowest_median, self.dropped_to, self.spread = None, None, 0.0
        self.n_judged = self.dropped_at = 0
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.n_high = self.n_skipped = self.n_collapsed = 0
        self.warned = False

    def _judge_nonfinite(self, metrics: StepMetrics) -> Verdict:
        self.n_skipped += 1
        names = " and ".join(n for n in ("loss", "grad_norm") if not math.isfinite(getattr(metrics, n)))
        if self.n_skipped >= self.settings.max_skips:
            return self._verdict("rewind", "non_finite", f"{names} not finite for {self.n_skipped} consecutive steps")
        return Verdict("skip", "non_finite", f"{names} not finite")

    def _judge_spike(self, metrics: StepMetrics) -> Verdict:
        log_loss = math.log(max(metrics.loss, 1e-12))
        limit = self._spike_limit()
        if limit is None or log_loss <= limit:
            self.n_high = 0
            self.losses.append(log_loss)
            return KEEP
        self.n_high += 1
        if self.n_high < self.settings.spike.patience:
            return KEEP
        assert self.lowest_median is not None
        reason = f"loss {metrics.loss:.3g} above its lowest median {math.exp(self.lowest_median):.3g}"
        return self._verdict("rewind", "spike", f"{reason} for {self.n_high} consecutive steps")

    def _spike_limit(self) -> float | None:
        """Return the log loss above which a step counts as high; None while there are too few steps."""
        settings = self.settings.spike
        if self.n_judged <= settings.warmup or len(self.losses) < 20:
            return None
        if self.lowest_median is None or self.n_judged % 10 == 0:
            middle = median(self.losses)
            self.lowest_median = middle if self.lowest_median is None else min(self.lowest_median, middle)
            self.spread = 1.4826 * median(abs(v - middle) for v in self.losses)
        return self.lowest_median + max(settings.n_sd * self.spread, math.log(settings.ratio))

    def _judge_stuck(self, metrics: StepMetrics) -> Verdict:
        settings = self.settings.stuck
        if settings.action == "ignore" or self.has_learnt:
            return KEEP
        if self.lowest_median is None or metrics.normalised_loss is None:
            return KEEP
        self.normalised_losses.append(metrics.normalised_loss)
        self.has_learnt = len(self.normalised_losses) == _RECENT and median(self.normalised_losses) < _LEARNT
        if self.has_learnt:
            return KEEP
        if self.dropped_to is None or self.lowest_median <= self.dropped_to + math.log1p(-settings.min_drop):
            self.dropped_at, self.dropped_to = self.n_judged, self.lowest_median
        n_steps = self.n_judged - self.dropped_at
        if n_steps < settings.patience:
            return KEEP
        self.dropped_to = None  # start counting again
        reason = (
            f"loss {metrics.loss:.3g} has not fallen by {100 * settings.min_drop:g} % in {n_steps} steps"
            " and is at chance level"
        )
        return self._verdict(settings.action, "stuck", reason)

    def _judge_collapse(self, metrics: StepMetrics) -> Verdict:
        settings = self.settings.collapse
        collapsed = (
            metrics.blank_share >= settings.blank_fraction
            or metrics.length_ratio <= settings.length_ratio
            or metrics.n_distinct <= settings.n_distinct
        )
        if not collapsed:
            varied = metrics.blank_share < _MAX_BLANK_FRACTION and metrics.n_distinct > 10
            informative = metrics.normalised_loss is not None and metrics.normalised_loss < _AT_CHANCE
            self.left_blank = self.left_blank or (varied and informative)
            self.n_collapsed, self.warned = 0, False
            return KEEP
        self.n_collapsed += 1
        if settings.action == "ignore" or self.warned or not self.left_blank or self.n_collapsed < settings.patience:
            return KEEP
        reason = (
            f"{100 * metrics.blank_share:.1f} % of frames blank, {metrics.n_distinct} different phonemes,"
            f" output length {metrics.length_ratio:.2f} of the target length for {self.n_collapsed} steps"
        )
        self.warned = True
        return self._verdict(settings.action, "collapse", reason)

    def _judge_grad_norm(self, lr: float) -> Verdict:
        settings = self.settings.adaptive
        if settings.threshold is None or len(self.grad_norms) < settings.window:
            return KEEP
        mean = sum(self.grad_norms) / len(self.grad_norms)
        is_exhausted = self.n_reductions >= settings.max_reductions or lr * settings.factor < settings.min_lr
        if mean <= settings.threshold or is_exhausted:
            return KEEP
        self.n_reductions += 1
        self.grad_norms.clear()
        return Verdict("reduce_lr", "gradient_norm", f"mean gradient norm {mean:.3g} above {settings.threshold:g}")

    def _verdict(self, action: Action, kind: str, reason: str) -> Verdict:
        """Return the verdict; after `max_rewinds` rewinds, stop instead of rewinding again."""
        if action == "rewind" and self.n_rewinds >= self.settings.max_rewinds:
            return Verdict("stop", kind, f"{reason}, after {self.n_rewinds} rewinds")
        return Verdict(action, kind, reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint."""
        state = {name: value for name, value in vars(self).items() if name != "settings"}
        return {name: list(value) if isinstance(value, deque) else value for name, value in state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `to_dict` returned."""
        for name, value in state.items():
            if isinstance(kept := getattr(self, name, None), deque):
                kept.clear()
                kept.extend(value)
            else:
                setattr(self, name, value)


def migrate_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the state of a guard that an earlier version saved."""
    return {_RENAMED_STATE.get(name, name): value for name, value in state.items()}
