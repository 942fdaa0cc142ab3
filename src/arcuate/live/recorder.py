"""A live session on disk: a journal while it runs, a canonical store when it ends.

    FOLDER/journal.jsonl   events as they happened, one line each; finals are on disk before anyone is told
    FOLDER/bins.f32        every bin that was decoded, in order, float32
    FOLDER/store/          one trial per sentence, made from the two above; live.jsonl beside its manifest

A killed server leaves the journal; the next one with the same folder goes on with it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.pronunciation import text_to_tokens
from arcuate.data.quality import QualityRow, exclusion_flags, find_problems, quality_rows
from arcuate.data.readers.source import ReadResult, is_safe_name
from arcuate.data.splits import find_leakage, hash_bins, hash_split
from arcuate.data.store import TrialInfo, trial_info
from arcuate.data.store_writer import create_store
from arcuate.data.trial import LIVE_CORPUS, SPLITS, Split, Trial
from arcuate.errors import UserError
from arcuate.files import read_jsonl, to_json_line, write_jsonl

JOURNAL, BINS, STORE, LIVE, LOCK = "journal.jsonl", "bins.f32", "store", "live.jsonl", ".lock"
KEPT = ("state", "trial", "partial", "final", "fault", "adaptation")  # kinds of events that are written down
BEGUN = "recording"  # a line for every server that recorded here, the first line among them


class Recorder:
    """Writes as things happen; belongs to the decoding thread.

    `day` is the name of the session that is recorded, where it is another than the one it is heard through.
    """

    def __init__(self, folder: Path, n_channels: int, day: str | None = None) -> None:
        self.folder = folder
        self.n_channels = n_channels
        self.day = day
        self.error: str | None = None  # why nothing is written any more
        self._latencies: list[float] = []
        refuse_foreign(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = claim(folder)
            self.finals = mend(folder, n_channels)
            self._bins = (folder / BINS).open("ab")
            self._journal = (folder / JOURNAL).open("a", encoding="utf-8")
            self.n_bins = self._bins.tell() // (4 * n_channels)
            self._write({"type": BEGUN, "n_channels": n_channels})
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None

    def add_bins(self, bins: np.ndarray) -> None:
        if self.error is not None:
            return
        with self._writing():
            self._bins.write(np.ascontiguousarray(bins, "<f4").tobytes())
            self.n_bins += len(bins)

    def note_latency(self, ms: float) -> None:
        self._latencies.append(round(ms, 3))

    def note(self, event: dict[str, Any]) -> dict[str, Any]:
        """Write an event down; a final one says where its bins are, and is safe before this returns."""
        if event["type"] == "state":
            self._latencies = []  # of frames that belong to no sentence
        if self.error is None and event["type"] in KEPT:
            with self._writing():
                event = self._placed(event)
                self._write(event)
        return {k: v for k, v in event.items() if k != "latencies_ms"}

    def close(self) -> None:
        """Everything on disk, and the store made."""
        for file in (self._bins, self._journal):
            with self._writing():
                file.close()
        try:
            seal(self.folder)
        finally:
            os.close(self._lock)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that is full or gone ends the recording, never the decoding."""
        try:
            yield
        except OSError as error:
            self.error = f"the recording in {self.folder} stopped: {error.strerror}"

    def _placed(self, event: dict[str, Any]) -> dict[str, Any]:
        if event["type"] != "final":
            return event
        latencies, self._latencies = self._latencies, []
        self._bins.flush()
        os.fsync(self._bins.fileno())
        day = {} if self.day is None else {"day": self.day}
        return {**event, **day, "first_bin": self.n_bins - event["n_bins"], "latencies_ms": latencies}

    def _write(self, event: dict[str, Any]) -> None:
        self._journal.write(to_json_line(event) + "\n")
        self._journal.flush()
        if event["type"] == "final":
            os.fsync(self._journal.fileno())


def refuse_foreign(folder: Path) -> None:
    try:
        is_foreign = folder.exists() and (
            not folder.is_dir()
            or (any(p.name != LOCK for p in folder.iterdir()) and not (folder / JOURNAL).exists())
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
    if is_foreign:
        raise UserError(f"{folder} exists and is no recording; choose another folder")
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written (see {place}); choose another folder")


def claim(folder: Path) -> int:
    """One server at a time records into a folder; the system frees the lock however its holder dies."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another server is recording into {folder}; choose another folder") from None
    except OSError:  # a file system without locks: there two servers are not told apart
        return handle
    return handle


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
    whole = "".join(to_json_line(row) + "\n" for row in rows)
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
    quality = {trial.id: quality_rows(ReadResult(trial.id, trial), find_problems(trial)) for trial in said}
    infos = [trial_info(trial, exclusion_flags(quality[trial.id]), hash_bins(trial.bins)) for trial in said]
    store = folder / STORE
    with create_store(store, n_channels, force=True) as writer:
        for session in dict.fromkeys(trial.session for trial in said):
            with writer.session(session) as out:
                for trial in (t for t in said if t.session == session):
                    out.add(trial)
        ordered = [i for s in dict.fromkeys(t.session for t in said) for i in infos if i.session == s]
        found: list[QualityRow] = [row for info in ordered for row in quality[info.id]]
        writer.write_manifest(about(said, infos), ordered, found)
        write_jsonl(writer.folder / LIVE, live_rows(rows, said))
    return store


def trials_of(folder: Path, finals: list[dict[str, Any]], n_channels: int) -> Iterator[Trial]:
    bins = np.memmap(folder / BINS, "<f4", "r").reshape(-1, n_channels)
    counts: dict[tuple[str, str], int] = {}
    for row in finals:
        session = str(row.get("day") or row["session"])
        if not is_safe_name(session):
            raise UserError(f"{folder / JOURNAL} names a session {session!r:.60}, which is no plain name")
        reference = row.get("reference")
        split: Split = "test" if reference is None else "val"  # what nobody wrote down cannot be scored
        number = counts.get((session, split), 0)
        counts[session, split] = number + 1
        tokens = None if reference is None else np.array(text_to_tokens(reference)[0], np.int32)
        first = int(row["first_bin"])
        piece = bins[max(0, first) : first + int(row["n_bins"])]  # on disk: an hour need not fit in memory
        yield Trial(session, split, number, 1, piece, tokens, reference, corpus=LIVE_CORPUS)


def about(trials: list[Trial], infos: list[TrialInfo]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    hashes: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for trial in trials:
        hashes[trial.split].append(hash_bins(trial.bins))
        texts[trial.split] += [trial.text] if trial.text else []
    usable = {split: sum(i.usable for i in infos if i.split == split) for split in SPLITS}
    return {
        "layout": "b2t25",
        "features": None,
        "splits": {split: {"trials": len(hashes[split]), "usable": usable[split]} for split in SPLITS},
        "hashes": {split: hash_split(i.sha256 for i in infos if i.split == split) for split in SPLITS},
        "leakage": find_leakage(hashes, texts),
        "recorded": "live",
    }


def live_rows(rows: list[dict[str, Any]], trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """For every sentence its text, times, partial texts, latencies and faults, by the id of its trial."""
    waiting: list[dict[str, Any]] = []
    names = iter(trials)
    for row in rows:
        if row["type"] == BEGUN:
            waiting = []  # what was half said when the server before was killed
            continue
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
