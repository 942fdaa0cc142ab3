"""Safe access to untrusted HDF5 files: only plain arrays stored inside the file itself, of bounded size."""

import math
from typing import Any

import h5py
import numpy as np

from arcuate.files import check_expansion

_MAX_CHUNK_BYTES = 2**26  # a chunk is inflated as a whole
_MAX_ATTRIBUTE_BYTES = 100_000


class Budget:
    """Bytes that the bins of a file may expand to: a few bytes can describe gigabytes of equal or repeated values."""

    def __init__(self, n_packed: int) -> None:
        self._n_packed, self._spent = n_packed, 0

    def spend(self, n_bytes: int) -> None:
        check_expansion(self._spent + n_bytes, self._n_packed)
        self._spent += n_bytes


def open_group(data: h5py.File, name: str) -> h5py.Group:
    _check_link(data, name)
    group = data[name]
    if not isinstance(group, h5py.Group):
        raise ValueError(f"{name} is not a group")
    return group


def open_dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """A plain dataset whose values are stored in this file."""
    _check_link(group, name)
    data = group[name]
    if not isinstance(data, h5py.Dataset) or data.shape is None:
        raise ValueError(f"{name} is not an array")
    if _is_outside(data):
        raise ValueError(f"{name} refers to another file, which is not allowed")
    if data.chunks and math.prod(data.chunks) * data.dtype.itemsize > _MAX_CHUNK_BYTES:
        raise ValueError(f"{name} is stored in chunks of {data.chunks} values, more than a trial has")
    return data


def check_inside(data: h5py.File) -> None:
    """Raise ValueError if anything in a file is a link to another file, or has its values there."""
    link = data.visititems_links(lambda name, found: name if isinstance(found, h5py.ExternalLink) else None)
    if link := link or data.visititems(lambda name, found: name if _is_outside(found) else None):
        raise ValueError(f"{link} is a link to another file, which is not allowed")


def _is_outside(item: Any) -> bool:
    return isinstance(item, h5py.Dataset) and bool(item.external or item.is_virtual)


def has_entry(group: h5py.Group, name: str) -> bool:
    """Whether the group has this entry, without following links."""
    return bool(group.id.links.exists(name.encode()))


def _check_link(group: h5py.Group, name: str) -> None:
    if not has_entry(group, name):
        raise KeyError(f"{name} is missing")
    if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name} is a link, which is not allowed")


def read_attribute(group: h5py.Group, name: str) -> Any:
    """A scalar attribute, or a dataset of that name with one value; None if there is neither."""
    if name in group.attrs:
        stored = group.attrs.get_id(name)
    elif has_entry(group, name):
        stored = open_dataset(group, name)
    else:
        return None
    is_plain = stored.dtype.kind in "iufS" or h5py.check_string_dtype(stored.dtype) is not None
    if not is_plain or int(np.prod(stored.shape)) != 1 or stored.dtype.itemsize > _MAX_ATTRIBUTE_BYTES:
        return None
    value = stored[()] if isinstance(stored, h5py.Dataset) else group.attrs[name]
    return value.reshape(-1)[0] if isinstance(value, np.ndarray) else value
