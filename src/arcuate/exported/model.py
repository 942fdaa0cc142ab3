"""`ExportedModel`: bins to log-probabilities in ONNX Runtime, one bin at a time, with explicit state.

The graphs are those of `exported/graphs.py`. The bin graph runs once per bin, the frame graph once per frame, so
results are bit-identical for any chunking of a trial.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from arcuate.data.statistics import Statistics
from arcuate.errors import UserError
from arcuate.exported.transducer import ExportedTransducer, Session
from arcuate.models.layout import Frames, Layout

NEXT = ".next"  # suffix of the output with the new value of a state tensor
_FLAGS = (np.zeros((1, 1), bool), np.ones((1, 1), bool))


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A graph with the names of its inputs, outputs and state tensors."""

    session: Session
    inputs: frozenset[str]
    states: tuple[str, ...]
    results: tuple[str, ...]  # outputs that are not states

    @cached_property
    def _outputs(self) -> list[str]:
        return [*self.results, *(name + NEXT for name in self.states)]

    def run(self, inputs: dict[str, Any]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run one step; return the results and the new state tensors."""
        values = self.session.run(self._outputs, {name: inputs[name] for name in self.inputs})
        n = len(self.results)
        return values[:n], dict(zip(self.states, values[n:], strict=True))


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
    bin_graph: LoadedGraph
    frame_graph: LoadedGraph
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
        found: list[list[np.ndarray]] = []
        for row in bins:
            state = self._push(state, row, True, found)
        return self._outputs(found), replace(state, n_bins=state.n_bins + len(bins))

    def precompute(self, state: ExportedState) -> ExportedState:
        """The same state: a step has no part that could be computed before its bin."""
        return state

    def finish(self, state: ExportedState) -> Frames:
        """End the trial: return the frames that were waiting for smoothing or for a complete patch."""
        found: list[list[np.ndarray]] = []
        zeros = np.zeros(self.layout.n_channels, np.float32)
        for _ in range(max(self.layout.patch_bins - state.n_bins, 0) + self.layout.look_ahead):
            state = self._push(state, zeros, False, found)
        return self._outputs(found)

    def _push(
        self, state: ExportedState, row: np.ndarray, is_data: bool, found: list[list[np.ndarray]]
    ) -> ExportedState:
        layout, n_pushed = self.layout, state.n_pushed + 1
        n_ready = n_pushed - layout.look_ahead
        inputs = {
            **state.tensors,
            **state.constants,
            "bin": row[None],
            "is_data": _FLAGS[is_data],
            "is_ready": _FLAGS[n_ready > 0],
        }
        _, changed = self.bin_graph.run(inputs)
        tensors = {**state.tensors, **changed}
        beyond = n_ready - layout.patch_bins
        if beyond >= 0 and beyond % layout.stride == 0:
            results, changed = self.frame_graph.run(tensors)
            tensors |= changed
            found.append(results)
        return ExportedState(tensors, state.constants, state.n_bins, n_pushed)

    def _outputs(self, found: list[list[np.ndarray]]) -> Frames:
        columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        log_probs = columns[0] if columns else np.empty((0, len(self.layout.classes)), np.float32)
        encoded = None
        if self.transducer is not None:
            encoded = columns[1] if columns else np.empty((0, self.transducer.width), np.float32)
        return Frames(log_probs, encoded)


def _row(values: np.ndarray, n: int) -> np.ndarray:
    row = np.asarray(values, np.float32).reshape(1, -1)
    if row.shape[1] != n:
        raise UserError(f"the statistics have {row.shape[1]} channels, but the model has {n}")
    return np.ascontiguousarray(row)
