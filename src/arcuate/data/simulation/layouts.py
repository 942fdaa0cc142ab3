"""Writers of file layouts; the same recording always gives the same bytes, except for the dates in NWB files."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import yaml
from scipy.io import savemat

from arcuate.data.alphabet import encode
from arcuate.data.nwb_file import Column, Series, write_nwb
from arcuate.data.readers.release import PARTITIONS
from arcuate.data.trial import BIN_SECONDS, SPLITS, Layout, Split, session_date

FOLDERS: dict[Layout, str] = {
    "b2t25": "hdf5_data_final",
    "b2t24": "competitionData",
    "nwb": "nwb",
    "falcon-h2": "000950",
}
MAPPING_FILE = "mapping.yaml"
_PAUSE_BINS = 500  # between trials on the time axis of an NWB file
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


WriteTrial = Callable[[SimulatedTrial], None]


@contextmanager
def write_hdf5_session(out: Path, session: str) -> Iterator[WriteTrial]:
    """Brain-to-Text '25: normalised features, one HDF5 file per split, trial by trial."""
    target = out / FOLDERS["b2t25"] / session
    target.mkdir(parents=True)
    paths = {split: target / f"data_{split}.hdf5" for split in SPLITS}
    contents = {split: BytesIO() for split in SPLITS}  # in memory, because HDF5 crashes the process if the disk is full
    files = {split: h5py.File(content, "w") for split, content in contents.items()}
    normaliser = _RollingNormaliser()

    def write(trial: SimulatedTrial) -> None:
        bins = normaliser.normalise(np.concatenate([trial.counts.astype(np.float32), trial.power], axis=1), trial.block)
        _write_group(files[trial.split].create_group(f"trial_{trial.number:04d}"), bins, trial)

    yield write
    for split, file in files.items():
        is_empty = not len(file)
        file.close()
        if not is_empty:
            paths[split].write_bytes(contents[split].getbuffer())


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


@contextmanager
def write_mat_session(out: Path, session: str, rng: np.random.Generator) -> Iterator[WriteTrial]:
    """Brain-to-Text '24: raw features, one .mat file per partition, written at the end."""
    trials: dict[Split, list[SimulatedTrial]] = {split: [] for split in SPLITS}
    paths = {split: out / FOLDERS["b2t24"] / name / f"{session}.mat" for name, split in PARTITIONS.items()}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    yield lambda trial: trials[trial.split].append(trial)
    for split, members in trials.items():
        if members:
            _save_mat(paths[split], split, members, rng)


def _save_mat(path: Path, split: Split, trials: list[SimulatedTrial], rng: np.random.Generator) -> None:
    texts = [HOLDOUT_TEXT if split == "test" else trial.text for trial in trials]
    crossings = [trial.counts for trial in trials]
    columns: dict[str, np.ndarray] = {"tx1": _cells(crossings)}
    for name, kept in (("tx2", 0.55), ("tx3", 0.5), ("tx4", 0.45)):  # increasingly strict thresholds
        crossings = [rng.binomial(counts, kept).astype(np.uint8) for counts in crossings]
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


@contextmanager
def write_nwb_session(out: Path, session: str) -> Iterator[WriteTrial]:
    """NWB: threshold crossings and spike-band power in bins, one file per session, written at the end."""
    trials: list[SimulatedTrial] = []
    folder = out / FOLDERS["nwb"]
    folder.mkdir(exist_ok=True)
    yield trials.append
    order = sorted(trials, key=lambda trial: (SPLITS.index(trial.split), trial.number))
    hidden = ["" if trial.split == "test" else trial.text for trial in order]
    columns = {
        "cue": Column("sentence that was cued; empty in the test split", hidden),
        "has_text": Column("whether the sentence is known", [trial.split != "test" for trial in order]),
        "block_num": Column("block number", [trial.block for trial in order]),
        "split": Column("train, val or test", [trial.split for trial in order]),
    }
    series = {
        "threshold_crossings": Series("Threshold crossings per bin of 20 ms.", _join(order, "counts"), "count"),
        "spike_band_power": Series("Spike-band power per bin of 20 ms.", _join(order, "power"), "a.u."),
    }
    starts, stops, times = _time_axis(order)
    write_nwb(folder / f"{session}.nwb", session, series, times, (starts, stops), columns)
    mapping = {
        "bins": [f"acquisition/{name}" for name in series],
        **{"text": "cue", "block": "block_num", "split": "split"},
    }
    (folder / MAPPING_FILE).write_text(yaml.safe_dump(mapping, sort_keys=False), encoding="utf-8")


@contextmanager
def write_falcon_session(out: Path, session: str, held_out: bool) -> Iterator[WriteTrial]:
    """FALCON H2: threshold crossings only; one file per part, in which > is the space and ~ the full stop.

    As in the release, held-out sessions have no part for local validation; the private part is named as its evaluator
    expects it.
    """
    trials: dict[Split, list[SimulatedTrial]] = {split: [] for split in SPLITS}
    yield lambda trial: trials[trial.split].append(trial)
    place, recorded = "held-out" if held_out else "held-in", session_date(session)
    parts = {"calib": trials["train"], "minival": trials["val"], "eval": trials["test"]}
    if held_out:
        parts = {"calib": trials["train"], "eval": [*trials["val"], *trials["test"]]}
    for part, members in parts.items():
        if not members:
            continue
        name = f"sub-T5-{place}-{part}/sub-T5-{place}-{part}_ses-{recorded:%Y%m%d}.nwb"
        if part == "eval":
            name = f"eval/T5_{recorded:%Y.%m.%d}_{place.replace('-', '_')}_eval.nwb"
        path = out / FOLDERS["falcon-h2"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        starts, stops, times = _time_axis(members)
        columns = {
            "cue": Column("sentence participant was prompted to write", [t.text for t in members]),
            "block_num": Column("experimental block trial belonged to", [t.block for t in members]),
        }
        series = {
            "binned_spikes": Series("Threshold crossings aggregated in 20ms bins", _join(members, "counts"), "int"),
            "eval_mask": Series("Timesteps to keep covariates", np.ones(len(times), bool), "bool"),
        }
        write_nwb(path, session, series, times, (starts, stops - BIN_SECONDS), columns)


def _join(trials: Sequence[SimulatedTrial], name: str) -> np.ndarray:
    return np.concatenate([getattr(trial, name) for trial in trials])


def _time_axis(trials: Sequence[SimulatedTrial]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts and ends of the trials and starts of all bins in s, with a pause of 10 s between trials."""
    lengths = np.array([len(trial.counts) for trial in trials], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + _PAUSE_BINS)[:-1]])
    ticks = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    return BIN_SECONDS * starts, BIN_SECONDS * (starts + lengths), BIN_SECONDS * ticks


def write_description(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """The table of blocks of the '25 release."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["Date", "Post-implant day", "Block number", "Number of sentences", "Corpus", "Split"])
        table.writerows(rows)
