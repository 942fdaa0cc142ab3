"""The guard: checks the metrics of every optimizer step before the update, and never changes the model.

On a healthy run every verdict is `keep`, and training is the same with and without the guard (bit for bit on a CPU).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from arcuate.training import step_size
from arcuate.training.config import GuardSettings
from arcuate.training.metrics import StepMetrics
from arcuate.training.search import MIN_STEPS, LrSearch
from arcuate.training.step_size import EXCESSIVE_UPDATE, HIGHEST_UPDATE, LARGE_UPDATE, SMALL_UPDATE

Remedy = Literal["lower", "raise"]
Action = Literal["keep", "skip", "rewind", "reduce_lr", "warn", "stop"]


@dataclass(frozen=True)
class Verdict:
    """Action for a step, and the reason; `kind` is the rule that applied: non_finite, skips, spike, rise, stuck, …"""

    action: Action
    kind: str = ""
    reason: str = ""
    lr_factor: float = 1.0  # factor of a reduction
    lr_scale: float | None = None  # scale of the next test run of a learning-rate search, or the chosen one
    remedy: Remedy = "lower"  # advice with `stop`: a lower or higher learning rate

    @property
    def applies_update(self) -> bool:
        if self.kind == "skips":  # the step is not finite
            return False
        return self.action in ("keep", "reduce_lr", "warn")


KEEP = Verdict("keep")

_MAX_SKIPS = 10  # consecutive non-finite steps before a rewind
_SKIP_WINDOW, _MAX_SKIP_SHARE = 200, 0.1  # steps in which skipped updates are counted, and their largest share
_WINDOW = 50  # steps in the running statistics of the loss; high steps are left out
_SPIKE_SD, _SPIKE_RATIO = 4.0, 2.0  # a high step's loss exceeds its lowest median by both: robust SDs, ratio
_RISE = 1.25  # ratio of the 20-step median loss to its lowest value that counts as a lasting rise
_MIN_DROP = 0.1  # smallest relative drop of the median loss that counts as progress
_COLLAPSED_BLANKS, _COLLAPSED_DISTINCT, _COLLAPSED_LENGTH = 0.98, 3, 0.1  # blank frames, phonemes, output / target
_COLLAPSE_STEPS = 50  # consecutive collapsed steps before the action
_NORM_WINDOW = 100  # steps in the mean gradient norm
_LR_FACTOR, _STUCK_LR_FACTOR = 0.3, 0.15  # factors on the learning rate after a rewind without a search
_RECENT = 20  # losses in the median of the last steps
_NEAR_LOWEST = 1.1  # a median loss within this factor of the lowest one is healthy
_MEDIAN_ERROR = 1.2533 / math.sqrt(_RECENT)  # standard error of that median, in SDs of a single step
_HEALTHY_ERRORS, _RISE_ERRORS = 5.0, 8.0  # in standard errors: largest healthy rise, smallest rise that counts
_MAX_BLANK_FRACTION = 0.9  # upper limit on blank frames for having left the all-blank solution
_ABOVE_CHANCE = 1.05  # normalised loss above which the output is worse than chance
_AT_CHANCE = 0.8  # normalised loss at or above which the output carries no information
_LEARNT = 0.65  # median normalised loss below which a model has learnt to decode

_LOWER_FACTORS = (1.0, 0.3, 0.1, 0.03)  # 1.0 is included because the data may have been the cause


class Guard:
    """Running statistics of the steps so far, and the rules that judge the next one."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.spike_patience = min(max(settings.stuck.patience // 5, 10), 20)  # consecutive high steps before a rewind
        self.spike_warmup = min(max(settings.stuck.patience // 2, 25), 50)  # steps before the first decision
        self.losses: deque[float] = deque(maxlen=_WINDOW)  # log loss of steps that were not high
        self.recent_losses: deque[float] = deque(maxlen=_RECENT)  # log loss of all finite steps
        self.grad_norms: deque[float] = deque(maxlen=_NORM_WINDOW)
        self.lowest_median: float | None = None  # lowest median of log loss so far
        self.lowest_recent: float | None = None  # lowest median of `recent_losses` so far
        self.lowest_spread = 0.0  # robust SD of the scatter between steps at that time
        self.spread = 0.0  # robust SD of log loss
        self.n_judged = 0
        self.dropped_at = 0  # value of n_judged when the median log loss last dropped
        self.dropped_to: float | None = None  # the median it dropped to
        self.n_skipped = 0  # consecutive
        self.skips: deque[int] = deque(maxlen=_SKIP_WINDOW)  # 1 = update skipped
        self.n_skip_alarms = 0
        self.n_high = 0  # consecutive
        self.n_risen = 0  # consecutive
        self.n_collapsed = 0  # consecutive
        self.left_blank = False  # the model has left the all-blank solution at least once
        self.normalised_losses: deque[float] = deque(maxlen=_RECENT)
        self.has_learnt = False  # the normalised loss has fallen clearly below chance level
        self.warned = False
        self.n_reductions = 0
        self.n_rewinds = 0  # excluding rewinds within a learning-rate search
        self.update_ratio: float | None = None  # largest norm of an update / norm of the weights since a rewind
        self.eps_limits = False  # eps exceeds the typical gradient; measured only if `total_change_is_small`
        self.n_planned: int | None = None  # steps of the run or stage, excluding rewound ones
        self.search = LrSearch()

    def judge(self, metrics: StepMetrics, lr: float, n_left: int | None = None) -> Verdict:
        """Judge one optimizer step; called once per step, before the update.

        `n_left` is the number of steps left in the run, including this one.
        """
        if not self.settings.enabled:
            return KEEP
        is_finite = metrics.is_finite
        if self.search.is_active:
            return self._judge_search(metrics if is_finite else None)
        self.skips.append(0 if is_finite else 1)
        too_many = self._judge_skips(lr)
        if not is_finite:
            return self._judge_nonfinite(metrics) if too_many is None else too_many
        self.n_skipped = 0
        self.n_judged += 1
        self.n_planned = None if n_left is None else self.n_judged + n_left - 1
        self.grad_norms.append(metrics.grad_norm)
        self.recent_losses.append(_log(metrics.loss))
        verdicts = (  # every rule is applied to every step, because each keeps its own statistics
            self._judge_spike(metrics),
            self._judge_rise(n_left),
            self._judge_stuck(metrics),
            self._judge_collapse(metrics),
            self._judge_grad_norm(lr),
        )
        return next((v for v in verdicts if v.action != "keep"), KEEP)

    def record_update_ratio(self, ratio: float) -> None:
        """Record a measured norm of the update / norm of the weights."""
        self.update_ratio = ratio if self.update_ratio is None else max(self.update_ratio, ratio)

    @property
    def is_healthy(self) -> bool:
        """Whether a rewind may return to this step: no rule has fired, and the loss is near its lowest median."""
        is_bad = bool(self.n_high or self.n_skipped or (self.n_collapsed and self.left_blank) or self.search.is_active)
        if is_bad or self.lowest_median is None:
            return not is_bad
        if self.lowest_recent is None or len(self.recent_losses) < _RECENT:
            return True
        limit = max(math.log(_NEAR_LOWEST), _HEALTHY_ERRORS * _MEDIAN_ERROR * self.lowest_spread)
        return median(self.recent_losses) - self.lowest_recent <= limit

    @property
    def updates_are_small(self) -> bool:
        """Whether all measured updates were too small relative to the weights to leave chance level."""
        return self.update_ratio is not None and (
            self.update_ratio < SMALL_UPDATE or (self.total_change_is_small and self.eps_limits)
        )

    @property
    def total_change_is_small(self) -> bool:
        """Whether updates of the measured size are too small to change the weights by their own norm within the run."""
        return step_size.distance_is_short(self.update_ratio, self.n_planned)

    @property
    def is_failing(self) -> bool:
        """Whether the last steps were high or non-finite, but not enough of them for a verdict.

        One high step counts, because its update was applied; one non-finite step does not, because it was skipped.
        """
        return self.n_high > 0 or self.n_skipped > 1

    def is_explosion(self, before: float, after: float) -> bool:
        """Whether an update made the loss explode, judged on its own batch before and after the update."""
        if not math.isfinite(before) or not math.isfinite(after):
            return True
        limit = self._spike_limit()
        return _log(after) > (_log(before) + math.log(_SPIKE_RATIO) if limit is None else limit)

    def lower_eps(self, eps: float, gradient: float) -> float | None:
        """Return a lower eps for a stuck run whose updates are small because eps exceeds the typical gradient.

        A higher learning rate would not help: with gradients far below eps, Adam reduces to SGD with momentum.
        """
        if not self.updates_are_small or not 0 < gradient < eps:
            return None
        return step_size.lower_eps(eps, gradient)

    def after_rewind(
        self,
        to_start: bool = False,
        lr_scale: float = 1.0,
        n_left: int | None = None,
        lr_step: int | None = None,
        is_far: bool = False,
        eps_lowered: bool = False,
    ) -> float:
        """Reset the counters; return the next learning-rate scale: of the first test run or, without a search, reduced.

        The statistics are kept unless the run restarts from its first checkpoint (`to_start`) or from one whose loss
        was much higher (`is_far`). `lr_scale` is the scale so far, `n_left` the number of steps from the checkpoint to
        the end of the run (None: no search), `lr_step` the step since then with the highest learning rate. After
        `eps_lowered` updates are no longer small, and the learning rate has to be chosen again.
        """
        small = to_start and self.updates_are_small and not eps_lowered
        factors = _LOWER_FACTORS if eps_lowered else self._search_factors(to_start)
        self.n_rewinds += 1
        self.dropped_to = None
        if to_start or is_far:
            self.losses.clear()
            self.normalised_losses.clear()
            self.lowest_median, self.lowest_recent = None, None
            self.n_judged = self.dropped_at = 0
        self._reset_counters()
        self.grad_norms.clear()
        self.update_ratio = None
        n_steps = min(max(self.settings.stuck.patience // 3, 20), 200)
        n_steps = min(n_steps, (n_left or 0) - 1)
        if n_steps >= MIN_STEPS:
            scales = [lr_scale * factor for factor in factors]
            early = (to_start or is_far) and not small
            return self.search.start(scales, n_steps, early, None if small else lr_step, n_left or 0)
        if eps_lowered:
            return lr_scale
        factor = _STUCK_LR_FACTOR if to_start else _LR_FACTOR
        return lr_scale / factor if small else lr_scale * factor

    def _search_factors(self, to_start: bool) -> Sequence[float]:
        """Return the learning-rate factors to try: lower ones, or in a stuck run those that its update size suggests.

        With a large eps, updates are proportional to the learning rate, so their size indicates a good factor.
        """
        ratio = self.update_ratio
        if not to_start or ratio is None or ratio > LARGE_UPDATE:
            return _LOWER_FACTORS
        if not self.updates_are_small:
            return [0.1, 0.3, 1.0, 3.0, 10.0]
        return [f for f in (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0) if f <= 10.0 or f * ratio <= HIGHEST_UPDATE]

    def start_stage(self) -> None:
        """Reset statistics and counters for a new stage; `left_blank` and `has_learnt` are kept."""
        self.losses.clear()
        self.grad_norms.clear()
        self.normalised_losses.clear()
        self.lowest_median, self.lowest_recent, self.dropped_to, self.spread = None, None, None, 0.0
        self.n_judged = self.dropped_at = 0
        self.update_ratio = None
        self.search.reset()
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.n_high = self.n_risen = self.n_skipped = self.n_collapsed = 0
        self.recent_losses.clear()
        self.skips.clear()
        self.warned = False

    def _judge_search(self, metrics: StepMetrics | None) -> Verdict:
        """Judge a step of a learning-rate search; no other rule applies until the search ends."""
        if not self.search.observe(None if metrics is None else _log(metrics.loss)):
            return KEEP if metrics else Verdict("skip", "search", "loss or grad_norm not finite in a test run")
        scale = self.search.next_scale or self.search.extend(self.update_ratio) or self.search.refine()
        if scale is not None:
            return Verdict("rewind", "search", f"next test run: learning rate × {scale:.3g}", lr_scale=scale)
        scale, tested = self.search.choose()
        self.search.reset()
        self.update_ratio = None
        return Verdict("rewind", "search", f"learning rate × {scale:.3g} (losses by scale: {tested})", lr_scale=scale)

    def _judge_nonfinite(self, metrics: StepMetrics) -> Verdict:
        self.n_skipped += 1
        names = " and ".join(n for n in ("loss", "grad_norm") if not math.isfinite(getattr(metrics, n)))
        if self.n_skipped >= _MAX_SKIPS:
            return self._verdict("rewind", "non_finite", f"{names} not finite for {self.n_skipped} consecutive steps")
        return Verdict("skip", "non_finite", f"{names} not finite")

    def _judge_skips(self, lr: float) -> Verdict | None:
        """Judge the share of skipped updates: reduce the learning rate, then rewind, then stop; None if it is low."""
        n = sum(self.skips)
        if n <= _MAX_SKIP_SHARE * _SKIP_WINDOW or not self.skips[-1]:
            return None
        reason = f"{n} of the last {len(self.skips)} updates skipped"
        self.skips.clear()
        self.n_skip_alarms += 1
        if self.n_skip_alarms == 1 and (factor := self._reduction(lr)) < 1:
            self.n_skipped += 1
            return Verdict("reduce_lr", "skips", reason, lr_factor=factor)
        if self.n_skip_alarms <= 2:
            return self._verdict("rewind", "skips", reason)
        return Verdict("stop", "skips", f"{reason}, after a lower learning rate and a rewind")

    def _judge_spike(self, metrics: StepMetrics) -> Verdict:
        log_loss = _log(metrics.loss)
        limit = self._spike_limit()
        if limit is None or log_loss <= limit:
            self.n_high = 0
            self.losses.append(log_loss)
            return KEEP
        self.n_high += 1
        if self.n_high < self.spike_patience:
            return KEEP
        assert self.lowest_median is not None
        reason = f"loss {metrics.loss:.3g} above its lowest median {math.exp(self.lowest_median):.3g}"
        return self._verdict("rewind", "spike", f"{reason} for {self.n_high} consecutive steps")

    def _spike_limit(self) -> float | None:
        """Return the log loss above which a step counts as high; None while there are too few steps."""
        if self.n_judged <= self.spike_warmup or len(self.losses) < 20:
            return None
        if self.lowest_median is None or self.n_judged % 10 == 0:
            middle = median(self.losses)
            self.lowest_median = middle if self.lowest_median is None else min(self.lowest_median, middle)
            self.spread = 1.4826 * median(abs(v - middle) for v in self.losses)
        return self.lowest_median + max(_SPIKE_SD * self.spread, math.log(_SPIKE_RATIO))

    def _judge_rise(self, n_left: int | None) -> Verdict:
        """Judge a lasting rise that is too small for a spike; at the last step of the run any duration counts."""
        if self.lowest_median is None or len(self.recent_losses) < _RECENT:
            return KEEP
        recent = median(self.recent_losses)
        if self.lowest_recent is None or recent <= self.lowest_recent:
            changes = [abs(b - a) for a, b in pairwise(self.losses)]  # unlike `spread`, independent of a trend
            self.lowest_recent, self.lowest_spread = recent, 1.4826 * median(changes) / math.sqrt(2)
        lowest = self.lowest_recent
        limit = lowest + max(math.log(_RISE), _RISE_ERRORS * _MEDIAN_ERROR * self.lowest_spread)
        if recent <= limit:
            self.n_risen = 0
            return KEEP
        self.n_risen += 1
        at_end = n_left == 1 and self.n_rewinds < self.settings.max_rewinds
        if self.n_risen < 2 * self.spike_patience and not at_end:
            return KEEP
        reason = f"median loss {math.exp(recent):.3g}, up from {math.exp(lowest):.3g},"
        return self._verdict("rewind", "rise", f"{reason} for {self.n_risen} consecutive steps")

    def _judge_stuck(self, metrics: StepMetrics) -> Verdict:
        patience = self.settings.stuck.patience
        if self.has_learnt:
            return KEEP
        if self.lowest_median is None or metrics.normalised_loss is None:
            return KEEP
        self.normalised_losses.append(metrics.normalised_loss)
        is_full = len(self.normalised_losses) == _RECENT
        self.has_learnt = is_full and median(self.normalised_losses) < _LEARNT
        if self.has_learnt:
            return KEEP
        if self.dropped_to is None or self.lowest_median <= self.dropped_to + math.log1p(-_MIN_DROP):
            self.dropped_at, self.dropped_to = self.n_judged, self.lowest_median
        n_steps = self.n_judged - self.dropped_at
        level = median(self.normalised_losses) if is_full else 0.0
        above_chance = level > _ABOVE_CHANCE and self.n_judged >= patience
        too_slow = level > _AT_CHANCE and self.n_judged >= 2 * patience and self.updates_are_small
        too_short = self.total_change_is_small and self.eps_limits and self.n_judged >= patience
        too_large = (self.update_ratio or 0.0) > EXCESSIVE_UPDATE and self.n_judged >= patience
        if n_steps < patience and not (above_chance or too_slow or too_short or too_large):
            return KEEP
        self.dropped_to = None  # start counting again
        fall = f"has not fallen by {100 * _MIN_DROP:g} % in {n_steps} steps and is at chance level"
        if n_steps < patience:
            place = "above" if above_chance else "at" if too_slow else "near"
            fall = f"is still {place} chance level after {self.n_judged} steps"
        size = ""
        if self.update_ratio is not None:
            too = ", too small to learn" if self.updates_are_small else ", too large" if too_large else ""
            too += f" in {self.n_planned:,} steps" if self.total_change_is_small and self.eps_limits else ""
            size = f"; update norm at most {self.update_ratio:.2g} of the weight norm{too}"
        return self._verdict("rewind", "stuck", f"loss {metrics.loss:.3g} {fall}{size}")

    def _judge_collapse(self, metrics: StepMetrics) -> Verdict:
        action = self.settings.collapse.action
        collapsed = (
            metrics.blank_share >= _COLLAPSED_BLANKS
            or metrics.length_ratio <= _COLLAPSED_LENGTH
            or metrics.n_distinct <= _COLLAPSED_DISTINCT
        )
        if not collapsed:
            varied = metrics.blank_share < _MAX_BLANK_FRACTION and metrics.n_distinct > 10
            informative = metrics.normalised_loss is not None and metrics.normalised_loss < _AT_CHANCE
            self.left_blank = self.left_blank or (varied and informative)
            self.n_collapsed, self.warned = 0, False
            return KEEP
        self.n_collapsed += 1
        if action == "ignore" or self.warned or not self.left_blank or self.n_collapsed < _COLLAPSE_STEPS:
            return KEEP
        reason = (
            f"{100 * metrics.blank_share:.1f} % of frames blank, {metrics.n_distinct} different phonemes,"
            f" output length {metrics.length_ratio:.2f} of the target length for {self.n_collapsed} steps"
        )
        self.warned = True
        return self._verdict(action, "collapse", reason)

    def _judge_grad_norm(self, lr: float) -> Verdict:
        settings = self.settings.adaptive
        if settings.threshold is None or len(self.grad_norms) < _NORM_WINDOW:
            return KEEP
        mean = sum(self.grad_norms) / len(self.grad_norms)
        if mean <= settings.threshold or (factor := self._reduction(lr)) == 1:
            return KEEP
        self.grad_norms.clear()
        reason = f"mean gradient norm {mean:.3g} above {settings.threshold:g}"
        return Verdict("reduce_lr", "gradient_norm", reason, lr_factor=factor)

    def _reduction(self, lr: float) -> float:
        """Count one more reduction and return its factor, clamped to `min_lr`; 1 if none is left."""
        settings = self.settings.adaptive
        if self.n_reductions >= settings.max_reductions or lr <= settings.min_lr:
            return 1.0
        self.n_reductions += 1
        return max(settings.factor, settings.min_lr / lr)

    def _verdict(self, action: Action, kind: str, reason: str) -> Verdict:
        """Return the verdict; after `max_rewinds` rewinds, stop instead of rewinding again."""
        remedy: Remedy = "raise" if kind == "stuck" and self.updates_are_small else "lower"
        if action == "rewind" and self.n_rewinds >= self.settings.max_rewinds:
            return Verdict("stop", kind, f"{reason}, after {self.n_rewinds} rewinds", remedy=remedy)
        return Verdict(action, kind, reason, remedy=remedy)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint."""
        state = {
            name: value
            for name, value in vars(self).items()
            if name not in ("settings", "search", "spike_patience", "spike_warmup")
        }
        state |= {f"search_{name}": value for name, value in self.search.to_dict().items()}
        return {name: list(value) if isinstance(value, deque | list) else value for name, value in state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `to_dict` returned."""
        for name, value in state.items():
            if name.startswith("search_"):
                setattr(self.search, name.removeprefix("search_"), list(value) if isinstance(value, list) else value)
            elif isinstance(kept := getattr(self, name, None), deque):
                kept.clear()
                kept.extend(value)
            else:
                setattr(self, name, value)


def _log(loss: float) -> float:
    return math.log(max(loss, 1e-12))
