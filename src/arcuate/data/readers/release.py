"""The folders of the two Brain-to-Text releases: detect the layout below a folder, and list its files.

    '25: <session>/data_{train,val,test}.hdf5      '24: {train,test,competitionHoldOut}/<session>.mat

Two tables beside the recordings, if present, give the corpus of each block and the speaking mode of simulated trials.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterator
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
from arcuate.errors import UserError

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
    unlisted: list[ReadResult] = []
    roots = {path.parent: "b2t25"} if _layout_inside(path) == "b2t25" else _search(path, unlisted)
    if not roots:
        expected = " or ".join(f"{files} ({name})" for name, files in _EXPECTED.items())
        raise UserError(
            f"no recordings in {path}: expected {expected} up to {_MAX_DEPTH} folders deep; {_describe_contents(path)}"
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
    notes = [f"{folder.id} beside the recordings cannot be listed" for folder in unlisted]
    folders = [path] if root == path.parent else _list_folders(root, skipped)  # a single session, or all
    files = [file for folder in folders for file in _list_files(folder, detected, skipped)]
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
    if _layout_inside(path) == "b2t24":
        raise UserError(f"{path} is one partition of a release; give the folder above it, {path.parent}")


def _search(path: Path, unlisted: list[ReadResult]) -> dict[Path, Layout]:
    """Roots of recordings at or below `path`, breadth first; every folder is visited once."""
    roots: dict[Path, Layout] = {}
    waiting = [(path, 0)]
    seen: set[str] = set()
    for folder, depth in waiting:  # which grows
        real = os.path.realpath(folder)
        if real in seen or len(seen) >= _MAX_FOLDERS:
            continue
        seen.add(real)
        inside = [folder / name for name in _list_names(folder, unlisted) if os.path.isdir(folder / name)]
        layouts = {layout for child in inside if (layout := _layout_inside(child))}
        if len(layouts) > 1:
            raise UserError(f"{folder} holds both layouts, b2t25 and b2t24; move one of them to a separate folder")
        if layouts:
            roots[folder] = layouts.pop()
        elif depth < _MAX_DEPTH:
            waiting.extend((child, depth + 1) for child in inside)
    return roots


def _layout_inside(folder: Path) -> Layout | None:
    """The layout of a folder of recordings: of one session ('25) or of one partition ('24)."""
    names = _list_names(folder, [])
    if any(name in FILES and os.path.isfile(folder / name) for name in names):
        return "b2t25"
    return "b2t24" if folder.name in PARTITIONS and any(name.endswith(".mat") for name in names) else None


def _describe_contents(folder: Path) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"it cannot be listed ({error.strerror})"
    if packed := [name for name in names if name.endswith((".zip", ".tar.gz", ".tgz", ".tar"))]:
        return f"it holds {packed[0]}; unpack it first"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}" if names else "it is empty"


# --- listing: everything that looks like data is either read or reported --------------------------------------


def _list_names(folder: Path, skipped: list[ReadResult]) -> list[str]:
    """Sorted names in a folder; a folder that cannot be listed is added to `skipped`."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith(_IGNORED_PREFIXES))
    except OSError as error:
        skipped.append(unreadable(folder.name, f"the folder cannot be listed: {error.strerror}"))
        return []


def _list_folders(root: Path, skipped: list[ReadResult]) -> list[Path]:
    """Sorted sub-folders; dangling links and stray data files are added to `skipped`."""
    paths = [root / name for name in _list_names(root, skipped)]
    for path in paths:
        if os.path.islink(path) and not os.path.exists(path):
            skipped.append(unreadable(path.name, "dangling symbolic link"))
        elif not os.path.isdir(path):
            _report_data(path.name, "data file outside the folders of the layout", skipped)
    return [path for path in paths if os.path.isdir(path)]


def _list_files(folder: Path, layout: Layout, skipped: list[ReadResult]) -> Iterator[SourceFile]:
    """The recordings in a folder; other files that look like data are added to `skipped`."""
    for name in _list_names(folder, skipped):
        if layout == "b2t25":
            session, split = folder.name, FILES.get(name)
        else:
            session, split = Path(name).stem, PARTITIONS.get(folder.name) if name.endswith(".mat") else None
        if split is None:
            _report_data(f"{folder.name}/{name}", f"not {_EXPECTED[layout]}", skipped)
        else:
            yield SourceFile(replace_surrogates(session), split, folder / name)


def _report_data(name: str, detail: str, skipped: list[ReadResult]) -> None:
    if name.lower().endswith(_DATA_SUFFIXES):
        problem = Problem("unrecognised file", None, detail, "ignored")
        skipped.append(ReadResult(replace_surrogates(name), None, (problem,)))


# --- tables beside the recordings ---------------------------------------------------------------------------


def _read_table(
    table: Path | None,
    read: Callable[[Path], tuple[dict[Any, str], list[str]]],
    notes: list[str],
    skipped: list[ReadResult],
) -> dict[Any, str]:
    """Contents of a table, if there is one; what cannot be used is added to the lists."""
    if table is None:
        return {}
    try:
        if (n_bytes := table.stat().st_size) > _MAX_TABLE_BYTES:
            raise ValueError(f"{n_bytes} bytes, expected at most {_MAX_TABLE_BYTES}")
        contents, unused = read(table)
    except (OSError, ValueError, csv.Error) as error:
        skipped.append(unreadable(table.name, summarise_error(error)))
        return {}
    notes.extend(f"{table.name}: {problem}" for problem in unused)
    return contents


def _read_corpora(path: Path) -> tuple[dict[tuple[date, int], str], list[str]]:
    """Corpus by (date, block), and notes on rows that could not be used."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = {re.sub(r"[\s_]+", " ", name).strip().lower(): name for name in rows.fieldnames or () if name}
    if missing := [name for name in ("date", "block number", "corpus") if name not in columns]:
        return {}, [f"it has no column {missing[0]!r}, so corpora are unknown"]
    found: dict[tuple[date, int], set[str]] = {}
    n_bad = 0
    for row in rows:
        recorded = _parse_date(row[columns["date"]] or "")
        block = _parse_integer(row[columns["block number"]] or "")
        corpus = (row[columns["corpus"]] or "").strip()
        if recorded is None or block is None or not corpus:
            n_bad += 1
        else:
            found.setdefault((recorded, block), set()).add(corpus)
    notes = [f"{n_bad} rows without a date, a block or a corpus"] if n_bad else []
    if n_ambiguous := sum(len(corpora) > 1 for corpora in found.values()):
        notes.append(f"{n_ambiguous} blocks with two corpora; treated as unknown")
    return {key: corpora.pop() for key, corpora in found.items() if len(corpora) == 1}, notes


def _read_modes(path: Path) -> tuple[dict[tuple[str, str, int], str], list[str]]:
    """Speaking mode by (session, split, number), and notes on lines that could not be used."""
    modes: dict[tuple[str, str, int], str] = {}
    n_bad = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                row = json.loads(line)
                modes[str(row["session"]), str(row["split"]), int(row["number"])] = replace_surrogates(str(row["mode"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                n_bad += 1
    return modes, [f"{n_bad} lines could not be used"] if n_bad else []


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
