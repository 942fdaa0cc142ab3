"""Simulation of recordings in the official file layouts, from sentences to spikes."""

from arcuate.data.readers.side_files import TRUTH_FILE
from arcuate.data.simulation.cohort import DIFFICULTIES, LAYOUTS, Simulation, simulate

__all__ = ["DIFFICULTIES", "LAYOUTS", "TRUTH_FILE", "Simulation", "simulate"]
