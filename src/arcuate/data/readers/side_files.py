"""Tables beside the recordings: the corpus of each block, and the speaking mode of each simulated trial."""

import csv
import json
import os
import re
from datetime import date
from pathlib import Path

from arcuate.data.readers.source import replace_surrogates
from arcuate.data.sessions import session_date

DESCRIPTION_FILE = "t15_copyTaskData_description.csv"
TRUTH_FILE = "simulation_truth.jsonl"
_MAX_BYTES = 200_000_000

Corpora = dict[tuple[date, int], str]
Modes = dict[tuple[str, str, int], str]
ERRORS = (OSError, ValueError, csv.Error)  # raised by a table that cannot be read


def find_beside(root: Path, given: Path, name: str) -> Path | None:
    """The table in the folder of the recordings, in the folder given by the user, or up to two folders above."""
    for folder in dict.fromkeys((root, given, root.parent, root.parent.parent)):
        if os.path.lexists(folder / name):
            return folder / name
    return None


def _check_size(path: Path) -> None:
    if (n_bytes := path.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"{n_bytes} bytes, expected at most {_MAX_BYTES}")


def read_corpora(path: Path) -> tuple[Corpora, list[str]]:
    """Corpus by (date, block), and notes on rows that could not be used."""
    _check_size(path)
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = {_normalise_column(name): name for name in rows.fieldnames or () if name}
    missing = [name for name in ("date", "block number", "corpus") if name not in columns]
    if missing:
        return {}, [f"{path.name} has no column {missing[0]!r}; corpora are unknown"]
    corpora: Corpora = {}
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


def read_modes(path: Path) -> tuple[Modes, list[str]]:
    """Speaking mode by (session, split, number), and notes on lines that could not be used."""
    modes: Modes = {}
    n_bad = 0
    _check_size(path)
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


def _normalise_column(name: str) -> str:
    return re.sub(r"[\s_]+", " ", name).strip().lower()


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
