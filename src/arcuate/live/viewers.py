"""Viewers of the page: message queues, and channel activity and phoneme probabilities as images.

A slow viewer misses images and does not delay others. A binary message is one or more images, one after another.
"""

import asyncio
import struct
from collections import deque
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.files import to_json_line

WINDOW_BINS = 500  # shown on the page: 10 s
MAX_VIEWERS = 64
_CAPACITY = 256  # messages that may be queued for a slow viewer
_MAX_FINALS = 200  # sentences sent to a viewer when it connects
_RASTER, _POSTERIORS = 1, 2  # kinds of images
_IMAGE_HEADER = struct.Struct("<BxHIHH")  # kind, padding, bins per row, bin number, rows, columns
_DECAY = 0.998  # per bin: channels are compared with their last 10 s
_GREY_PER_SD = 28.0
_Message = str | bytes


class RasterEncoder:
    """Channel activity as grey levels, by running mean and variance per channel; decoding does not use them."""

    def __init__(self, n_channels: int) -> None:
        self._mean = np.zeros(n_channels)
        self._variance = np.ones(n_channels)
        self.n_bins = 0

    def encode(self, bins: np.ndarray) -> bytes:
        """Image of bins (t, C) as grey levels around 128."""
        rows = np.empty(bins.shape, np.uint8)
        for row, values in zip(rows, bins, strict=True):
            alpha = max(1 - _DECAY, 1 / (1 + self.n_bins))  # plain mean until the window is full
            self.n_bins += 1
            self._mean += alpha * (values - self._mean)
            self._variance += alpha * ((values - self._mean) ** 2 - self._variance)
            z = (values - self._mean) / (np.sqrt(self._variance) + 1e-6)
            row[:] = np.clip(128 + _GREY_PER_SD * z, 0, 255)
        return _IMAGE_HEADER.pack(_RASTER, 1, self.n_bins - len(bins), *rows.shape) + rows.tobytes()


def encode_posteriors(log_probs: np.ndarray, position: int, stride: int) -> bytes:
    """Image of frames (f, V) as probabilities from 0 to 255.

    `position` is the number of bins received so far, `stride` the bins per frame.
    """
    rows = np.round(255 * np.exp(np.clip(log_probs, -20, 0))).astype(np.uint8)
    return _IMAGE_HEADER.pack(_POSTERIORS, stride, position, *rows.shape) + rows.tobytes()


class Viewer:
    """Queue of messages to one viewer; used in the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.queue: asyncio.Queue[_Message] = asyncio.Queue(capacity)
        self.n_dropped = 0

    def offer(self, message: _Message) -> bool:
        """Queue a message; return False if the queue is full."""
        if self.queue.full():
            self.n_dropped += 1
            return False
        self.queue.put_nowait(message)
        return True

    def replace(self, message: _Message) -> None:
        """Queue a message in place of all that wait."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(message)


class Broadcaster:
    """Sends messages to all viewers; keeps the current state for viewers that connect late or fall behind."""

    def __init__(self, max_viewers: int = MAX_VIEWERS, capacity: int = _CAPACITY) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # until the server has started
        self.max_viewers, self.capacity = max_viewers, capacity
        self.viewers: set[Viewer] = set()
        self._latest: dict[str, dict[str, Any]] = {}
        self._finals: deque[dict[str, Any]] = deque(maxlen=_MAX_FINALS)
        self._images: deque[tuple[int, bytes]] = deque()  # of the last seconds, with their bin number

    def publish(self, message: dict[str, Any] | bytes) -> None:
        """Send a message from any thread; never blocks."""
        if self.loop is None:
            self._send_to_all(message)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._send_to_all, message)

    def join(self) -> Viewer:
        if len(self.viewers) >= self.max_viewers:
            raise UserError(f"the maximum of {self.max_viewers} viewers is reached; close another page first")
        viewer = Viewer(self.capacity)
        viewer.offer(self.snapshot())
        if self._images:
            viewer.offer(b"".join(image for _, image in self._images))
        self.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    def snapshot(self) -> str:
        """The current state in one message."""
        return to_json_line({"type": "snapshot", "finals": list(self._finals), "now": self._latest})

    def restore(self, finals: list[dict[str, Any]]) -> None:
        self._finals.extend(finals)

    def _send_to_all(self, message: dict[str, Any] | bytes) -> None:
        if isinstance(message, dict):
            self._update_state(message)
        else:
            self._keep_image(message)
        encoded = message if isinstance(message, bytes) else to_json_line(message)
        for viewer in self.viewers:
            if not viewer.offer(encoded) and isinstance(encoded, str):
                viewer.replace(self.snapshot())  # text must not be lost

    def _update_state(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "final":
            self._finals.append(event)
        elif kind != "fault":
            self._latest[kind] = event
        if kind in ("final", "trial"):
            self._latest.pop("partial", None)

    def _keep_image(self, image: bytes) -> None:
        position = int(_IMAGE_HEADER.unpack_from(image)[2])
        if self._images and position < self._images[-1][0] - WINDOW_BINS:  # bins are counted from the start again
            self._images.clear()
        self._images.append((position, image))
        while self._images[0][0] < position - WINDOW_BINS:
            self._images.popleft()
