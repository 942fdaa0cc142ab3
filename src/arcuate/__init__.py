"""Arcuate: intracortical recordings of attempted speech to text."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from arcuate.api import load as load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`arcuate.load` pulls in torch only when it is asked for."""
    if name == "load":
        from arcuate.api import load

        return load
    raise AttributeError(f"module 'arcuate' has no attribute {name!r}")
