"""Arcuate: intracortical recordings of attempted speech to text."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.decoding.decoder import load as load
    from arcuate.live.decoder import StreamingDecoder as StreamingDecoder

__version__ = "0.1.0"


__all__ = ["StreamingDecoder", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`arcuate.load` and `StreamingDecoder` pull in torch only when they are asked for."""
    if name == "load":
        from arcuate.decoding.decoder import load

        return load
    if name == "StreamingDecoder":
        from arcuate.live.decoder import StreamingDecoder

        return StreamingDecoder
    raise AttributeError(f"module 'arcuate' has no attribute {name!r}")
