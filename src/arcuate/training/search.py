"""Learning-rate search after an incident: short test runs from one checkpoint, and the choice between them.

A fixed reduction assumes that the cause is known. After a rewind the guard instead trains a few steps from the same
checkpoint at each of several learning rates and continues with the one whose loss is lowest. The test runs only choose
the rate: each is undone by another rewind. The position in the data never moves back, so a resumed run repeats them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MIN_STEPS = 10  # shortest test run; no search with fewer steps left in the run
_FAILED = 1e9  # score of a test run with non-finite steps or an exploding loss
_TIE = 0.03  # scores (log loss) that differ by less are equal; the higher learning rate is then taken
_EXPLODED = math.log(3.0)  # rise of log loss within a test run
_MAX_NONFINITE = 3  # non-finite steps after which a test run has failed
_FINAL_LENGTH = 3  # length of the final test runs / length of the first ones


@dataclass
class LrSearch:
    """State of the search: the scales to try, the scores so far, and the losses of the current test run."""

    scales: list[float] = field(default_factory=list)  # learning-rate scales, one per test run; empty = no search
    scores: list[float] = field(default_factory=list)  # median log loss of the second half of each finished test run
    losses: list[float] = field(default_factory=list)  # log losses of the current test run
    n_steps: int = 0  # per test run
    n_nonfinite: int = 0  # non-finite steps of the current test run
    lr_step: int | None = None  # test runs use the scheduled learning rate of this step; None = their own
    is_early: bool = False  # the loss still falls steeply at the checkpoint
    n_left: int = 0  # steps left in the run at the checkpoint
    is_final: bool = False  # now in the longer test runs of the best scale and the next lower one

    @property
    def is_active(self) -> bool:
        return bool(self.scales)

    def start(
        self, scales: Sequence[float], n_steps: int, is_early: bool, lr_step: int | None = None, n_left: int = 0
    ) -> float:
        """Start the first test run and return its scale.

        With `lr_step` the test runs use the learning rate of that step, at which the run failed, because the rate at
        the checkpoint may be low enough for any scale to work.
        """
        self.reset()
        self.scales, self.n_steps, self.is_early, self.lr_step = list(scales), n_steps, is_early, lr_step
        self.n_left = n_left
        return self.scales[0]

    @property
    def _is_upward(self) -> bool:
        """Whether the test runs look for a higher learning rate, because updates were too small."""
        return not self.is_early and self.scales[0] < self.scales[-1]

    def refine(self) -> float | None:
        """Start longer test runs of the best scale and its neighbour; return the first of them, None if there are none.

        Early test runs favour learning rates that are too high for a whole run, because the loss falls fastest just
        below the rate at which it diverges. The learning-rate range test (Smith 2017) therefore takes a rate below the
        best one; longer test runs decide between the two. In an upward search all short test runs may end before the
        model has left the all-blank solution, so the neighbour is the next higher scale.
        """
        if self.is_final or not (self.is_early or self._is_upward):
            return None
        best = self._best()
        usable = [scale for scale, score in zip(self.scales, self.scores, strict=True) if score != _FAILED]
        if self.is_early:
            pair = [max((scale for scale in self.scales if scale < best), default=best), best]
        else:
            pair = [best, min((scale for scale in usable if scale > best), default=best)]
        n_steps = min(_FINAL_LENGTH * self.n_steps, self.n_left - 1)
        if pair[0] == pair[1] or n_steps < 2 * self.n_steps:
            return None
        self.scales, self.scores, self.n_steps, self.is_final = pair, [], n_steps, True
        return pair[0]

    def reset(self) -> None:
        """Discard all test runs."""
        self.scales, self.scores, self.losses = [], [], []
        self.n_steps = self.n_nonfinite = self.n_left = 0
        self.lr_step, self.is_final = None, False

    def observe(self, log_loss: float | None) -> bool:
        """Add a step of the current test run (None: not finite); return whether the test run is over."""
        if log_loss is None:
            self.n_nonfinite += 1
        else:
            self.losses.append(log_loss)
        n = len(self.losses) + self.n_nonfinite
        first, last = self.losses[: MIN_STEPS // 2], self.losses[-MIN_STEPS // 2 :]
        exploded = len(self.losses) >= MIN_STEPS and median(last) > median(first) + _EXPLODED
        failed = self.n_nonfinite >= _MAX_NONFINITE or exploded
        if n < self.n_steps and not failed:
            return False
        last = self.losses[-len(self.losses) // (4 if self.is_final else 2) :]
        self.scores.append(_FAILED if failed else median(last))
        self.losses, self.n_nonfinite = [], 0
        return True

    @property
    def next_scale(self) -> float | None:
        """The scale of the next test run; None after the last."""
        return self.scales[len(self.scores)] if len(self.scores) < len(self.scales) else None

    def choose(self) -> tuple[float, str]:
        """Return the chosen scale and a description of the last test runs."""
        chosen = self._best()
        if self.is_early and not self.is_final:  # too few steps for longer test runs
            chosen = max((scale for scale in self.scales if scale < chosen), default=chosen)
        tested = ", ".join(
            f"{scale:.3g}: {'failed' if score == _FAILED else format(math.exp(score), '.3g')}"
            for scale, score in sorted(zip(self.scales, self.scores, strict=True))
        )
        return chosen, tested

    def _best(self) -> float:
        """Return the scale with the lowest score; if tied, the highest, or in the final test runs the lowest."""
        limit = min(self.scores) + _TIE
        tied = [scale for scale, score in zip(self.scales, self.scores, strict=True) if score <= limit]
        return min(tied) if self.is_final else max(tied)
