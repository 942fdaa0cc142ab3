"""Arcuate: intracortical recordings of attempted speech to text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.data.prepare import prepare as prepare
    from arcuate.data.simulation import simulate as simulate
    from arcuate.decoding.decoder import load as load
    from arcuate.evaluation.evaluate import evaluate as evaluate
    from arcuate.experiments.train import train as train
    from arcuate.insight.comparison import compare as compare
    from arcuate.insight.doctor import diagnose as diagnose
    from arcuate.live.decoder import StreamingDecoder as StreamingDecoder

__version__ = "0.1.0"

__all__ = [
    "StreamingDecoder",
    "__version__",
    "compare",
    "diagnose",
    "evaluate",
    "load",
    "prepare",
    "simulate",
    "train",
]

_MODULES = {
    "simulate": "arcuate.data.simulation",
    "prepare": "arcuate.data.prepare",
    "train": "arcuate.experiments.train",
    "evaluate": "arcuate.evaluation.evaluate",
    "load": "arcuate.decoding.decoder",
    "StreamingDecoder": "arcuate.live.decoder",
    "diagnose": "arcuate.insight.doctor",
    "compare": "arcuate.insight.comparison",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because most of them need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'arcuate' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
