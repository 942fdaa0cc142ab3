"""Input of a live session: the items that sources put into its queue, and checks on incoming bins."""

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arcuate.data.statistics import Statistics
from arcuate.data.trial import BIN_SECONDS
from arcuate.errors import UserError

_STOP_S = 10.0  # longest wait for the thread of a source to end
_MAX_TIME_S = 1e12  # larger timestamps are ignored
_RESTART_S = 5.0  # bins numbered as older than this mean that the source counts from the start again
_MAX_VALUE = 1e6  # largest absolute value that can be a measurement
_JITTER_S = 0.05  # of timestamps; a larger delay is a gap


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive bins."""

    bins: np.ndarray  # (t, C)
    time_s: float | None = None  # end of the last bin, by the source's clock
    first: int | None = None  # number of the first bin, counted by the source


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Frames of a model that runs elsewhere; only the word search runs here."""

    log_probs: np.ndarray  # (f, V) in the order of the model's classes


@dataclass(frozen=True)
class Mark:
    """Start of a trial; ends the sentence before it. The trial lasts until its `End`, whatever pauses it contains."""

    trial: str | None = None
    session: str | None = None
    reference: str | None = None
    statistics: Statistics | None = None  # statistics of its block, if known


@dataclass(frozen=True)
class End:
    """End of the sentence; `on_done` is called on the decoding thread afterwards, even if there was no sentence."""

    on_done: Callable[[], None] | None = None


@dataclass(frozen=True)
class SessionChange:
    """The next bins are of another session, without a trial: sentences end at silences."""

    session: str


@dataclass(frozen=True)
class Command:
    """Command of a viewer: open, close, end, cut (end an incomplete sentence) or reset_adaptation."""

    name: str


@dataclass(frozen=True)
class AdaptationChanged:
    """The update thread has finished a sentence."""


Item = Chunk | LogProbs | Mark | End | SessionChange | Command | AdaptationChanged


class Source(ABC):
    """A source of bins: puts items into the session's queue on its own thread between `start` and `stop`.

    A thread that ends by itself because of an error reports it to `on_error`, so that it never ends silently.
    """

    def __init__(self, name: str) -> None:
        self.on_error: Callable[[str], object] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_reporting, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=_STOP_S)

    @abstractmethod
    def _run(self) -> None:
        """Work until stopped."""

    def _run_reporting(self) -> None:
        try:
            self._run()
        except (UserError, OSError) as error:
            self._report(f"{self._thread.name} stopped: {error}")
        finally:
            if sys.exception() is not None:
                self._report(f"{self._thread.name} stopped unexpectedly; see the output of the server, then restart it")

    def _report(self, message: str) -> None:
        if self.on_error is not None:
            self.on_error(message)


# --- checks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A problem with the input and how it was handled."""

    kind: str  # channels, not_finite, too_large, gap, clock, repeat, restart
    message: str
    action: str  # dropped, hold, reset


@dataclass(frozen=True, eq=False)
class ValidatedBins:
    """Bins to decode, faults found, and whether the current sentence must end first."""

    bins: np.ndarray  # (t, C) float32, finite
    faults: tuple[Fault, ...] = ()
    ends_sentence: bool = False


class InputValidator:
    """Validates chunks of one source; keeps the last bin and the expected bin number and time."""

    def __init__(self, n_channels: int, max_gap_s: float = 0.5) -> None:
        self.n_channels, self.max_gap_s = n_channels, max_gap_s
        self.reset()

    def reset(self) -> None:
        """Accept any bin number and time next, as after a change of source or a jump."""
        self._last = np.zeros(self.n_channels, np.float32)
        self._next: int | None = None
        self._time_s: float | None = None

    def validate(self, chunk: Chunk) -> ValidatedBins:
        """Repair or drop invalid bins and fill gaps with the last bin."""
        bins, nothing = np.asarray(chunk.bins), np.empty((0, self.n_channels), np.float32)
        if bins.ndim != 2 or bins.shape[1] != self.n_channels or bins.dtype.kind not in "fiu":
            shape = "x".join(map(str, bins.shape))
            message = f"expected bins of {self.n_channels} channels, got an array of {shape} ({bins.dtype})"
            return ValidatedBins(nothing, (Fault("channels", message, "dropped"),))
        if not len(bins):
            return ValidatedBins(nothing)
        faults = self._check_restart(chunk.first)
        ends_sentence = bool(faults)
        with np.errstate(over="ignore"):  # overflow becomes infinity, which is replaced
            bins = bins.astype(np.float32)
        faults += self._replace_invalid(bins)
        if chunk.first is not None and self._next is not None and chunk.first < self._next:
            n = min(self._next - chunk.first, len(bins))
            bins = bins[n:]
            faults.append(Fault("repeat", f"{n} bins were received before", "dropped"))
        missing = self._count_missing(len(bins), chunk, faults) if len(bins) else 0
        if missing:
            too_long = missing * BIN_SECONDS > self.max_gap_s
            action = "reset" if too_long else "hold"
            faults.append(Fault("gap", f"{missing * BIN_SECONDS:.2f} s of bins are missing", action))
            ends_sentence = ends_sentence or too_long
            bins = bins if too_long else np.concatenate([np.tile(self._last, (missing, 1)), bins])
        if len(bins):
            self._last = bins[-1]
        return ValidatedBins(bins, tuple(faults), ends_sentence)

    def _check_restart(self, first: int | None) -> list[Fault]:
        """A restarted source counts from 0 again; its bins must not be dropped as repeats."""
        if first is None or self._next is None or (self._next - first) * BIN_SECONDS <= _RESTART_S:
            return []
        message = f"bin numbers restarted at {first} after {self._next - 1}"
        self.reset()
        return [Fault("restart", message, "reset")]

    def _replace_invalid(self, bins: np.ndarray) -> list[Fault]:
        """Replace values that cannot be measurements by the channel's last value, in place.

        A single one would corrupt running statistics.
        """
        not_finite = ~np.isfinite(bins)
        too_large = ~not_finite & (np.abs(bins) > _MAX_VALUE)
        invalid = not_finite | too_large
        if not invalid.any():
            return []
        previous = self._last
        for row, mask in zip(bins, invalid, strict=True):
            row[mask] = previous[mask]
            previous = row
        kinds = (("not_finite", not_finite, "not finite"), ("too_large", too_large, f"beyond {_MAX_VALUE:g}"))
        return [
            Fault(kind, f"{n} {'value is' if n == 1 else 'values are'} {problem}", "hold")
            for kind, mask, problem in kinds
            if (n := int(mask.sum()))
        ]

    def _count_missing(self, n_bins: int, chunk: Chunk, faults: list[Fault]) -> int:
        """Number of bins missing before these, by bin numbers or else by timestamps."""
        missing = 0
        if chunk.first is not None:
            missing = 0 if self._next is None else max(0, chunk.first - self._next)
            self._next = chunk.first + len(chunk.bins)
        if chunk.time_s is not None and abs(chunk.time_s) < _MAX_TIME_S:
            late_s = 0.0 if self._time_s is None else chunk.time_s - self._time_s - n_bins * BIN_SECONDS
            self._time_s = chunk.time_s
            if late_s < -max(_JITTER_S, n_bins * BIN_SECONDS):
                faults.append(Fault("clock", f"the clock jumped back by {-late_s:.2f} s", "hold"))
            elif chunk.first is None and late_s > _JITTER_S:
                missing = max(1, round(late_s / BIN_SECONDS))
        return missing
