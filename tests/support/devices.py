"""Stand-ins for an accelerator: tensors that count what would synchronise, and a `torch.cuda` that records calls."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arcuate.data.batching import Batch

_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "bincount")
_READING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")


class DeviceTensor(torch.Tensor):
    """A CPU tensor that plays one on a device: everything computed from it is one too, and reads are counted.

    `x[0] = 1.0` and `x[indices] = 1.0` count as well: torch makes a tensor of the number on the host, and waits for its
    copy to the device. `x[1:] = 1.0` is a fill, and does not wait.
    """

    reads: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READS and any(isinstance(a, DeviceTensor) for a in args):
            with torch._C.DisableTorchFunctionSubclass():
                cls.reads[name] += 1
                plain = [a.as_subclass(torch.Tensor) if isinstance(a, DeviceTensor) else a for a in args]
                return function(*plain, **(kwargs or {}))
        if name == "__setitem__" and isinstance(args[0], DeviceTensor) and isinstance(args[2], (int, float)):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, torch.Tensor) for i in index) or args[0][args[1]].ndim == 0:
                cls.reads["assigned number"] += 1
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
    return batch.map(lambda t: t.as_subclass(DeviceTensor))


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the reads of device tensors inside the context."""
    DeviceTensor.reads = Counter()
    with _CountReads():
        yield DeviceTensor.reads


class CountWaitingCopies(TorchDispatchMode):
    """Counts what would wait on a GPU, or fail there, if tensors on the meta device play those of the GPU.

    Unlike `DeviceTensor` they take the branches of an accelerator. Copies from the CPU wait unless they are
    `non_blocking`; an operation on tensors of both devices fails on a GPU, except that lengths may stay on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.n_copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket._qualified_op_name.removeprefix("aten::")
        devices = {t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim}
        if name == "_to_copy" and kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) > 1 and name != "_pack_padded_sequence":
            self.n_copies += 1
            if name != "_to_copy" or not kwargs.get("non_blocking"):
                self.found[name] += 1
        return function(*args, **kwargs)


class FakeCuda:
    """Replaces the parts of `torch.cuda` that training calls, and records the calls."""

    def __init__(self, monkeypatch: Any, n_devices: int) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stream = "default"
        fake = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "side"

            def wait_stream(self, other: Any) -> None:
                fake.calls.append(("wait_stream", other.name))

        @contextmanager
        def use(stream: Stream) -> Iterator[None]:
            fake.stream, before = stream.name, fake.stream
            yield
            fake.stream = before

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n_devices)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("set_device", device)))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1_000_000 * device.index)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
