"""The small tables beside the recordings: which corpus a block read from, and which mode was simulated."""

import csv
import json
import os
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from arcuate.data.readers.source import replace_surrogates
from arcuate.data.sessions import session_date

CORPUS_TABLE = "t15_copyTaskData_description.csv"
MODE_TABLE = "simulation_truth.jsonl"
_MAX_BYTES = 200_000_000

Corpora = dict[tuple[date, int], str]
Modes = dict[tuple[str, str, int], str]
ERRORS = (OSError, ValueError, csv.Error)  # what a table that cannot be read may raise


def find_beside(root: Path, given: Path, name: str) -> Path | None:
    """The table in the recordings' folder, in the folder the user named, or up to two folders above."""
    for folder in dict.fromkeys((root, given, root.parent, root.parent.parent)):
        if os.path.lexists(folder / name):
            return folder / name
    return None


def _refuse_large(path: Path) -> None:
    if (n_bytes := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"{n_bytes} bytes are more than such a table can have")


def read_corpora(path: Path) -> tuple[Corpora, list[str]]:
    """Corpus by (day, block), and what in the table could not be used."""
    _refuse_large(path)
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = {_plain(name): name for name in rows.fieldnames or () if name}
    missing = [name for name in ("date", "block number", "corpus") if name not in columns]
    if missing:
        return {}, [f"{path.name} has no column {missing[0]!r}; corpora stay unknown"]
    corpora: Corpora = {}
    unusable: set[tuple[date, int]] = set()
    n_bad = 0
    for row in rows:
        day = _day(row[columns["date"]] or "")
        block = _number(row[columns["block number"]] or "")
        corpus = (row[columns["corpus"]] or "").strip()
        if day is None or block is None or not corpus:
            n_bad += 1
        elif corpora.setdefault((day, block), corpus) != corpus:
            unusable.add((day, block))
    notes = [f"{path.name}: {n_bad} rows without a date, a block or a corpus"] if n_bad else []
    if unusable:
        notes.append(f"{path.name}: {len(unusable)} blocks with two corpora; theirs stay unknown")
    return {key: corpus for key, corpus in corpora.items() if key not in unusable}, notes


def read_modes(path: Path) -> tuple[Modes, list[str]]:
    """Speaking mode by (session, split, number), and what in the file could not be used."""
    modes: Modes = {}
    n_bad = 0
    _refuse_large(path)
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in _nonempty(lines):
            try:
                row = json.loads(line)
                modes[str(row["session"]), str(row["split"]), int(row["number"])] = replace_surrogates(
                    str(row["mode"])
                )
            except (ValueError, KeyError, TypeError, RecursionError):
                n_bad += 1
    return modes, [f"{path.name}: {n_bad} lines could not be used"] if n_bad else []


def _nonempty(lines: Iterable[str]) -> Iterable[str]:
    return (line for line in lines if line.strip())


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", " ", name).strip().lower()


def _number(cell: str) -> int | None:
    try:
        value = float(cell)
        return int(value) if value == int(value) else None
    except (ValueError, OverflowError):
        return None


def _day(cell: str) -> date | None:
    """2023-08-11, 2023.08.11, 20230811 or 8/11/2023 (the release is American)."""
    text = cell.strip()
    if american := re.match(r"(\d{1,2})\D(\d{1,2})\D(\d{4})(?!\d)", text):
        text = f"{american[3]}.{american[1]}.{american[2]}"
    return session_date(text)
