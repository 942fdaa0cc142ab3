"""Session dates: the date in a session's name, the order of sessions, gaps in days, and the nearest session."""

import re
from collections.abc import Sequence
from datetime import date

from arcuate.errors import UserError

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
