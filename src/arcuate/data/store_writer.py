"""Writing a store, trial by trial, to a temporary folder that is renamed when it is complete."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate.data.quality import QualityRow, hash_arrays, write_quality_csv
from arcuate.data.statistics import RunningStatistics, signed_log
from arcuate.data.store import (
    FORMAT,
    LOG_PREFIX,
    MANIFEST_FILE,
    QUALITY_FILE,
    VERSION,
    SessionInfo,
    TrialInfo,
    is_store,
    session_path,
)
from arcuate.data.trial import Trial
from arcuate.errors import UserError
from arcuate.files import DISK_FULL, exclusive_lock, explain_write_error, old_folder, replace_folder, sync

_CHUNK_BINS = 64
_SPARE_BYTES = 2**18  # for HDF5 metadata


class _StatisticsTracker:
    """Running statistics of the blocks of a session and of the trials before each trial."""

    def __init__(self, prefix: str, transform: Callable[[np.ndarray], np.ndarray], n_channels: int) -> None:
        self.prefix, self._transform, self._empty = prefix, transform, RunningStatistics.empty(n_channels)
        self._blocks: dict[tuple[str, int], RunningStatistics] = {}
        self._past: list[RunningStatistics] = []
        self._last_block: tuple[str, int] | None = None

    def add(self, trial: Trial) -> int:
        """Add a trial, after recording the statistics of the bins before it; returns the index of its block."""
        key = trial.split, trial.block
        so_far = self._blocks.setdefault(key, self._empty)
        past = so_far
        if not so_far.n_bins and self._last_block is not None and self._last_block[0] == trial.split:
            past = self._blocks[self._last_block]
        self._past.append(past)
        self._blocks[key] = so_far.merge(RunningStatistics.from_bins(self._transform(trial.bins)))
        if len(trial.bins):
            self._last_block = key
        return list(self._blocks).index(key)

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, tracked in (("block", list(self._blocks.values())), ("past", self._past)):
            statistics = [s.statistics() for s in tracked]
            arrays[f"{self.prefix}{name}_mean"] = np.stack([s.mean for s in statistics])
            arrays[f"{self.prefix}{name}_sd"] = np.stack([s.sd for s in statistics])
            arrays[f"{name}_n"] = np.asarray([s.n_bins for s in statistics], dtype="<i8")
        return arrays


class SessionWriter:
    """One session file, written trial by trial; memory does not grow with the number of bins."""

    def __init__(self, path: Path, n_channels: int) -> None:
        self._path = path
        self._file = h5py.File(path, "w")
        self._bins = self._file.create_dataset(
            "bins", shape=(0, n_channels), maxshape=(None, n_channels), chunks=(_CHUNK_BINS, n_channels), dtype="<f4"
        )
        self._n_channels = n_channels
        self._block_of: list[int] = []
        self._trackers = (
            _StatisticsTracker("", lambda bins: bins, n_channels),
            _StatisticsTracker(LOG_PREFIX, signed_log, n_channels),
        )

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
        block, *_ = [tracker.add(trial) for tracker in self._trackers]  # the same block for both
        self._block_of.append(block)

    def finish(self) -> tuple[int, str]:
        """Write the statistics and close the file; returns its size in bytes and the hash of the statistics."""
        arrays = {"block_of": np.asarray(self._block_of, dtype="<i8")}
        for tracker in self._trackers:
            arrays |= tracker.arrays()
        self._reserve(sum(array.nbytes for array in arrays.values()))
        for name, array in arrays.items():
            self._file.create_dataset(name, data=array)
        n_bytes = close_reserved(self._file)
        sync(self._path)
        return n_bytes, hash_arrays(arrays)

    def close(self) -> None:
        """Close the file, complete or not."""
        with suppress(OSError, RuntimeError, ValueError):
            self._file.close()

    def _reserve(self, n_bytes: int) -> None:
        reserve_space(self._file, n_bytes + _CHUNK_BINS * self._n_channels * 4)


def reserve_space(file: h5py.File, n_bytes: int) -> None:
    """Allocate disk space before HDF5 writes, so that a full disk raises here and not inside HDF5.

    HDF5 cannot close a file whose last write failed, and crashes the process at exit. `close_reserved` releases what
    was not used.
    """
    for needed in (_SPARE_BYTES, n_bytes + _SPARE_BYTES):  # first for what HDF5 has not written yet
        if shutil.disk_usage(Path(file.filename).parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(file.id.get_vfd_handle(), int(file.id.get_filesize()), needed)
        except (AttributeError, OSError) as error:  # not on every system and file system
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
        file.flush()


def close_reserved(file: h5py.File) -> int:
    """Close a file and release the space that was reserved for it; returns its size in bytes."""
    path = file.filename
    file.flush()
    n_bytes = int(file.id.get_filesize())
    file.close()
    os.truncate(path, n_bytes)
    return n_bytes


class StoreWriter:
    """Writes the files of a store to a temporary folder."""

    def __init__(self, folder: Path, n_channels: int) -> None:
        self.folder = folder
        self.n_channels = n_channels
        self._sessions: list[SessionInfo] = []
        (folder / "sessions").mkdir()

    @contextmanager
    def session(self, name: str) -> Iterator[SessionWriter]:
        """Write one session; no file is kept for a session without trials."""
        path = session_path(self.folder, name)
        writer = SessionWriter(path, self.n_channels)
        try:
            yield writer
            n_trials, n_bins = writer.n_trials, writer.n_bins
            if n_trials:
                self._sessions.append(SessionInfo(name, n_trials, n_bins, *writer.finish()))
        finally:
            writer.close()
        if not n_trials:
            path.unlink()

    def write_manifest(
        self, header: Mapping[str, Any], trials: Sequence[TrialInfo], quality: Sequence[QualityRow]
    ) -> None:
        write_quality_csv(self.folder / QUALITY_FILE, quality)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "n_channels": self.n_channels,
            **header,
            "sessions": [asdict(session) for session in self._sessions],
        }
        lines = [json.dumps(asdict(info), ensure_ascii=False) for info in trials]
        text = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
        rows = ",\n  ".join(lines)
        text += f',\n "trials": [\n  {rows}\n ]\n}}\n'
        (self.folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
        sync(self.folder / MANIFEST_FILE)


@contextmanager
def create_store(path: Path, n_channels: int, force: bool) -> Iterator[StoreWriter]:
    """Write a store to a temporary folder and rename it at the end; on any failure `path` is left unchanged."""
    check_store_target(path, force)
    temporary = path.parent / f".{path.name}.partial"
    lock = path.parent / f".{path.name}.lock"
    busy = f"another `arcuate prepare` is writing {path.name}; wait for it to finish"
    try:
        with exclusive_lock(lock, busy, remove=True):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            temporary.mkdir()
            try:
                yield StoreWriter(temporary, n_channels)
                check_store_target(path, force)
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()
                replace_folder(temporary, path)
                shutil.rmtree(temporary, ignore_errors=True)  # the previous store, if the two were swapped
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise explain_write_error(error, path) from error


def check_store_target(path: Path, force: bool) -> None:
    """Raise UserError unless `path` is free, or a store that `force` allows to replace."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a broken link; remove it or choose another folder")
    if not path.exists() and is_store(old_folder(path)):
        raise UserError(
            f"replacing {path} was interrupted; its previous content is in {old_folder(path)}; rename or remove that"
            " folder"
        )
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not is_store(path):
        raise UserError(f"{path} exists and is not a store; choose another folder")
    if not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another folder")
