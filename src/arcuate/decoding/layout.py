"""`ModelLayout`: what a stream needs to know about a model, without the model. Importing it needs only numpy."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from arcuate.data.alphabet import SILENCE, SILENCE_NAME
from arcuate.decoding.log_probs import reorder_classes

Normalisation = Literal["none", "block", "rolling"]


@dataclass(frozen=True)
class ModelDelay:
    """Delay of a frame by design, in ms; computing time comes on top."""

    smoothing_ms: float  # future bins used by smoothing
    patch_ms: float  # longest wait of a bin until its stride is complete
    encoder_ms: float  # frames held back by the encoder

    @property
    def total_ms(self) -> float:
        return self.smoothing_ms + self.patch_ms + self.encoder_ms


@dataclass(frozen=True)
class ModelLayout:
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

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Columns of the model's output in the order of the searches."""
        names = self.classes
        columns, _ = reorder_classes(np.arange(len(names), dtype=np.float32)[None], names, "the model")
        return tuple(int(c) for c in columns[0])

    @property
    def silence(self) -> int:
        """Silence column of the model's output, -1 if there is none."""
        if SILENCE_NAME in self.classes:
            return self.classes.index(SILENCE_NAME)
        return SILENCE if len(self.classes) > SILENCE else -1
