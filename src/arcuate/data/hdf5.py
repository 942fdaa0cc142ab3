"""Opening HDF5 files, which ends the process if memory runs out in the middle."""

from pathlib import Path
from typing import Any

import h5py

from arcuate.errors import require_memory

_ROOM = 2**24  # bytes; opening takes less than 1 MB with the caches in use here


def open_hdf5(path: Path, mode: str = "r", **options: Any) -> h5py.File:
    """Open an HDF5 file; raises MemoryError where the library would access memory that it did not get."""
    require_memory(_ROOM, f"opening {path.name}")
    return h5py.File(path, mode, **options)
