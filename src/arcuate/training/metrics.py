"""Metrics of one optimizer step, and their means over a logging interval."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

MIN_LOSS_SCALE = 1.0  # gradients that overflow at this scale do so without scaling as well


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step over all its batches and all processes."""

    loss: float  # mean per trial
    grad_norm: float  # before clipping
    normalised_loss: float | None  # loss per token / chance-level loss, log(number of classes); None: no token head
    blank_share: float  # fraction of frames whose most probable class is the blank
    n_distinct: int  # different phonemes in the greedy output
    length_ratio: float  # length of the greedy output / length of the targets
    losses: dict[str, float] = field(default_factory=dict)  # by head, before weights
    loss_scale: float | None = None  # loss scale of fp16; None in other precisions
    update_ratio: float | None = None  # norm of the update before this step / norm of the weights, if measured

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale made fp16 gradients overflow: the scaler lowers the scale and training continues.

        A scale at its minimum cannot be the cause.
        """
        if self.loss_scale is None or self.loss_scale <= MIN_LOSS_SCALE:
            return False
        return math.isfinite(self.loss) and not math.isfinite(self.grad_norm)

    @property
    def may_update(self) -> bool:
        """False for fp16 gradients that are not finite, which never reach the weights, with or without the guard."""
        return self.loss_scale is None or math.isfinite(self.grad_norm)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def to_dict(self) -> dict[str, float | str | None]:
        """Return plain values for incidents.jsonl; non-finite numbers become text, because JSON has none."""
        values = asdict(self)
        for name in ("loss_scale", "update_ratio"):
            if values[name] is None:
                del values[name]
        values |= {f"loss_{head}": loss for head, loss in values.pop("losses").items()}
        return {name: v if v is None or math.isfinite(v) else str(v) for name, v in values.items()}


@dataclass(frozen=True)
class Validation:
    """Result of one validation."""

    row: dict[str, Any]  # row of metrics.jsonl, without its step
    predictions: tuple[dict[str, Any], ...] = ()  # lines of predictions.jsonl, without their step


@dataclass
class IntervalMetrics:
    """Sums over the steps since the last row of metrics.jsonl, divided once when the row is written."""

    loss: float = 0.0
    grad_norm: float = 0.0
    grad_norm_max: float = 0.0
    blank_share: float = 0.0
    n_distinct: float = 0.0
    length_ratio: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    update_ratio: float | None = None  # norm of the last measured update / norm of the weights
    n_finite: int = 0
    n_steps: int = 0
    n_trials: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # steps without an update, by the rule that decided

    def add(self, metrics: StepMetrics, n_trials: int, skipped_by: str | None) -> None:
        """Add one step; `skipped_by` names the rule if its update was not applied."""
        self.n_steps += 1
        self.n_trials += n_trials
        if skipped_by is not None:
            self.skipped[skipped_by] = self.skipped.get(skipped_by, 0) + 1
        if skipped_by is not None and not metrics.is_finite:
            return
        self.n_finite += 1
        for name in ("loss", "grad_norm", "blank_share", "n_distinct", "length_ratio"):
            setattr(self, name, getattr(self, name) + getattr(metrics, name))
        self.grad_norm_max = max(self.grad_norm_max, metrics.grad_norm)
        for head, loss in metrics.losses.items():
            self.losses[head] = self.losses.get(head, 0.0) + loss

    def to_row(self, step: int, learning_rates: dict[str, float], cost: dict[str, float]) -> dict[str, Any]:
        """Return one row of metrics.jsonl over the steps added so far; means are over the finite ones."""
        n = self.n_finite

        def mean(total: float) -> float | None:
            return total / n if n else None

        return {
            "step": step,
            "split": "train",
            "loss": mean(self.loss),
            "losses": {head: mean(loss) for head, loss in self.losses.items()},
            "grad_norm": mean(self.grad_norm),
            "grad_norm_max": self.grad_norm_max if n else None,
            "update_ratio": self.update_ratio,
            "blank_share": mean(self.blank_share),
            "n_distinct": mean(self.n_distinct),
            "length_ratio": mean(self.length_ratio),
            "lr": learning_rates.get("rest"),
            "lr_bias": learning_rates.get("bias"),
            "lr_session": learning_rates.get("session"),
            "skipped": self.skipped,
            "n_trials": self.n_trials,
            "cost": cost,
        }
