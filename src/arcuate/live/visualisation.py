"""What the page draws: channel activity and phoneme probabilities, and the description of model and source."""

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

_RASTER, _POSTERIORS = 1, 2  # kinds of binary messages
_HEADER = struct.Struct("<BxHIHH")  # kind, padding, 0, bin number, rows, columns
_DECAY = 0.998  # per bin: channels are compared with their last 10 s
_GREY_PER_SD = 28.0


class Visualisation:
    """Running mean and variance per channel for display; decoding does not use them."""

    def __init__(self, n_channels: int) -> None:
        self._mean = np.zeros(n_channels)
        self._variance = np.ones(n_channels)
        self._weight = 0.0
        self.n_bins = 0

    def raster_message(self, bins: np.ndarray) -> bytes:
        """Bins (t, C) as grey levels around 128."""
        rows = np.empty(bins.shape, np.uint8)
        for row, values in zip(rows, bins, strict=True):
            share = max(1 - _DECAY, 1 / (1 + self._weight))
            self._weight = min(self._weight + 1, 1 / (1 - _DECAY))
            self._mean += share * (values - self._mean)
            self._variance += share * ((values - self._mean) ** 2 - self._variance)
            z = (values - self._mean) / (np.sqrt(self._variance) + 1e-6)
            row[:] = np.clip(128 + _GREY_PER_SD * z, 0, 255)
        self.n_bins += len(bins)
        return _HEADER.pack(_RASTER, 0, self.n_bins - len(bins), *rows.shape) + rows.tobytes()


def posterior_message(log_probs: np.ndarray, position: int) -> bytes:
    """Frames (f, V) as probabilities from 0 to 255; `position` is the number of bins received so far."""
    rows = np.round(255 * np.exp(np.clip(log_probs, -20, 0))).astype(np.uint8)
    return _HEADER.pack(_POSTERIORS, 0, position, *rows.shape) + rows.tobytes()


def model_info(decoder: StreamingDecoder, source: Source | None, settings: LiveSettings) -> dict[str, Any]:
    """Description of the model and of the trials to replay, fetched once by the page."""
    engine, delay = decoder.engine, decoder.delay
    has_bins = not isinstance(source, RedisLogits)
    return {
        "n_channels": decoder.n_channels,
        "features": _channel_layout(decoder.n_channels, decoder.sessions[-1]) if has_bins else [],
        "classes": list(engine.model.config.classes),
        "sessions": list(decoder.sessions),
        "session": decoder.session,
        "frame_ms": BIN_MS * engine.model.config.settings.front_end.patch.stride,
        "delay_ms": {
            "smoothing": delay.smoothing_ms,
            "patch": delay.patch_ms,
            "encoder": delay.encoder_ms,
            "total": delay.total_ms,
        },
        "words": engine.search is not None,
        "n_words": len(engine.search.words) if engine.search else 0,
        "phrase": settings.start.phrase is not None,
        "replay": _replay_trials(source) if isinstance(source, Replay) else None,
    }


def _channel_layout(n_channels: int, session: str) -> list[dict[str, Any]]:
    """Threshold crossings and spike-band power by array, in the order of both releases."""
    arrays = list_arrays(layout_of_session(session), n_channels)
    return [
        {
            "name": feature.name,
            "arrays": [
                {"name": a.name, "first": feature.channels[a.electrodes.start], "n": len(a.electrodes)} for a in arrays
            ],
        }
        for feature in list_features(n_channels)
    ]


def _replay_trials(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "id": t.id,
            "session": t.session,
            "number": t.number,
            "split": t.split,
            "text": t.text,
            "s": t.n_bins * BIN_SECONDS,
        }
        for t in replay.trials.trials
    ]
