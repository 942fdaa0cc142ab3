"""Writers of file layouts; the same recording always gives the same bytes, except for the dates in NWB files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
from scipy.io import savemat

from arcuate.data.alphabet import encode
from arcuate.data.nwb_file import Column, Series, trial_times, write_nwb
from arcuate.data.readers.release import PARTITIONS
from arcuate.data.trial import BIN_SECONDS, SPLITS, Layout, Split, session_date

_MAX_LABELS = 500
HOLDOUT_TEXT = "this sentence is withheld"
_MAT_HEADER = b"MATLAB 5.0 MAT-file, simulated by arcuate"
_ROLLING_TRIALS = 20


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


def write_b2t25(folder: Path, trials: Sequence[SimulatedTrial], rng: np.random.Generator) -> None:
    """Brain-to-Text '25: normalised features, one HDF5 file per split of the session."""
    target = folder / trials[0].session
    target.mkdir(parents=True)
    normalised = _normalise(trials)
    for split in SPLITS:
        members = [i for i, trial in enumerate(trials) if trial.split == split]
        content = BytesIO()  # in memory first, because HDF5 crashes the process if the disk is full
        with h5py.File(content, "w") as file:
            for i in members:
                _write_group(file.create_group(f"trial_{trials[i].number:04d}"), normalised[i], trials[i])
        if members:
            (target / f"data_{split}.hdf5").write_bytes(content.getbuffer())


def _write_group(group: h5py.Group, bins: np.ndarray, trial: SimulatedTrial) -> None:
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


def _normalise(trials: Sequence[SimulatedTrial]) -> list[np.ndarray]:
    """z-scores over the last trials of the block, including the current one, as in the '25 release."""
    normalised: list[np.ndarray] = []
    recent: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # block, bins, sums and sums of squares of trials
    for trial in trials:
        bins = np.concatenate([trial.counts.astype(np.float32), trial.power], axis=1)
        wide = bins.astype(np.float64)
        recent = [part for part in recent if part[0] == trial.block][1 - _ROLLING_TRIALS :]
        recent.append((trial.block, len(bins), wide.sum(axis=0), np.square(wide).sum(axis=0)))
        n = sum(part[1] for part in recent)
        mean = np.sum([part[2] for part in recent], axis=0) / n
        variance = np.sum([part[3] for part in recent], axis=0) / n - mean**2
        alive = variance > 1e-9 * (1 + mean**2)
        scaled = np.where(alive, (bins - mean) / np.sqrt(np.where(alive, variance, 1.0)), 0.0)
        normalised.append(np.clip(scaled, -10.0, 10.0).astype(np.float32))
    return normalised


def write_b2t24(folder: Path, trials: Sequence[SimulatedTrial], rng: np.random.Generator) -> None:
    """Brain-to-Text '24: raw features, one .mat file per partition; `rng` draws the stricter thresholds."""
    for name in PARTITIONS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        members = [trial for trial in trials if trial.split == split]
        name = next(name for name, of_split in PARTITIONS.items() if of_split == split)
        if members:
            _save_mat(folder / name / f"{trials[0].session}.mat", members, rng)


def _save_mat(path: Path, trials: list[SimulatedTrial], rng: np.random.Generator) -> None:
    crossings = [trial.counts for trial in trials]
    columns: dict[str, np.ndarray] = {"tx1": _cells(crossings)}
    for name, kept in (("tx2", 0.55), ("tx3", 0.5), ("tx4", 0.45)):  # increasingly strict thresholds
        crossings = [rng.binomial(counts, kept).astype(np.uint8) for counts in crossings]
        columns[name] = _cells(crossings)
    columns["spikePow"] = _cells([trial.power for trial in trials])
    columns["sentenceText"] = np.array([HOLDOUT_TEXT if trial.split == "test" else trial.text for trial in trials])
    columns["blockIdx"] = np.array([[trial.block] for trial in trials], dtype=np.float64)
    savemat(path, columns, do_compression=False)
    with path.open("r+b") as file:  # the header contains the date of writing
        file.write(_MAT_HEADER.ljust(116))


def _cells(values: list[np.ndarray]) -> np.ndarray:
    cells = np.empty((1, len(values)), dtype=object)
    for i, value in enumerate(values):
        cells[0, i] = value
    return cells


def write_falcon(folder: Path, trials: Sequence[SimulatedTrial], rng: np.random.Generator) -> None:
    """FALCON H2: threshold crossings only; one file per part, in which > is the space and ~ the full stop.

    As in the release, held-out sessions have no part for local validation; the private part is named as its evaluator
    expects it.
    """
    session = trials[0].session
    is_held_out = session.partition(".")[2] in FALCON_HELD_OUT
    place, recorded = "held-out" if is_held_out else "held-in", session_date(session)
    splits: dict[str, tuple[Split, ...]] = {"calib": ("train",), "minival": ("val",), "eval": ("test",)}
    if is_held_out:
        splits = {"calib": ("train",), "eval": ("val", "test")}
    for part, chosen in splits.items():
        members = [trial for split in chosen for trial in trials if trial.split == split]
        name = f"sub-T5-{place}-{part}/sub-T5-{place}-{part}_ses-{recorded:%Y%m%d}.nwb"
        if part == "eval":
            name = f"eval/T5_{recorded:%Y.%m.%d}_{place.replace('-', '_')}_eval.nwb"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        starts, stops, times = trial_times([len(trial.counts) for trial in members])
        columns = {
            "cue": Column("sentence participant was prompted to write", [t.text for t in members]),
            "block_num": Column("experimental block trial belonged to", [t.block for t in members]),
        }
        counts = np.concatenate([trial.counts for trial in members])
        series = {
            "binned_spikes": Series("Threshold crossings aggregated in 20ms bins", counts, "int"),
            "eval_mask": Series("Timesteps to keep covariates", np.ones(len(times), bool), "bool"),
        }
        write_nwb(path, session, series, times, (starts, stops - BIN_SECONDS), columns, identifier=path.stem)


# Sessions of FALCON H2, whose evaluator accepts no other dates.
FALCON_HELD_IN = (
    "2022.05.18 2022.05.23 2022.05.25 2022.06.01 2022.06.03 2022.06.06 2022.06.08 2022.06.13 2022.06.15 2022.06.22"
    " 2022.09.01 2022.09.29 2022.10.06 2022.10.18 2022.10.25 2022.10.27 2022.11.01 2022.11.03 2022.12.08 2022.12.15"
    " 2023.02.28"
).split()
FALCON_HELD_OUT = "2023.04.17 2023.05.31 2023.06.28 2023.08.16 2023.10.09".split()

# By layout: the folder of the recordings, and the function that writes the trials of a session to it.
WRITERS: dict[Layout, tuple[str, Callable[[Path, Sequence[SimulatedTrial], np.random.Generator], None]]] = {
    "b2t25": ("hdf5_data_final", write_b2t25),
    "b2t24": ("competitionData", write_b2t24),
    "falcon-h2": ("000950", write_falcon),
}
