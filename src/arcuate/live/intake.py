"""What comes in, made fit to decode: channel count, values, gaps and clocks, each with a defined answer."""

from dataclasses import dataclass

import numpy as np

from arcuate.live.chunk import Chunk
from arcuate.live.settings import Faults
from arcuate.trial import BIN_S

MAX_TIME_S = 1e12  # beyond this a clock is no clock


@dataclass(frozen=True)
class Fault:
    """Something was wrong with the input, and this is what was done about it."""

    kind: str  # channels, not_finite, gap, clock, repeat
    what: str
    action: str  # dropped, hold, zero, reset


@dataclass(frozen=True, eq=False)
class Admitted:
    """Bins to decode, what was wrong, and whether the sentence before them must end first."""

    bins: np.ndarray  # (t, C) float32, finite
    faults: tuple[Fault, ...] = ()
    ends_sentence: bool = False


class Intake:
    """Remembers the last bin and where source and clock should be by now."""

    def __init__(self, n_channels: int, settings: Faults) -> None:
        self.n_channels = n_channels
        self.settings = settings
        self.forget()

    def forget(self) -> None:
        """A new source or a jump: whatever comes next is right."""
        self._last = np.zeros(self.n_channels, np.float32)
        self._next: int | None = None
        self._time_s: float | None = None

    def admit(self, chunk: Chunk) -> Admitted:
        bins = np.asarray(chunk.bins)
        if bins.ndim != 2 or bins.shape[1] != self.n_channels or bins.dtype.kind not in "fiu":
            shape = "x".join(map(str, bins.shape))
            what = f"{shape} values where the model reads {self.n_channels} channels"
            return Admitted(self._none, (Fault("channels", what, "dropped"),))
        if not len(bins):
            return Admitted(self._none)
        bins, faults = self._repair(bins.astype(np.float32))
        bins, repeats = self._drop_repeats(bins, chunk.first)
        missing, clock = self._missing(len(bins), chunk) if len(bins) else (0, ())
        return self._fill(bins, missing, (*faults, *repeats, *clock))

    @property
    def _none(self) -> np.ndarray:
        return np.empty((0, self.n_channels), np.float32)

    def _repair(self, bins: np.ndarray) -> tuple[np.ndarray, tuple[Fault, ...]]:
        bad = ~np.isfinite(bins)
        if not bad.any():
            return bins, ()
        held = self._last
        for row, wrong in zip(bins, bad, strict=True):
            row[wrong] = held[wrong] if self.settings.not_finite == "hold" else 0.0
            held = row
        what = f"{int(bad.sum())} values of {len(bins)} bins are not finite"
        return bins, (Fault("not_finite", what, self.settings.not_finite),)

    def _drop_repeats(self, bins: np.ndarray, first: int | None) -> tuple[np.ndarray, tuple[Fault, ...]]:
        if first is None or self._next is None or first >= self._next:
            return bins, ()
        n = min(self._next - first, len(bins))
        return bins[n:], (Fault("repeat", f"{n} bins came before", "dropped"),)

    def _missing(self, n_bins: int, chunk: Chunk) -> tuple[int, tuple[Fault, ...]]:
        """How many bins are missing before these, by their numbers or else by the clock."""
        missing = 0
        faults: tuple[Fault, ...] = ()
        if chunk.first is not None:
            missing = 0 if self._next is None else max(0, chunk.first - self._next)
            self._next = chunk.first + len(chunk.bins)
        if chunk.time_s is not None and abs(chunk.time_s) < MAX_TIME_S:
            late = 0.0 if self._time_s is None else chunk.time_s - self._time_s - n_bins * BIN_S
            self._time_s = chunk.time_s
            if late < -max(self.settings.tolerance_s, n_bins * BIN_S):
                faults = (Fault("clock", f"the clock went back by {-late:.2f} s", "hold"),)
            elif chunk.first is None and late > self.settings.tolerance_s:
                missing = max(1, round(late / BIN_S))
        return missing, faults

    def _fill(self, bins: np.ndarray, missing: int, faults: tuple[Fault, ...]) -> Admitted:
        ends, settings = False, self.settings
        if missing:
            long = missing * BIN_S > settings.max_gap_s
            action = "reset" if long else settings.gap
            faults = (*faults, Fault("gap", f"{missing * BIN_S:.2f} s are missing", action))
            ends = action == "reset"
            if action != "reset":
                filling = self._last if action == "hold" else np.zeros_like(self._last)
                bins = np.concatenate([np.tile(filling, (missing, 1)), bins])
        if len(bins):
            self._last = bins[-1]
        return Admitted(bins, faults, ends)
