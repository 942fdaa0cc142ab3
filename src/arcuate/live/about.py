"""What the page wants to know once: the model, its channels by array, the trials there are to replay."""

from typing import Any

from arcuate.live.decoder import StreamingDecoder
from arcuate.live.settings import LiveSettings
from arcuate.live.sources.redis import RedisLogits
from arcuate.live.sources.replay import Replay
from arcuate.live.sources.source import Source

T15 = ("ventral 6v", "area 4", "55b", "dorsal 6v")
T12 = ("6v superior", "6v inferior")


def describe(decoder: StreamingDecoder, source: Source | None, settings: LiveSettings) -> dict[str, Any]:
    engine, delay = decoder.engine, decoder.delay
    patch = engine.model.card.settings.front_end.patch
    return {
        "n_channels": decoder.n_channels,
        "features": []
        if isinstance(source, RedisLogits)
        else features(decoder.n_channels, decoder.sessions[-1]),
        "classes": list(engine.model.card.classes),
        "sessions": list(decoder.sessions),
        "session": decoder.session,
        "frame_ms": 20 * patch.stride,
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
    names = T12 if session.startswith("t12") else T15
    half = n_channels // 2
    if n_channels % 2 or half % len(names):
        return [{"name": "channels", "arrays": [{"name": "all", "first": 0, "n": n_channels}]}]
    size = half // len(names)
    return [
        {
            "name": kind,
            "arrays": [{"name": name, "first": start + i * size, "n": size} for i, name in enumerate(names)],
        }
        for kind, start in (("threshold crossings", 0), ("spike-band power", half))
    ]


def trials_of(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "id": t.id,
            "session": t.session,
            "number": t.number,
            "split": t.split,
            "text": t.text,
            "s": t.n_bins * 0.02,
        }
        for t in replay.prepared.trials
    ]
