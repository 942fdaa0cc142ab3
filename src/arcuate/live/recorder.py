"""Recording of a live session: a journal while it runs, a store when it ends.

    FOLDER/journal.jsonl   events in order, one line each; a final text is on disk before it is published
    FOLDER/bins.f32        every decoded bin, in order, float32
    FOLDER/store/          one trial per sentence, made from the two above; live.jsonl beside its manifest

If the server is killed, the next one with the same folder continues the journal.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from arcuate.data.alphabet import CLASSES
from arcuate.data.quality import exclusion_flags, find_problems, quality_rows
from arcuate.data.readers.source import ReadResult, is_safe_name
from arcuate.data.store_writer import create_store
from arcuate.data.text import sentence_tokens
from arcuate.data.trial import LIVE_CORPUS, Split, Trial
from arcuate.errors import UserError, check_resources, escape_controls
from arcuate.files import exclusive_lock, read_jsonl, to_json_line, write_jsonl

STORE = "store"
_JOURNAL, _BINS, _LIVE, _LOCK = "journal.jsonl", "bins.f32", "live.jsonl", ".lock"
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700  # permissions: the owner only
_RECORDED_EVENTS = ("state", "trial", "partial", "final", "fault", "adaptation")
_START = "recording"  # type of the line that every server writes first


class Recorder:
    """Writes bins and events as they occur; used by the decoding thread only.

    `session` is the name under which sentences are stored, if it differs from the session whose layer decodes them.
    """

    def __init__(
        self, folder: Path, n_channels: int, session: str | None = None, classes: tuple[str, ...] = CLASSES
    ) -> None:
        self.folder = folder
        self.n_channels = n_channels
        self.session = session
        self.error: str | None = None  # why recording has stopped
        self._latencies: list[float] = []
        self._lock = ExitStack()
        check_recording_folder(folder)
        try:
            folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._lock.enter_context(
                exclusive_lock(folder / _LOCK, f"another server is recording into {folder}; choose another folder")
            )
            self.finals = _repair_recording(folder, n_channels)
            # the journal first: a folder without one is not taken for a recording
            self._journal = _open_private(folder / _JOURNAL, "a")
            self._bins = _open_private(folder / _BINS, "ab")
            self.n_bins = self._bins.tell() // (4 * n_channels)
            alphabet = {} if classes == CLASSES else {"classes": list(classes)}
            self._write({"type": _START, "n_channels": n_channels, **alphabet})
        except OSError as error:
            check_resources(error, folder)
            raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None

    def add_bins(self, bins: np.ndarray) -> None:
        if self.error is not None:
            return
        with self._stop_on_error():
            self._bins.write(np.ascontiguousarray(bins, "<f4").tobytes())
            self.n_bins += len(bins)

    def add_latency(self, ms: float) -> None:
        self._latencies.append(round(ms, 3))

    def add_event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Write an event; return it for publication. A final event contains the position of its bins and is synced."""
        if event["type"] == "state":
            self._latencies = []  # discard those of frames outside a sentence
        if self.error is None and event["type"] in _RECORDED_EVENTS:
            with self._stop_on_error():
                event = self._locate(event)
                self._write(event)
        return {k: v for k, v in event.items() if k != "latencies_ms"}

    def close(self) -> None:
        """Close all files and make the store."""
        for file in (self._bins, self._journal):
            with self._stop_on_error():
                file.close()
        with self._lock:
            try:
                make_store(self.folder)
            except UserError as error:
                raise UserError(
                    f"the sentences are in {self.folder}, but not yet in a store ({error}); to make it, start and stop"
                    f" arcuate live with --record {self.folder} again"
                ) from error

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """A full or lost disk ends the recording, not the decoding."""
        try:
            yield
        except OSError as error:
            self.error = f"the recording in {self.folder} stopped: {error.strerror}"

    def _locate(self, event: dict[str, Any]) -> dict[str, Any]:
        """Sync bins.f32, and add the position of the sentence in it to a final event."""
        if event["type"] != "final":
            return event
        latencies, self._latencies = self._latencies, []
        self._bins.flush()
        os.fsync(self._bins.fileno())
        session = {} if self.session is None else {"recorded_session": self.session}
        return {**event, **session, "first_bin": self.n_bins - event["n_bins"], "latencies_ms": latencies}

    def _write(self, event: dict[str, Any]) -> None:
        self._journal.write(to_json_line(event) + "\n")
        self._journal.flush()
        if event["type"] == "final":
            os.fsync(self._journal.fileno())


def _open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file that others cannot read: recordings contain what a person said."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, _PRIVATE_FILE)

    file = open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)  # noqa: SIM115 - closed by `close`
    path.chmod(_PRIVATE_FILE)  # made by an earlier version
    return file


def check_recording_folder(folder: Path) -> None:
    """Raise `UserError` if a folder cannot be written or contains anything but a recording."""
    try:
        in_use = folder.exists() and (
            not folder.is_dir() or (any(p.name != _LOCK for p in folder.iterdir()) and not (folder / _JOURNAL).exists())
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
    if in_use:
        raise UserError(f"{folder} exists and is not a recording; choose another folder")
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written (see {existing}); choose another folder")


def _repair_recording(folder: Path, n_channels: int) -> list[dict[str, Any]]:
    """Truncate what a killed server left incomplete; return the finals so far."""
    journal, bins = folder / _JOURNAL, folder / _BINS
    if not journal.exists():
        return []
    rows = _read_journal(journal)
    if rows and rows[0]["n_channels"] != n_channels:
        raise UserError(
            f"{folder} is a recording of {rows[0]['n_channels']} channels, but the model has {n_channels}; choose"
            " another folder"
        )
    os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    if bins.exists():
        os.truncate(bins, bins.stat().st_size // (4 * n_channels) * 4 * n_channels)
    return [row for row in rows if row["type"] == "final"]


def _storable(text: Any) -> Any:
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text


_Text = Annotated[str, BeforeValidator(_storable)]  # a lone surrogate is no damage: the store escapes it


class _Start(BaseModel):
    """What the first line of a journal must contain."""

    type: Literal["recording"]
    n_channels: int = Field(ge=1, le=2**40)
    classes: list[Annotated[str, Field(min_length=1)]] = Field(list(CLASSES), min_length=2)


class _Final(BaseModel):
    """What the store needs of a final event."""

    session: _Text
    recorded_session: _Text | None = None
    trial: _Text | None
    reference: _Text | None = None
    text: _Text
    words: list[_Text]
    n_bins: int = Field(ge=0, le=2**40)
    first_bin: int = Field(ge=-(2**40), le=2**40)


def _read_journal(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal. What the store is made of is checked; the file may be damaged or hostile."""
    rows = list(read_jsonl(path, growing=True))
    for number, row in enumerate(rows, start=1):
        is_stored = row.get("type") == "final" and row.get("n_bins") != 0
        kind: type[BaseModel] | None = _Start if number == 1 else _Final if is_stored else None
        try:
            if not isinstance(row.get("type"), str):
                raise ValueError("type")
            if kind is not None:
                kind.model_validate(row, strict=True)
        except ValueError:
            raise UserError(f"{path} line {number} is not a line of a recording; repair or remove it") from None
    return rows


# --- the store of a recording ------------------------------------------------------------------------------------


def make_store(folder: Path) -> Path | None:
    """Make the store of a recording from its journal; None if it has no sentence."""
    rows = _read_journal(folder / _JOURNAL)
    n_channels = int(rows[0]["n_channels"]) if rows else 0
    classes = tuple(rows[0].get("classes", CLASSES)) if rows else CLASSES
    finals = [row for row in rows if row["type"] == "final" and row["n_bins"] > 0]
    if not finals:
        return None
    trials = list(_read_trials(folder, finals, n_channels, classes))
    sessions = list(dict.fromkeys(trial.session for trial in trials))
    quality = {trial.id: quality_rows(ReadResult(trial.id, trial), find_problems(trial)) for trial in trials}
    store = folder / STORE
    with create_store(store, n_channels, force=True) as writer:
        writer.folder.chmod(_PRIVATE_FOLDER)
        for trial in sorted(trials, key=lambda trial: sessions.index(trial.session)):
            writer.add(trial, exclusion_flags(quality[trial.id]))
        writer.finish("b2t25", classes, [row for info in writer.trials for row in quality[info.id]])
        write_jsonl(writer.folder / _LIVE, _sentence_rows(rows, trials))
        for path in writer.folder.rglob("*"):
            path.chmod(_PRIVATE_FOLDER if path.is_dir() else _PRIVATE_FILE)
    return store


def _read_trials(
    folder: Path, finals: list[dict[str, Any]], n_channels: int, classes: tuple[str, ...]
) -> Iterator[Trial]:
    bins = _map_bins(folder / _BINS, n_channels)
    counts: dict[tuple[str, str], int] = {}
    for row in finals:
        session = str(row.get("recorded_session") or row["session"])
        if not is_safe_name(session):
            raise UserError(f"{folder / _JOURNAL} has an invalid session name {session!r:.60}")
        reference = row.get("reference")
        reference = None if reference is None else escape_controls(reference)  # HDF5 holds no NUL
        split: Split = "test" if reference is None else "val"  # without a reference it cannot be scored
        number = counts.get((session, split), 0)
        counts[session, split] = number + 1
        label = None if reference is None else sentence_tokens(reference, classes)
        tokens = None if label is None else np.array(label, np.int32)
        first = max(0, row["first_bin"])
        part = bins[first : row["first_bin"] + row["n_bins"]]  # memory-mapped: may exceed the memory
        if not len(part) or row["first_bin"] + row["n_bins"] > len(bins):
            raise UserError(f"{folder / _BINS} has {len(bins)} bins, but sentence {row.get('number')} ends after them")
        if not np.isfinite(part).all():
            raise UserError(f"{folder / _BINS} is damaged: bins of sentence {row.get('number')} are not finite")
        yield Trial(session, split, number, 1, part, tokens, reference, corpus=LIVE_CORPUS)


def _map_bins(path: Path, n_channels: int) -> np.ndarray:
    """Memory-map the complete bins of a recording; a full disk or a kill may leave a part of one after them."""
    try:
        n_bins = path.stat().st_size // (4 * n_channels)
        if not n_bins:
            return np.empty((0, n_channels), np.float32)
        return np.memmap(path, "<f4", "r", shape=(n_bins, n_channels))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def _sentence_rows(rows: list[dict[str, Any]], trials: list[Trial]) -> Iterator[dict[str, Any]]:
    """For every sentence its text, times, partial texts, latencies and faults, with the id of its trial."""
    pending: list[dict[str, Any]] = []
    remaining = iter(trials)
    for row in rows:
        if row["type"] == _START:
            pending = []  # discard those of a sentence that a killed server did not finish
            continue
        if row["type"] != "final":
            pending.append(row)
            continue
        partials = [{k: p.get(k) for k in ("at", "words", "n_settled")} for p in pending if p["type"] == "partial"]
        faults = [p for p in pending if p["type"] == "fault"]
        pending = []
        if row["n_bins"] > 0:
            trial = {"id": next(remaining).id, "source_trial": row["trial"]}
            yield {**row, **trial, "partials": partials, "faults": faults}
