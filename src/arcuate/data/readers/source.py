"""Types that all readers share: source files, read results, problems; and the listing of folders."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from arcuate.data.sessions import session_date, session_order
from arcuate.data.trial import SPLITS, Layout, Split, Trial

Severity = Literal["note", "ignored", "bad", "unreadable"]

MAX_VALUES = 2**27  # values in one trial (half a gigabyte as float32); more means a damaged file
MAX_TOKENS = 100_000
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
class FileSummary:
    """Trial counts of a file, without reading its bins."""

    n_trials: int
    n_channels: Mapping[int, int]  # channels -> number of trials; empty if that requires reading the file


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
    skipped: tuple[ReadResult, ...] = ()  # files that look like data and are not part of the layout

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file.session for file in self.files))

    def corpus_of(self, session: str, block: int) -> str | None:
        recorded = session_date(session)
        return self.corpora.get((recorded, block)) if recorded else None


def file_order(file: SourceFile) -> tuple[date, str, int]:
    """Sort key: by session, then train, val, test."""
    return *session_order(file.session), SPLITS.index(file.split)


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


# Listing of a release's folders: everything that looks like data is either read or reported.

_DATA_SUFFIXES = (".hdf5", ".h5", ".hdf", ".he5", ".mat", ".nwb")
_IGNORED_PREFIXES = (".", "__MACOSX", "lost+found")


def list_names(folder: Path, skipped: list[ReadResult]) -> list[str]:
    """Sorted names in a folder; a folder that cannot be listed is added to `skipped`."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(_IGNORED_PREFIXES))
    except OSError as error:
        skipped.append(unreadable(folder.name, f"the folder cannot be listed: {error.strerror}"))
        return []


def list_folders(root: Path, skipped: list[ReadResult]) -> Iterator[Path]:
    """Sorted sub-folders; dangling links and stray data files are added to `skipped`."""
    for name in list_names(root, skipped):
        path = root / name
        if os.path.isdir(path):
            yield path
        elif os.path.islink(path) and not os.path.exists(path):
            skipped.append(unreadable(name, "dangling symbolic link"))
        elif looks_like_data(name):
            skipped.append(unrecognised(name, "data file outside the folders of the layout"))


def looks_like_data(name: str) -> bool:
    return name.lower().endswith(_DATA_SUFFIXES)


def unreadable(identity: str, detail: str) -> ReadResult:
    return ReadResult(replace_surrogates(identity), None, (Problem("unreadable", None, detail, "unreadable"),))


def unrecognised(identity: str, detail: str) -> ReadResult:
    return ReadResult(replace_surrogates(identity), None, (Problem("unrecognised file", None, detail, "ignored"),))
