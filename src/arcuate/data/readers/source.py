"""The nouns of reading: where recordings lie, what one reading gave, and what was wrong with it."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from arcuate.data.sessions import session_date, session_order
from arcuate.data.trial import SPLITS, Split, Trial

Layout = Literal["b2t25", "b2t24"]
Severity = Literal["note", "ignored", "bad", "unreadable"]

MAX_VALUES = 2**27  # values in one trial (half a gigabyte as float32); a larger claim is a broken file
MAX_TOKENS = 100_000
REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")

# What reading a foreign file may raise without it being a fault of this program.
FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError, EOFError, ArithmeticError)


class UnreadableFile(Exception):
    """A source file that cannot be read; the message says why."""


@dataclass(frozen=True)
class SourceFile:
    session: str
    split: Split
    path: Path

    @property
    def id(self) -> str:
        return f"{self.session}/{self.split}"


@dataclass(frozen=True)
class Problem:
    """Something wrong with one trial or file. A note changes nothing, a bad trial stays out of training.

    What is ignored is no file of the layout, though it may hold data.
    """

    reason: str
    number: float | None
    detail: str
    severity: Severity = "bad"


@dataclass(frozen=True)
class ReadResult:
    """What came of one trial (or, for a note on the whole file, of none)."""

    id: str
    trial: Trial | None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class FileSummary:
    """A look at a file without reading its bins."""

    n_trials: int
    n_channels: Mapping[int, int]  # channels -> trials that have so many; empty where only reading tells


@dataclass(frozen=True)
class Source:
    """Recordings found on disk."""

    layout: Layout
    root: Path
    files: tuple[SourceFile, ...]  # by session (chronological), then train, val, test
    corpora: Mapping[tuple[date, int], str] = field(default_factory=dict)  # (day, block) -> corpus
    modes: Mapping[tuple[str, str, int], str] = field(
        default_factory=dict
    )  # (session, split, number) -> mode
    notes: tuple[str, ...] = ()
    passed: tuple[ReadResult, ...] = ()  # what looks like part of the release and is no file to read

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.session for file in self.files))

    def corpus_of(self, session: str, block: int) -> str | None:
        day = session_date(session)
        return self.corpora.get((day, block)) if day else None


def file_order(file: SourceFile) -> tuple[date, str, int]:
    return *session_order(file.session), SPLITS.index(file.split)


def replace_surrogates(text: str) -> str:
    """The same text with a sign of replacement for what no text can hold: bytes that were no UTF-8."""
    return _SURROGATES.sub(REPLACEMENT, text)


def is_safe_name(name: str) -> bool:
    """Whether a session's name can become a file name everywhere."""
    return re.fullmatch(r"\w[\w .+\-]{0,99}", name) is not None and not name.endswith((".", " "))


def summarise_error(error: BaseException) -> str:
    """What a file library's exception says, in one line of sensible length."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = " ".join(replace_surrogates(str(said)).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


# What lies in a release's folders: everything that looks like data is either read or named.

_DATA_ENDINGS = (".hdf5", ".h5", ".hdf", ".he5", ".mat", ".nwb")
_NO_RECORDINGS = (".", "__MACOSX", "lost+found")


def list_names(folder: Path, passed: list[ReadResult]) -> list[str]:
    """Names in a folder, in order; one that cannot be listed is put on record."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(_NO_RECORDINGS))
    except OSError as error:
        passed.append(unreadable(folder.name, f"the folder cannot be listed: {error.strerror}"))
        return []


def list_folders(root: Path, passed: list[ReadResult]) -> Iterator[Path]:
    """Sub-folders in order. Links to nothing and data files that stand among them are put on record."""
    for name in list_names(root, passed):
        path = root / name
        if os.path.isdir(path):
            yield path
        elif os.path.islink(path) and not os.path.exists(path):
            passed.append(unreadable(name, "a link to nothing"))
        elif looks_like_data(name):
            passed.append(unrecognised(name, "a data file beside the folders it should be in"))


def looks_like_data(name: str) -> bool:
    return name.lower().endswith(_DATA_ENDINGS)


def unreadable(identity: str, detail: str) -> ReadResult:
    return ReadResult(
        replace_surrogates(identity), None, (Problem("unreadable", None, detail, "unreadable"),)
    )


def unrecognised(identity: str, detail: str) -> ReadResult:
    return ReadResult(
        replace_surrogates(identity), None, (Problem("unrecognised file", None, detail, "ignored"),)
    )
