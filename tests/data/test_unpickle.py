"""Hostile and damaged pickles and checkpoints: refused in one sentence, and nothing in them is executed."""

import os
import pickle
import struct
from collections.abc import Callable
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


def loop() -> list:
    content: list = []
    content.append(content)
    return content


def shared() -> list:
    level: list = [0]
    for _ in range(40):
        level = [level, level]
    return level


HOSTILE = {
    "object whose address is in the file": pickle.dumps(Call(np.ndarray, (1,), "O", b"\x01" * 8)),
    "huge array": pickle.dumps(Call(np.ndarray, (2**40,), "f4")),
    "dtype of objects": pickle.dumps(Call(np.dtype, "O")),
    "item size of a dtype": pickle.dumps(np.arange(4, dtype="<f4"), 2).replace(b"f4", b"f8"),
    "deep key": b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "deep list": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "repeated": pickle.dumps(shared()),
    "contains itself": pickle.dumps(loop()),
    "integer of 16 Mbit": pickle.dumps({"epochs": 1 << 2**24}),
    "code point outside Unicode": b"\x80\x04\x8c\x03\xed\xa0\x80.",
    "object array": pickle.dumps(np.array([{}, []], dtype=object)),
    "text beyond the file": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "truncated": pickle.dumps([1, 2, 3])[:-3],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("arcuate.data.unpickle._MAX_VALUES", 10_000)  # five million take seconds
    (tmp_path / "args").write_bytes(HOSTILE[name])
    with pytest.raises(UserError, match="args"):
        load_pickle(tmp_path / "args")


@pytest.mark.parametrize("load", [load_pickle, load_checkpoint])
def test_code_in_a_file_is_not_executed(tmp_path: Path, load: Callable[[Path], object]) -> None:
    content = {"weights": [1.0], "call": Call(os.mkdir, str(tmp_path / "executed"))}
    if load is load_checkpoint:
        torch.save(content, tmp_path / "args")
    else:
        (tmp_path / "args").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"refers to \w+\.mkdir"):
        load(tmp_path / "args")
    assert not (tmp_path / "executed").exists()


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
    whole = (tmp_path / "weights").read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "weights").write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as a PyTorch checkpoint"):
            load_checkpoint(tmp_path / "weights")
