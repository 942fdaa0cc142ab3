"""How long frames take from their last bin to the text, and how many come too late."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

RECENT = 2000  # frames that quantiles on screen are of


@dataclass(eq=False)
class Meter:
    """Milliseconds per frame; a frame misses its deadline when the next one is already due."""

    deadline_ms: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    n_frames: int = 0
    n_missed: int = 0
    max_ms: float = 0.0

    def add(self, ms: float) -> None:
        self.recent.append(ms)
        self.n_frames += 1
        self.n_missed += ms > self.deadline_ms
        self.max_ms = max(self.max_ms, ms)

    def summary(self) -> dict[str, float | int | None]:
        values = np.array(self.recent)
        known = len(values) > 0
        return {
            "frame_ms_p50": float(np.percentile(values, 50)) if known else None,
            "frame_ms_p99": float(np.percentile(values, 99)) if known else None,
            "frame_ms_max": self.max_ms if known else None,
            "missed_deadlines": self.n_missed,
            "n_frames": self.n_frames,
            "deadline_ms": self.deadline_ms,
        }
