"""The decoding thread: items arrive through a bounded queue, events leave without ever blocking.

One push of bins: a source puts a `Chunk` into the queue; `InputValidator` repairs it; `Endpointer` passes it to
`Decoder` and emits partial and final text; the recorder writes bins and events; `publish` sends events, channel
activity and phoneme probabilities to the viewers.
"""

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.data.trial import BIN_MS
from arcuate.decoding.decoder import Decoder
from arcuate.errors import UserError
from arcuate.evaluation.unlabelled import ErrorReference
from arcuate.live.endpointing import Endpointer, Event
from arcuate.live.input import (
    AdaptationChanged,
    Chunk,
    Command,
    End,
    InputValidator,
    Item,
    LogProbs,
    Mark,
    SessionChange,
)
from arcuate.live.options import LiveOptions
from arcuate.live.recorder import Recorder
from arcuate.live.viewers import RasterEncoder, encode_posteriors
from arcuate.progress import logger

if TYPE_CHECKING:
    from arcuate.live.adaptation import AdaptationStatus

QUEUE_SIZE = 512  # items waiting to be decoded
_LATENCY_PERIOD_S = 0.5  # between two latency events
_STALLED_S = 10.0  # spent on one item, which holds at most a few seconds of bins
_POLL_S = 0.5  # how often a blocked producer checks that the thread is alive
_RECENT_FRAMES = 2000  # over which the latency quantiles on the page are taken
_RASTER_BINS = 2  # per raster message: 25 messages a second

Publish = Callable[[Event | bytes], None]


class LiveSession:
    """Decoder, endpointer, recorder and subscribers of one stream, all used by the decoding thread only."""

    def __init__(
        self,
        decoder: Decoder,
        options: LiveOptions,
        publish: Publish,
        recorder: Recorder | None = None,
        error_reference: ErrorReference | None = None,
        stalled_s: float = _STALLED_S,
    ) -> None:
        self.decoder = decoder
        self.options = options
        self.subscribers: list[Publish] = [publish]  # receivers of events: the page, Redis
        self.recorder = recorder
        self.error: str | None = None  # why decoding or its source has stopped
        self._stalled_s = stalled_s
        self._stride = decoder.layout.stride
        self.latency = _LatencyMeter(deadline_ms=float(BIN_MS * self._stride))
        self._queue: queue.Queue[tuple[float, Item | None]] = queue.Queue(QUEUE_SIZE)
        self._validator = InputValidator(decoder.n_channels, options.max_gap_s)
        self._raster = RasterEncoder(decoder.n_channels)
        self._endpointer = Endpointer(decoder, options, self._emit, self._on_decoded, error_reference)
        if recorder is not None:
            self._endpointer.n_sentences = len(recorder.finals)  # continue the counts of a resumed recording
            for final in recorder.finals:
                self._endpointer.count_errors(final.get("alignment"))
        self._published_recording: bool | None = None
        self._latency_published_s = 0.0
        self._published_adaptation: AdaptationStatus | None = None
        self._unsent_bins: list[np.ndarray] = []
        self._position = 0  # number of bins received, which aligns frames with bins on the page
        self._discard_after: float | None = None  # monotonic time after which queued items are dropped
        self._busy_since: float | None = None  # monotonic time at which the current item was taken from the queue
        if decoder.adapter is not None:
            decoder.adapter.on_update = lambda: self.put(AdaptationChanged(), wait=False)
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float | None = None) -> None:
        """End the current sentence, finish the recording and stop the thread.

        Queued items are decoded first; with `drain_s`, only for that many seconds.
        """
        if drain_s is not None:
            self._discard_after = time.monotonic() + drain_s
        while self.alive and not self._try_put(None, _POLL_S):
            pass
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def health(self) -> str:
        """One word: ok, stopped (a thread has ended), or stalled (the decoding thread is stuck in one item)."""
        if not self.alive or self.error is not None:
            return "stopped"
        since = self._busy_since
        return "stalled" if since is not None and time.monotonic() - since > self._stalled_s else "ok"

    @property
    def state(self) -> str:
        return self._endpointer.state if self._endpointer.is_open else "closed"

    @property
    def n_sentences(self) -> int:
        return self._endpointer.n_sentences

    def put(self, item: Item, wait: bool = True) -> bool:
        """Queue an item; return False if the thread has stopped or, without `wait`, if the queue is full."""
        while not self._try_put(item, _POLL_S if wait else 0.0):
            if not wait or not self.alive:
                return False
        return True

    def _try_put(self, item: Item | None, timeout_s: float) -> bool:
        try:
            self._queue.put((time.perf_counter(), item), block=timeout_s > 0, timeout=timeout_s)
        except queue.Full:
            return False
        return True

    def publish(self, event: Event | bytes) -> None:
        """Send an event to all receivers, none of which may block."""
        for subscriber in self.subscribers:
            subscriber(event)

    def fail(self, message: str) -> None:
        """Report an error after which no more text is decoded; called by any thread."""
        self.error = self.error or message
        self.publish({"type": "error", "message": message})

    # --- decoding thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # raise the priority above the server's, if permitted
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        try:
            try:
                self._process_queue()
            finally:
                if self.decoder.adapter is not None:
                    self.decoder.adapter.close()
                if self.recorder is not None:
                    self.recorder.close()
        except (UserError, OSError) as error:
            self.fail(str(error))
        finally:
            if sys.exception() is not None:
                self.fail("decoding stopped unexpectedly; see the output of the server, then restart it")

    def _process_queue(self) -> None:
        self._publish_adaptation()
        self._publish_recording()
        n_dropped = 0
        while (received := self._queue.get())[1] is not None:
            if self._discard_after is not None and time.monotonic() > self._discard_after:
                n_dropped += 1
                continue
            self._busy_since = time.monotonic()
            self._process(*received)
            self._publish_recording()
            if self._queue.empty():
                self.decoder.precompute()
            self._busy_since = None
        if n_dropped:
            message = f"{n_dropped} queued messages were not decoded because the server stopped"
            self._emit({"type": "fault", "kind": "stop", "message": message, "action": "dropped"})
            logger.warning(message)
        self._endpointer.end(cut=True)

    def _process(self, received_s: float, item: Item | None) -> None:
        match item:
            case Chunk():
                self._process_bins(item, received_s)
            case LogProbs():
                waited = time.perf_counter() - received_s
                self._position += len(item.log_probs) * self._stride  # as if their bins had arrived
                self._record_latency([waited + s for s in self._endpointer.push_log_probs(item.log_probs)])
            case Mark():
                self._validator.reset()
                self._endpointer.start_trial(item)
                self._publish_adaptation()
            case SessionChange():
                self._endpointer.change_session(item.session)
                self._publish_adaptation()
            case End():
                self._endpointer.end()
                if item.on_done is not None:
                    item.on_done()
            case Command(name="open"):
                self._endpointer.open()
            case Command(name="close"):
                self._endpointer.close()
            case Command(name="end" | "cut" as name):
                self._endpointer.end(cut=name == "cut")
            case Command(name="reset_adaptation"):
                self.decoder.reset_adaptation()
                self._publish_adaptation()
            case AdaptationChanged():
                self._publish_adaptation()

    def _process_bins(self, chunk: Chunk, received_s: float) -> None:
        validated = self._validator.validate(chunk)
        for fault in validated.faults:
            self._emit({"type": "fault", **asdict(fault)})
        if validated.ends_sentence:
            self._endpointer.end(cut=True)
        if not len(validated.bins):
            return
        waited = time.perf_counter() - received_s
        self._position = self._raster.n_bins + sum(map(len, self._unsent_bins))
        self._record_latency([waited + seconds for seconds in self._endpointer.push(validated.bins)])
        self._unsent_bins.append(validated.bins)
        if sum(map(len, self._unsent_bins)) >= _RASTER_BINS:
            self.publish(self._raster.encode(np.concatenate(self._unsent_bins)))
            self._unsent_bins.clear()

    def _record_latency(self, seconds: list[float]) -> None:
        """Record the time from the arrival of bins to the text of their frames."""
        for s in seconds:
            self.latency.add(1000 * s)
            if self.recorder is not None:
                self.recorder.add_latency(1000 * s)
        now = time.perf_counter()
        if now - self._latency_published_s >= _LATENCY_PERIOD_S:
            self._latency_published_s = now
            self.publish({"type": "latency", **self.latency.summary()})

    def _on_decoded(self, bins: np.ndarray, log_probs: np.ndarray) -> None:
        if self.recorder is not None:
            self.recorder.add_bins(bins)
        self._position += len(bins)
        if len(log_probs):
            self.publish(encode_posteriors(log_probs, self._position, self._stride))

    # --- events -------------------------------------------------------------------------------------------

    def _publish_recording(self) -> None:
        """Report whether the session is being recorded, and why recording has failed."""
        if self.recorder is not None and self._published_recording is not (self.recorder.error is None):
            self._published_recording = self.recorder.error is None
            self.publish({"type": "recording", "on": self._published_recording, "message": self.recorder.error})

    def _publish_adaptation(self) -> None:
        status = self.decoder.adaptation
        if status is not None and status != self._published_adaptation:
            self._published_adaptation = status
            self._emit({"type": "adaptation", **vars(status)})

    def _emit(self, event: dict[str, Any]) -> None:
        event = {**event, "at": time.time()}
        if self.recorder is not None:
            event = self.recorder.add_event(event)
        self.publish(event)


@dataclass(eq=False)
class _LatencyMeter:
    """Time from the last bin of a frame to its text, in ms; a deadline is missed once the next frame is due."""

    deadline_ms: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_FRAMES))
    n_frames: int = 0
    n_missed: int = 0
    max_ms: float = 0.0

    def add(self, ms: float) -> None:
        self.recent.append(ms)
        self.n_frames += 1
        self.n_missed += ms > self.deadline_ms
        self.max_ms = max(self.max_ms, ms)

    def summary(self) -> dict[str, float | int | None]:
        p50, p99 = np.percentile(self.recent, (50, 99)).tolist() if self.recent else (None, None)
        return {
            "frame_ms_p50": p50,
            "frame_ms_p99": p99,
            "frame_ms_max": self.max_ms if self.recent else None,
            "missed_deadlines": self.n_missed,
            "n_frames": self.n_frames,
            "deadline_ms": self.deadline_ms,
        }
