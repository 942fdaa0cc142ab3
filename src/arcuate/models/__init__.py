"""Models: everything deterministic between stored bins and log-probabilities."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.models.gru import GRU as GRU
    from arcuate.models.io import load_model as load_model
    from arcuate.models.model import Model as Model
    from arcuate.models.ssm import SSM as SSM
    from arcuate.models.transformer import Transformer as Transformer

_MODULES = {"GRU": "gru", "SSM": "ssm", "Model": "model", "Transformer": "transformer", "load_model": "io"}
__all__ = ["GRU", "SSM", "Model", "Transformer", "load_model"]


def __getattr__(name: str) -> Any:
    """Import torch only when a model is used; the settings do not need it."""
    if name in _MODULES:
        return getattr(import_module(f"arcuate.models.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'arcuate.models' has no attribute {name!r}")
