"""Simulated against real recordings: the statistics the simulator is calibrated to.

    python benchmarks/simulator_statistics.py [--markdown FILE] [--seed N]

The real column is measured again if the real trials are beside the checkout (`../shared/real`); otherwise it
shows the values stored in this file.
"""

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np
from scipy.io import loadmat
from scipy.stats import kurtosis, skew

from arcuate.data.simulation import simulate
from arcuate.data.text import pronounce

SHARED = Path(__file__).resolve().parents[2] / "shared" / "real"
T15_TRIAL = SHARED / "t15_trial" / "hdf5_data_final" / "t15.2023.08.11" / "data_train.hdf5"
T12_TRIAL = SHARED / "t12_trial" / "t12.2022.04.28_train_trial10.npz"
T12_LENGTHS = SHARED / "t12_trial" / "t12.2022.04.28_train_frame_lens.csv"

PUBLISHED = {
    "crossing rate, Hz": "26.5 (4.5–65.8)",
    "Fano factor": "1.18 (0.92–1.47)",
    "largest count in a bin": "10",
    "lag-1 autocorrelation, crossings": "0.016 (-0.130–0.243)",
    "lag-1 autocorrelation, power": "0.112 (-0.115–0.380)",
    "lag-5 autocorrelation, crossings": "0.080 (-0.044–0.267)",
    "lag-5 autocorrelation, power": "0.182 (-0.012–0.431)",
    "crossings–power correlation": "0.78 (0.41–0.90)",
    "pairwise correlation of crossings": "0.010 (-0.087–0.125)",
    "variance left after smoothing": "0.247",
    "z-scored: SD": "1.00",
    "z-scored: min": "-2.4",
    "z-scored: max": "10.0",
    "z-scored: skew": "1.68",
    "z-scored: excess kurtosis": "4.40",
    "power, coefficient of variation": "0.58 (0.26–1.14)",
    "time per phoneme, ms": "254 (212–318)",
    "correlation of length with phonemes": "0.92",
    "words per sentence": "6.3",
    "phonemes per sentence": "28.1",
    "trial length, bins": "mean 312, median 295, max 919",
}
SOURCES = dict.fromkeys(list(PUBLISHED)[-6:], "T12")

Summary = dict[str, str]


def middle(values: Iterable[float], digits: int) -> str:
    low, median, high = np.quantile(np.asarray(list(values)), [0.05, 0.5, 0.95])
    return f"{median:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def recover_counts(z: np.ndarray) -> np.ndarray:
    """Integer counts of one electrode from z-scored crossings, whose levels are equally spaced."""
    levels = np.unique(z[z < 10])
    if len(levels) < 2:
        return np.zeros_like(z)
    return np.round((z - levels[0]) / np.diff(levels).min())


def autocorrelation(x: np.ndarray, lag: int) -> np.ndarray:
    centred = x - x.mean(axis=0)
    return (centred[lag:] * centred[:-lag]).mean(axis=0) / x.var(axis=0)


def smooth(x: np.ndarray) -> np.ndarray:
    taps = np.exp(-0.5 * (np.arange(-4, 5) / 2.0) ** 2)
    return np.apply_along_axis(np.convolve, 0, x, taps / taps.sum(), mode="valid")


def describe_bins(trials: list[np.ndarray]) -> Summary:
    """Statistics of z-scored trials (T, 2N): crossings, then power. Pools electrodes of all trials."""
    pooled: dict[str, list[float]] = {}

    def pool(name: str, values: Iterable[float]) -> None:
        pooled.setdefault(name, []).extend(np.ravel(np.asarray(values)).tolist())

    smoothed = []
    for bins in trials:
        n = bins.shape[1] // 2
        alive = (bins[:, :n].std(axis=0) > 0) & (bins[:, n:].std(axis=0) > 0)
        crossings, power = bins[:, :n][:, alive], bins[:, n:][:, alive]
        counts = np.stack([recover_counts(crossings[:, i]) for i in range(crossings.shape[1])], axis=1)
        pool("rate", counts.mean(axis=0) / 0.02)
        active = counts.mean(axis=0) > 0
        pool("fano", counts.var(axis=0)[active] / counts.mean(axis=0)[active])
        pool("max", [counts[:, counts.max(axis=0) < 20].max()])
        for lag in (1, 5):
            pool(f"crossings {lag}", autocorrelation(crossings, lag))
            pool(f"power {lag}", autocorrelation(power, lag))
        both = zip(crossings.T, power.T, strict=True)
        pool("correlation", [np.corrcoef(a, b)[0, 1] for a, b in both])
        pairs = np.corrcoef(crossings.T)
        pool("pairs", pairs[np.triu_indices(len(pairs), 1)])
        smoothed.append(smooth(bins).var(axis=0).sum() / bins.var(axis=0).sum())
    values = np.concatenate([bins.ravel() for bins in trials])
    return {
        "crossing rate, Hz": middle(pooled["rate"], 1),
        "Fano factor": middle(pooled["fano"], 2),
        "largest count in a bin": f"{np.median(pooled['max']):.0f}",
        "lag-1 autocorrelation, crossings": middle(pooled["crossings 1"], 3),
        "lag-1 autocorrelation, power": middle(pooled["power 1"], 3),
        "lag-5 autocorrelation, crossings": middle(pooled["crossings 5"], 3),
        "lag-5 autocorrelation, power": middle(pooled["power 5"], 3),
        "crossings–power correlation": middle(pooled["correlation"], 2),
        "pairwise correlation of crossings": middle(pooled["pairs"], 3),
        "variance left after smoothing": f"{np.median(smoothed):.3f}",
        "z-scored: SD": f"{values.std():.2f}",
        "z-scored: min": f"{np.median([bins.min() for bins in trials]):.1f}",
        "z-scored: max": f"{values.max():.1f}",
        "z-scored: skew": f"{skew(values):.2f}",
        "z-scored: excess kurtosis": f"{kurtosis(values):.2f}",
    }


def describe_timing(lengths: np.ndarray, n_phonemes: np.ndarray) -> Summary:
    return {
        "time per phoneme, ms": middle(20 * lengths / n_phonemes, 0),
        "correlation of length with phonemes": f"{np.corrcoef(lengths, n_phonemes)[0, 1]:.2f}",
    }


def real() -> Summary:
    summary = dict(PUBLISHED)
    if T15_TRIAL.is_file():
        with h5py.File(T15_TRIAL) as file:
            summary |= describe_bins([file["trial_0000/input_features"][:]])
    if T12_TRIAL.is_file():
        summary["power, coefficient of variation"] = middle(np.load(T12_TRIAL)["spikePow_block_cv"], 2)
    if T12_LENGTHS.is_file():
        with T12_LENGTHS.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        lengths = np.array([float(row["n_bins_20ms"]) for row in rows])
        summary |= describe_timing(lengths, np.array([float(row["n_phones_incl_SIL"]) for row in rows]))
    return summary


def simulated(folder: Path, seed: int) -> Summary:
    """The same from simulated files: one '25 cohort for the bins, one '24 cohort for power and timing."""
    simulate(folder / "t15", layout="b2t25", n_sessions=4, n_trials=30, n_electrodes=256, seed=seed)
    trials = []
    for path in sorted((folder / "t15").rglob("data_train.hdf5")):
        with h5py.File(path) as file:
            # The first trials of a block are normalised by themselves, as the real one is.
            trials += [group["input_features"][:] for group in file.values() if group.attrs["trial_num"] < 2]
    summary = describe_bins(trials)

    simulate(folder / "t12", layout="b2t24", n_sessions=6, n_trials=100, n_electrodes=16, seed=seed)
    variation, lengths, phonemes, words = [], [], [], []
    for path in sorted((folder / "t12" / "competitionData" / "train").glob("*.mat")):
        mat = loadmat(path)
        blocks = mat["blockIdx"].ravel()
        cells = mat["spikePow"][0]
        for block in np.unique(blocks):
            power = np.concatenate([cells[i] for i in np.flatnonzero(blocks == block)])[:, :16]
            variation += (power.std(axis=0) / power.mean(axis=0)).tolist()
        for cell, text in zip(cells, mat["sentenceText"], strict=True):
            lengths.append(len(cell))
            phonemes.append(len(pronounce(text.strip()).names))
            words.append(len(text.split()))
    summary["power, coefficient of variation"] = middle(variation, 2)
    summary |= describe_timing(np.array(lengths), np.array(phonemes))
    summary["words per sentence"] = f"{np.mean(words):.1f}"
    summary["phonemes per sentence"] = f"{np.mean(phonemes):.1f}"
    summary["trial length, bins"] = (
        f"mean {np.mean(lengths):.0f}, median {np.median(lengths):.0f}, max {np.max(lengths):.0f}"
    )
    return summary


def table(measured: Summary, reference: Summary) -> str:
    lines = ["| statistic, median (5–95 %) | real | simulated |", "|---|---|---|"]
    for name in PUBLISHED:
        lines.append(f"| {name} ({SOURCES.get(name, 'T15')}) | {reference[name]} | {measured[name]} |")
    return "\n".join(lines)


def main(out: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description="Compare simulated with real recordings.")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = table(simulated(Path(folder), arguments.seed), real())
    out(text)
    if not T15_TRIAL.is_file():
        out("(No real trials beside this checkout: the real column shows the values kept in the script.)")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
