"""Types that all readers share: the protocol, source files, read results and problems."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol

from arcuate.data.alphabet import CLASSES
from arcuate.data.trial import Layout, Split, Trial, session_date

Severity = Literal["note", "ignored", "bad", "unreadable"]

MAX_VALUES = 2**27  # values in one trial (half a gigabyte as float32); more means a damaged file
REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")

# Exceptions that the file libraries may raise on a damaged file.
FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError, EOFError, ArithmeticError)


class UnreadableFile(Exception):
    """A source file that cannot be read; the message gives the reason."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a release: the trials of one split of one session."""

    session: str
    split: Split
    path: Path

    @property
    def id(self) -> str:
        return f"{self.session}/{self.split}"


NO_LABEL = "no label"  # reason of a `Problem`: a training or validation trial without a label


@dataclass(frozen=True)
class Problem:
    """A problem of one trial or file.

    note: no consequence; bad: excluded from training; unreadable: missing in the store; ignored: not a file of the
    layout, though it may hold data.
    """

    reason: str
    number: float | None
    detail: str
    severity: Severity = "bad"


@dataclass(frozen=True)
class ReadResult:
    """Outcome of reading one trial; `trial` is None if it failed or if the problems concern a file."""

    id: str
    trial: Trial | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Source:
    """Recordings found on disk."""

    layout: Layout
    root: Path
    files: tuple[SourceFile, ...]  # by session (chronological), then train, val, test
    corpora: Mapping[tuple[date, int], str] = field(default_factory=dict)  # (date, block) -> corpus
    # (session, split, number) -> speaking mode
    modes: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = CLASSES  # alphabet of the labels
    mapping: Mapping[str, Any] | None = None  # of an NWB file
    skipped: tuple[ReadResult, ...] = ()  # files that look like data and are not part of the layout
    simulated: bool = False  # written by `arcuate simulate`

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.session for file in self.files))

    def annotate(self, trial: Trial) -> Trial:
        """The trial with corpus and speaking mode from the tables beside the recordings."""
        recorded = session_date(trial.session)
        corpus = trial.corpus or (self.corpora.get((recorded, trial.block)) if recorded else None)
        mode = trial.mode or self.modes.get((trial.session, trial.split, trial.number))
        return replace(trial, corpus=corpus, mode=mode)


class Reader(Protocol):
    """A reader of one layout: finds the files of a release and reads their trials one by one.

    User-defined readers are classes without arguments, registered as entry points of `arcuate.readers`. Files are read
    in a child process, one after another.
    """

    layout: Layout

    def find_source(self, path: Path) -> Source: ...

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]: ...


def replace_surrogates(text: str) -> str:
    """Replace surrogates, which stand for bytes that were not UTF-8, by U+FFFD."""
    return _SURROGATES.sub(REPLACEMENT, text)


def is_safe_name(name: str) -> bool:
    """Whether a session's name is a valid file name on every system."""
    return re.fullmatch(r"\w[\w .+\-]{0,99}", name) is not None and not name.endswith((".", " "))


def summarise_error(error: BaseException) -> str:
    """The message of a file library's exception in one line of at most 200 characters."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = " ".join(replace_surrogates(str(message)).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def unreadable(identity: str, detail: str) -> ReadResult:
    return ReadResult(replace_surrogates(identity), None, (Problem("unreadable", None, detail, "unreadable"),))
