"""Simulation of recordings in the official file layouts, from sentences to spikes."""

from arcuate.data.readers.release import TRUTH_FILE
from arcuate.data.simulation.cohort import DIFFICULTIES, Simulation, simulate

__all__ = ["DIFFICULTIES", "TRUTH_FILE", "Simulation", "simulate"]
