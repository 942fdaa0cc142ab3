"""Trial: one attempted sentence with its recording, label and origin; session dates."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal, TypeAlias, get_args

import numpy as np

from arcuate.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Layout: TypeAlias = str  # name of a built-in or user-defined reader
# Participant in the names of simulated sessions; the evaluator of FALCON H2 accepts real session names only.
SIMULATED_PARTICIPANTS: dict[Layout, str] = {"b2t25": "sim", "b2t24": "sim24", "nwb": "sim", "falcon-h2": "t5"}
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


# --- session dates -----------------------------------------------------------------------------------------

_DATE = re.compile(r"(?<!\d)((?:19|20)\d\d)(?:\D(\d{1,2})\D(\d{1,2})|(\d\d)(\d\d))(?!\d)")


def session_date(session: str) -> date | None:
    """The recording date in a session's name, such as t15.2023.08.11, 2023-8-11 or 20230811."""
    match = _DATE.search(session)
    if match is None:
        return None
    year, month, day = (int(part) for part in match.groups() if part is not None)
    try:
        return date(year, month, day)
    except ValueError:
        return None


def session_order(session: str) -> tuple[date, str]:
    """Sort key: by date, then by name; sessions without a date come last."""
    return session_date(session) or date.max, session


def days_between(session: str, other: str) -> int | None:
    """Days from `other` to `session`; None if a name has no date."""
    a, b = session_date(session), session_date(other)
    return (a - b).days if a and b else None


def days_since_first(sessions: Sequence[str]) -> list[int | None]:
    """Days from the first dated session to each session; None if a name has no date."""
    first = next((session for session in sessions if session_date(session)), None)
    return [None if first is None else days_between(session, first) for session in sessions]


def nearest_session(session: str, known: Sequence[str]) -> str:
    """The known session nearest in time (the earlier one of two); the last known one if names have no dates."""
    if not known:
        raise UserError("the model has no session layer to use for a new session; train on at least one session")
    gaps = {other: gap for other in known if (gap := days_between(session, other)) is not None}
    return min(gaps, key=lambda other: (abs(gaps[other]), -gaps[other])) if gaps else known[-1]


def layout_of_session(session: str) -> Layout:
    """The layout implied by a session's name: participants t12 and sim24 are '24, any other the '25 release."""
    return "b2t24" if session.lower().startswith(("t12", SIMULATED_PARTICIPANTS["b2t24"])) else "b2t25"
