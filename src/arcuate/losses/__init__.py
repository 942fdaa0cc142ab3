"""Losses: one number per trial each."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.losses.rnnt import rnnt_loss as rnnt_loss

__all__ = ["rnnt_loss"]


def __getattr__(name: str) -> Any:
    """`arcuate.losses.rnnt_loss` pulls in torch only when it is asked for; the settings beside it do not."""
    if name == "rnnt_loss":
        from arcuate.losses.rnnt import rnnt_loss

        return rnnt_loss
    raise AttributeError(f"module 'arcuate.losses' has no attribute {name!r}")
