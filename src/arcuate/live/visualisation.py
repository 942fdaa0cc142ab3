"""What the page draws of the recording: every channel against its own recent past, and phoneme probabilities."""

import struct
from typing import Any

import numpy as np

from arcuate.data.arrays import layout_of_session, list_arrays, list_features
from arcuate.data.trial import BIN_MS, BIN_SECONDS
from arcuate.live.config import LiveSettings
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.messages import Source
from arcuate.live.sources.redis import RedisLogits
from arcuate.live.sources.replay import Replay

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


# What the page wants to know once: the model, its channels by array, the trials there are to replay.


def describe(decoder: StreamingDecoder, source: Source | None, settings: LiveSettings) -> dict[str, Any]:
    engine, delay = decoder.engine, decoder.delay
    patch = engine.model.config.settings.front_end.patch
    return {
        "n_channels": decoder.n_channels,
        "features": []
        if isinstance(source, RedisLogits)
        else features(decoder.n_channels, decoder.sessions[-1]),
        "classes": list(engine.model.config.classes),
        "sessions": list(decoder.sessions),
        "session": decoder.session,
        "frame_ms": BIN_MS * patch.stride,
        "delay_ms": {
            "smoothing": delay.smoothing_ms,
            "patch": delay.patch_ms,
            "encoder": delay.encoder_ms,
            "total": delay.total_ms,
        },
        "words": engine.search is not None,
        "n_words": len(engine.search.words) if engine.search else 0,
        "may_close": True,
        "phrase": settings.start.phrase is not None,
        "replay": trials_of(source) if isinstance(source, Replay) else None,
    }


def features(n_channels: int, session: str) -> list[dict[str, Any]]:
    """Which channels are threshold crossings and which power, array by array, as both releases order them."""
    arrays = list_arrays(layout_of_session(session), n_channels)
    return [
        {
            "name": feature.name,
            "arrays": [
                {"name": a.name, "first": feature.channels[a.electrodes.start], "n": len(a.electrodes)}
                for a in arrays
            ],
        }
        for feature in list_features(n_channels)
    ]


def trials_of(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "id": t.id,
            "session": t.session,
            "number": t.number,
            "split": t.split,
            "text": t.text,
            "s": t.n_bins * BIN_SECONDS,
        }
        for t in replay.prepared.trials
    ]
