"""Interface of the transducer head for the searches: numpy arrays in and out, independent of the implementation.

`models/transducer.py` computes them with torch, `exported/transducer.py` with an exported model. Importing
this module needs only numpy.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from arcuate.data.alphabet import BLANK

TRANSDUCER_BEAM = 8  # default number of hypotheses kept by a transducer or joint search
MAX_SYMBOLS = 4  # tokens per frame
START = BLANK  # start-of-sequence token of the prediction network, whose inputs never contain a blank


@dataclass(frozen=True)
class HeadWeights:
    """Weights of the two heads in a joint score."""

    ctc: float = 0.3
    transducer: float = 1.0

    def total(self, transducer: float, ctc: float) -> float:
        """Weighted sum; a head with weight 0 is left out, because 0 · −inf would be NaN."""
        return (self.transducer * transducer if self.transducer else 0.0) + (self.ctc * ctc if self.ctc else 0.0)


class TransducerHead(Protocol):
    """Prediction network and joiner. The state of the prediction network has one row per hypothesis."""

    @property
    def n_classes(self) -> int: ...

    @property
    def context(self) -> int | None:
        """Context of the prediction network in tokens; None: all tokens so far."""
        ...

    def project(self, frames: np.ndarray) -> np.ndarray:
        """Project encoder frames for the joiner. (f, D) -> (f, W)"""
        ...

    def silent_frame(self) -> np.ndarray:
        """The projection of an encoder frame of zeros. (W,)"""
        ...

    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Projected predictions (n, W) before the first token, and the state after them."""
        ...

    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Projected predictions after one more token per row, and the state after them. (n,) -> (n, W)"""
        ...

    def join(self, frames: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits of every projected frame (f, W) with every prediction (R, W), and their log-sums. (f, R, V), (f, R)"""
        ...


def array_head(head: Any) -> TransducerHead:
    """The head itself, or the array interface of a torch module."""
    found: TransducerHead = getattr(head, "array_head", head)
    return found


def to_array(frames: Any) -> np.ndarray:
    """A tensor or array as an array of float32."""
    values = frames.detach().cpu().float().numpy() if hasattr(frames, "detach") else frames
    return np.asarray(values, np.float32)


def predict_prefixes(head: TransducerHead, parents: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Projected predictions after every prefix of a prefix tree, and the row of each prefix. (M,) -> (R, W), (M,)

    Node 0 is the empty prefix; `parents` precede their children, and `tokens` are the last tokens. Prefixes that the
    prediction network does not distinguish share a row.
    """
    if head.context is None:
        return _predict_all(head, parents, tokens), np.arange(len(parents))
    recent = np.full((len(parents), head.context), START, np.int64)  # last tokens of each prefix
    ancestors = np.arange(len(parents))
    for back in range(head.context - 1, -1, -1):
        recent[:, back] = np.where(ancestors > 0, tokens[ancestors], START)
        ancestors = parents[ancestors]
    distinct, rows = np.unique(recent, axis=0, return_inverse=True)
    before = np.concatenate([distinct[:, :1], distinct[:, :-1]], axis=1)  # the first column is dropped by the step
    return head.step(before, distinct[:, -1])[0], rows.reshape(-1)


def _predict_all(head: TransducerHead, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    depth = np.zeros_like(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    predicted, state = head.start(1)
    outputs = np.zeros((len(parents), predicted.shape[1]), predicted.dtype)
    outputs[0], nodes = predicted[0], np.zeros(1, np.int64)
    for length in range(1, int(depth.max()) + 1):  # one batch of prefixes of equal length at a time
        longer = np.flatnonzero(depth == length)
        above = np.searchsorted(nodes, parents[longer])
        predicted, state = head.step(state[above], tokens[longer])
        outputs[longer], nodes = predicted, longer
    return outputs
