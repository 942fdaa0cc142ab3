"""Trial: one attempted sentence, from its recording to everything else in the package."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
BIN_MS = 20
BIN_SECONDS = BIN_MS / 1000
LIVE_CORPUS = "live"  # corpus of sentences that were said in a live session


@dataclass(frozen=True)
class Trial:
    """One attempted sentence as it was recorded, before any normalisation."""

    session: str  # a recording day, e.g. "t15.2023.08.11"
    split: Split
    number: int  # position within its source file
    block: int
    bins: np.ndarray = field(repr=False)  # (T, C) float32, 20 ms each
    tokens: np.ndarray | None  # (U,) int32 class indices, true length; None where the release has no labels
    text: str | None
    corpus: str | None = None
    mode: str | None = None  # speaking strategy ("vocalised", "silent") where it is known

    @property
    def id(self) -> str:
        return trial_id(self.session, self.split, self.number)


def trial_id(session: str, split: str, number: int) -> str:
    return f"{session}/{split}/{number:04d}"
