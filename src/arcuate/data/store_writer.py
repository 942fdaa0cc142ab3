"""Writing a store: aside, trial by trial, and put in place only when it is whole."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate.data.quality import QualityRow, write_quality_csv
from arcuate.data.statistics import RunningStatistics, signed_log
from arcuate.data.store import (
    FORMAT,
    LOG_PREFIX,
    MANIFEST_FILE,
    QUALITY_FILE,
    VERSION,
    TrialInfo,
    is_store,
    session_path,
)
from arcuate.data.trial import Trial
from arcuate.errors import UserError

_CHUNK_BINS = 64
_SPARE = 2**18  # bytes for HDF5's own bookkeeping

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Track:
    """Statistics of the blocks of a session as its trials go by, of the bins or of their logarithms."""

    def __init__(self, prefix: str, view: Callable[[np.ndarray], np.ndarray], n_channels: int) -> None:
        self.prefix, self._view, self._empty = prefix, view, RunningStatistics.empty(n_channels)
        self._blocks: dict[tuple[str, int], RunningStatistics] = {}
        self._past: list[RunningStatistics] = []
        self._last: tuple[str, int] | None = None

    def add(self, trial: Trial) -> int:
        """Take in a trial; what came before it is kept before it counts itself. Gives the index of its block."""
        key = trial.split, trial.block
        so_far = self._blocks.setdefault(key, self._empty)
        past = so_far
        if not so_far.n_bins and self._last is not None and self._last[0] == trial.split:
            past = self._blocks[self._last]
        self._past.append(past)
        self._blocks[key] = so_far.merge(RunningStatistics.from_bins(self._view(trial.bins)))
        if len(trial.bins):
            self._last = key
        return list(self._blocks).index(key)

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, moments in (("block", list(self._blocks.values())), ("past", self._past)):
            found = [m.statistics() for m in moments]
            arrays[f"{self.prefix}{name}_mean"] = np.stack([s.mean for s in found])
            arrays[f"{self.prefix}{name}_sd"] = np.stack([s.sd for s in found])
            arrays[f"{name}_n"] = np.asarray([s.n_bins for s in found], dtype="<i8")
        return arrays


class SessionWriter:
    """One session file, filled trial by trial; memory does not grow with the bins."""

    def __init__(self, path: Path, n_channels: int) -> None:
        self._path = path
        self._file = h5py.File(path, "w")
        self._bins = self._file.create_dataset(
            "bins",
            shape=(0, n_channels),
            maxshape=(None, n_channels),
            chunks=(_CHUNK_BINS, n_channels),
            dtype="<f4",
        )
        self._n_channels = n_channels
        self._block_of: list[int] = []
        self._tracks = (_Track("", lambda bins: bins, n_channels), _Track(LOG_PREFIX, signed_log, n_channels))

    @property
    def n_trials(self) -> int:
        return len(self._block_of)

    @property
    def n_bins(self) -> int:
        return int(self._bins.shape[0])

    def add(self, trial: Trial) -> None:
        n_before, n_bins = self.n_bins, len(trial.bins)
        self._reserve(trial.bins.nbytes)
        self._bins.resize(n_before + n_bins, axis=0)
        if n_bins:
            self._bins[n_before:] = trial.bins
        block, *_ = [track.add(trial) for track in self._tracks]  # the same for all of them
        self._block_of.append(block)

    def finish(self) -> int:
        """Write the statistics and close; gives the size of the file in bytes."""
        arrays = {"block_of": np.asarray(self._block_of, dtype="<i8")}
        for track in self._tracks:
            arrays |= track.arrays()
        self._reserve(sum(array.nbytes for array in arrays.values()))
        for name, array in arrays.items():
            self._file.create_dataset(name, data=array)
        self._file.flush()
        n_bytes = int(self._file.id.get_filesize())
        self._file.close()
        os.truncate(self._path, n_bytes)  # gives back what was reserved and not needed
        _sync(self._path)
        return n_bytes

    def abandon(self) -> None:
        with suppress(OSError, RuntimeError, ValueError):
            self._file.close()

    def _reserve(self, n_bytes: int) -> None:
        """Take the disk space before HDF5 writes: a full disk then stops us here, not half-way inside HDF5.

        HDF5 cannot close a file whose last write failed, and brings the process down when it exits.
        """
        self._file.flush()
        end = int(self._file.id.get_filesize())
        row = self._n_channels * 4
        needed = n_bytes + _CHUNK_BINS * row + _SPARE
        try:
            os.posix_fallocate(self._file.id.get_vfd_handle(), end, needed)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            if shutil.disk_usage(self._path.parent).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


class StoreWriter:
    """A store in the making, in a folder beside its final place."""

    def __init__(self, folder: Path, n_channels: int) -> None:
        self.folder = folder
        self.n_channels = n_channels
        self._sessions: list[dict[str, Any]] = []
        (folder / "sessions").mkdir()

    @contextmanager
    def session(self, name: str) -> Iterator[SessionWriter]:
        """Write one session; a session without trials leaves no file."""
        path = session_path(self.folder, name)
        writer = SessionWriter(path, self.n_channels)
        try:
            yield writer
            n_trials, n_bins = writer.n_trials, writer.n_bins
            if n_trials:
                n_bytes = writer.finish()
                self._sessions.append(
                    {"name": name, "n_trials": n_trials, "n_bins": n_bins, "n_bytes": n_bytes}
                )
        finally:
            writer.abandon()
        if not n_trials:
            path.unlink()

    def write_manifest(
        self, about: dict[str, Any], trials: Sequence[TrialInfo], quality: Sequence[QualityRow]
    ) -> None:
        write_quality_csv(self.folder / QUALITY_FILE, quality)
        head = {
            "format": FORMAT,
            "version": VERSION,
            "n_channels": self.n_channels,
            **about,
            "sessions": self._sessions,
        }
        lines = [json.dumps(asdict(info), ensure_ascii=False) for info in trials]
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
        listed = ",\n  ".join(lines)
        text += f',\n "trials": [\n  {listed}\n ]\n}}\n'
        (self.folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
        _sync(self.folder / MANIFEST_FILE)


@contextmanager
def create_store(path: Path, n_channels: int, force: bool) -> Iterator[StoreWriter]:
    """Write a store aside and put it in place at the end; on any failure the place is left as it was."""
    check_store_target(path, force)
    aside = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(aside):
            try:
                yield StoreWriter(aside, n_channels)
                _put_in_place(aside, path, force)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
    except OSError as error:
        raise UserError(_explain(error, path)) from error


def check_store_target(path: Path, force: bool) -> None:
    """Never mix with what is there, and replace nothing that is not a store."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link to nothing; remove it or choose another folder")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not is_store(path):
        raise UserError(f"{path} exists and is not a store; choose another folder")
    if not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another folder")


@contextmanager
def _claimed(aside: Path) -> Iterator[None]:
    """Hold the folder aside for this process alone; what a killed process left there is removed."""
    lock = aside.with_suffix(".lock")
    handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _lock(handle, aside)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(handle)


def _lock(handle: int, aside: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two preparations of one store at a time are not told apart there
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        place = aside.name.removeprefix(".").removesuffix(".partial")
        raise UserError(f"another `arcuate prepare` is writing {place}; wait for it to finish") from error


def _put_in_place(aside: Path, path: Path, force: bool) -> None:
    check_store_target(path, force)
    if not path.exists():
        aside.rename(path)
        return
    if not any(path.iterdir()):
        path.rmdir()
        aside.rename(path)
        return
    old = path.parent / f".{path.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    try:
        aside.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _explain(error: OSError, path: Path) -> str:
    if error.errno in _FULL or "No space left" in str(error):
        return f"the disk is full; free some space and prepare {path} again (nothing was left behind)"
    reason = error.strerror or " ".join(str(error).split())
    return f"cannot write {path}: {reason}; check the folder and its rights"
