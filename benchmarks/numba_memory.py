"""Memory of compiled code: NumPy alone, with Numba imported, with one compiled function.

python benchmarks/numba_memory.py
"""

import resource

import numpy as np


def print_peak(label: str) -> None:
    print(f"{label:26} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:4.0f} MB peak memory")


def total(values: np.ndarray) -> float:
    summed = 0.0
    for i in range(values.shape[0]):
        summed += values[i]
    return summed


print_peak("Python and NumPy")
import numba  # noqa: E402 (its cost is what is measured)

print_peak("Numba imported")
numba.njit(cache=True)(total)(np.zeros(3))
print_peak("one sum of floats compiled")
