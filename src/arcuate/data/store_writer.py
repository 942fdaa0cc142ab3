"""Writing a store, trial by trial, to a temporary folder that is renamed when it is complete."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np

from arcuate.data.quality import QualityRow, find_leakage, hash_bins, hash_trial, write_quality_csv
from arcuate.data.statistics import RunningStatistics, signed_log
from arcuate.data.store import (
    HEADER_BYTES,
    LOG_PREFIX,
    MANIFEST_FILE,
    QUALITY_FILE,
    Manifest,
    TrialInfo,
    check_replaced,
    is_store,
    session_path,
    statistics_path,
)
from arcuate.data.trial import Layout, Trial
from arcuate.errors import UserError
from arcuate.files import locked_folder, sync


@contextmanager
def create_store(path: Path, n_channels: int, force: bool = False) -> Iterator["StoreWriter"]:
    """Write a store to a temporary folder and rename it at the end; on any failure `path` is left unchanged."""
    check_store_target(path, force)
    with locked_folder(path) as folder:
        writer = StoreWriter(folder, n_channels)
        try:
            yield writer
        finally:
            writer.close()
        check_store_target(path, force)


def check_store_target(path: Path, force: bool) -> None:
    """Raise UserError unless `path` is free, or a store that `force` allows to replace."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a broken link; remove it or choose another folder")
    check_replaced(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not is_store(path):
        raise UserError(f"{path} exists and is not a store; choose another folder")
    if not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another folder")


class StoreWriter:
    """Writes a store trial by trial, those of a session one after another; memory does not grow with the bins.

    A dry run only makes the manifest.
    """

    def __init__(self, folder: Path, n_channels: int, dry_run: bool = False) -> None:
        self.folder, self.n_channels, self._dry_run = folder, n_channels, dry_run
        self.trials: list[TrialInfo] = []
        self._bins_hashes: dict[str, list[bytes]] = {}  # by split
        self._statistics: dict[str, str] = {}  # hash of the statistics of each session
        self._session: _SessionWriter | None = None
        if not dry_run:
            (folder / "sessions").mkdir()

    def add(self, trial: Trial, flags: tuple[str, ...] = ()) -> None:
        """Add a trial; `flags` are the reasons that exclude it from training."""
        if trial.session not in self._statistics:
            self._end_session()
            self._statistics[trial.session] = ""
            if not self._dry_run:
                self._session = _SessionWriter(self.folder, trial.session, self.n_channels)
        elif self.trials[-1].session != trial.session:
            raise ValueError(f"the trials of session {trial.session} are not added one after another")
        if self._session is not None:
            self._session.add(trial)
        bins_hash = hash_bins(trial.bins)
        if len(trial.bins):
            self._bins_hashes.setdefault(trial.split, []).append(bins_hash)
        tokens = None if trial.tokens is None else tuple(int(token) for token in trial.tokens)
        info = TrialInfo(
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
            sha256=hash_trial(bins_hash, tokens, trial.text),
        )
        self.trials.append(info)

    def finish(
        self,
        layout: Layout,
        classes: Sequence[str],
        quality: Sequence[QualityRow] = (),
        *,
        features: str | None = None,
        simulated: bool = False,
    ) -> Manifest:
        """Write the manifest and the table of quality cases, after the last trial."""
        self._end_session()
        texts: dict[str, list[str]] = {}
        for info in self.trials:
            if info.text:
                texts.setdefault(info.split, []).append(info.text)
        manifest = Manifest(
            layout=layout,
            features=features,
            simulated=simulated,
            n_channels=self.n_channels,
            classes=tuple(classes),
            leakage=find_leakage(self._bins_hashes, texts),
            statistics=self._statistics,
            trials=tuple(self.trials),
        )
        if not self._dry_run:
            write_quality_csv(self.folder / QUALITY_FILE, quality)
            (self.folder / MANIFEST_FILE).write_text(manifest.to_text(), encoding="utf-8")
            for path in (self.folder / QUALITY_FILE, self.folder / MANIFEST_FILE):
                sync(path)
        return manifest

    def close(self) -> None:
        """Close the files, complete or not."""
        if self._session is not None:
            self._session.close()

    def _end_session(self) -> None:
        if self._session is not None:
            self._statistics[self._session.name] = self._session.finish()
            self._session = None


class _SessionWriter:
    """The two files of one session: bins, and statistics of its blocks and of the bins before each trial."""

    def __init__(self, store: Path, name: str, n_channels: int) -> None:
        self.name, self._store, self._n_channels = name, store, n_channels
        self._file = session_path(store, name).open("xb")
        self._file.write(_array_header(0, n_channels))
        self._n_bins = 0
        # of the bins, then of their logarithms, as if these were further channels
        self._blocks: dict[tuple[str, int], RunningStatistics] = {}
        self._block_of: list[int] = []
        self._past: list[RunningStatistics] = []
        self._last_block: tuple[str, int] | None = None

    def add(self, trial: Trial) -> None:
        self._file.write(np.ascontiguousarray(trial.bins, "<f4").data)
        self._n_bins += len(trial.bins)
        key = trial.split, trial.block
        so_far = self._blocks.setdefault(key, RunningStatistics.empty(2 * self._n_channels))
        is_first = not so_far.n_bins and self._last_block is not None and self._last_block[0] == trial.split
        self._past.append(self._blocks[self._last_block] if is_first and self._last_block else so_far)
        both = np.concatenate([trial.bins, signed_log(trial.bins)], axis=1)
        self._blocks[key] = so_far.merge(RunningStatistics.from_bins(both))
        if len(trial.bins):
            self._last_block = key
        self._block_of.append(list(self._blocks).index(key))

    def finish(self) -> str:
        """Complete the array and write the statistics; returns their hash."""
        self._file.seek(0)
        self._file.write(_array_header(self._n_bins, self._n_channels))
        self.close()
        arrays = {"block_of": np.asarray(self._block_of, dtype="<i8")}
        for prefix, columns in (("", slice(self._n_channels)), (LOG_PREFIX, slice(self._n_channels, None))):
            for name, tracked in (("block", list(self._blocks.values())), ("past", self._past)):
                found = [running.statistics() for running in tracked]
                arrays[f"{prefix}{name}_mean"] = np.stack([s.mean[columns] for s in found])
                arrays[f"{prefix}{name}_sd"] = np.stack([s.sd[columns] for s in found])
                arrays[f"{name}_n"] = np.asarray([s.n_bins for s in found], dtype="<i8")
        path = statistics_path(self._store, self.name)
        with path.open("xb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        for written in (session_path(self._store, self.name), path):
            sync(written)
        return sha256(path.read_bytes()).hexdigest()

    def close(self) -> None:
        self._file.close()


def _array_header(n_bins: int, n_channels: int) -> bytes:
    """The header of an .npy file (NumPy Enhancement Proposal 1), of one size for every number of bins."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_bins}, {n_channels}), }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + f"{text:<{HEADER_BYTES - 11}}\n".encode()
