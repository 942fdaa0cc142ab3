"""Hostile pickles that crashed or flooded the process when numpy's own classes were in the list of names."""

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.data.unpickle import load_checkpoint, load_pickle
from arcuate.errors import UserError


class Call:
    """A call in the file: `pickle.dumps` writes the name and the arguments."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.function, self.arguments


def _refused(path: Path, content: bytes, load=load_pickle) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(path)
    return str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        Call(np.ndarray, (1,), "O", b"\x01" * 8),  # an object whose address is in the file
        Call(np.ndarray, (2**40,), "f4"),
        Call(np.ndarray, (4,), np.dtype("f4"), b"x" * 16),
        Call(np.dtype, "O"),
    ],
)
def test_array_classes_cannot_be_called(tmp_path: Path, call: Call) -> None:
    _refused(tmp_path / "args", pickle.dumps({"a": call}))
    torch.save({"a": call}, tmp_path / "zip")
    with pytest.raises(UserError):
        load_checkpoint(tmp_path / "zip")


def test_state_of_a_dtype_cannot_change_its_size(tmp_path: Path) -> None:
    content = pickle.dumps(np.arange(4, dtype="<f4"), 2)
    assert b"J\xff\xff\xff\xff" in content  # item size -1: that of the type
    _refused(tmp_path / "args", content.replace(b"J\xff\xff\xff\xff", b"J\x00\x10\x00\x00", 1))


def test_deep_keys_do_not_overflow_the_stack(tmp_path: Path) -> None:
    deep = b"\x80\x04" + b"}" + b")" + b"\x85" * 200_000 + b"N" + b"s."
    assert "key" in _refused(tmp_path / "args", deep)
    assert "nested" in _refused(tmp_path / "args", b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".")


def test_shared_containers_are_counted_as_often_as_they_are_used(tmp_path: Path) -> None:
    level: list = [0]
    for _ in range(40):
        level = [level, level]
    assert "repeat" in _refused(tmp_path / "args", pickle.dumps(level))
    loop: list = []
    loop.append(loop)
    assert "itself" in _refused(tmp_path / "args", pickle.dumps(loop))


def test_lengths_beyond_the_file(tmp_path: Path) -> None:
    for code in (b"\x8e", b"\x8d", b"\x96"):  # bytes, text and bytearray with a length of 8 bytes
        _refused(tmp_path / "args", b"\x80\x04" + code + struct.pack("<Q", 2**62) + b"x.")


def test_tensors_stay_within_their_storage(tmp_path: Path) -> None:
    torch.save({"h0": torch.ones(3)}, tmp_path / "good")
    with zipfile.ZipFile(tmp_path / "good") as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    assert b"K\x03\x85" in parts[name]
    parts[name] = parts[name].replace(b"K\x03\x85", b"K\x64\x85", 1)  # 100 values of 3
    with zipfile.ZipFile(tmp_path / "bad", "w") as archive:
        for part, content in parts.items():
            archive.writestr(part, content)
    with pytest.raises(UserError, match="exceeds its storage"):
        load_checkpoint(tmp_path / "bad")


def test_damaged_tensors_are_found_by_their_checksum(tmp_path: Path) -> None:
    torch.save({"h0": torch.full((3,), 1.5)}, tmp_path / "weights")
    content = (tmp_path / "weights").read_bytes()
    values = struct.pack("<3f", 1.5, 1.5, 1.5)
    (tmp_path / "weights").write_bytes(content.replace(values, struct.pack("<3f", 1.5, 2.5, 1.5)))
    with pytest.raises(UserError, match="checksum"):
        load_checkpoint(tmp_path / "weights")


@pytest.mark.parametrize("is_zip", [True, False])
def test_both_formats_of_checkpoints(tmp_path: Path, is_zip: bool) -> None:
    layer = torch.nn.Linear(3, 4)
    content = {
        "state": layer.state_dict(),
        "parameter": layer.weight,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "rate": np.float64(0.25),
    }
    torch.save(content, tmp_path / "weights", _use_new_zipfile_serialization=is_zip)
    loaded = load_checkpoint(tmp_path / "weights")
    for name in ("parameter", "half", "empty", "transposed"):
        assert torch.equal(loaded[name], content[name]) and loaded[name].dtype == content[name].dtype
    assert torch.equal(loaded["state"]["bias"], layer.bias) and loaded["rate"] == 0.25
