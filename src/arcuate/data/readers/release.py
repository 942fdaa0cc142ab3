"""The folders of the two Brain-to-Text releases: detect the layout below a folder, and list its files.

    '25: <session>/data_{train,val,test}.hdf5      '24: {train,test,competitionHoldOut}/<session>.mat

Two tables beside the recordings, if present, give the corpus of each block and the speaking mode of simulated trials.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from arcuate.data.readers.source import (
    Problem,
    ReadResult,
    Source,
    SourceFile,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.trial import SPLITS, Layout, Split, session_date, session_order
from arcuate.errors import UserError, check_regular

FILES: dict[str, Split] = {"data_train.hdf5": "train", "data_val.hdf5": "val", "data_test.hdf5": "test"}
PARTITIONS: dict[str, Split] = {"train": "train", "test": "val", "competitionHoldOut": "test"}
DESCRIPTION_FILE = "t15_copyTaskData_description.csv"
TRUTH_FILE = "simulation_truth.jsonl"
_EXPECTED: dict[Layout, str] = {
    "b2t25": "<session>/data_{train,val,test}.hdf5",
    "b2t24": "{train,test,competitionHoldOut}/<session>.mat",
}
_DATA_SUFFIXES = (".hdf5", ".h5", ".hdf", ".he5", ".mat", ".nwb")
_IGNORED_PREFIXES = (".", "__MACOSX", "lost+found")
_MAX_TABLE_BYTES = 200_000_000
_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000


def find_release(path: Path, layout: Layout | None = None) -> Source:
    """The recordings in `path`, which is the folder of the sessions or any folder above it.

    The layout is detected; UserError if it is not the given one.
    """
    path = Path(os.path.abspath(path))
    _check_folder(path)
    listed, denied = _list_folders(path)
    root, detected = _find_root(path, listed, denied)
    if layout not in (None, detected):
        raise UserError(f"{path} has the layout {detected}, not {layout}; leave out --layout")
    skipped = [unreadable(folder.name, f"the folder cannot be listed: {denied[folder]}") for folder in sorted(denied)]
    notes = [f"{row.id} beside the recordings cannot be listed" for row in skipped]
    skipped = [row for row, folder in zip(skipped, sorted(denied), strict=True) if folder.parent == root]
    skipped += _stray_entries(root, listed.get(root, ()))
    files: list[SourceFile] = []
    for folder in sorted(folder for folder in listed if folder.parent == root):
        for name in listed[folder]:
            if file := _recording(folder, name, detected):
                files.append(file)
            elif name.lower().endswith(_DATA_SUFFIXES):
                skipped.append(_unrecognised(f"{folder.name}/{name}", f"not {_EXPECTED[detected]}"))
    files.sort(key=lambda file: (session_order(file.session), SPLITS.index(file.split)))
    beside = [folder / TRUTH_FILE for folder in (root, path, root.parent, root.parent.parent)]
    truth = next((table for table in beside if os.path.lexists(table)), None)
    tables = [table.with_name(DESCRIPTION_FILE) for table in beside if detected == "b2t25"]
    description = next((table for table in tables if os.path.lexists(table)), None)
    return Source(
        layout=detected,
        root=root,
        files=tuple(files),
        corpora=_read_table(description, _read_corpora, notes, skipped),
        modes=_read_table(truth, _read_modes, notes, skipped),
        notes=tuple(notes),
        skipped=tuple(skipped),
        simulated=truth is not None,
    )


def _check_folder(path: Path) -> None:
    if path.is_file():
        hint = "unpack it and give the folder" if path.suffix in (".zip", ".gz", ".tar") else "give the folder it is in"
        raise UserError(f"{path} is a file; {hint}")
    if not path.is_dir():
        raise UserError(f"no folder {path}; give the folder of the recordings")
    if (path / "manifest.json").is_file() and (path / "sessions").is_dir():
        raise UserError(f"{path} is already a prepared store; give the folder of the original recordings")


def _list_folders(path: Path) -> tuple[dict[Path, list[str]], dict[Path, str]]:
    """Names in the folders at and below `path`, breadth first, each folder once; and why others cannot be listed."""
    listed: dict[Path, list[str]] = {}
    denied: dict[Path, str] = {}
    waiting, seen = [(path, 0)], {os.path.realpath(path)}
    for folder, depth in waiting:  # which grows
        try:
            names = sorted(name for name in os.listdir(folder) if not name.startswith(_IGNORED_PREFIXES))
        except OSError as error:
            denied[folder] = str(error.strerror)
            continue
        listed[folder] = names
        for child in (folder / name for name in names if depth <= _MAX_DEPTH and os.path.isdir(folder / name)):
            if (real := os.path.realpath(child)) not in seen and len(seen) < _MAX_FOLDERS:
                seen.add(real)
                waiting.append((child, depth + 1))
    return listed, denied


def _recording(folder: Path, name: str, layout: Layout) -> SourceFile | None:
    """The recording with this name in a folder of a session ('25) or of a partition ('24)."""
    if layout == "b2t25":
        session, split = folder.name, FILES.get(name)
    else:
        session, split = Path(name).stem, PARTITIONS.get(folder.name) if name.endswith(".mat") else None
    return SourceFile(replace_surrogates(session), split, folder / name) if split else None


def _find_root(path: Path, listed: dict[Path, list[str]], denied: dict[Path, str]) -> tuple[Path, Layout]:
    """The folder of all sessions or partitions, and its layout; UserError unless there is exactly one."""
    layouts: dict[Path, set[Layout]] = {}
    for folder, names in listed.items():
        for layout in _EXPECTED:
            if any(_recording(folder, name, layout) and not os.path.isdir(folder / name) for name in names):
                layouts.setdefault(folder.parent, set()).add(layout)
    if layouts.get(path.parent) == {"b2t24"}:
        raise UserError(f"{path} is one partition of a release; give the folder above it, {path.parent}")
    roots = {root: found for root, found in layouts.items() if not layouts.keys() & set(root.parents)}
    if not roots:
        expected = " or ".join(f"{files} ({name})" for name, files in _EXPECTED.items())
        raise UserError(
            f"no recordings in {path}: expected {expected} up to {_MAX_DEPTH} folders deep; {_describe(path, listed)}"
            + "".join(f"; {folder.name} cannot be listed" for folder in sorted(denied)[:1])
        )
    if len(roots) > 1:
        examples = " and ".join(f"{root} ({', '.join(sorted(found))})" for root, found in sorted(roots.items())[:2])
        more = f" and {len(roots) - 2} more" if len(roots) > 2 else ""
        raise UserError(f"several sets of recordings in {path}: {examples}{more}; give the folder of one of them")
    ((root, found),) = roots.items()
    if len(found) > 1:
        raise UserError(f"{root} holds both layouts, b2t25 and b2t24; move one of them to a separate folder")
    return root, found.pop()


def _describe(folder: Path, listed: dict[Path, list[str]]) -> str:
    names = listed.get(folder, [])
    if packed := [name for name in names if name.endswith((".zip", ".tar.gz", ".tgz", ".tar"))]:
        return f"it holds {packed[0]}; unpack it first"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}" if names else "it is empty"


def _stray_entries(root: Path, names: Sequence[str]) -> Iterator[ReadResult]:
    """Dangling links and data files beside the folders of the layout."""
    for name in names:
        if os.path.islink(root / name) and not os.path.exists(root / name):
            yield unreadable(name, "dangling symbolic link")
        elif name.lower().endswith(_DATA_SUFFIXES) and not os.path.isdir(root / name):
            yield _unrecognised(name, "data file outside the folders of the layout")


def _unrecognised(name: str, detail: str) -> ReadResult:
    return ReadResult(replace_surrogates(name), None, (Problem("unrecognised file", None, detail, "ignored"),))


# --- tables beside the recordings ---------------------------------------------------------------------------


def _read_table(
    table: Path | None,
    read: Callable[[Iterable[str]], Iterator[tuple[Any, str] | None]],
    notes: list[str],
    skipped: list[ReadResult],
) -> dict[Any, str]:
    """Values by key; rows without them (None) are counted in a note, a key with two values is left out as well."""
    found: dict[Any, set[str]] = {}
    n_unusable = 0
    if table is None:
        return {}
    try:
        check_regular(table, _MAX_TABLE_BYTES)
        with table.open(encoding="utf-8-sig", errors="replace") as lines:
            for row in read(lines):
                if row is None:
                    n_unusable += 1
                else:
                    found.setdefault(row[0], set()).add(row[1])
    except (OSError, ValueError, csv.Error) as error:
        skipped.append(unreadable(table.name, summarise_error(error)))
        return {}
    if n_unusable := n_unusable + sum(len(values) > 1 for values in found.values()):
        notes.append(f"{table.name}: {n_unusable} rows could not be used")
    return {key: values.pop() for key, values in found.items() if len(values) == 1}


def _read_corpora(lines: Iterable[str]) -> Iterator[tuple[tuple[date, int], str] | None]:
    """Corpus by (date, block)."""
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = {re.sub(r"[\s_]+", " ", name).strip().lower(): name for name in rows.fieldnames or () if name}
    if missing := [name for name in ("date", "block number", "corpus") if name not in columns]:
        raise ValueError(f"it has no column {missing[0]!r}, so corpora are unknown")
    for row in rows:
        day, block, corpus = ((row[columns[name]] or "").strip() for name in ("date", "block number", "corpus"))
        recorded, number = _parse_date(day), re.fullmatch(r"(\d{1,9})(\.0*)?", block)
        yield ((recorded, int(number[1])), corpus) if recorded and number and corpus else None


def _read_modes(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str, int], str] | None]:
    """Speaking mode by (session, split, number)."""
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line)
            key = str(row["session"]), str(row["split"]), int(row["number"])
            yield key, replace_surrogates(str(row["mode"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            yield None


def _parse_date(cell: str) -> date | None:
    """Date of a table cell: 2023-08-11, 2023.08.11, 20230811 or 8/11/2023 (month first, as in the release)."""
    american = re.match(r"(\d{1,2})\D(\d{1,2})\D(\d{4})(?!\d)", cell)
    return session_date(f"{american[3]}.{american[1]}.{american[2]}" if american else cell)
