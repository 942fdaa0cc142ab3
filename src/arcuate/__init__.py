"""Arcuate: intracortical recordings of attempted speech to text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.data.prepare import prepare as prepare
    from arcuate.data.simulation import simulate as simulate
    from arcuate.decoding.decoder import load as load
    from arcuate.evaluation.decode import decode as decode
    from arcuate.evaluation.evaluate import evaluate as evaluate
    from arcuate.experiments.ablation import ablate as ablate
    from arcuate.experiments.average import average as average
    from arcuate.experiments.calibrate import calibrate as calibrate
    from arcuate.experiments.multi_seed import train_seeds as train_seeds
    from arcuate.experiments.sweep import sweep as sweep
    from arcuate.experiments.train import train as train
    from arcuate.insight.comparison import compare as compare
    from arcuate.insight.doctor import diagnose as diagnose
    from arcuate.live.decoder import StreamingDecoder as StreamingDecoder

__version__ = "0.1.0"

__all__ = [
    "StreamingDecoder",
    "__version__",
    "ablate",
    "average",
    "calibrate",
    "compare",
    "decode",
    "diagnose",
    "evaluate",
    "load",
    "prepare",
    "simulate",
    "sweep",
    "train",
    "train_seeds",
]

_MODULES = {
    "simulate": "arcuate.data.simulation",
    "prepare": "arcuate.data.prepare",
    "train": "arcuate.experiments.train",
    "train_seeds": "arcuate.experiments.multi_seed",
    "average": "arcuate.experiments.average",
    "sweep": "arcuate.experiments.sweep",
    "ablate": "arcuate.experiments.ablation",
    "evaluate": "arcuate.evaluation.evaluate",
    "decode": "arcuate.evaluation.decode",
    "calibrate": "arcuate.experiments.calibrate",
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
