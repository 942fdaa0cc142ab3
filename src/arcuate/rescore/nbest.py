"""n-best lists with their scores by source, as the word search writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.combine.lists import CandidateList, finite_number, parse_list
from arcuate.errors import UserError
from arcuate.run import read_jsonl


@dataclass(frozen=True, eq=False)
class NBest:
    """The readings of one trial: sound and n-gram in nat, one entry per text."""

    found: CandidateList
    acoustic: np.ndarray  # (n,) with the search's bonuses
    ngram: np.ndarray  # (n,)
    row: Mapping[str, Any]  # the line as it was read


def read_nbest(path: Path, limit: int | None = None) -> list[NBest]:
    """Lines with `nbest`, each entry with `text`, `acoustic` and `lm` (and `bonus`); the first `limit` entries."""
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} holds no lines; write it with: arcuate decode … --out {path}")
    seen: dict[str, int] = {}
    lists = []
    for number, row in enumerate(rows, start=1):
        where = f"{path} line {number}"
        if not isinstance(row.get("nbest"), list):
            raise UserError(f"{where} has no nbest list; write it with: arcuate decode … --out {path}")
        cut = {**row, "nbest": row["nbest"][:limit]}
        found = parse_list(cut, where, f"line {number}")
        if found.id in seen:
            raise UserError(
                f"{where}: trial {found.id!r} was on line {seen[found.id]} already; keep one of the two"
            )
        seen[found.id] = number
        lists.append(NBest(found, *_sources(cut["nbest"], where), cut))
    return lists


def _sources(entries: Sequence[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    sound, ngram = [], []
    for i, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or "acoustic" not in entry or "lm" not in entry:
            raise UserError(f"{where}: entry {i} of nbest needs acoustic and lm beside its text")
        bonus = finite_number(entry.get("bonus", 0.0), f"{where}: bonus of entry {i}")
        sound.append(finite_number(entry["acoustic"], f"{where}: acoustic of entry {i}") + bonus)
        ngram.append(finite_number(entry["lm"], f"{where}: lm of entry {i}"))
    return np.array(sound, dtype=np.float64), np.array(ngram, dtype=np.float64)


def search_balance(lists: Sequence[NBest]) -> float:
    """The weight of sound against one nat of n-gram that the search itself used, read off its scores."""
    ratios = [
        (score - sound) / ngram
        for nbest in lists
        if nbest.found.scores is not None
        for score, sound, ngram in zip(nbest.found.scores, nbest.acoustic, nbest.ngram, strict=True)
        if abs(ngram) > 1e-6
    ]
    weight = float(np.median(ratios)) if ratios else 0.0
    return 1 / weight if weight > 1e-6 else 1.0
