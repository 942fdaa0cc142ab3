"""Arcuate: intracortical recordings of attempted speech to text.

Everything the command line does is a function here, with typed arguments and a typed result; none of them prints.
Each is imported on first use, so that `import arcuate` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.data.prepare import prepare as prepare
    from arcuate.data.simulation import simulate as simulate
    from arcuate.data.store import Store as Store
    from arcuate.decoding.decoder import load as load
    from arcuate.errors import UserError as UserError
    from arcuate.evaluation.decode import decode as decode
    from arcuate.evaluation.evaluate import evaluate as evaluate
    from arcuate.evaluation.tune import tune as tune
    from arcuate.experiments.recipe import Recipe as Recipe
    from arcuate.experiments.recipe import load_recipe as load_recipe
    from arcuate.experiments.train import train as train
    from arcuate.insight.doctor import diagnose as diagnose
    from arcuate.insight.ledger.compare import compare as compare
    from arcuate.live.decoder import StreamingDecoder as StreamingDecoder
    from arcuate.run import Run as Run

__version__ = "0.1.0"

_HOMES = {
    "Recipe": "experiments.recipe",
    "Run": "run",
    "Store": "data.store",
    "StreamingDecoder": "live.decoder",
    "UserError": "errors",
    "compare": "insight.ledger.compare",
    "decode": "evaluation.decode",
    "diagnose": "insight.doctor",
    "evaluate": "evaluation.evaluate",
    "load": "decoding.decoder",
    "load_recipe": "experiments.recipe",
    "prepare": "data.prepare",
    "simulate": "data.simulation",
    "train": "experiments.train",
    "tune": "evaluation.tune",
}

__all__ = [
    "Recipe",
    "Run",
    "Store",
    "StreamingDecoder",
    "UserError",
    "__version__",
    "compare",
    "decode",
    "diagnose",
    "evaluate",
    "load",
    "load_recipe",
    "prepare",
    "simulate",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"arcuate.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'arcuate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
