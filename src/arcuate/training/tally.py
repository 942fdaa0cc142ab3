"""What happened since the last log line: sums on the device, read once, divided once."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Tally:
    """Adds up training numbers without a host–device synchronisation per step."""

    loss: list[torch.Tensor] = field(default_factory=list)
    grad_norm: list[torch.Tensor] = field(default_factory=list)
    blank_share: list[torch.Tensor] = field(default_factory=list)
    n_trials: int = 0
    waiting_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        blank_share: torch.Tensor,
        n_trials: int,
        waiting_s: float,
    ) -> None:
        self.loss.append(loss.detach())
        self.grad_norm.append(grad_norm.detach())
        self.blank_share.append(blank_share.detach())
        self.n_trials += n_trials
        self.waiting_s += waiting_s

    def row(self, step: int, rates: dict[str, float]) -> dict[str, Any]:
        """One line of metrics.jsonl over the steps added so far."""
        n_steps = len(self.loss)
        loss, norm, blank = (torch.stack(v).float() for v in (self.loss, self.grad_norm, self.blank_share))
        seconds = (time.perf_counter() - self.started) / n_steps
        return {
            "step": step,
            "split": "train",
            "loss": loss.mean().item(),
            "grad_norm": norm.mean().item(),
            "grad_norm_max": norm.max().item(),
            "blank_share": blank.mean().item(),
            "lr": rates.get("rest"),
            "lr_session": rates.get("session"),
            "n_trials": self.n_trials,
            "cost": {"seconds_per_step": seconds, "waiting_for_data_s": self.waiting_s / n_steps},
        }
