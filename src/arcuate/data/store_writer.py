"""Writing a store, trial by trial, to a temporary folder that is renamed when it is complete."""

from collections.abc import Callable, Iterator, Sequence
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
    is_store,
    session_path,
    statistics_path,
)
from arcuate.data.trial import Layout, Trial
from arcuate.errors import UserError
from arcuate.files import locked_folder, old_folder, sync


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


class ManifestBuilder:
    """Collects the entries of a manifest trial by trial."""

    def __init__(self, n_channels: int) -> None:
        self.n_channels = n_channels
        self.trials: list[TrialInfo] = []
        self._bins_hashes: dict[str, list[bytes]] = {}  # by split
        self._statistics: dict[str, str] = {}  # hash of the statistics of each session

    def add(self, trial: Trial, flags: tuple[str, ...] = ()) -> None:
        """Add a trial; `flags` are the reasons that exclude it from training."""
        bins_hash = hash_bins(trial.bins)
        if len(trial.bins):
            self._bins_hashes.setdefault(trial.split, []).append(bins_hash)
        self._statistics.setdefault(trial.session, "")
        self.trials.append(trial_info(trial, flags, bins_hash))

    def finish(
        self,
        layout: Layout,
        classes: Sequence[str],
        quality: Sequence[QualityRow] = (),
        *,
        features: str | None = None,
        simulated: bool = False,
    ) -> Manifest:
        """The manifest, after the last trial."""
        texts: dict[str, list[str]] = {}
        for info in self.trials:
            if info.text:
                texts.setdefault(info.split, []).append(info.text)
        return Manifest(
            layout=layout,
            features=features,
            simulated=simulated,
            n_channels=self.n_channels,
            classes=tuple(classes),
            leakage=find_leakage(self._bins_hashes, texts),
            statistics=self._statistics,
            trials=tuple(self.trials),
        )


class StoreWriter(ManifestBuilder):
    """Writes a store trial by trial; memory does not grow with the number of bins.

    The trials of a session are added one after another.
    """

    def __init__(self, folder: Path, n_channels: int) -> None:
        super().__init__(n_channels)
        self.folder = folder
        self._session: _SessionWriter | None = None
        (folder / "sessions").mkdir()

    def add(self, trial: Trial, flags: tuple[str, ...] = ()) -> None:
        if self._session is None or self._session.name != trial.session:
            self._end_session()
            if trial.session in self._statistics:
                raise ValueError(f"the trials of session {trial.session} are not added one after another")
            self._session = _SessionWriter(self.folder, trial.session, self.n_channels)
        self._session.add(trial)
        super().add(trial, flags)

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
        manifest = super().finish(layout, classes, features=features, simulated=simulated)
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


def trial_info(trial: Trial, flags: tuple[str, ...], bins_hash: bytes) -> TrialInfo:
    """The manifest entry of a trial, given its quality flags and the hash of its bins."""
    tokens = None if trial.tokens is None else tuple(int(token) for token in trial.tokens)
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
        sha256=hash_trial(bins_hash, tokens, trial.text),
    )


class _SessionWriter:
    """The two files of one session."""

    def __init__(self, store: Path, name: str, n_channels: int) -> None:
        self.name, self._store, self._n_channels = name, store, n_channels
        self._file = session_path(store, name).open("xb")
        self._file.write(_array_header(0, n_channels))
        self._n_bins = 0
        self._block_of: list[int] = []
        self._trackers = (
            _StatisticsTracker("", lambda bins: bins, n_channels),
            _StatisticsTracker(LOG_PREFIX, signed_log, n_channels),
        )

    def add(self, trial: Trial) -> None:
        self._file.write(np.ascontiguousarray(trial.bins, "<f4").data)
        self._n_bins += len(trial.bins)
        block, *_ = [tracker.add(trial) for tracker in self._trackers]  # the same block for both
        self._block_of.append(block)

    def finish(self) -> str:
        """Complete the array and write the statistics; returns their hash."""
        self._file.seek(0)
        self._file.write(_array_header(self._n_bins, self._n_channels))
        self.close()
        arrays = {"block_of": np.asarray(self._block_of, dtype="<i8")}
        for tracker in self._trackers:
            arrays |= tracker.arrays()
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


class _StatisticsTracker:
    """Running statistics of the blocks of a session and of the trials before each trial."""

    def __init__(self, prefix: str, transform: Callable[[np.ndarray], np.ndarray], n_channels: int) -> None:
        self._prefix, self._transform, self._empty = prefix, transform, RunningStatistics.empty(n_channels)
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
            arrays[f"{self._prefix}{name}_mean"] = np.stack([s.mean for s in statistics])
            arrays[f"{self._prefix}{name}_sd"] = np.stack([s.sd for s in statistics])
            arrays[f"{name}_n"] = np.asarray([s.n_bins for s in statistics], dtype="<i8")
        return arrays
