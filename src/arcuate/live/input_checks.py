"""What comes in, made fit to decode: channel count, values, gaps and clocks, each with a defined answer."""

from dataclasses import dataclass

import numpy as np

from arcuate.data.trial import BIN_SECONDS
from arcuate.live.config import Faults
from arcuate.live.messages import Chunk

MAX_TIME_S = 1e12  # beyond this a clock is no clock
ANEW_S = 5.0  # bins numbered as if they were from longer ago are not old: their source counts anew


@dataclass(frozen=True)
class Fault:
    """Something was wrong with the input, and this is what was done about it."""

    kind: str  # channels, not_finite, too_large, gap, clock, repeat, restart
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
        anew = self._counts_anew(chunk.first)
        with np.errstate(over="ignore"):  # what does not fit becomes infinity, which is answered
            bins, faults = self._repair(bins.astype(np.float32))
        bins, repeats = self._drop_repeats(bins, chunk.first)
        missing, clock = self._missing(len(bins), chunk) if len(bins) else (0, ())
        return self._fill(bins, missing, (*anew, *faults, *repeats, *clock), bool(anew))

    @property
    def _none(self) -> np.ndarray:
        return np.empty((0, self.n_channels), np.float32)

    def _counts_anew(self, first: int | None) -> tuple[Fault, ...]:
        """A source that was started again numbers its bins from 0 once more; it must not be taken for an echo."""
        if first is None or self._next is None or (self._next - first) * BIN_SECONDS <= ANEW_S:
            return ()
        what = f"bins are numbered from {first} again, after {self._next - 1}"
        self.forget()
        return (Fault("restart", what, "reset"),)

    def _repair(self, bins: np.ndarray) -> tuple[np.ndarray, tuple[Fault, ...]]:
        """Values that cannot have been measured; one alone would spoil what the stream is normalised by."""
        lost = ~np.isfinite(bins)
        large = np.abs(bins) > self.settings.max_value
        bad = lost | large
        if not bad.any():
            return bins, ()
        held, action = self._last, self.settings.not_finite
        for row, wrong in zip(bins, bad, strict=True):
            row[wrong] = held[wrong] if action == "hold" else 0.0
            held = row
        of = f"of {len(bins)} bins are"
        n_lost, n_large = int(lost.sum()), int((large & ~lost).sum())
        told = (
            (n_lost, Fault("not_finite", f"{n_lost} values {of} not finite", action)),
            (
                n_large,
                Fault("too_large", f"{n_large} values {of} beyond {self.settings.max_value:g}", action),
            ),
        )
        return bins, tuple(fault for n, fault in told if n)

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
            late = 0.0 if self._time_s is None else chunk.time_s - self._time_s - n_bins * BIN_SECONDS
            self._time_s = chunk.time_s
            if late < -max(self.settings.tolerance_s, n_bins * BIN_SECONDS):
                faults = (Fault("clock", f"the clock went back by {-late:.2f} s", "hold"),)
            elif chunk.first is None and late > self.settings.tolerance_s:
                missing = max(1, round(late / BIN_SECONDS))
        return missing, faults

    def _fill(self, bins: np.ndarray, missing: int, faults: tuple[Fault, ...], ends: bool) -> Admitted:
        settings = self.settings
        if missing:
            long = missing * BIN_SECONDS > settings.max_gap_s
            action = "reset" if long else settings.gap
            faults = (*faults, Fault("gap", f"{missing * BIN_SECONDS:.2f} s are missing", action))
            ends = ends or action == "reset"
            if action != "reset":
                filling = self._last if action == "hold" else np.zeros_like(self._last)
                bins = np.concatenate([np.tile(filling, (missing, 1)), bins])
        if len(bins):
            self._last = bins[-1]
        return Admitted(bins, faults, ends)
