"""Read an exported model: metadata, graphs, lexicon and n-gram, all validated before use."""

import json
import math
import mmap
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from arcuate.errors import UserError
from arcuate.exported.archive import METADATA, Archive, damaged, open_archive
from arcuate.exported.check import check_graph
from arcuate.exported.model import NEXT, ExportedModel, LoadedGraph
from arcuate.exported.transducer import ExportedTransducer
from arcuate.models.layout import HEAD_NAMES, Head, Layout, ModelDelay

if TYPE_CHECKING:
    from arcuate.language.lexicon import Lexicon
    from arcuate.language.ngram.model import LanguageModel

FORMAT, VERSION = "arcuate-export", 1
LANGUAGE_MODEL = "ngram.alm"
LEXICON_WORDS = "lexicon.words.txt"
SILENT_FRAME = "silent_frame.f32"  # projected encoder frame of zeros: input of the internal LM
SESSION_WEIGHTS, SESSION_BIASES = "session_weights.f32", "session_biases.f32"
_MAX_METADATA = 2**24
_MAX_STATE_BYTES = 2**28
_MAX_GRAPH_BYTES = 2**28  # of all values while graphs are computed; weights do not count
_MAX_GRAPH_S = 10.0  # for one frame, which has 80 ms
_DTYPES = ("float32", "float64", "int64")
_INSTALL = "exported models run in ONNX Runtime; install it with: pip install 'arcuate[runtime]'"


@dataclass(frozen=True, eq=False)
class ExportedFile:
    """A verified file with its metadata parsed."""

    archive: Archive
    metadata: Mapping[str, Any]
    layout: Layout
    precision: Literal["fp32", "int8"]
    n_sessions_stored: int  # session layers; 0 if the layer is part of the graph or the model has none

    @property
    def path(self) -> Path:
        return self.archive.path

    @property
    def has_words(self) -> bool:
        return LANGUAGE_MODEL in self.archive

    @property
    def head(self) -> Head:
        """The heads to decode with: CTC, or both with the transducer."""
        head = self.metadata.get("head", "ctc")
        if head not in HEAD_NAMES:
            raise damaged(self.path, f"its head is {head!r:.40}")
        return head

    @property
    def trained_on(self) -> Mapping[str, Any]:
        """Layout and features of the training data: the input of `Store.check_trained_on`."""
        source = self.metadata.get("source")
        data = source.get("data") if isinstance(source, dict) else None
        return data if isinstance(data, dict) else {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the word search, as stored."""
        found = self.metadata.get("decoding")
        if not isinstance(found, dict):
            raise damaged(self.path, "its search settings are missing")
        return found


def open_export(path: str | Path) -> ExportedFile:
    """Open and verify an exported model without loading its graphs."""
    archive = open_archive(path)
    try:
        metadata = json.loads(archive.bytes(METADATA, _MAX_METADATA))
    except (ValueError, RecursionError):
        raise damaged(archive.path, "its metadata cannot be read") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise damaged(archive.path, "its metadata have an unknown format")
    if metadata.get("version") != VERSION:
        raise UserError(f"{archive.path} has format version {metadata.get('version')!s:.20}; expected {VERSION}")
    layout = _parse_layout(metadata.get("model"), archive.path)
    precision, n_stored = metadata.get("precision"), metadata.get("n_session_layers")
    if precision not in ("fp32", "int8") or n_stored not in (0, len(layout.sessions)) or type(n_stored) is not int:
        raise damaged(archive.path, "its precision or number of session layers is invalid")
    return ExportedFile(archive, metadata, layout, precision, n_stored)


def load_model(file: ExportedFile, threads: int = 1) -> ExportedModel:
    """Load the graphs into ONNX Runtime."""
    bin_graph, bin_states = _load_graph(file, "bin", threads)
    frame_graph, frame_states = _load_graph(file, "frame", threads)
    n, n_channels, weights, biases = file.n_sessions_stored, file.layout.n_channels, None, None
    if n:
        weights = file.archive.array(SESSION_WEIGHTS, "float32", (n, n_channels, n_channels))
        biases = file.archive.array(SESSION_BIASES, "float32", (n, n_channels))
    if ("session_weight" in bin_graph.inputs) != bool(n):
        raise damaged(file.path, "its session layers do not match its graph")
    transducer = None if file.head == "ctc" else load_transducer(file, threads)
    initial = {**bin_states, **frame_states}
    return ExportedModel(
        *(file.layout, file.archive.digest, file.trained_on, bin_graph, frame_graph, initial, weights, biases),
        transducer=transducer,
    )


def load_transducer(file: ExportedFile, threads: int = 1) -> ExportedTransducer:
    """Load prediction network and joiner of a file whose head is not CTC alone."""
    described = file.metadata.get("transducer")
    sizes = described if isinstance(described, dict) else {}
    width, depth, context = (sizes.get(key) for key in ("width", "depth", "context"))
    for size, limit in ((width, 8192), (depth, 16), (1 if context is None else context, 8)):
        if type(size) is not int or not 1 <= size <= limit:
            raise damaged(file.path, "its transducer metadata are invalid")
    assert isinstance(width, int) and isinstance(depth, int)
    real, whole = "tensor(float)", "tensor(int64)"
    predictor, inputs, outputs = _open_session(file, "predictor", threads)
    if context is None:
        expected: dict[str, Any] = {"tokens": (whole, ("n",)), "state": (real, ("n", 2, depth, width))}
        results: dict[str, Any] = {"predicted": (real, ("n", width)), "state.next": (real, ("n", 2, depth, width))}
    else:
        expected, results = {"recent": (whole, ("n", context))}, {"predicted": (real, ("n", width))}
    joiner, joiner_inputs, joiner_outputs = _open_session(file, "joiner", threads)
    n_classes = len(file.layout.classes)
    joined = {"frames": (real, ("f", 1, width)), "predicted": (real, ("r", width))}
    logits = {"logits": (real, ("f", "r", n_classes))}
    if (inputs, outputs, joiner_inputs, joiner_outputs) != (expected, results, joined, logits):
        raise damaged(file.path, "the graphs of its transducer do not match its metadata")
    silence = file.archive.array(SILENT_FRAME, "float32", (width,))
    return ExportedTransducer(predictor, joiner, n_classes, width, context, depth, silence)


def _open_session(file: ExportedFile, name: str, threads: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A graph in ONNX Runtime, and types and shapes of its inputs and outputs."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(_INSTALL) from None
    content, where = file.archive.bytes(f"{name}.onnx"), f"{file.path}: {name}.onnx"
    check_graph(content, where)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    _limit_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    errors = _runtime_errors()
    try:  # constants are not folded, because that allocates memory without a limit
        session = onnxruntime.InferenceSession(
            content,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
            enable_fallback=0,  # which prints to stdout and tries the same again
        )
        _try_graph(session)
    except errors as error:
        raise damaged(file.path, f"{name}.onnx cannot be loaded ({' '.join(str(error).split())[:120]})") from None
    inputs = {i.name: (i.type, tuple(i.shape)) for i in session.get_inputs()}
    outputs = {o.name: (o.type, tuple(o.shape)) for o in session.get_outputs()}
    return _CheckedSession(session, errors, where), inputs, outputs


@cache
def _limit_memory() -> None:
    """Bound the memory of all graphs of this process: a few operators can expand a small input a millionfold."""
    import onnxruntime as ort

    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg({"max_mem": _MAX_GRAPH_BYTES}))


def _try_graph(session: Any) -> None:
    """Compute a graph once, with a bound on time; its work is the same for every frame."""
    import onnxruntime as ort

    shapes = {
        i.name: (i.type, [n if isinstance(n, int) and n > 0 else 1 for n in i.shape]) for i in session.get_inputs()
    }
    if sum(math.prod(shape) for _, shape in shapes.values()) * 8 > _MAX_STATE_BYTES or len(shapes) > 2000:
        raise ValueError("its inputs are too large")
    inputs = {name: np.zeros(shape, _NUMPY_TYPES.get(kind, "float32")) for name, (kind, shape) in shapes.items()}
    options = ort.RunOptions()
    timer = threading.Timer(_MAX_GRAPH_S, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        session.run(None, inputs, options)
    finally:
        timer.cancel()


def _runtime_errors() -> tuple[type[Exception], ...]:
    """The exceptions of ONNX Runtime, which share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    found = [c for c in vars(state).values() if isinstance(c, type) and issubclass(c, Exception)]
    return (*found, RuntimeError, ValueError)


@dataclass(frozen=True, eq=False)
class _CheckedSession:
    """A graph whose failures are user errors: a malicious graph may load and then fail on its inputs."""

    session: Any
    errors: tuple[type[Exception], ...]
    where: str

    def run(self, outputs: list[str], inputs: dict[str, Any], /) -> list[np.ndarray]:
        try:
            found: list[np.ndarray] = self.session.run(outputs, inputs)
        except self.errors as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"{self.where} cannot be computed ({reason}); export the model again") from None
        return found


def _load_graph(file: ExportedFile, name: str, threads: int) -> tuple[LoadedGraph, dict[str, np.ndarray]]:
    """One graph and the initial values of its state tensors."""
    session, inputs, outputs = _open_session(file, name, threads)
    initial = _initial_states(file, name)
    for state, value in initial.items():
        expected = (_ONNX_TYPES[value.dtype.name], value.shape)
        if inputs.get(state) != expected or outputs.get(state + NEXT) != expected:
            raise damaged(file.path, f"its state tensor {state!r:.60} does not match {name}.onnx")
    results = tuple(o for o in outputs if o.removesuffix(NEXT) not in initial)
    _check_interface(file, name, {k: v for k, v in inputs.items() if k not in initial}, results, outputs)
    return LoadedGraph(session, frozenset(inputs), tuple(initial), results), initial


_ONNX_TYPES = {"float32": "tensor(float)", "float64": "tensor(double)", "int64": "tensor(int64)"}
_NUMPY_TYPES = {"tensor(bool)": "bool"} | {onnx: dtype for dtype, onnx in _ONNX_TYPES.items()}


def _check_interface(
    file: ExportedFile, name: str, inputs: dict[str, Any], results: tuple[str, ...], outputs: dict[str, Any]
) -> None:
    """Check the inputs and outputs of a graph against the model described in the metadata."""
    layout, n = file.layout, file.layout.n_channels
    real, flag = "tensor(float)", ("tensor(bool)", (1, 1))
    if name == "frame":
        expected: dict[str, Any] = {"patch": (real, (layout.patch_bins, n))}
        matches = inputs == expected and results[:1] == ("log_probs",)
        matches = matches and outputs["log_probs"] == (real, (1, len(layout.classes)))
        matches = matches and results[1:] == (() if file.head == "ctc" else ("joiner_frame",))
    else:
        known = {"bin": (real, (1, n)), "is_data": flag, "is_ready": flag, "by_block": flag}
        known |= {"mean": (real, (1, n)), "sd": (real, (1, n)), "past_bins": ("tensor(double)", (1, 1))}
        known |= {"session_weight": (real, (n, n)), "session_bias": (real, (1, n))}
        matches = inputs.items() <= known.items() and not results
    if not matches:
        raise damaged(file.path, f"the inputs and outputs of {name}.onnx do not match its metadata")


def _initial_states(file: ExportedFile, graph: str) -> dict[str, np.ndarray]:
    states = file.metadata.get("states")
    listed = states.get(graph) if isinstance(states, dict) else None
    if not isinstance(listed, list) or len(listed) > 1000:
        raise damaged(file.path, "its state tensors are not listed")
    found: dict[str, np.ndarray] = {}
    n_bytes = 0
    for entry in listed:
        described: Any = entry if isinstance(entry, dict) else {}
        name, dtype, shape = (described.get(key) for key in ("name", "dtype", "shape"))
        if not isinstance(name, str) or dtype not in _DTYPES or not _is_shape(shape):
            raise damaged(file.path, "the metadata of its state tensors are invalid")
        n_bytes += math.prod(shape) * np.dtype(dtype).itemsize
        if n_bytes > _MAX_STATE_BYTES:
            raise damaged(file.path, "its state tensors are too large")
        member = f"initial.{name}"
        is_stored = member in file.archive
        found[name] = file.archive.array(member, dtype, tuple(shape)) if is_stored else np.zeros(shape, dtype)
    return found


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 < n < 2**24 for n in shape)


# --- metadata ---------------------------------------------------------------------------------------------

_LAYOUT_LIMITS = {"n_channels": 65_536, "patch_bins": 200, "stride": 200, "look_ahead": 200, "rolling_bins": 10**6}


def _parse_layout(tree: Any, path: Path) -> Layout:
    if not isinstance(tree, dict):
        raise damaged(path, "its metadata do not describe the model")
    for key, limit in _LAYOUT_LIMITS.items():
        if type(tree.get(key)) is not int or not (0 if key == "look_ahead" else 1) <= tree[key] <= limit:
            raise damaged(path, f"{key} is {tree.get(key)!r:.40}")
    classes, sessions = (_names(tree.get(key), key, path) for key in ("classes", "sessions"))
    delay = tree.get("delay")
    if tree.get("normalise") not in ("none", "block", "rolling") or type(tree.get("log1p")) is not bool:
        raise damaged(path, "its normalisation is unknown")
    if not isinstance(delay, dict) or not all(_is_number(delay.get(f.name)) for f in fields(ModelDelay)):
        raise damaged(path, "its delay is missing")
    layout = Layout(
        classes,
        sessions,
        tree["n_channels"],
        tree["patch_bins"],
        tree["stride"],
        tree["look_ahead"],
        tree["normalise"],
        tree["log1p"],
        tree["rolling_bins"],
        ModelDelay(*(float(delay[f.name]) for f in fields(ModelDelay))),
    )
    return layout


def _names(value: Any, key: str, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= 10_000 or not all(isinstance(v, str) for v in value):
        raise damaged(path, f"its {key} are missing")
    if len(set(value)) != len(value) or any(len(v) > 200 for v in value):
        raise damaged(path, f"its {key} are not distinct")
    return tuple(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e9


# --- words ------------------------------------------------------------------------------------------------


def read_language_model(file: ExportedFile) -> "LanguageModel":
    """The n-gram of a file, mapped, with every link and number checked."""
    from arcuate.language.ngram.model import LanguageModel, check_values

    member, name = file.archive.member(LANGUAGE_MODEL), file.metadata.get("lm")
    model = LanguageModel.open(file.path, member.offset, member.size)
    check_values(model)
    _release_pages(model.arrays.log_probs)
    return replace(model, name=name if isinstance(name, str) else model.name)


def _release_pages(array: np.ndarray) -> None:
    """Release the pages of a mapped array after a check that read all of them; they are read again when used."""
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def lexicon_members(lexicon: "Lexicon") -> dict[str, bytes]:
    """Members of an archive that hold a lexicon."""
    return {
        LEXICON_WORDS: "\n".join(lexicon.words).encode(),
        "lexicon.word_of.i32": lexicon.word_of.astype("<i4").tobytes(),
        "lexicon.tokens.i32": lexicon.tokens.astype("<i4").tobytes(),
        "lexicon.offsets.i64": lexicon.offsets.astype("<i8").tobytes(),
    }


def read_lexicon(file: ExportedFile, classes: tuple[str, ...]) -> "Lexicon":
    """The lexicon of a file over these classes, with every index checked."""
    from arcuate.language.lexicon import Lexicon

    archive = file.archive
    try:
        words = tuple(archive.bytes(LEXICON_WORDS).decode().split("\n"))
    except UnicodeDecodeError:
        raise damaged(archive.path, "its words are not UTF-8 text") from None
    word_of = archive.array("lexicon.word_of.i32", "<i4", (None,))
    tokens = archive.array("lexicon.tokens.i32", "<i4", (None,))
    offsets = archive.array("lexicon.offsets.i64", "<i8", (None,))
    is_valid = (
        len(set(words)) == len(words)
        and len(offsets) == len(word_of) + 1 > 1
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and bool((np.diff(offsets) > 0).all())
        and 0 <= int(word_of.min()) <= int(word_of.max()) < len(words)
        and 0 < int(tokens.min()) <= int(tokens.max()) < len(classes)
    )
    if not is_valid:
        raise damaged(archive.path, "its lexicon is inconsistent")
    label = file.metadata.get("lexicon")
    return Lexicon(words, word_of, tokens, offsets, classes, label if isinstance(label, str) else "")
