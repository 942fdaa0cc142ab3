"""`Frames`, `Layout` and `Head`: what decoding knows of a model, without the model. Importing it needs only NumPy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from arcuate.data.alphabet import BOUNDARY_NAMES
from arcuate.errors import UserError

Head = Literal["ctc", "transducer", "both"]
HEAD_NAMES: tuple[Head, ...] = ("ctc", "transducer", "both")
Normalisation = Literal["none", "block", "rolling"]


@dataclass(frozen=True, eq=False)
class Frames:
    """Outputs of a model for the frames of a trial, or for some of them."""

    log_probs: np.ndarray  # (F, V) natural logarithms, CTC head
    encoded: np.ndarray | None = None  # (F, D) input of the transducer; None if it is not decoded

    def __len__(self) -> int:
        return len(self.log_probs)

    @property
    def for_transducer(self) -> np.ndarray:
        """Input of the transducer. (F, D)"""
        if self.encoded is None:
            raise UserError("the transducer needs the bins of a trial, but only CTC log-probabilities were given")
        return self.encoded


def join_frames(parts: Sequence[Frames]) -> Frames:
    """Consecutive frames as one; there must be at least one part."""
    encoded = [part.encoded for part in parts if part.encoded is not None]
    return Frames(np.concatenate([part.log_probs for part in parts]), np.concatenate(encoded) if encoded else None)


@dataclass(frozen=True)
class ModelDelay:
    """Algorithmic delay of a frame in ms, excluding computation."""

    smoothing_ms: float  # future bins used by smoothing
    patch_ms: float  # longest wait of a bin until its stride is complete
    encoder_ms: float  # frames held back by the encoder; infinite for a bidirectional one

    @property
    def total_ms(self) -> float:
        return self.smoothing_ms + self.patch_ms + self.encoder_ms

    @property
    def is_finite(self) -> bool:
        """Whether frames are complete before the end of a trial, so that the model can stream."""
        return math.isfinite(self.encoder_ms)


@dataclass(frozen=True)
class Layout:
    """Classes, sessions and the timing and normalisation of the input."""

    classes: tuple[str, ...]
    sessions: tuple[str, ...]
    n_channels: int
    patch_bins: int  # bins of a frame
    stride: int  # bins between frames
    look_ahead: int  # future bins used by smoothing
    normalise: Normalisation
    log1p: bool
    rolling_bins: int
    delay: ModelDelay

    @property
    def silence(self) -> int:
        """Column of the silence or word boundary in the model's output, -1 if there is none."""
        found = next((name for name in BOUNDARY_NAMES if name in self.classes), None)
        return -1 if found is None else self.classes.index(found)


@overload
def check_head(name: str) -> Head: ...


@overload
def check_head(name: str | None) -> Head | None: ...


def check_head(name: str | None) -> Head | None:
    """Return the name of a head, or raise UserError."""
    if name is not None and name not in HEAD_NAMES:
        raise UserError(f"--head {name!r} is unknown; choose {', '.join(HEAD_NAMES)}")
    return name
