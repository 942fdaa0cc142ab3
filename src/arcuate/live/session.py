"""The one thread that decodes: bins and wishes come in through a bounded queue, events go out and never wait."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from arcuate.data.trial import BIN_MS
from arcuate.errors import UserError
from arcuate.live.adaptation import Standing, to_event
from arcuate.live.config import LiveSettings
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.endpointing import Event, Listener
from arcuate.live.input_checks import Intake
from arcuate.live.latency import Meter
from arcuate.live.messages import Chunk, Command, End, Item, Learned, Mark, Scores
from arcuate.live.recorder import Recorder
from arcuate.live.visualisation import Picture, posteriors

ROOM = 512  # items that may wait to be decoded
LATENCY_S = 0.5  # how often the latency is told
PATIENCE_S = 0.5  # how often someone who waits for room looks whether the thread still lives
DRAWN = 2  # bins that are sent to be drawn at once: 25 pictures a second

Publish = Callable[[Event | bytes], None]


class LiveSession:
    """A decoder, what it hears, and who is told. All of it is touched by its own thread alone."""

    def __init__(
        self,
        decoder: StreamingDecoder,
        settings: LiveSettings,
        publish: Publish,
        recorder: Recorder | None = None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self._publish = publish
        self.listeners: list[Publish] = []  # others that are told, such as Redis
        self.recorder = recorder
        self.error: str | None = None
        self._stride = decoder.engine.model.config.settings.front_end.patch.stride
        self.meter = Meter(deadline_ms=float(BIN_MS * self._stride))
        self._inbox: queue.Queue[tuple[float, Item | None]] = queue.Queue(ROOM)
        self._intake = Intake(decoder.n_channels, settings.faults)
        self._picture = Picture(decoder.n_channels)
        self._listener = Listener(decoder, settings, self._emit, self._heard)
        if recorder is not None:
            self._listener.n_sentences = len(recorder.finals)  # they go on where a killed server was
        self._record_told: bool | None = None
        self._told_s = 0.0
        self._standing: Standing | None = None
        self._unseen: list[np.ndarray] = []
        self._at = 0  # bins heard, for the page to draw frames under them
        if decoder.follower is not None:
            decoder.follower.changed = lambda: self.put(Learned(), wait=False)
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the sentence being said, write everything down, leave."""
        while self.alive and not self._offer(None, PATIENCE_S):
            pass
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def state(self) -> str:
        return self._listener.state if self._listener.opened else "closed"

    @property
    def n_sentences(self) -> int:
        return self._listener.n_sentences

    def put(self, item: Item, wait: bool = True) -> bool:
        """Hand something over; without `wait` it is refused when too much is waiting already."""
        while not self._offer(item, PATIENCE_S if wait else 0.0):
            if not wait or not self.alive:
                return False
        return True

    def _offer(self, item: Item | None, seconds: float) -> bool:
        """Whether there was room within so many seconds."""
        try:
            self._inbox.put((time.perf_counter(), item), block=seconds > 0, timeout=seconds)
        except queue.Full:
            return False
        return True

    def publish(self, event: Event | bytes) -> None:
        """Tell everyone; nobody may make this wait."""
        self._publish(event)
        for listener in self.listeners:
            listener(event)

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # decoding goes before the page, where that is allowed
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        try:
            self._tell_adaptation()
            self._tell_recording()
            while (taken := self._inbox.get())[1] is not None:
                self._take(*taken)
                self._tell_recording()
                if self._inbox.empty():
                    self.decoder.ahead()
            self._listener.end(cut=True)
        except (UserError, OSError) as error:
            self._fail(str(error))
        finally:
            self._leave()

    def _fail(self, why: str) -> None:
        self.error = why
        self.publish({"type": "error", "what": why})

    def _leave(self) -> None:
        """Write everything down; whatever else stopped the thread is told too."""
        if sys.exception() is not None:
            self._fail("decoding stopped; the reason is in the output of the server, start it again")
        if self.decoder.follower is not None:
            self.decoder.follower.close()
        try:
            if self.recorder is not None:
                self.recorder.close()
        except (UserError, OSError) as error:
            self._fail(str(error))

    def _take(self, arrived: float, item: Item | None) -> None:
        match item:
            case Chunk():
                self._hear(item, arrived)
            case Scores():
                self._read(item, arrived)
            case Mark():
                self._intake.forget()
                self._listener.mark(item)
                self._tell_adaptation()
            case End():
                self._listener.end()
                if item.then is not None:
                    item.then()
            case Command(what="open"):
                self._listener.open()
            case Command(what="close"):
                self._listener.close()
            case Command(what="end"):
                self._listener.end()
            case Command(what="forget"):
                self.decoder.reset_adaptation()
                self._tell_adaptation()
            case Learned():
                self._tell_adaptation()
            case Command(what="cut"):
                self._listener.end(cut=True)

    def _hear(self, chunk: Chunk, arrived: float) -> None:
        admitted = self._intake.admit(chunk)
        for fault in admitted.faults:
            self._emit({"type": "fault", **asdict(fault)})
        if admitted.ends_sentence:
            self._listener.end(cut=True)
        if not len(admitted.bins):
            return
        begun = time.perf_counter()
        self._at = self._picture.n_bins + sum(map(len, self._unseen))
        self._count([begun - arrived + spent for spent in self._listener.hear(admitted.bins)])
        self._unseen.append(admitted.bins)
        if sum(map(len, self._unseen)) >= DRAWN:
            self.publish(self._picture.raster(np.concatenate(self._unseen)))
            self._unseen.clear()

    def _read(self, scores: Scores, arrived: float) -> None:
        begun = time.perf_counter()
        self._at += len(scores.log_probs) * self._stride  # as if their bins had been heard
        self._count([begun - arrived + spent for spent in self._listener.read(scores.log_probs)])

    def _count(self, seconds: list[float]) -> None:
        """How long after their bins came frames were read."""
        for spent in seconds:
            self.meter.add(1000 * spent)
            if self.recorder is not None:
                self.recorder.note_latency(1000 * spent)
        self._tell_latency()

    def _heard(self, bins: np.ndarray, log_probs: np.ndarray) -> None:
        if self.recorder is not None:
            self.recorder.add_bins(bins)
        self._at += len(bins)
        if len(log_probs):
            self.publish(posteriors(log_probs, self._at))

    def _tell_recording(self) -> None:
        """Everyone may know whether they are written down, and when that has failed."""
        if self.recorder is not None and self._record_told is not (self.recorder.error is None):
            self._record_told = self.recorder.error is None
            self.publish({"type": "recording", "on": self._record_told, "what": self.recorder.error})

    def _tell_latency(self) -> None:
        now = time.perf_counter()
        if now - self._told_s >= LATENCY_S:
            self._told_s = now
            self.publish({"type": "latency", **self.meter.summary()})

    def _tell_adaptation(self) -> None:
        standing = self.decoder.adaptation
        if standing is not None and standing != self._standing:
            self._standing = standing
            self._emit(to_event(standing))

    def _emit(self, event: dict[str, Any]) -> None:
        event = {**event, "at": time.time()}
        if self.recorder is not None:
            event = self.recorder.note(event)
        self.publish(event)
