"""Trial: one attempted sentence with its recording, label and origin."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Layout = Literal["b2t25", "b2t24"]  # Brain-to-Text '25 and '24
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
BIN_MS = 20  # duration of one bin
BIN_SECONDS = BIN_MS / 1000
LIVE_CORPUS = "live"  # corpus of sentences recorded in a live session


@dataclass(frozen=True)
class Trial:
    """One attempted sentence as recorded, before any normalisation."""

    session: str  # such as "t15.2023.08.11"
    split: Split
    number: int  # position within its source file
    block: int
    bins: np.ndarray = field(repr=False)  # (T, C) float32
    tokens: np.ndarray | None  # (U,) int32 class indices, true length; None without label
    text: str | None
    corpus: str | None = None
    mode: str | None = None  # speaking mode ("vocalised", "silent") if known

    @property
    def id(self) -> str:
        return trial_id(self.session, self.split, self.number)


def trial_id(session: str, split: str, number: int) -> str:
    return f"{session}/{split}/{number:04d}"
