"""The guard: a judge that receives numbers and says what to do about them. It never touches the model.

On a healthy run every verdict is `keep`, and training with the guard is bit for bit training without it.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from arcuate.training.config import Guard as GuardSettings

Action = Literal["keep", "skip", "rewind", "cool", "warn", "stop"]
RECENT, NEAR = 20, 1.25  # the last so many losses, within this factor of the lowest median
SPEAKING = 0.9  # below this share of blanks, with several phonemes, a model has begun to speak
GUESSING = 0.8  # of the loss of a blind guess: a model above it says nothing yet, whatever it utters
LEARNING = 0.65  # and in the middle of its last steps below this it has learned to read


@dataclass(frozen=True)
class Numbers:
    """What one optimizer step looked like."""

    loss: float
    grad_norm: float
    ignorance: (
        float | None
    )  # loss per token over that of a blind guess among all classes; None: nothing was read
    blank_share: float  # of frames
    n_distinct: int  # different phonemes in the greedy output of the batch
    length_ratio: float  # length of the greedy output over the length of the targets
    losses: dict[str, float] = field(default_factory=dict)  # by head, before weights


@dataclass(frozen=True)
class Verdict:
    action: Action
    kind: str = ""
    reason: str = ""


KEEP = Verdict("keep")


class Guard:
    """Running statistics of the numbers seen so far, and the judgement of the next ones."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.losses: deque[float] = deque(maxlen=settings.spike.window)  # log loss of kept steps
        self.norms: deque[float] = deque(maxlen=settings.adaptive.window)
        self.lowest: float | None = None  # lowest median of log loss so far
        self.spread = 0.0  # robust SD of log loss
        self.n_judged = 0
        self.fell_at = 0  # when the median log loss last fell
        self.fell_to: float | None = None  # and where to
        self.n_skipped = 0  # in a row
        self.n_high = 0  # in a row
        self.n_collapsed = 0  # in a row
        self.spoke = False  # has the model ever left the blank state
        self.doubts: deque[float] = deque(maxlen=RECENT)  # ignorance of the last steps
        self.learned = False  # has it left the level of guessing behind
        self.warned = False
        self.n_adapted = 0
        self.n_rewinds = 0

    def judge(self, numbers: Numbers, rate: float) -> Verdict:
        """What to do with this step; called once per optimizer step, before the update."""
        if not self.settings.enabled:
            return KEEP
        if not (math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm)):
            return self._judge_nonfinite(numbers)
        self.n_skipped = 0
        self.n_judged += 1
        self.norms.append(numbers.grad_norm)
        verdicts = (
            self._judge_spike(numbers),
            self._judge_stuck(numbers),
            self._judge_collapse(numbers),
            self._judge_norm(rate),
        )
        return next((v for v in verdicts if v.action != "keep"), KEEP)

    @property
    def healthy(self) -> bool:
        """Nothing wrong at the moment, and the loss near its lowest: a checkpoint made now is one to come back to."""
        streak = self.n_high or self.n_skipped or (self.n_collapsed and self.spoke)
        if streak or self.lowest is None:
            return not streak
        recent = median(list(self.losses)[-RECENT:])
        return recent - self.lowest <= max(self.spread, math.log(NEAR))

    def rewound(self, to_start: bool = False) -> None:
        """Told after a rewind: the streaks begin anew; the statistics stay, unless the run begins anew too."""
        self.n_rewinds += 1
        self.fell_to = None
        if to_start:
            self.losses.clear()
            self.doubts.clear()
            self.lowest, self.n_judged = None, 0
        self.n_high = self.n_skipped = self.n_collapsed = 0
        self.warned = False
        self.norms.clear()

    def new_stage(self) -> None:
        """Told when other losses begin to count: levels and streaks start anew, what was learned stays learned."""
        self.losses.clear()
        self.norms.clear()
        self.doubts.clear()
        self.lowest, self.fell_to, self.spread = None, None, 0.0
        self.n_judged = self.fell_at = self.n_high = self.n_skipped = self.n_collapsed = 0
        self.warned = False

    def _judge_nonfinite(self, numbers: Numbers) -> Verdict:
        self.n_skipped += 1
        what = " and ".join(n for n in ("loss", "grad_norm") if not math.isfinite(getattr(numbers, n)))
        if self.n_skipped >= self.settings.max_skips:
            return self._rewind("non_finite", f"{what} not finite for {self.n_skipped} steps in a row")
        return Verdict("skip", "non_finite", f"{what} not finite")

    def _judge_spike(self, numbers: Numbers) -> Verdict:
        settings = self.settings.spike
        value = math.log(max(numbers.loss, 1e-12))
        limit = self._limit()
        if limit is None or value <= limit:
            self.n_high = 0
            self.losses.append(value)
            return KEEP
        self.n_high += 1
        if self.n_high < settings.patience:
            return KEEP
        assert self.lowest is not None
        usual = math.exp(self.lowest)
        return self._rewind(
            "spike", f"loss {numbers.loss:.3g} against {usual:.3g} before, for {self.n_high} steps in a row"
        )

    def _limit(self) -> float | None:
        """Log loss above which a step counts as high; None while there is too little to go by."""
        settings = self.settings.spike
        if self.n_judged <= settings.warmup or len(self.losses) < 20:
            return None
        if self.lowest is None or self.n_judged % 10 == 0:
            middle = median(self.losses)
            self.lowest = middle if self.lowest is None else min(self.lowest, middle)
            self.spread = 1.4826 * median(abs(v - middle) for v in self.losses)
        return self.lowest + max(settings.deviations * self.spread, math.log(settings.ratio))

    def _judge_stuck(self, numbers: Numbers) -> Verdict:
        settings = self.settings.stuck
        if self.lowest is None or self.learned or settings.action == "ignore" or numbers.ignorance is None:
            return KEEP
        self.doubts.append(numbers.ignorance)
        self.learned = len(self.doubts) == RECENT and median(self.doubts) < LEARNING
        if self.learned:
            return KEEP
        if self.fell_to is None or self.lowest <= self.fell_to + math.log1p(-settings.fall):
            self.fell_at, self.fell_to = self.n_judged, self.lowest
        n_steps = self.n_judged - self.fell_at
        if n_steps < settings.patience:
            return KEEP
        self.fell_to = None  # judged: the next patience begins
        reason = (
            f"loss {numbers.loss:.3g} has not fallen by {100 * settings.fall:g} % in {n_steps} steps"
            " and stands at the level of guessing"
        )
        if settings.action == "rewind":
            return self._rewind("stuck", reason)
        return Verdict(settings.action, "stuck", reason)

    def _judge_collapse(self, numbers: Numbers) -> Verdict:
        settings = self.settings.collapse
        silent = numbers.blank_share >= settings.blank_share or numbers.length_ratio <= settings.length_ratio
        collapsed = silent or numbers.n_distinct <= settings.n_distinct
        if not collapsed:
            speaks = numbers.blank_share < SPEAKING and numbers.n_distinct > 10
            knows = numbers.ignorance is not None and numbers.ignorance < GUESSING
            self.spoke = self.spoke or (speaks and knows)
            self.n_collapsed, self.warned = 0, False
            return KEEP
        self.n_collapsed += 1
        if (
            not self.spoke
            or self.n_collapsed < settings.patience
            or settings.action == "ignore"
            or self.warned
        ):
            return KEEP
        reason = (
            f"{100 * numbers.blank_share:.1f} % of frames blank, {numbers.n_distinct} different phonemes,"
            f" output {numbers.length_ratio:.2f} of its target's length, for {self.n_collapsed} steps"
        )
        self.warned = True
        if settings.action == "rewind":
            return self._rewind("collapse", reason)
        return Verdict(settings.action, "collapse", reason)

    def _judge_norm(self, rate: float) -> Verdict:
        settings = self.settings.adaptive
        if settings.threshold is None or len(self.norms) < settings.window:
            return KEEP
        mean = sum(self.norms) / len(self.norms)
        if mean <= settings.threshold or self.n_adapted >= settings.max_times:
            return KEEP
        if rate * settings.factor < settings.floor:
            return KEEP
        self.n_adapted += 1
        self.norms.clear()
        return Verdict("cool", "gradient_norm", f"mean gradient norm {mean:.3g} above {settings.threshold:g}")

    def _rewind(self, kind: str, reason: str) -> Verdict:
        if self.n_rewinds >= self.settings.max_rewinds:
            return Verdict("stop", kind, f"{reason}, and {self.n_rewinds} rewinds did not help")
        return Verdict("rewind", kind, reason)

    def to_json(self) -> dict[str, Any]:
        plain = {k: v for k, v in vars(self).items() if k != "settings"}
        return {k: list(v) if isinstance(v, deque) else v for k, v in plain.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            if isinstance(kept := getattr(self, name, None), deque):
                kept.clear()
                kept.extend(value)
            else:
                setattr(self, name, value)
