"""Stand-ins for an accelerator: tensors that count what would synchronise, and a `torch.cuda` that records calls."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arcuate.data.batching import Batch

_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "bincount")
_READING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")


class DeviceTensor(torch.Tensor):
    """A CPU tensor that plays one on a device: everything computed from it is one too, and reads are counted."""

    reads: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READS and any(isinstance(a, DeviceTensor) for a in args):
            with torch._C.DisableTorchFunctionSubclass():
                cls.reads[name] += 1
                plain = [a.as_subclass(torch.Tensor) if isinstance(a, DeviceTensor) else a for a in args]
                return function(*plain, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class _CountReads(TorchDispatchMode):
    """Counts operations whose result has a data-dependent shape or goes to the host, wherever they are called."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in _READING_OPS and any(isinstance(a, DeviceTensor) for a in args):
            DeviceTensor.reads[name] += 1
        return function(*args, **(kwargs or {}))


def on_device(batch: Batch) -> Batch:
    """The batch as `Batch.to` would leave it on an accelerator."""
    statistics = batch.statistics
    if statistics is not None:
        statistics = statistics._map(lambda t: t.as_subclass(DeviceTensor))
    moved = batch._map(lambda t: t.as_subclass(DeviceTensor), lambda _: statistics)
    return moved


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of device tensors inside the context."""
    DeviceTensor.reads = Counter()
    with _CountReads():
        yield DeviceTensor.reads
