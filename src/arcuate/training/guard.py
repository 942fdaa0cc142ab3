"""The guard: checks the metrics of every optimizer step before the update, and never changes the model.

On a healthy run every verdict is `keep`, and training is the same with and without the guard (bit for bit on a CPU).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from arcuate.training import step_size
from arcuate.training.config import GuardSettings
from arcuate.training.curriculum import Count
from arcuate.training.metrics import StepMetrics
from arcuate.training.search import MIN_STEPS, LrSearch
from arcuate.training.step_size import EXCESSIVE_UPDATE, HIGHEST_UPDATE, LARGE_UPDATE, SMALL_UPDATE

Remedy = Literal["lower", "raise"]
Action = Literal["keep", "skip", "rewind", "reduce_lr", "warn", "stop"]
T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """Action for a step, and the reason; `kind` is the rule that applied: non_finite, skips, spike, rise, stuck, …"""

    action: Action
    kind: str = ""
    reason: str = ""
    lr_factor: float = 1.0  # factor of a reduction, which the next learning rates contain
    lr_scale: float | None = None  # scale of the next test run of a learning-rate search, or the chosen one
    remedy: Remedy = "lower"  # advice with `stop`: a lower or higher learning rate

    @property
    def applies_update(self) -> bool:
        if self.kind == "skips":  # the step is not finite
            return False
        return self.action in ("keep", "reduce_lr", "warn")


KEEP = Verdict("keep")


@dataclass(frozen=True)
class Rewind:
    """Where training continues after a rewind, and how."""

    to: int  # step of a checkpoint
    lr_scale: float  # of the scheduled learning rate
    eps: float | None  # of Adam; None: that of the recipe


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


@dataclass
class GuardMemory:
    """What the guard remembers between steps; saved with every checkpoint."""

    lr_scale: float = 1.0  # product of the reductions and searches so far
    eps: Annotated[float, Field(gt=0.0)] | None = None  # of Adam, if the guard lowered it
    targets: Annotated[list[Count], Field(max_length=6)] = field(default_factory=list)  # steps of healthy checkpoints
    rewound_to: Count | None = None
    losses: list[float] = field(default_factory=list)  # log loss of the last steps that were not high
    recent_losses: list[float] = field(default_factory=list)  # log loss of the last finite steps
    grad_norms: list[float] = field(default_factory=list)
    lowest_median: float | None = None  # lowest median of log loss so far
    lowest_recent: float | None = None  # lowest median of `recent_losses` so far
    lowest_spread: float = 0.0  # robust SD of the scatter between steps at that time
    spread: float = 0.0  # robust SD of log loss
    n_judged: int = 0
    dropped_at: int = 0  # value of n_judged when the median log loss last dropped
    dropped_to: float | None = None  # the median it dropped to
    n_skipped: int = 0  # consecutive
    skips: list[int] = field(default_factory=list)  # 1 = update skipped
    n_skip_alarms: int = 0
    n_high: int = 0  # consecutive
    n_risen: int = 0  # consecutive
    n_collapsed: int = 0  # consecutive
    left_blank: bool = False  # the model has left the all-blank solution at least once
    normalised_losses: list[float] = field(default_factory=list)
    has_learnt: bool = False  # the normalised loss has fallen clearly below chance level
    warned: bool = False
    n_reductions: int = 0
    n_rewinds: int = 0  # excluding rewinds within a learning-rate search
    update_ratio: float | None = None  # largest norm of an update / norm of the weights since a rewind
    eps_limits: bool = False  # eps exceeds the typical gradient; measured only if `total_change_is_small`
    n_planned: int | None = None  # steps of the run or stage, excluding rewound ones
    search: LrSearch = field(default_factory=LrSearch)


def _keep(values: list[T], value: T, n: int) -> None:
    """Append a value and keep the last `n`."""
    values.append(value)
    del values[:-n]


class Guard:
    """The rules that judge the next step from the steps so far."""

    def __init__(self, settings: GuardSettings, memory: GuardMemory | None = None) -> None:
        self.settings = settings
        self.memory = memory or GuardMemory()
        self.spike_patience = min(max(settings.stuck.patience // 5, 10), 20)  # consecutive high steps before a rewind
        self.spike_warmup = min(max(settings.stuck.patience // 2, 25), 50)  # steps before the first decision

    def judge(self, metrics: StepMetrics, lr: float, n_left: int | None = None) -> Verdict:
        """Judge one optimizer step; called once per step, before the update.

        `n_left` is the number of steps left in the run, including this one.
        """
        if not self.settings.enabled:
            return KEEP
        m = self.memory
        is_finite = metrics.is_finite
        if m.search.is_active:
            return self._judge_search(metrics if is_finite else None)
        _keep(m.skips, 0 if is_finite else 1, _SKIP_WINDOW)
        too_many = self._judge_skips(lr)
        if not is_finite:
            return self._judge_nonfinite(metrics) if too_many is None else too_many
        m.n_skipped = 0
        m.n_judged += 1
        m.n_planned = None if n_left is None else m.n_judged + n_left - 1
        _keep(m.grad_norms, metrics.grad_norm, _NORM_WINDOW)
        _keep(m.recent_losses, _log(metrics.loss), _RECENT)
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
        m = self.memory
        m.update_ratio = ratio if m.update_ratio is None else max(m.update_ratio, ratio)

    @property
    def is_healthy(self) -> bool:
        """Whether a rewind may return to this step: no rule has fired, and the loss is near its lowest median."""
        m = self.memory
        is_bad = bool(m.n_high or m.n_skipped or (m.n_collapsed and m.left_blank) or m.search.is_active)
        if is_bad or m.lowest_median is None:
            return not is_bad
        if m.lowest_recent is None or len(m.recent_losses) < _RECENT:
            return True
        limit = max(math.log(_NEAR_LOWEST), _HEALTHY_ERRORS * _MEDIAN_ERROR * m.lowest_spread)
        return median(m.recent_losses) - m.lowest_recent <= limit

    @property
    def updates_are_small(self) -> bool:
        """Whether all measured updates were too small relative to the weights to leave chance level."""
        m = self.memory
        return m.update_ratio is not None and (
            m.update_ratio < SMALL_UPDATE or (self.total_change_is_small and m.eps_limits)
        )

    @property
    def total_change_is_small(self) -> bool:
        """Whether updates of the measured size are too small to change the weights by their own norm within the run."""
        return step_size.distance_is_short(self.memory.update_ratio, self.memory.n_planned)

    @property
    def is_failing(self) -> bool:
        """Whether the last steps were high or non-finite, but not enough of them for a verdict.

        One high step counts, because its update was applied; one non-finite step does not, because it was skipped.
        """
        return self.memory.n_high > 0 or self.memory.n_skipped > 1

    def checkpoint_saved(self, step: int) -> None:
        """Remember the checkpoint of a healthy step as a target of rewinds.

        Kept are this checkpoint, the one before it, the first of each of the last three octaves (powers of 2) of the
        step, so that a rewind to about half the step is possible at any time, and the first, until something is learnt.
        """
        if not self.is_healthy:
            return
        earlier = [target for target in self.memory.targets if target < step]
        first = [] if self.memory.has_learnt else earlier[:1]
        octaves: dict[int, int] = {}
        for target in (*earlier, step):
            octaves.setdefault(target.bit_length(), target)
        older = [target for octave, target in octaves.items() if 0 < step.bit_length() - 2 <= octave]
        self.memory.targets = sorted({*first, *older, *earlier[-1:], step})

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

    def plan_rewind(
        self,
        verdict: Verdict,
        step: int,
        bounds: tuple[int, int],
        scheduled_lr: Callable[[int], float],
        eps: float,
        gradient: float | None = None,
    ) -> Rewind:
        """Choose the checkpoint and the learning rate with which training continues after a verdict to rewind.

        `bounds` are the first and the last step of the run or stage, `eps` that of the recipe, `gradient` the typical
        gradient of a weight if the run is stuck.
        """
        m, to_start = self.memory, verdict.kind == "stuck"
        if verdict.lr_scale is not None:  # a learning-rate search stays at its checkpoint
            m.targets = [target for target in m.targets if target <= (m.rewound_to or 0)]
        elif to_start:
            m.targets = m.targets[:1]
        elif verdict.kind == "rise":  # the weights degraded slowly: go back to half the last healthy step
            m.targets = [target for target in m.targets if target <= m.targets[-1] // 2] or m.targets[:1]
        elif m.rewound_to is not None and len(m.targets) > 1 and m.targets[-1] <= m.rewound_to:
            m.targets = m.targets[:-1]  # this checkpoint was already tried: go further back
        m.rewound_to = to = m.targets[-1] if m.targets else 0
        if verdict.lr_scale is not None:
            m.lr_scale = verdict.lr_scale
            return Rewind(to, m.lr_scale, m.eps)
        lower = self.lower_eps(m.eps or eps, gradient) if to_start and gradient is not None else None
        m.eps = lower or m.eps
        lr_step = max(range(to, max(step, to + 1)), key=scheduled_lr)
        is_far = verdict.kind == "rise" or to == bounds[0]
        m.lr_scale = self.after_rewind(to_start, m.lr_scale, bounds[1] - to, lr_step, is_far, lower is not None)
        return Rewind(to, m.lr_scale, m.eps)

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
        m = self.memory
        small = to_start and self.updates_are_small and not eps_lowered
        factors = _LOWER_FACTORS if eps_lowered else self._search_factors(to_start)
        m.n_rewinds += 1
        m.dropped_to = None
        if to_start or is_far:
            m.losses.clear()
            m.normalised_losses.clear()
            m.lowest_median, m.lowest_recent = None, None
            m.n_judged = m.dropped_at = 0
        self._reset_counters()
        m.grad_norms.clear()
        m.update_ratio = None
        n_steps = min(max(self.settings.stuck.patience // 3, 20), 200)
        n_steps = min(n_steps, (n_left or 0) - 1)
        if n_steps >= MIN_STEPS:
            scales = [lr_scale * factor for factor in factors]
            early = (to_start or is_far) and not small
            return m.search.start(scales, n_steps, early, None if small else lr_step, n_left or 0)
        if eps_lowered:
            return lr_scale
        factor = _STUCK_LR_FACTOR if to_start else _LR_FACTOR
        return lr_scale / factor if small else lr_scale * factor

    def _search_factors(self, to_start: bool) -> Sequence[float]:
        """Return the learning-rate factors to try: lower ones, or in a stuck run those that its update size suggests.

        With a large eps, updates are proportional to the learning rate, so their size indicates a good factor.
        """
        ratio = self.memory.update_ratio
        if not to_start or ratio is None or ratio > LARGE_UPDATE:
            return _LOWER_FACTORS
        if not self.updates_are_small:
            return [0.1, 0.3, 1.0, 3.0, 10.0]
        return [f for f in (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0) if f <= 10.0 or f * ratio <= HIGHEST_UPDATE]

    def start_stage(self) -> None:
        """Reset statistics and counters for a new stage; `left_blank` and `has_learnt` are kept."""
        m = self.memory
        m.losses.clear()
        m.grad_norms.clear()
        m.normalised_losses.clear()
        m.lowest_median, m.lowest_recent, m.dropped_to, m.spread = None, None, None, 0.0
        m.n_judged = m.dropped_at = 0
        m.update_ratio = None
        m.search.reset()
        self._reset_counters()

    def _reset_counters(self) -> None:
        m = self.memory
        m.n_high = m.n_risen = m.n_skipped = m.n_collapsed = 0
        m.recent_losses.clear()
        m.skips.clear()
        m.warned = False

    def _judge_search(self, metrics: StepMetrics | None) -> Verdict:
        """Judge a step of a learning-rate search; no other rule applies until the search ends."""
        m = self.memory
        if not m.search.observe(None if metrics is None else _log(metrics.loss)):
            return KEEP if metrics else Verdict("skip", "search", "loss or grad_norm not finite in a test run")
        scale = m.search.next_scale or m.search.refine()
        if scale is not None:
            return Verdict("rewind", "search", f"next test run: learning rate × {scale:.3g}", lr_scale=scale)
        scale, tested = m.search.choose()
        m.search.reset()
        m.update_ratio = None
        return Verdict("rewind", "search", f"learning rate × {scale:.3g} (losses by scale: {tested})", lr_scale=scale)

    def _judge_nonfinite(self, metrics: StepMetrics) -> Verdict:
        m = self.memory
        m.n_skipped += 1
        names = " and ".join(n for n in ("loss", "grad_norm") if not math.isfinite(getattr(metrics, n)))
        if m.n_skipped >= _MAX_SKIPS:
            return self._verdict("rewind", "non_finite", f"{names} not finite for {m.n_skipped} consecutive steps")
        return Verdict("skip", "non_finite", f"{names} not finite")

    def _judge_skips(self, lr: float) -> Verdict | None:
        """Judge the share of skipped updates: reduce the learning rate, then rewind, then stop; None if it is low."""
        m = self.memory
        n = sum(m.skips)
        if n <= _MAX_SKIP_SHARE * _SKIP_WINDOW or not m.skips[-1]:
            return None
        reason = f"{n} of the last {len(m.skips)} updates skipped"
        m.skips.clear()
        m.n_skip_alarms += 1
        if m.n_skip_alarms == 1 and (factor := self._reduction(lr)) < 1:
            m.n_skipped += 1
            return Verdict("reduce_lr", "skips", reason, lr_factor=factor)
        if m.n_skip_alarms <= 2:
            return self._verdict("rewind", "skips", reason)
        return Verdict("stop", "skips", f"{reason}, after a lower learning rate and a rewind")

    def _judge_spike(self, metrics: StepMetrics) -> Verdict:
        m = self.memory
        log_loss = _log(metrics.loss)
        limit = self._spike_limit()
        if limit is None or log_loss <= limit:
            m.n_high = 0
            _keep(m.losses, log_loss, _WINDOW)
            return KEEP
        m.n_high += 1
        if m.n_high < self.spike_patience:
            return KEEP
        assert m.lowest_median is not None
        reason = f"loss {metrics.loss:.3g} above its lowest median {math.exp(m.lowest_median):.3g}"
        return self._verdict("rewind", "spike", f"{reason} for {m.n_high} consecutive steps")

    def _spike_limit(self) -> float | None:
        """Return the log loss above which a step counts as high; None while there are too few steps."""
        m = self.memory
        if m.n_judged <= self.spike_warmup or len(m.losses) < 20:
            return None
        if m.lowest_median is None or m.n_judged % 10 == 0:
            middle = median(m.losses)
            m.lowest_median = middle if m.lowest_median is None else min(m.lowest_median, middle)
            m.spread = 1.4826 * median(abs(v - middle) for v in m.losses)
        return m.lowest_median + max(_SPIKE_SD * m.spread, math.log(_SPIKE_RATIO))

    def _judge_rise(self, n_left: int | None) -> Verdict:
        """Judge a lasting rise that is too small for a spike; at the last step of the run any duration counts."""
        m = self.memory
        if m.lowest_median is None or len(m.recent_losses) < _RECENT:
            return KEEP
        recent = median(m.recent_losses)
        if m.lowest_recent is None or recent <= m.lowest_recent:
            changes = [abs(b - a) for a, b in pairwise(m.losses)]  # unlike `spread`, independent of a trend
            m.lowest_recent, m.lowest_spread = recent, 1.4826 * median(changes) / math.sqrt(2)
        lowest = m.lowest_recent
        limit = lowest + max(math.log(_RISE), _RISE_ERRORS * _MEDIAN_ERROR * m.lowest_spread)
        if recent <= limit:
            m.n_risen = 0
            return KEEP
        m.n_risen += 1
        at_end = n_left == 1 and m.n_rewinds < self.settings.max_rewinds
        if m.n_risen < 2 * self.spike_patience and not at_end:
            return KEEP
        reason = f"median loss {math.exp(recent):.3g}, up from {math.exp(lowest):.3g},"
        return self._verdict("rewind", "rise", f"{reason} for {m.n_risen} consecutive steps")

    def _judge_stuck(self, metrics: StepMetrics) -> Verdict:
        m = self.memory
        if m.has_learnt or m.lowest_median is None or metrics.normalised_loss is None:
            return KEEP
        _keep(m.normalised_losses, metrics.normalised_loss, _RECENT)
        level = median(m.normalised_losses) if len(m.normalised_losses) == _RECENT else None
        m.has_learnt = level is not None and level < _LEARNT
        if m.has_learnt:
            return KEEP
        if m.dropped_to is None or m.lowest_median <= m.dropped_to + math.log1p(-_MIN_DROP):
            m.dropped_at, m.dropped_to = m.n_judged, m.lowest_median
        n_steps = m.n_judged - m.dropped_at
        if n_steps >= self.settings.stuck.patience:
            fall = f"has not fallen by {100 * _MIN_DROP:g} % in {n_steps} steps and is at chance level"
        elif place := self._place_near_chance(level or 0.0):
            fall = f"is still {place} chance level after {m.n_judged} steps"
        else:
            return KEEP
        m.dropped_to = None  # start counting again
        return self._verdict("rewind", "stuck", f"loss {metrics.loss:.3g} {fall}{self._describe_updates()}")

    def _place_near_chance(self, level: float) -> str | None:
        """Where a normalised loss that still falls is stuck all the same; None if it may go on."""
        m, patience = self.memory, self.settings.stuck.patience
        if m.n_judged < patience:
            return None
        if level > _ABOVE_CHANCE:
            return "above"
        if level > _AT_CHANCE and m.n_judged >= 2 * patience and self.updates_are_small:
            return "at"
        never_arrives = self.total_change_is_small and m.eps_limits
        return "near" if never_arrives or (m.update_ratio or 0.0) > EXCESSIVE_UPDATE else None

    def _describe_updates(self) -> str:
        m = self.memory
        if m.update_ratio is None:
            return ""
        too_large = m.update_ratio > EXCESSIVE_UPDATE and m.n_judged >= self.settings.stuck.patience
        too = ", too small to learn" if self.updates_are_small else ", too large" if too_large else ""
        too += f" in {m.n_planned:,} steps" if self.total_change_is_small and m.eps_limits else ""
        return f"; update norm at most {m.update_ratio:.2g} of the weight norm{too}"

    def _judge_collapse(self, metrics: StepMetrics) -> Verdict:
        m = self.memory
        action = self.settings.collapse.action
        collapsed = (
            metrics.blank_share >= _COLLAPSED_BLANKS
            or metrics.length_ratio <= _COLLAPSED_LENGTH
            or metrics.n_distinct <= _COLLAPSED_DISTINCT
        )
        if not collapsed:
            varied = metrics.blank_share < _MAX_BLANK_FRACTION and metrics.n_distinct > 10
            informative = metrics.normalised_loss is not None and metrics.normalised_loss < _AT_CHANCE
            m.left_blank = m.left_blank or (varied and informative)
            m.n_collapsed, m.warned = 0, False
            return KEEP
        m.n_collapsed += 1
        if action == "ignore" or m.warned or not m.left_blank or m.n_collapsed < _COLLAPSE_STEPS:
            return KEEP
        reason = (
            f"{100 * metrics.blank_share:.1f} % of frames blank, {metrics.n_distinct} different phonemes,"
            f" output length {metrics.length_ratio:.2f} of the target length for {m.n_collapsed} steps"
        )
        m.warned = True
        return self._verdict(action, "collapse", reason)

    def _judge_grad_norm(self, lr: float) -> Verdict:
        m = self.memory
        settings = self.settings.adaptive
        if settings.threshold is None or len(m.grad_norms) < _NORM_WINDOW:
            return KEEP
        mean = sum(m.grad_norms) / len(m.grad_norms)
        if mean <= settings.threshold or (factor := self._reduction(lr)) == 1:
            return KEEP
        m.grad_norms.clear()
        reason = f"mean gradient norm {mean:.3g} above {settings.threshold:g}"
        return Verdict("reduce_lr", "gradient_norm", reason, lr_factor=factor)

    def _reduction(self, lr: float) -> float:
        """Count one more reduction and return its factor, clamped to `min_lr`; 1 if none is left."""
        settings = self.settings.adaptive
        if self.memory.n_reductions >= settings.max_reductions or lr <= settings.min_lr:
            return 1.0
        self.memory.n_reductions += 1
        return max(settings.factor, settings.min_lr / lr)

    def _verdict(self, action: Action, kind: str, reason: str) -> Verdict:
        """Return the verdict; after `max_rewinds` rewinds, stop instead of rewinding again."""
        remedy: Remedy = "raise" if kind == "stuck" and self.updates_are_small else "lower"
        if action == "rewind" and self.memory.n_rewinds >= self.settings.max_rewinds:
            return Verdict("stop", kind, f"{reason}, after {self.memory.n_rewinds} rewinds", remedy=remedy)
        return Verdict(action, kind, reason, remedy=remedy)


def _log(loss: float) -> float:
    return math.log(max(loss, 1e-12))
