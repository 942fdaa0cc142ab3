"""What compiled code costs in memory before it does anything: NumPy alone, with Numba, with one compiled function.

python benchmarks/numba_memory.py
"""

import resource

import numpy as np


def peak(what: str) -> None:
    print(f"{what:26} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:4.0f} MB at its peak")


def total(values: np.ndarray) -> float:
    summed = 0.0
    for i in range(values.shape[0]):
        summed += values[i]
    return summed


peak("Python and NumPy")
import numba  # noqa: E402 (its cost is what is measured)

peak("Numba imported")
numba.njit(cache=True)(total)(np.zeros(3))
peak("one sum of floats compiled")
