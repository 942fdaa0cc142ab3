"""`ExportedModel`: bins to log-probabilities in ONNX Runtime, one bin at a time, with explicit state.

The graphs are those of `exported/graphs.py`. The bin graph runs once per bin, the frame graph once per frame, so
results are bit-identical for any chunking of a trial.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arcuate.data.alphabet import BLANK
from arcuate.data.statistics import Statistics
from arcuate.errors import UserError
from arcuate.exported.check import Graph, load_graph
from arcuate.exported.file import SESSION_BIASES, SESSION_WEIGHTS, SILENT_FRAME, ExportedFile, damaged
from arcuate.models.layout import Frames, Layout, join_frames

NEXT = ".next"  # suffix of the output with the new value of a state tensor
_FLAGS = (np.zeros((1, 1), bool), np.ones((1, 1), bool))


@dataclass(frozen=True, eq=False)
class ExportedTransducer:
    """`TransducerHead` of the searches (`decoding/transducer.py`). The frame graph has already projected its frames."""

    predictor: Graph
    joiner: Graph
    n_classes: int
    width: int
    context: int | None  # context of a stateless prediction network in tokens; None: an LSTM
    depth: int  # layers of the LSTM
    silence: np.ndarray  # (W,)

    def project(self, frames: np.ndarray) -> np.ndarray:
        return frames

    def silent_frame(self) -> np.ndarray:
        return self.silence

    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        if self.context is None:
            return self.step(np.zeros((n, 2, self.depth, self.width), np.float32), np.full(n, BLANK, np.int64))
        state = np.full((n, self.context), BLANK, np.int64)
        return self.predictor.run({"recent": state})["predicted"], state

    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.ascontiguousarray(tokens, np.int64)
        if self.context is not None:
            state = np.concatenate([state[:, 1:], tokens[:, None]], axis=1)
            return self.predictor.run({"recent": state})["predicted"], state
        found = self.predictor.run({"state": np.ascontiguousarray(state), "tokens": tokens})
        return found["predicted"], found["state" + NEXT]

    def join(self, frames: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = {"frames": np.ascontiguousarray(frames[:, None]), "predicted": np.ascontiguousarray(predicted)}
        logits = self.joiner.run(inputs)["logits"]  # (f, R, V)
        highest = logits.max(axis=-1)
        return logits, highest + np.log(np.exp(logits - highest[..., None]).sum(axis=-1))


@dataclass(frozen=True, eq=False)
class ExportedState:
    """State of a stream within a trial. Immutable: `step` returns a new one."""

    tensors: Mapping[str, np.ndarray]
    constants: Mapping[str, np.ndarray]  # inputs that stay the same within a trial: session layer, statistics
    n_bins: int = 0  # bins received
    n_pushed: int = 0  # bins processed, including zeros appended at the end of a trial


@dataclass(frozen=True, eq=False)
class ExportedModel:
    """The graphs of one model, with its session layers and initial state."""

    layout: Layout
    identity: str  # digest of the file
    trained_on: Mapping[str, Any]  # layout and features of the training data: the input of `Store.check_trained_on`
    bin_graph: Graph
    frame_graph: Graph
    initial: Mapping[str, np.ndarray]
    session_weights: np.ndarray | None  # (S, C, C)
    session_biases: np.ndarray | None  # (S, C)
    transducer: ExportedTransducer | None = None

    def start(self, session: str, statistics: Statistics | None = None, rolling: bool = False) -> ExportedState:
        """State before the first bin; `rolling` uses running statistics for a model trained on block statistics."""
        layout, constants = self.layout, {}
        index = layout.sessions.index(session)
        if self.session_weights is not None and self.session_biases is not None:
            constants["session_weight"] = np.ascontiguousarray(self.session_weights[index])
            constants["session_bias"] = np.ascontiguousarray(self.session_biases[index][None])
        if layout.normalise != "none":
            if statistics is None:
                raise UserError(
                    f"the model normalises its input (front_end.normalise={layout.normalise}); pass its statistics"
                )
            constants["mean"] = _row(statistics.mean, layout.n_channels)
            constants["sd"] = _row(statistics.sd, layout.n_channels)
            constants["past_bins"] = np.full((1, 1), float(min(statistics.n_bins, layout.rolling_bins)))
            constants["by_block"] = np.full((1, 1), layout.normalise == "block" and not rolling)
        return ExportedState(self.initial, constants)

    def step(self, state: ExportedState, bins: np.ndarray) -> tuple[Frames, ExportedState]:
        """Next stored bins (t, C), any number -> the frames they complete, and the state after them."""
        found: list[Frames] = []
        for row in bins:
            state = self._push(state, row, True, found)
        return self._outputs(found), replace(state, n_bins=state.n_bins + len(bins))

    def precompute(self, state: ExportedState) -> ExportedState:
        """The same state: a step has no part that could be computed before its bin."""
        return state

    def finish(self, state: ExportedState) -> Frames:
        """End the trial: return the frames that were waiting for smoothing or for a complete patch."""
        found: list[Frames] = []
        zeros = np.zeros(self.layout.n_channels, np.float32)
        for _ in range(max(self.layout.patch_bins - state.n_bins, 0) + self.layout.look_ahead):
            state = self._push(state, zeros, False, found)
        return self._outputs(found)

    def _push(self, state: ExportedState, row: np.ndarray, is_data: bool, found: list[Frames]) -> ExportedState:
        layout, n_pushed = self.layout, state.n_pushed + 1
        n_ready = n_pushed - layout.look_ahead
        flags = {"is_data": _FLAGS[is_data], "is_ready": _FLAGS[n_ready > 0]}
        tensors = {**state.tensors, **state.constants, "bin": row[None], **flags}
        tensors |= _next_states(self.bin_graph.run(tensors))
        beyond = n_ready - layout.patch_bins
        if beyond >= 0 and beyond % layout.stride == 0:
            results = self.frame_graph.run(tensors)
            tensors |= _next_states(results)
            found.append(Frames(results["log_probs"], results.get("joiner_frame")))
        return replace(state, tensors={name: tensors[name] for name in state.tensors}, n_pushed=n_pushed)

    def _outputs(self, found: list[Frames]) -> Frames:
        if found:
            return join_frames(found)
        encoded = None if self.transducer is None else np.empty((0, self.transducer.width), np.float32)
        return Frames(np.empty((0, len(self.layout.classes)), np.float32), encoded)


def _next_states(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removesuffix(NEXT): value for name, value in outputs.items() if name.endswith(NEXT)}


def _row(values: np.ndarray, n: int) -> np.ndarray:
    row = np.asarray(values, np.float32).reshape(1, -1)
    if row.shape[1] != n:
        raise UserError(f"the statistics have {row.shape[1]} channels, but the model has {n}")
    return np.ascontiguousarray(row)


# --- loading ----------------------------------------------------------------------------------------------


def load_model(file: ExportedFile) -> ExportedModel:
    """Load the graphs of a file and try them."""
    n, n_channels, weights, biases = file.metadata.n_session_layers, file.layout.n_channels, None, None
    if n:
        weights = file.archive.array(SESSION_WEIGHTS, "float32", (n, n_channels, n_channels))
        biases = file.archive.array(SESSION_BIASES, "float32", (n, n_channels))
    model = ExportedModel(
        layout=file.layout,
        identity=file.archive.digest,
        trained_on=file.trained_on,
        bin_graph=_load_graph(file, "bin"),
        frame_graph=_load_graph(file, "frame"),
        initial=file.initial_states(),
        session_weights=weights,
        session_biases=biases,
        transducer=None if file.metadata.head == "ctc" else _load_transducer(file),
    )
    if not _is_consistent(model):
        raise damaged(file.path, "its graphs do not match its metadata")
    return model


def _load_graph(file: ExportedFile, name: str) -> Graph:
    return load_graph(file.archive.bytes(f"{name}.onnx"), f"{file.path}: {name}.onnx")


def _load_transducer(file: ExportedFile) -> ExportedTransducer:
    sizes = file.metadata.transducer
    if sizes is None:
        raise damaged(file.path, "its transducer is not described")
    graphs = _load_graph(file, "predictor"), _load_graph(file, "joiner")
    silence = file.archive.array(SILENT_FRAME, "float32", (sizes.width,))
    return ExportedTransducer(*graphs, len(file.layout.classes), sizes.width, sizes.context, sizes.depth, silence)


def _is_consistent(model: ExportedModel) -> bool:
    """Whether the graphs return all states, and fit the layout on a trial of one frame and on two tokens."""
    layout, transducer = model.layout, model.transducer
    n, n_classes = layout.n_channels, len(layout.classes)
    known = Statistics(np.zeros((1, n), np.float32), np.ones((1, n), np.float32), 0)
    if not {name + NEXT for name in model.initial} <= {*model.bin_graph.outputs, *model.frame_graph.outputs}:
        return False
    try:
        state = model.start(layout.sessions[0], known)
        first, state = model.step(state, np.zeros((layout.patch_bins, n), np.float32))
        frames = join_frames([first, model.finish(state)])
        fits = frames.log_probs.shape == (1, n_classes)
        if transducer is not None:
            predicted, after = transducer.start(2)
            predicted, _ = transducer.step(after, np.ones(2, np.int64))
            fits &= transducer.join(frames.for_transducer, predicted)[0].shape == (1, 2, n_classes)
    except (LookupError, ValueError, TypeError):  # a value that no graph gives, or of another shape
        return False
    return fits
