"""Losses, one value per trial each."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.losses.rnnt import rnnt_loss as rnnt_loss

__all__ = ["rnnt_loss"]


def __getattr__(name: str) -> Any:
    """Import torch only when a loss is used; the settings do not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'arcuate.losses' has no attribute {name!r}")
    return getattr(import_module("arcuate.losses.rnnt"), name)
