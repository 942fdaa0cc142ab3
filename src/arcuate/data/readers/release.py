"""The folders of the two Brain-to-Text releases: detect the layout below a folder, and list its files.

    '25: <session>/data_{train,val,test}.hdf5      '24: {train,test,competitionHoldOut}/<session>.mat

Two tables beside the recordings, if present, give the corpus of each block and the speaking mode of simulated trials.
"""

import csv
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

from arcuate.data.readers.source import (
    Problem,
    ReadResult,
    Recognise,
    Source,
    SourceFile,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.trial import SPLITS, Layout, Split, session_date, session_order
from arcuate.errors import UserError

FILES: dict[str, Split] = {"data_train.hdf5": "train", "data_val.hdf5": "val", "data_test.hdf5": "test"}
PARTITIONS: dict[str, Split] = {"train": "train", "test": "val", "competitionHoldOut": "test"}
DESCRIPTION_FILE = "t15_copyTaskData_description.csv"
TRUTH_FILE = "simulation_truth.jsonl"
_DATA_SUFFIXES = (".hdf5", ".h5", ".hdf", ".he5", ".mat", ".nwb")
_IGNORED_PREFIXES = (".", "__MACOSX", "lost+found")
_MAX_TABLE_BYTES = 200_000_000
_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000
_EXPECTED = (
    "<session>/data_{train,val,test}.hdf5 (Brain-to-Text '25) or"
    " {train,test,competitionHoldOut}/<session>.mat (Brain-to-Text '24)"
)


def find_release(path: Path, layout: Layout | None = None) -> Source:
    """The recordings in `path`, which is the folder of the sessions or any folder above it.

    The layout is detected; UserError if it is not the given one.
    """
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
        examples = " and ".join(f"{root} ({found})" for root, found in sorted(roots.items())[:2])
        more = f" and {len(roots) - 2} more" if len(roots) > 2 else ""
        raise UserError(f"several sets of recordings in {path}: {examples}{more}; give the folder of one of them")
    ((root, detected),) = roots.items()
    if layout not in (None, detected):
        raise UserError(f"{path} has the layout {detected}, not {layout}; leave out --layout")
    skipped: list[ReadResult] = []
    folders = [path] if root == path.parent else list(_list_folders(root, skipped))  # a single session, or all
    files = list(_list_files(folders, _recognise_25 if detected == "b2t25" else _recognise_24, skipped))
    files.sort(key=lambda file: (session_order(file.session), SPLITS.index(file.split)))
    notes = [f"{folder.id} beside the recordings cannot be listed" for folder in unlisted]
    corpora: dict[tuple[date, int], str] = {}
    if detected == "b2t25":
        corpora = _read_beside(root, path, DESCRIPTION_FILE, _read_corpora, notes, skipped)
    modes: dict[tuple[str, str, int], str] = _read_beside(root, path, TRUTH_FILE, _read_modes, notes, skipped)
    return Source(
        *(detected, root, tuple(files), corpora, modes, tuple(notes)),
        skipped=tuple(skipped),
        simulated=_find_beside(root, path, TRUTH_FILE) is not None,
    )


def _recognise_25(folder: Path, name: str) -> SourceFile | str:
    if name in FILES:
        return SourceFile(replace_surrogates(folder.name), FILES[name], folder / name)
    return f"not one of {', '.join(FILES)}"


def _recognise_24(folder: Path, name: str) -> SourceFile | str:
    if (split := PARTITIONS.get(folder.name)) is None:
        return f"not in one of the folders {', '.join(PARTITIONS)}"
    if not name.endswith(".mat"):
        return "not <session>.mat"
    return SourceFile(replace_surrogates(Path(name).stem), split, folder / name)


def _check_folder(path: Path) -> None:
    if path.is_file():
        hint = "unpack it and give the folder" if path.suffix in (".zip", ".gz", ".tar") else "give the folder it is in"
        raise UserError(f"{path} is a file; {hint}")
    if not path.is_dir():
        raise UserError(f"no folder {path}; give the folder of the recordings")
    if (path / "manifest.json").is_file() and (path / "sessions").is_dir():
        raise UserError(f"{path} is already a prepared store; give the folder of the original recordings")
    if _is_partition(path):
        raise UserError(f"{path} is one partition of a release; give the folder above it, {path.parent}")


def _search(path: Path, unlisted: list[ReadResult]) -> dict[Path, Layout]:
    """Roots of recordings at or below `path`, breadth first; every folder is visited once."""
    if _is_session(path):
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
        inside = [folder / name for name in _list_names(folder, unlisted) if os.path.isdir(folder / name)]
        if any(_is_session(child) for child in inside):
            roots[folder] = "b2t25"
        if any(_is_partition(child) for child in inside):
            if folder in roots:
                raise UserError(f"{folder} holds both layouts, b2t25 and b2t24; move one of them to a separate folder")
            roots[folder] = "b2t24"
        if folder not in roots and depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in inside)
    return roots


def _is_session(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in FILES)


def _is_partition(folder: Path) -> bool:
    return folder.name in PARTITIONS and any(name.endswith(".mat") for name in _list_names(folder, []))


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


# --- listing: everything that looks like data is either read or reported --------------------------------------


def _list_files(folders: Iterable[Path], recognise: Recognise, skipped: list[ReadResult]) -> Iterator[SourceFile]:
    """The recordings in these folders; other files that look like data are added to `skipped`."""
    for folder in folders:
        for name in _list_names(folder, skipped):
            found = recognise(folder, name)
            if isinstance(found, SourceFile):
                yield found
            elif _looks_like_data(name):
                skipped.append(_unrecognised(f"{folder.name}/{name}", found))


def _list_names(folder: Path, skipped: list[ReadResult]) -> list[str]:
    """Sorted names in a folder; a folder that cannot be listed is added to `skipped`."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(_IGNORED_PREFIXES))
    except OSError as error:
        skipped.append(unreadable(folder.name, f"the folder cannot be listed: {error.strerror}"))
        return []


def _list_folders(root: Path, skipped: list[ReadResult]) -> Iterator[Path]:
    """Sorted sub-folders; dangling links and stray data files are added to `skipped`."""
    for name in _list_names(root, skipped):
        path = root / name
        if os.path.isdir(path):
            yield path
        elif os.path.islink(path) and not os.path.exists(path):
            skipped.append(unreadable(name, "dangling symbolic link"))
        elif _looks_like_data(name):
            skipped.append(_unrecognised(name, "data file outside the folders of the layout"))


def _looks_like_data(name: str) -> bool:
    return name.lower().endswith(_DATA_SUFFIXES)


def _unrecognised(identity: str, detail: str) -> ReadResult:
    return ReadResult(replace_surrogates(identity), None, (Problem("unrecognised file", None, detail, "ignored"),))


# --- tables beside the recordings ---------------------------------------------------------------------------


def _find_beside(root: Path, given: Path, name: str) -> Path | None:
    """A file in the folder of the recordings, in the folder given by the user, or up to two folders above."""
    folders = dict.fromkeys((root, given, root.parent, root.parent.parent))
    return next((folder / name for folder in folders if os.path.lexists(folder / name)), None)


def _read_beside(
    root: Path,
    given: Path,
    name: str,
    read: Callable[[Path], tuple[dict[Any, str], list[str]]],
    notes: list[str],
    skipped: list[ReadResult],
) -> dict[Any, str]:
    """Contents of a table, if there is one; what cannot be used is added to the lists."""
    table = _find_beside(root, given, name)
    if table is None:
        return {}
    try:
        if (n_bytes := table.stat().st_size) > _MAX_TABLE_BYTES:
            raise ValueError(f"{n_bytes} bytes, expected at most {_MAX_TABLE_BYTES}")
        contents, unused = read(table)
    except (OSError, ValueError, csv.Error) as error:
        skipped.append(unreadable(table.name, summarise_error(error)))
        return {}
    notes.extend(unused)
    return contents


def _read_corpora(path: Path) -> tuple[dict[tuple[date, int], str], list[str]]:
    """Corpus by (date, block), and notes on rows that could not be used."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = {re.sub(r"[\s_]+", " ", name).strip().lower(): name for name in rows.fieldnames or () if name}
    missing = [name for name in ("date", "block number", "corpus") if name not in columns]
    if missing:
        return {}, [f"{path.name} has no column {missing[0]!r}; corpora are unknown"]
    corpora: dict[tuple[date, int], str] = {}
    ambiguous: set[tuple[date, int]] = set()
    n_bad = 0
    for row in rows:
        recorded = _parse_date(row[columns["date"]] or "")
        block = _parse_integer(row[columns["block number"]] or "")
        corpus = (row[columns["corpus"]] or "").strip()
        if recorded is None or block is None or not corpus:
            n_bad += 1
        elif corpora.setdefault((recorded, block), corpus) != corpus:
            ambiguous.add((recorded, block))
    notes = [f"{path.name}: {n_bad} rows without a date, a block or a corpus"] if n_bad else []
    if ambiguous:
        notes.append(f"{path.name}: {len(ambiguous)} blocks with two corpora; treated as unknown")
    return {key: corpus for key, corpus in corpora.items() if key not in ambiguous}, notes


def _read_modes(path: Path) -> tuple[dict[tuple[str, str, int], str], list[str]]:
    """Speaking mode by (session, split, number), and notes on lines that could not be used."""
    modes: dict[tuple[str, str, int], str] = {}
    n_bad = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                modes[str(row["session"]), str(row["split"]), int(row["number"])] = replace_surrogates(str(row["mode"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                n_bad += 1
    return modes, [f"{path.name}: {n_bad} lines could not be used"] if n_bad else []


def _parse_integer(cell: str) -> int | None:
    try:
        value = float(cell)
        return int(value) if value == int(value) else None
    except (ValueError, OverflowError):
        return None


def _parse_date(cell: str) -> date | None:
    """Date of a table cell: 2023-08-11, 2023.08.11, 20230811 or 8/11/2023 (month first, as in the release)."""
    text = cell.strip()
    if american := re.match(r"(\d{1,2})\D(\d{1,2})\D(\d{4})(?!\d)", text):
        text = f"{american[3]}.{american[1]}.{american[2]}"
    return session_date(text)
