"""Simulated against real recordings: statistics of the bins, and errors of a decoder trained on them.

    python benchmarks/simulator.py                              # the statistics that the simulator is calibrated to
    python benchmarks/simulator.py RUN/results/val.jsonl        # phoneme errors of a run; nothing is fitted to these

Real statistics are stored in this file; real confusions are read from `../shared/real` beside the checkout. Results are
those of `arcuate evaluate`.
"""

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from common import percent, table
from rapidfuzz.distance import Levenshtein
from scipy.io import loadmat
from scipy.stats import kurtosis, skew

from arcuate.data.simulation import simulate
from arcuate.data.text import pronounce

SHARED = Path(__file__).resolve().parents[2] / "shared" / "real"
CONFUSIONS = SHARED / "real_phoneme_confusions.json"
BY_SESSION = SHARED / "T15_val_PER_by_session.json"
DELETED, INSERTED = "<del>", "<ins>"

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
}
SOURCES = dict.fromkeys(list(PUBLISHED)[-3:], "T12")

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
    variation, lengths, phonemes = [], [], []
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
    summary["power, coefficient of variation"] = middle(variation, 2)
    summary |= describe_timing(np.array(lengths), np.array(phonemes))
    return summary


# Errors of decoders.


@dataclass(frozen=True)
class Errors:
    """A confusion table: (reference, decoded) to count, with <del> and <ins> as partners."""

    name: str
    counts: Counter[tuple[str, str]]

    def rate(self, kind: str) -> float:
        n_phonemes = sum(n for (expected, _), n in self.counts.items() if expected != INSERTED)
        return sum(n for pair, n in self.counts.items() if kind_of(pair) == kind) / n_phonemes

    @property
    def per(self) -> float:
        return sum(self.rate(kind) for kind in ("S", "D", "I"))

    def confused(self) -> list[tuple[str, str]]:
        """The twenty most confused pairs, both directions together."""
        pairs: Counter[tuple[str, str]] = Counter()
        for (expected, decoded), n in self.counts.items():
            if kind_of((expected, decoded)) == "S":
                pairs[(min(expected, decoded), max(expected, decoded))] += n
        return [pair for pair, _ in pairs.most_common(20)]

    def per_phoneme(self) -> dict[str, float]:
        """Error rate of each phoneme: fraction of its tokens decoded as another or deleted."""
        expected: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for (phoneme, decoded), n in self.counts.items():
            if phoneme != INSERTED:
                expected[phoneme] += n
                right[phoneme] += n * (phoneme == decoded)
        return {phoneme: 1 - right[phoneme] / n for phoneme, n in expected.items()}


def kind_of(pair: tuple[str, str]) -> str:
    expected, decoded = pair
    return "I" if expected == INSERTED else "D" if decoded == DELETED else "S" if expected != decoded else "="


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Pairs (reference, decoded) of one best alignment."""
    for step in Levenshtein.opcodes(reference, hypothesis):
        expected = reference[step.src_start : step.src_end] or [INSERTED] * (step.dest_end - step.dest_start)
        yield from zip(expected, hypothesis[step.dest_start : step.dest_end] or [DELETED] * len(expected), strict=True)


def read_results(path: Path) -> tuple[Errors, dict[str, float]]:
    """The confusion table of a run and its error rate in every session."""
    counts: Counter[tuple[str, str]] = Counter()
    edits: Counter[str] = Counter()
    lengths: defaultdict[str, int] = defaultdict(int)
    for trial in map(json.loads, path.read_text("utf-8").splitlines()):
        pairs = list(align(trial["reference"], trial["hypothesis"]))
        counts.update(pairs)
        edits[trial["session"]] += sum(kind_of(pair) != "=" for pair in pairs)
        lengths[trial["session"]] += len(trial["reference"])
    return Errors("simulated", counts), {session: edits[session] / lengths[session] for session in lengths}


def read_real() -> list[Errors]:
    """The real tables, except that of sentences seen in training, which has hardly any errors."""
    tables = json.loads(CONFUSIONS.read_text("utf-8")) if CONFUSIONS.is_file() else []
    found = [Errors(t["name"].split(" (")[0], Counter({pair(k): n for k, n in t["counts"].items()})) for t in tables]
    return [errors for errors in found if errors.per > 0.01]


def pair(key: str) -> tuple[str, str]:
    """ "T>D", "<ins>>L" and "EH><del>" to (reference, decoded)."""
    if key.startswith(INSERTED):
        return INSERTED, key[len(INSERTED) + 1 :]
    expected, _, decoded = key.partition(">")
    return expected, decoded


def likeness(a: Errors, b: Errors) -> tuple[float, float]:
    """Rank correlation of the phonemes' error rates, and shared pairs among the 20 most confused."""
    ours, theirs = a.per_phoneme(), b.per_phoneme()
    common = sorted(set(ours) & set(theirs))
    ranks = [np.argsort(np.argsort([rates[phoneme] for phoneme in common])) for rates in (ours, theirs)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]), len({*a.confused()} & {*b.confused()}) / 20


def spread(rates: Iterable[float]) -> str:
    values = np.array(list(rates))
    return f"{percent(values.mean())} mean, SD over mean {values.std() / values.mean():.2f}, {len(values)} sessions"


def report(run: Errors, by_session: dict[str, float], real: list[Errors]) -> str:
    rows = [
        [
            e.name,
            percent(e.per),
            *(percent(e.rate(kind)) for kind in "SDI"),
            ", ".join(map("–".join, e.confused()[:12])),
        ]
        for e in (run, *real)
    ]
    lines = [table(["decoder", "PER", "S", "D", "I", "most confused pairs"], rows), ""]
    among = [likeness(a, b) for i, a in enumerate(real) for b in real[i + 1 :]]
    pairs = [(errors.name, *likeness(run, errors)) for errors in real]
    pairs += [("real decoders among themselves, mean", *np.mean(among, axis=0))] if among else []
    shown = [[name, f"{correlation:.2f}", percent(shared, 0)] for name, correlation, shared in pairs]
    lines.append(table(["against", "rank correlation of phoneme error rates", "of the 20 worst pairs shared"], shown))
    lines.append(f"\nPER by session, simulated: {spread(by_session.values())}.")
    if BY_SESSION.is_file():
        lines.append(f"PER by session, real T15: {spread(json.loads(BY_SESSION.read_text('utf-8')).values())}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="results of a run; without them, statistics of the bins")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.results is not None:
        print(report(*read_results(arguments.results), read_real()))
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = simulated(Path(folder), arguments.seed)
    rows = [
        [f"{name} ({SOURCES.get(name, 'T15')})", published, measured[name]] for name, published in PUBLISHED.items()
    ]
    print(table(["statistic, median (5–95 %)", "real", "simulated"], rows))


if __name__ == "__main__":
    main()
