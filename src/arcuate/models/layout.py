"""`Layout` and `Head`: what searches and streams know of a model, without the model. Importing it needs only NumPy."""

from dataclasses import dataclass
from typing import Literal

from arcuate.data.alphabet import BOUNDARY_NAMES
from arcuate.errors import UserError

Head = Literal["ctc", "transducer", "both"]
HEAD_NAMES: tuple[Head, ...] = ("ctc", "transducer", "both")
Normalisation = Literal["none", "block", "rolling"]

_CANDIDATES_PER_ENTRY = 20  # real frames stay below 14, flat ones slightly exceed 20 (docs/live.md)


def candidate_bound(beam: int) -> int:
    """Default bound of a stream on the candidates of the word search per frame (`max_candidates`)."""
    return max(1_000, _CANDIDATES_PER_ENTRY * beam)


@dataclass(frozen=True)
class ModelDelay:
    """Algorithmic delay of a frame in ms, excluding computation."""

    smoothing_ms: float  # future bins used by smoothing
    patch_ms: float  # longest wait of a bin until its stride is complete
    encoder_ms: float  # frames held back by the encoder

    @property
    def total_ms(self) -> float:
        return self.smoothing_ms + self.patch_ms + self.encoder_ms


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


def check_head(name: str) -> Head:
    """Return the name of a head, or raise UserError."""
    if name not in HEAD_NAMES:
        raise UserError(f"--head {name!r} is unknown; choose {', '.join(HEAD_NAMES)}")
    return name
