"""The exported file: its layout, and files that are damaged or made to deceive."""

import json
import random
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from arcuate.errors import UserError
from arcuate.exported.check import OPERATORS, check_graph
from arcuate.exported.file import open_archive
from arcuate.runtime import Decoder
from support.exports import export_model, repack
from support.fuzzing import mutate
from support.live_parts import bins, small_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tmp_path_factory.mktemp("export") / "model.arcx", small_model(normalise="rolling"))


def test_equal_models_give_equal_files(path: Path, tmp_path: Path) -> None:
    again = export_model(tmp_path / "model.arcx", small_model(normalise="rolling"))
    assert again.read_bytes() == path.read_bytes()


def test_zip_tools_read_it_and_members_are_aligned(path: Path) -> None:
    archive = open_archive(path)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.namelist() == list(archive.members)
        assert all(file.read(name) == archive.bytes(name) for name in archive.members)
        metadata = json.loads(file.read("metadata.json"))
    assert all(offset % 64 == 0 for offset, _ in archive.members.values())
    assert metadata["model"]["sessions"] == ["day1", "day2"]
    assert metadata["precision"] == "fp32"


def test_int8_is_smaller_and_close(tmp_path: Path) -> None:
    model = small_model(n_channels=64)
    files = [export_model(tmp_path / f"{int8}.arcx", model, words=False, int8=int8) for int8 in (False, True)]
    fp32, int8 = (Decoder.load(file, warm=False) for file in files)
    sizes = [open_archive(file).member("frame.onnx")[1] for file in files]
    assert sizes[1] < 0.5 * sizes[0]
    difference = np.abs(np.exp(fp32.log_probs(bins(100, 64))) - np.exp(int8.log_probs(bins(100, 64))))
    assert 0 < difference.max() < 0.1
    frame = onnx.load_from_string(open_archive(files[1]).bytes("frame.onnx"))
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= {node.op_type for node in frame.graph.node}


# --- damaged files ----------------------------------------------------------------------------------------


def test_every_change_to_a_byte_is_refused(path: Path, tmp_path: Path) -> None:
    """Mutations anywhere in the file, headers and padding included, fail the checksum."""
    content, rng, target = path.read_bytes(), random.Random(0), tmp_path / "damaged.arcx"
    for _ in range(300):
        changed = mutate(content, rng)
        if changed == content:
            continue
        target.write_bytes(changed)
        with pytest.raises(UserError, match=r"damaged|cannot read") as error:
            open_archive(target)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["metadata.json", "bin.onnx", "frame.onnx", "session_weights.f32"])
def test_missing_members(path: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        Decoder.load(repack(path, tmp_path / "m.arcx", {name: None}))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"format": "other"},
        {"precision": "fp64"},
        {"states": {}},
        {"states": {"bin": [{"name": "patch", "dtype": "float32", "shape": [10**6, 10**6]}], "frame": []}},
        {"model": None},
        {"decoding": {"beam": 10**12}},
        {"confidence": []},
        {"confidence": {"accept_above": "high"}},
        {"confidence": {"word": {"intercept": 0.0, "weights": [1.0] * 9}}},
        {"confidence": {"sentence": {"intercept": 0.0, "weights": [1e300] * 4}}},
    ],
)
def test_metadata_are_checked(path: Path, tmp_path: Path, change: dict) -> None:
    metadata = json.loads(open_archive(path).bytes("metadata.json"))
    if "confidence" in change:
        stored = metadata["decoding"]["confidence"]
        changed = stored | change["confidence"] if change["confidence"] else []
        metadata["decoding"] |= {"confidence": changed}
    else:
        metadata |= change
    forged = repack(path, tmp_path / "m.arcx", {"metadata.json": json.dumps(metadata).encode()})
    with pytest.raises(UserError):
        Decoder.load(forged, warm=False)


# --- graphs made to deceive -------------------------------------------------------------------------------


def graph(*nodes: onnx.NodeProto, initializers: tuple = (), domain: str = "", **fields: object) -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in ("x", "y")]
    made = helper.make_graph(list(nodes), "g", values[:1], values[1:], list(initializers))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid(domain, 17)], ir_version=8)
    return model.SerializeToString()


def external() -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    return tensor


def branch() -> onnx.NodeProto:
    inner = helper.make_graph([], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1,))])
    return helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)


IDENTITY = helper.make_node("Identity", ["x"], ["y"])
REFUSED = {
    "external data": graph(IDENTITY, initializers=(external(),)),
    "custom operator": graph(helper.make_node("Danger", ["x"], ["y"], domain="com.example")),
    "unknown operator": graph(helper.make_node("Loop", ["x"], ["y"])),
    "operator that allocates": graph(helper.make_node("ConstantOfShape", ["x"], ["y"])),
    "subgraph": graph(branch()),
    "other operator set": graph(IDENTITY, domain="com.example"),
    "tensor attribute": graph(
        helper.make_node("Identity", ["x"], ["y"], value=numpy_helper.from_array(np.zeros(1, np.float32)))
    ),
    "nothing": b"",
    "noise": bytes(range(256)),
}


WRONG_SIZE = graph(
    helper.make_node("Add", ["x", "w"], ["y"]),
    initializers=(helper.make_tensor("w", TensorProto.FLOAT, (2,), np.zeros(2, "<f4").tobytes(), raw=True),),
).replace(b"\x08\x02\x10\x01", b"\x08\x7f\x10\x01")


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="not a supported ONNX graph"):
        check_graph(REFUSED[name], "test.onnx")


def test_a_plain_graph_is_accepted() -> None:
    check_graph(
        graph(IDENTITY, initializers=(numpy_helper.from_array(np.zeros((2, 3), np.float32), "w"),)), "test.onnx"
    )


def test_no_operator_reads_files_or_loops() -> None:
    assert not OPERATORS & {"If", "Loop", "Scan", "SequenceMap", "ConstantOfShape", "Expand", "Tile", "RandomNormal"}


def test_a_name_that_is_not_text_is_one_sentence_and_prints_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word on stdout, where `--json` prints one object."""
    content = open_archive(path).bytes("bin.onnx").replace(b"c1", b"\xff1", 1)
    with pytest.raises(UserError, match=r"bin\.onnx"):
        Decoder.load(repack(path, tmp_path / "m.arcx", {"bin.onnx": content}), warm=False)
    assert capsys.readouterr().out == ""


def test_a_graph_that_loads_and_fails_is_one_sentence(path: Path, tmp_path: Path) -> None:
    """The number of columns that a slice takes is a constant, which only a run finds to be wrong."""
    model = onnx.load_from_string(open_archive(path).bytes("bin.onnx"))
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT64:
            tensor.raw_data = np.full(tensor.dims, 5, np.int64).tobytes()
    forged = repack(path, tmp_path / "m.arcx", {"bin.onnx": model.SerializeToString()})
    with pytest.raises(UserError, match=r"bin\.onnx"):
        Decoder.load(forged, warm=False).push(bins(30))


def doubling(model: onnx.ModelProto, source: str, n: int) -> bytes:
    """The graph with a value that is joined to itself n times; the result depends on it."""
    nodes = [helper.make_node("Reshape", [source, "all"], ["big0"])]
    nodes += [helper.make_node("Concat", [f"big{i}"] * 2, [f"big{i + 1}"], axis=0) for i in range(n)]
    nodes += [helper.make_node("ReduceSum", [f"big{n}"], ["sum"], keepdims=0)]
    nodes += [helper.make_node("Add", ["log_probs.small", "sum"], ["log_probs"])]
    for node in model.graph.node:
        node.output[:] = ["log_probs.small" if name == "log_probs" else name for name in node.output]
        node.input[:] = ["log_probs.small" if name == "log_probs" else name for name in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "all"))
    model.graph.node.extend(nodes)
    return model.SerializeToString()


@pytest.mark.parametrize("source", ["patch", "constant"])
def test_a_graph_cannot_take_all_memory(path: Path, tmp_path: Path, source: str) -> None:
    """40 small operators that make 16 TB; computed from the input, or from a constant when the graph is loaded."""
    model = onnx.load_from_string(open_archive(path).bytes("frame.onnx"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.float32), "constant"))
    forged = repack(path, tmp_path / "m.arcx", {"frame.onnx": doubling(model, source, 40)})
    with pytest.raises(UserError, match=r"frame\.onnx cannot be loaded"):
        Decoder.load(forged, warm=False)
    assert Decoder.load(path, warm=False).push(bins(30)) is not None  # others still load


def test_forged_graphs_do_not_load(path: Path, tmp_path: Path) -> None:
    forged = repack(path, tmp_path / "m.arcx", {"bin.onnx": REFUSED["external data"]})
    with pytest.raises(UserError, match=r"bin\.onnx is not a supported ONNX graph"):
        Decoder.load(forged)
    with pytest.raises(UserError, match=r"bin\.onnx cannot be loaded"):
        Decoder.load(repack(path, tmp_path / "m.arcx", {"bin.onnx": WRONG_SIZE}))
    forged = repack(path, tmp_path / "m.arcx", {"bin.onnx": open_archive(path).bytes("frame.onnx")})
    with pytest.raises(UserError, match="do not match its metadata"):
        Decoder.load(forged)


def test_members_above_the_limit_of_plain_zip_archives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long n-gram: its header has an extra field, and it is still aligned."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 2000)
    large = open_archive(repack(path, tmp_path / "large.arcx", {}))
    small = open_archive(path)
    assert {name: large.bytes(name) for name in large.members} == {name: small.bytes(name) for name in small.members}
