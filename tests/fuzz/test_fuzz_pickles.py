"""Pickles and PyTorch checkpoints: generated opcodes and mutated files."""

import io
import pickle
import pickletools
import random
import struct
from pathlib import Path

import numpy as np
import torch

from arcuate.data.unpickle import load_checkpoint, load_pickle
from support.cases import cases
from support.fuzzing import damaged, fuzz

_OPCODES = [op for op in pickletools.opcodes if op.name != "STOP"]
_NAMES = (
    "numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy.core.multiarray scalar",
    "numpy._core.numeric _frombuffer", "collections OrderedDict", "builtins set", "builtins frozenset",
    "builtins complex", "_codecs encode", "os system", "builtins eval", "torch._utils _rebuild_tensor_v2",
    "torch FloatStorage",
)  # fmt: skip
_DTYPES = ("O", "O8", "V8", "f4", "<f8", "U3", "S1000000", "M8", "i4,O", "f4", "?", "c16", "2f4")


def _argument(code: str, rng: random.Random) -> bytes:
    """Plausible bytes for an opcode's argument: small and huge lengths, names, numbers."""
    lengths = (0, 1, 3, 200, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
    name = rng.choice(_NAMES)
    text = rng.choice((*_DTYPES, "latin1", name, "-1", "1e400", "0", "9" * 30)).encode()
    return {
        "uint1": bytes([rng.randrange(256)]),
        "uint2": rng.randbytes(2),
        "uint4": struct.pack("<I", rng.choice(lengths) % 2**32),
        "uint8": struct.pack("<Q", rng.choice(lengths)),
        "int4": struct.pack("<i", rng.choice((-1, 0, 1, 2**31 - 1))),
        "float8": rng.randbytes(8),
        "stringnl_noescape_pair": name.replace(" ", "\n").encode() + b"\n",
        "string1": bytes([len(text)]) + text,
        "unicodestring1": bytes([len(text)]) + text,
        "bytes1": bytes([len(text)]) + text,
        "long1": b"\x02" + rng.randbytes(2),
    }.get(code, struct.pack("<Q", rng.choice(lengths)) if code.endswith("8") else text + b"\n")


def random_pickle(rng: random.Random) -> bytes:
    """Opcodes at random, with allowed names in wrong places, deep nesting and huge lengths."""
    kind = rng.randrange(6)
    out = io.BytesIO()
    out.write(b"\x80\x04")
    if kind == 0:
        depth = rng.choice((50, 200, 1000)) if rng.random() < 0.99 else 100_000
        opener, closer = rng.choice(((b"(", b"t"), (b"]", b"a"), (b"(", b"l"), (b"N", b"\x85")))
        body = opener + closer * depth if closer == b"\x85" else opener * depth + b"N" + closer * depth
        out.write(body + rng.choice((b"", b"}" + b"(", b"N" + b"s")))
    elif kind == 1:  # a name called with arguments it is not meant for
        shape = rng.choice(((1,), (2**62,), (-1,), (0,), (3, 2**40)))
        arguments = rng.choice(
            ((shape, rng.choice(_DTYPES), b"x" * 8), (shape,), (b"x" * 16, rng.choice(_DTYPES)), ([[1, 2]] * 3,), ())
        )
        out.write(b"c" + rng.choice(_NAMES).replace(" ", "\n").encode() + b"\n")
        out.write(pickle.dumps(arguments, 2)[2:-1] + rng.choice((b"R", b"\x81", b"R" + b"}b", b"RN\x85b")))
    elif kind == 2:  # an array whose state does not fit
        array = pickle.dumps(np.arange(3).astype(rng.choice(("f4", "i8", "U2"))), rng.choice((2, 4, 5)))
        data = bytearray(array)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(2, len(data))] = rng.randrange(256)
        return bytes(data)
    else:
        for _ in range(rng.randrange(1, 40)):
            op = rng.choice(_OPCODES)
            out.write(op.code.encode("latin1"))
            if op.arg is not None:
                out.write(_argument(op.arg.name, rng))
    out.write(b".")
    return out.getvalue()


def _read_pickle(content: bytes, folder: Path) -> None:
    (folder / "args").write_bytes(content)
    load_pickle(folder / "args")


def _read_checkpoint(content: bytes, folder: Path) -> None:
    (folder / "weights").write_bytes(content)
    load_checkpoint(folder / "weights")


def test_generated_pickles(tmp_path: Path) -> None:
    rng = random.Random(1)
    inputs = [random_pickle(rng) for _ in range(cases(10))]
    fuzz(_read_pickle, inputs, tmp_path / "pickles").check(minimum_refused=0.6)


def test_damaged_checkpoints(tmp_path: Path) -> None:
    content = {"model_state_dict": {"h0": torch.ones(2, 3), "w": torch.ones(5)}, "val_PER": np.float64(0.1), "n": 3}
    seeds = []
    for is_zip in (True, False):
        torch.save(content, tmp_path / "seed", _use_new_zipfile_serialization=is_zip)
        seeds.append((tmp_path / "seed").read_bytes())
    fuzz(_read_checkpoint, damaged(seeds, 10), tmp_path / "checkpoints").check(minimum_refused=0.2)
