"""Fixtures of the rescoring tests."""

from support.rescoring import small_model

__all__ = ["small_model"]
