"""Binary messages to the page: channel activity and phoneme probabilities as images, and the last seconds of both."""

import struct
from collections import deque

import numpy as np

WINDOW_BINS = 500  # shown on the page: 10 s
_RASTER, _POSTERIORS = 1, 2  # kinds of messages
_IMAGE_HEADER = struct.Struct("<BxHIHH")  # kind, padding, bins per row, bin number, rows, columns
_DECAY = 0.998  # per bin: channels are compared with their last 10 s
_GREY_PER_SD = 28.0


class RasterEncoder:
    """Channel activity as grey levels, by running mean and variance per channel; decoding does not use them."""

    def __init__(self, n_channels: int) -> None:
        self._mean = np.zeros(n_channels)
        self._variance = np.ones(n_channels)
        self.n_bins = 0

    def encode(self, bins: np.ndarray) -> bytes:
        """Message with bins (t, C) as grey levels around 128."""
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
    """Message with frames (f, V) as probabilities from 0 to 255.

    `position` is the number of bins received so far, `stride` the bins per frame.
    """
    rows = np.round(255 * np.exp(np.clip(log_probs, -20, 0))).astype(np.uint8)
    return _IMAGE_HEADER.pack(_POSTERIORS, stride, position, *rows.shape) + rows.tobytes()


class ImageHistory:
    """The images of the last seconds; a page that is opened later shows them."""

    def __init__(self) -> None:
        self._messages: deque[tuple[int, int, bytes]] = deque()  # kind, bin number, message

    def add(self, message: bytes) -> None:
        kind, _, position, _, _ = _IMAGE_HEADER.unpack_from(message)
        if self._messages and position < self._messages[-1][1] - WINDOW_BINS:  # bins are counted from the start again
            self._messages.clear()
        self._messages.append((kind, position, message))
        while self._messages[0][1] < position - WINDOW_BINS:
            self._messages.popleft()

    def merged(self) -> list[bytes]:
        """The images in as few messages as possible: consecutive rows of one kind are joined."""
        merged: list[bytes] = []
        for kind in (_RASTER, _POSTERIORS):
            run: list[bytes] = []
            for message in (m for k, _, m in self._messages if k == kind):
                if run and not _follows(run[-1], message):
                    merged.append(_join(run))
                    run = []
                run.append(message)
            if run:
                merged.append(_join(run))
        return merged


def _follows(before: bytes, after: bytes) -> bool:
    """Whether the rows of two messages of one kind are consecutive."""
    kind, stride, first, rows, columns = _IMAGE_HEADER.unpack_from(before)
    _, _, second, n, other = _IMAGE_HEADER.unpack_from(after)
    step = rows if kind == _RASTER else n * stride  # a raster counts from its first bin, frames to their last
    return columns == other and second - first == step


def _join(run: list[bytes]) -> bytes:
    """One message with the rows of consecutive ones."""
    kind, stride, first, _, columns = _IMAGE_HEADER.unpack_from(run[0])
    position = first if kind == _RASTER else _IMAGE_HEADER.unpack_from(run[-1])[2]
    data = b"".join(message[_IMAGE_HEADER.size :] for message in run)
    return _IMAGE_HEADER.pack(kind, stride, position, len(data) // columns, columns) + data
