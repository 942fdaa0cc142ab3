"""Models: everything deterministic between stored bins and token scores."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.models.gru import GRU as GRU
    from arcuate.models.io import load_model as load_model
    from arcuate.models.model import Model as Model
    from arcuate.models.ssm import SSM as SSM

HOMES = {"Model": "model", "load_model": "io", "GRU": "gru", "SSM": "ssm"}
__all__ = ["GRU", "SSM", "Model", "load_model"]


def __getattr__(name: str) -> Any:
    """Torch is pulled in only when a model is asked for; the settings beside it do without."""
    if name in HOMES:
        return getattr(import_module(f"arcuate.models.{HOMES[name]}"), name)
    raise AttributeError(f"module 'arcuate.models' has no attribute {name!r}")
