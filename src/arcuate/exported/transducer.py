"""The transducer head of an exported model: prediction network and joiner in ONNX Runtime."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from arcuate.data.alphabet import BLANK


class Session(Protocol):
    """A loaded graph: `onnxruntime.InferenceSession`."""

    def run(self, outputs: list[str], inputs: dict[str, Any], /) -> list[np.ndarray]: ...


@dataclass(frozen=True, eq=False)
class ExportedTransducer:
    """`TransducerHead` of the searches (`decoding/transducer.py`). The frame graph has already projected its frames."""

    predictor: Session
    joiner: Session
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
        if self.context is not None:
            state = np.full((n, self.context), BLANK, np.int64)
            return self._predict(state), state
        zeros = np.zeros((n, 2, self.depth, self.width), np.float32)
        return self.step(zeros, np.full(n, BLANK, np.int64))

    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.context is not None:
            state = np.concatenate([state[:, 1:], np.asarray(tokens, np.int64)[:, None]], axis=1)
            return self._predict(state), state
        inputs = {"state": np.ascontiguousarray(state), "tokens": np.ascontiguousarray(tokens, np.int64)}
        predicted, after = self.predictor.run(["predicted", "state.next"], inputs)
        return predicted, after

    def _predict(self, recent: np.ndarray) -> np.ndarray:
        return self.predictor.run(["predicted"], {"recent": recent})[0]

    def join(self, frames: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = {"frames": np.ascontiguousarray(frames[:, None]), "predicted": np.ascontiguousarray(predicted)}
        logits = self.joiner.run(["logits"], inputs)[0]  # (f, R, V)
        highest = logits.max(axis=-1)
        return logits, highest + np.log(np.exp(logits - highest[..., None]).sum(axis=-1))
