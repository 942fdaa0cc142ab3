"""Writers of the two official file layouts; the same recording always gives the same bytes."""

import csv
import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import h5py
import numpy as np
from scipy.io import savemat

from arcuate.data.alphabet import encode
from arcuate.data.readers.b2t24 import PARTITIONS
from arcuate.data.trial import SPLITS, Split

_MAX_LABELS = 500
HOLDOUT_TEXT = "this sentence is withheld"
_MAT_HEADER = b"MATLAB 5.0 MAT-file, simulated by arcuate"
_ROLLING_TRIALS = 20
_SPARE_BYTES = 2**22  # for labels and HDF5 metadata
_PARTITION_OF: dict[Split, str] = {split: name for name, split in PARTITIONS.items()}


@dataclass(frozen=True)
class PlannedTrial:
    """One trial of a session's schedule."""

    split: Split
    number: int  # position within its file
    block: int
    order: int  # position within its block
    corpus: str
    mode: str


@dataclass(frozen=True)
class SimulatedTrial(PlannedTrial):
    """A trial with its sentence and recording."""

    session: str
    text: str
    names: list[str]  # phonemes
    onsets: np.ndarray  # (U,) of the phonemes, in bins
    counts: np.ndarray  # (T, N) uint8
    power: np.ndarray  # (T, N) float32


class SessionWriter(Protocol):
    """Writes the trials of one session; leaving the context completes the files."""

    def write(self, trial: SimulatedTrial) -> None: ...
    def __enter__(self) -> "SessionWriter": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Hdf5SessionWriter:
    """Brain-to-Text '25: normalised features, one HDF5 file per split, trial by trial."""

    folder = "hdf5_data_final"

    def __init__(self, out: Path, session: str) -> None:
        self._target = out / self.folder / session
        self._target.mkdir(parents=True)
        self._files = {split: h5py.File(self._path(split), "w") for split in SPLITS}
        self._normaliser = _RollingNormaliser()

    def __enter__(self) -> "Hdf5SessionWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for split, file in self._files.items():
            if kind is not None:  # keep the first error; the files are discarded anyway
                with suppress(OSError, RuntimeError):
                    file.close()
                continue
            empty = not len(file)
            file.close()
            if empty:
                self._path(split).unlink()

    def _path(self, split: Split) -> Path:
        return self._target / f"data_{split}.hdf5"

    def _check_free_space(self, n_bytes: int) -> None:
        """Raise before HDF5 writes, because HDF5 cannot close a file whose last write failed."""
        if shutil.disk_usage(self._target).free < n_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._target))

    def write(self, trial: SimulatedTrial) -> None:
        raw = np.concatenate([trial.counts.astype(np.float32), trial.power], axis=1)
        bins = self._normaliser.normalise(raw, trial.block)
        self._check_free_space(2 * bins.nbytes + _SPARE_BYTES)
        group = self._files[trial.split].create_group(f"trial_{trial.number:04d}")
        _dataset(group, "input_features", bins)
        group.attrs["n_time_steps"] = len(bins)
        if trial.split != "test":
            labels = np.zeros(_MAX_LABELS, np.int32)
            labels[: len(trial.names)] = encode(trial.names)
            letters = np.zeros(_MAX_LABELS, np.int32)
            letters[: len(trial.text)] = [ord(letter) for letter in trial.text]
            _dataset(group, "seq_class_ids", labels)
            _dataset(group, "transcription", letters)
            group.attrs["seq_len"] = len(trial.names)
            group.attrs["sentence_label"] = trial.text
        group.attrs["session"] = trial.session
        group.attrs["block_num"] = trial.block
        group.attrs["trial_num"] = trial.order


def _dataset(group: h5py.Group, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=values, track_times=False)


class _RollingNormaliser:
    """z-scores over the last trials of the block, including the current one, as in the '25 release."""

    def __init__(self) -> None:
        self._block: int | None = None
        self._sums: list[tuple[int, np.ndarray, np.ndarray]] = []

    def normalise(self, bins: np.ndarray, block: int) -> np.ndarray:
        if block != self._block:
            self._block, self._sums = block, []
        wide = bins.astype(np.float64)
        self._sums.append((len(bins), wide.sum(axis=0), np.square(wide).sum(axis=0)))
        self._sums = self._sums[-_ROLLING_TRIALS:]
        n = sum(part[0] for part in self._sums)
        mean = np.sum([part[1] for part in self._sums], axis=0) / n
        variance = np.sum([part[2] for part in self._sums], axis=0) / n - mean**2
        alive = variance > 1e-9 * (1 + mean**2)
        sd = np.sqrt(np.where(alive, variance, 1.0))
        scaled = np.where(alive, (bins - mean) / sd, 0.0)
        return np.clip(scaled, -10.0, 10.0).astype(np.float32)


class MatSessionWriter:
    """Brain-to-Text '24: raw features, one .mat file per partition."""

    folder = "competitionData"

    def __init__(self, out: Path, session: str, rng: np.random.Generator) -> None:
        self._session = session
        self._root = out / self.folder
        self._trials: dict[Split, list[SimulatedTrial]] = {split: [] for split in SPLITS}
        self._rng = rng
        for partition in _PARTITION_OF.values():
            (self._root / partition).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "MatSessionWriter":
        return self

    def write(self, trial: SimulatedTrial) -> None:
        self._trials[trial.split].append(trial)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for split, trials in self._trials.items():
                if trials:
                    self._save(self._root / _PARTITION_OF[split] / f"{self._session}.mat", split, trials)

    def _save(self, path: Path, split: Split, trials: list[SimulatedTrial]) -> None:
        texts = [HOLDOUT_TEXT if split == "test" else trial.text for trial in trials]
        crossings = [trial.counts for trial in trials]
        columns: dict[str, np.ndarray] = {"tx1": _cells(crossings)}
        for name, kept in (("tx2", 0.55), ("tx3", 0.5), ("tx4", 0.45)):  # increasingly strict thresholds
            crossings = [self._rng.binomial(counts, kept).astype(np.uint8) for counts in crossings]
            columns[name] = _cells(crossings)
        columns["spikePow"] = _cells([trial.power for trial in trials])
        columns["sentenceText"] = np.array(texts)
        columns["blockIdx"] = np.array([[trial.block] for trial in trials], dtype=np.float64)
        savemat(path, columns, do_compression=False)
        with path.open("r+b") as file:  # the header contains the date of writing
            file.write(_MAT_HEADER.ljust(116))


def _cells(values: list[np.ndarray]) -> np.ndarray:
    cells = np.empty((1, len(values)), dtype=object)
    for i, value in enumerate(values):
        cells[0, i] = value
    return cells


def write_description(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """The table of blocks of the '25 release."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["Date", "Post-implant day", "Block number", "Number of sentences", "Corpus", "Split"])
        table.writerows(rows)
