"""A simulated cohort in the official file layouts, from sentence to spikes."""

from arcuate.data.simulation.cohort import DIFFICULTIES, LAYOUTS, TRUTH, simulate

__all__ = ["DIFFICULTIES", "LAYOUTS", "TRUTH", "simulate"]
