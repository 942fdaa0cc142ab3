"""Recordings on disk: find the files of a release below a folder, detect their layout, count and read their trials."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arcuate.data.readers import b2t24, b2t25, side_files
from arcuate.data.readers.source import (
    FileSummary,
    ReadResult,
    Source,
    SourceFile,
    file_order,
    list_names,
    summarise_error,
    unreadable,
)
from arcuate.data.trial import Layout
from arcuate.errors import UserError

_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000
_EXPECTED = (
    "<session>/data_{train,val,test}.hdf5 (Brain-to-Text '25) or"
    " {train,test,competitionHoldOut}/<session>.mat (Brain-to-Text '24)"
)


def find_source(path: Path) -> Source:
    """The recordings in `path`, which is the folder of the sessions or any folder above it."""
    path = Path(os.path.abspath(path))
    _check_folder(path)
    unlisted: list[ReadResult] = []
    roots = _search(path, unlisted)
    if not roots:
        raise UserError(
            f"no recordings in {path}: expected {_EXPECTED} up to {_MAX_DEPTH} folders deep; {_describe_contents(path)}"
            + "".join(f"; {folder.id} cannot be listed" for folder in unlisted[:1])
        )
    if len(roots) > 1:
        examples = " and ".join(f"{root} ({layout})" for root, layout in sorted(roots.items())[:2])
        more = f" and {len(roots) - 2} more" if len(roots) > 2 else ""
        raise UserError(f"several sets of recordings in {path}: {examples}{more}; give the folder of one of them")
    ((root, layout),) = roots.items()
    only = path if root == path.parent else None  # the folder of a single session was given
    files, skipped = b2t25.list_files(root, only) if layout == "b2t25" else b2t24.list_files(root)
    notes = [f"{folder.id} beside the recordings cannot be listed" for folder in unlisted]
    corpora: side_files.Corpora = {}
    if layout == "b2t25":
        corpora = _read_beside(root, path, side_files.DESCRIPTION_FILE, side_files.read_corpora, notes, skipped)
    modes: side_files.Modes = _read_beside(root, path, side_files.TRUTH_FILE, side_files.read_modes, notes, skipped)
    return Source(layout, root, tuple(sorted(files, key=file_order)), corpora, modes, tuple(notes), tuple(skipped))


def _read_beside(
    root: Path,
    given: Path,
    name: str,
    read: Callable[[Path], tuple[dict[Any, str], list[str]]],
    notes: list[str],
    skipped: list[ReadResult],
) -> dict[Any, str]:
    """Contents of a table beside the recordings, if there is one; what cannot be used is added to the lists."""
    if (table := side_files.find_beside(root, given, name)) is None:
        return {}
    try:
        contents, unused = read(table)
    except side_files.ERRORS as error:
        skipped.append(unreadable(table.name, summarise_error(error)))
        return {}
    notes.extend(unused)
    return contents


def _check_folder(path: Path) -> None:
    if path.is_file():
        hint = "unpack it and give the folder" if path.suffix in (".zip", ".gz", ".tar") else "give the folder it is in"
        raise UserError(f"{path} is a file; {hint}")
    if not path.is_dir():
        raise UserError(f"no folder {path}; give the folder of the recordings")
    if (path / "manifest.json").is_file() and (path / "sessions").is_dir():
        raise UserError(f"{path} is already a prepared store; give the folder of the original recordings")
    if b2t24.is_partition(path):
        raise UserError(f"{path} is one partition of a release; give the folder above it, {path.parent}")


def _search(path: Path, unlisted: list[ReadResult]) -> dict[Path, Layout]:
    """Roots of recordings at or below `path`, breadth first; every folder is visited once."""
    if b2t25.is_session(path):
        return {path.parent: "b2t25"}
    roots: dict[Path, Layout] = {}
    waiting = deque([(path, 0)])
    seen: set[str] = set()
    while waiting:
        folder, depth = waiting.popleft()
        real = os.path.realpath(folder)
        if real in seen or len(seen) >= _MAX_FOLDERS:
            continue
        seen.add(real)
        inside = _folders(folder, unlisted)
        if any(b2t25.is_session(child) for child in inside):
            roots[folder] = "b2t25"
        if any(b2t24.is_partition(child) for child in inside):
            if folder in roots:
                raise UserError(f"{folder} holds both layouts, b2t25 and b2t24; move one of them to a separate folder")
            roots[folder] = "b2t24"
        if folder not in roots and depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in inside)
    return roots


def _folders(folder: Path, unlisted: list[ReadResult]) -> list[Path]:
    """Sorted sub-folders, without hidden ones."""
    return [folder / name for name in list_names(folder, unlisted) if os.path.isdir(folder / name)]


def _describe_contents(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"it cannot be listed ({error.strerror})"
    if not names:
        return "it is empty"
    packed = [name for name in names if name.endswith((".zip", ".tar.gz", ".tgz", ".tar"))]
    if packed:
        return f"it holds {packed[0]}; unpack it first"
    return "it holds " + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def summarise_file(source: Source, file: SourceFile) -> FileSummary:
    """Number of trials in a file, without reading them."""
    return b2t25.summarise_file(file) if source.layout == "b2t25" else b2t24.summarise_file(file)


def read_trials(source: Source, file: SourceFile, features: str = b2t24.DEFAULT_FEATURES) -> Iterator[ReadResult]:
    """The trials of one file, one at a time; `features` selects features and area of the '24 layout."""
    results = b2t25.read_trials(file) if source.layout == "b2t25" else b2t24.read_trials(file, features)
    for result in results:
        if (trial := result.trial) is not None:
            mode = source.modes.get((trial.session, trial.split, trial.number))
            corpus = source.corpus_of(trial.session, trial.block)
            result = replace(result, trial=replace(trial, mode=mode, corpus=corpus))
        yield result
