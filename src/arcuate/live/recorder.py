"""A live session on disk: a journal while it runs, a canonical store when it ends.

    FOLDER/journal.jsonl   events as they happened, one line each; finals are on disk before anyone is told
    FOLDER/bins.f32        every bin that was decoded, in order, float32
    FOLDER/store/          one trial per sentence, made from the two above; live.jsonl beside its manifest

A killed server leaves the journal; the next one with the same folder goes on with it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.pronounce import to_tokens
from arcuate.quality import NON_FINITE
from arcuate.readers.source import safe_name
from arcuate.run import read_jsonl, to_line, write_lines
from arcuate.splits import find_leakage, hash_bins, hash_split, hash_trial
from arcuate.store import TrialInfo
from arcuate.store_writer import writing_store
from arcuate.trial import SPLITS, Split, Trial

JOURNAL, BINS, STORE, LIVE = "journal.jsonl", "bins.f32", "store", "live.jsonl"
KEPT = ("state", "trial", "partial", "final", "fault", "adaptation")  # kinds of events that are written down


class Recorder:
    """Writes as things happen; belongs to the decoding thread."""

    def __init__(self, folder: Path, n_channels: int) -> None:
        self.folder = folder
        self.n_channels = n_channels
        refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.finals = mend(folder, n_channels)
        self._bins = (folder / BINS).open("ab")
        self._journal = (folder / JOURNAL).open("a", encoding="utf-8")
        self.n_bins = self._bins.tell() // (4 * n_channels)
        self._latencies: list[float] = []
        if not self.finals and not self._journal.tell():
            self._write({"type": "recording", "n_channels": n_channels})

    def add_bins(self, bins: np.ndarray) -> None:
        self._bins.write(np.ascontiguousarray(bins, "<f4").tobytes())
        self.n_bins += len(bins)

    def note_latency(self, ms: float) -> None:
        self._latencies.append(round(ms, 3))

    def note(self, event: dict[str, Any]) -> dict[str, Any]:
        """Write an event down; a final one says where its bins are, and is safe before this returns."""
        if event["type"] == "final":
            event = {**event, "first_bin": self.n_bins - event["n_bins"], "latencies_ms": self._latencies}
            self._latencies = []
            self._bins.flush()
            os.fsync(self._bins.fileno())
        if event["type"] in KEPT:
            self._write(event)
        return {k: v for k, v in event.items() if k != "latencies_ms"}

    def _write(self, event: dict[str, Any]) -> None:
        self._journal.write(to_line(event) + "\n")
        self._journal.flush()
        if event["type"] == "final":
            os.fsync(self._journal.fileno())

    def close(self) -> None:
        """Everything on disk, and the store made."""
        self._bins.close()
        self._journal.close()
        seal(self.folder)


def refuse_foreign(folder: Path) -> None:
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / JOURNAL).exists())
    ):
        raise UserError(f"{folder} exists and is no recording; choose another folder")


def mend(folder: Path, n_channels: int) -> list[dict[str, Any]]:
    """The finals of a recording so far; what a killed writer left half written is cut off."""
    journal, bins = folder / JOURNAL, folder / BINS
    if not journal.exists():
        return []
    rows = read_jsonl(journal, growing=True)
    if rows and rows[0].get("n_channels") != n_channels:
        raise UserError(
            f"{folder} is a recording of {rows[0].get('n_channels')} channels; choose another folder"
        )
    whole = "".join(to_line(row) + "\n" for row in rows)
    if journal.stat().st_size != len(whole.encode()):
        os.truncate(journal, len(whole.encode()))
    if bins.exists():
        os.truncate(bins, bins.stat().st_size // (4 * n_channels) * 4 * n_channels)
    return [row for row in rows if row["type"] == "final"]


def seal(folder: Path) -> Path | None:
    """Make the store of a recording from its journal; None where nothing was said."""
    rows = read_jsonl(folder / JOURNAL, growing=True)
    n_channels = int(rows[0]["n_channels"]) if rows else 0
    finals = [row for row in rows if row["type"] == "final" and row["n_bins"] > 0]
    if not finals:
        return None
    said = list(trials_of(folder, finals, n_channels))
    store = folder / STORE
    infos = [info_of(trial) for trial in said]
    with writing_store(store, n_channels, force=True) as writer:
        for session in dict.fromkeys(trial.session for trial in said):
            with writer.session(session) as out:
                for trial in (t for t in said if t.session == session):
                    out.add(trial)
        ordered = [i for s in dict.fromkeys(t.session for t in said) for i in infos if i.session == s]
        writer.write_manifest(about(said, infos), ordered, [])
        write_lines(writer.folder / LIVE, live_rows(rows, said))
    return store


def trials_of(folder: Path, finals: list[dict[str, Any]], n_channels: int) -> Iterator[Trial]:
    bins = np.memmap(folder / BINS, "<f4", "r").reshape(-1, n_channels)
    counts: dict[tuple[str, str], int] = {}
    for row in finals:
        session = str(row["session"])
        if not safe_name(session):
            raise UserError(f"{folder / JOURNAL} names a session {session!r:.60}, which is no plain name")
        reference = row.get("reference")
        split: Split = "test" if reference is None else "val"  # what nobody wrote down cannot be scored
        number = counts.get((session, split), 0)
        counts[session, split] = number + 1
        tokens = None if reference is None else np.array(to_tokens(reference)[0], np.int32)
        first = max(0, int(row["first_bin"]))
        piece = np.array(bins[first : int(row["first_bin"]) + int(row["n_bins"])])
        yield Trial(session, split, number, 1, piece, tokens, reference, corpus="live")


def info_of(trial: Trial) -> TrialInfo:
    tokens = None if trial.tokens is None else tuple(int(t) for t in trial.tokens)
    flags: tuple[str, ...] = () if np.isfinite(trial.bins).all() else (NON_FINITE,)
    digest = hash_trial(hash_bins(trial.bins), tokens, trial.text)
    return TrialInfo(
        id=trial.id,
        session=trial.session,
        split=trial.split,
        number=trial.number,
        block=trial.block,
        n_bins=len(trial.bins),
        tokens=tokens,
        text=trial.text,
        corpus=trial.corpus,
        mode=trial.mode,
        usable=not flags,
        flags=flags,
        sha256=digest,
    )


def about(trials: list[Trial], infos: list[TrialInfo]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    hashes: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for trial in trials:
        hashes[trial.split].append(hash_bins(trial.bins))
        texts[trial.split] += [trial.text] if trial.text else []
    counts = {split: len(hashes[split]) for split in SPLITS}
    return {
        "layout": "b2t25",
        "features": None,
        "splits": {split: {"trials": n, "usable": n} for split, n in counts.items()},
        "hashes": {split: hash_split(i.sha256 for i in infos if i.split == split) for split in SPLITS},
        "leakage": find_leakage(hashes, texts),
        "recorded": "live",
    }


def live_rows(rows: list[dict[str, Any]], trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """For every sentence its text, times, partial texts, latencies and faults, by the id of its trial."""
    waiting: list[dict[str, Any]] = []
    names = iter(trials)
    for row in rows:
        if row["type"] != "final":
            waiting.append(row)
            continue
        partials = [
            {k: w[k] for k in ("at", "words", "n_settled")} for w in waiting if w["type"] == "partial"
        ]
        faults = [w for w in waiting if w["type"] == "fault"]
        waiting = []
        if row["n_bins"] > 0:
            yield {
                **row,
                "id": next(names).id,
                "source_trial": row["trial"],
                "partials": partials,
                "faults": faults,
            }
