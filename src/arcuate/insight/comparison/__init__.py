"""Comparison of runs on the same trials, with significance tests."""

from arcuate.insight.comparison.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
