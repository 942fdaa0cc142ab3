"""What happened since the last log line: sums with counts, divided once."""

import time
from dataclasses import dataclass, field
from typing import Any

from arcuate.training.guard import Numbers, Verdict


@dataclass
class Tally:
    """Adds up the numbers of the steps since the last row of metrics.jsonl."""

    loss: float = 0.0
    grad_norm: float = 0.0
    grad_norm_max: float = 0.0
    blank_share: float = 0.0
    n_distinct: float = 0.0
    length_ratio: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    n_finite: int = 0
    n_steps: int = 0
    n_trials: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    waiting_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, numbers: Numbers, verdict: Verdict, n_trials: int, waiting_s: float) -> None:
        self.n_steps += 1
        self.n_trials += n_trials
        self.waiting_s += waiting_s
        if verdict.action in ("skip", "rewind", "stop"):
            self.skipped[verdict.kind] = self.skipped.get(verdict.kind, 0) + 1
        if verdict.kind == "non_finite":
            return
        self.n_finite += 1
        self.loss += numbers.loss
        self.grad_norm += numbers.grad_norm
        self.grad_norm_max = max(self.grad_norm_max, numbers.grad_norm)
        self.blank_share += numbers.blank_share
        self.n_distinct += numbers.n_distinct
        self.length_ratio += numbers.length_ratio
        for head, loss in numbers.losses.items():
            self.losses[head] = self.losses.get(head, 0.0) + loss

    def row(self, step: int, rates: dict[str, float], memory_mb: float | None) -> dict[str, Any]:
        """One line of metrics.jsonl over the steps added so far; means over the finite ones."""
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
            "blank_share": mean(self.blank_share),
            "n_distinct": mean(self.n_distinct),
            "length_ratio": mean(self.length_ratio),
            "lr": rates.get("rest"),
            "lr_bias": rates.get("bias"),
            "lr_session": rates.get("session"),
            "skipped": self.skipped,
            "n_trials": self.n_trials,
            "cost": {
                "seconds_per_step": (time.perf_counter() - self.started) / max(1, self.n_steps),
                "waiting_for_data_s": self.waiting_s / max(1, self.n_steps),
                "memory_mb": memory_mb,
            },
        }

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("started", "waiting_s")}
