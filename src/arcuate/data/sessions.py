"""Recording days by the names of their sessions: dates, gaps, and which known day is nearest."""

import re
from collections.abc import Sequence
from datetime import date

from arcuate.errors import UserError

DATE = re.compile(r"(\d{4})\D(\d{1,2})\D(\d{1,2})")


def date_of(session: str) -> date | None:
    """The recording day in a session's name, such as t15.2023.08.11."""
    found = DATE.search(session)
    try:
        return date(*(int(part) for part in found.groups())) if found else None
    except ValueError:
        return None


def nearest_session(session: str, known: Sequence[str]) -> str:
    """The known session nearest in time, of two the earlier; the last known one where names have no dates."""
    if not known:
        raise UserError("the model knows no session, so there is no layer to read a new day with")
    day = date_of(session)
    dated = [(other, when) for other in known if (when := date_of(other)) is not None]
    if day is None or not dated:
        return known[-1]
    return min(dated, key=lambda pair: (abs((pair[1] - day).days), pair[1]))[0]


def days_between(session: str, other: str) -> int | None:
    a, b = date_of(session), date_of(other)
    return (a - b).days if a and b else None
