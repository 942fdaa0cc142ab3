"""What the page draws of the recording: every channel against its own recent past, and phoneme probabilities."""

import struct

import numpy as np

RASTER, POSTERIORS = 1, 2
HEADER = struct.Struct("<BxHIHH")  # kind, nothing, 0, bin number, rows, columns
FADE = 0.998  # per bin: the past that a channel is compared with is some 10 s
SPREAD = 28.0  # grey levels per standard deviation


class Picture:
    """Running mean and spread per channel; only for the eye, decoding knows nothing of it."""

    def __init__(self, n_channels: int) -> None:
        self._mean = np.zeros(n_channels)
        self._square = np.ones(n_channels)
        self._weight = 0.0
        self.n_bins = 0

    def raster(self, bins: np.ndarray) -> bytes:
        """Bins (t, C) as a message: grey levels around 128."""
        rows = np.empty(bins.shape, np.uint8)
        for row, values in zip(rows, bins, strict=True):
            share = max(1 - FADE, 1 / (1 + self._weight))
            self._weight = min(self._weight + 1, 1 / (1 - FADE))
            self._mean += share * (values - self._mean)
            self._square += share * ((values - self._mean) ** 2 - self._square)
            z = (values - self._mean) / (np.sqrt(self._square) + 1e-6)
            row[:] = np.clip(128 + SPREAD * z, 0, 255)
        self.n_bins += len(bins)
        return HEADER.pack(RASTER, 0, self.n_bins - len(bins), *rows.shape) + rows.tobytes()


def posteriors(log_probs: np.ndarray, at: int) -> bytes:
    """Frames (f, V) as a message: probabilities from 0 to 255; `at` bins had been heard when they were read."""
    rows = np.round(255 * np.exp(np.clip(log_probs, -20, 0))).astype(np.uint8)
    return HEADER.pack(POSTERIORS, 0, at, *rows.shape) + rows.tobytes()
