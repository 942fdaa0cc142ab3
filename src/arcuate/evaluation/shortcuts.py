"""Shortcuts: properties of a data set that identify a sentence without neural information about it.

Three checks, without training. `repeated sentences`: sentences of four or more words that also occur in the training
split. `length`: trials whose nearest training trial by length has the same sentence. `baseline`: the same, with the
nearest trial by the mean of its first and last bins, before and after speech. The last two are computed over trials
whose sentence occurs in the training split; chance level is estimated by permuting their sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.seeds import derive_seed
from arcuate.data.store import Store, TrialInfo
from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.charts.formats import finite_number
from arcuate.files import read_json
from arcuate.progress import percent
from arcuate.run import Run

_MIN_WORDS = 4  # shorter sentences ("I don't know.") recur naturally
_MIN_TRIALS = 8
_EDGE_BINS = 5
_MAX_REPEATED = 0.1
_MAX_IDENTIFIED = 0.35
_N_PERMUTATIONS = 200
_MAX_TRAINING_TRIALS = 4000


@dataclass(frozen=True)
class FloorRates:
    """The lowest error rates that `evaluate --floor` reached without neural information."""

    per: float | None
    wer: float | None  # None: words were not decoded


def read_floor(run: Run, split: str) -> FloorRates | None:
    """The floor of a run on a split; None if it was not measured."""
    file = run.measurement_file("floor", split)
    if not file.is_file():
        return None
    found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged; measure the floor again with: arcuate evaluate {run.path} --floor")
    by_input = found.get("wer_floor")
    rates = by_input.values() if isinstance(by_input, dict) else ()
    wer = [rate for value in rates if (rate := finite_number(value)) is not None]
    return FloorRates(finite_number(found.get("lowest")), min(wer, default=None))


@dataclass(frozen=True)
class Shortcut:
    """One check: share of trials identified, share expected by chance, and whether the difference is too large."""

    name: str
    share: float | None  # None: too few trials to test
    chance: float | None
    n_trials: int
    flagged: bool

    def summary(self) -> str:
        """The finding in one sentence."""
        if self.share is None:
            return f"{self.name}: not tested, only {self.n_trials} trials share a sentence with the training split"
        chance = "" if self.chance is None else f", {percent(self.chance)} by chance"
        verdict = "SHORTCUT" if self.flagged else "no shortcut"
        return f"{self.name}: {percent(self.share)} of {self.n_trials} trials{chance}: {verdict}"


def find_shortcuts(
    store: Store, training: Sequence[TrialInfo], judged: Sequence[TrialInfo], seed: int = 0
) -> tuple[Shortcut, ...]:
    """Check the trials of a split for shortcuts to their sentences, relative to the training split."""
    rng = np.random.default_rng(derive_seed(seed, "shortcuts"))
    training = [t for t in training if t.text][:_MAX_TRAINING_TRIALS]
    known = [normalise_text(t.text or "") for t in training]
    judged = [t for t in judged if t.text]
    texts = [normalise_text(t.text or "") for t in judged]
    return (
        _repeated(known, texts),
        _identified("length", _lengths(training), known, _lengths(judged), texts, rng),
        _identified("baseline", _baselines(store, training), known, _baselines(store, judged), texts, rng),
    )


def _repeated(known: Sequence[str], texts: Sequence[str]) -> Shortcut:
    long = [text for text in texts if len(text.split()) >= _MIN_WORDS]
    if len(long) < _MIN_TRIALS:
        return Shortcut("repeated sentences", None, None, len(long), False)
    share = float(np.mean([text in set(known) for text in long]))
    return Shortcut("repeated sentences", share, None, len(long), share > _MAX_REPEATED)


def _lengths(trials: Sequence[TrialInfo]) -> np.ndarray:
    return np.array([[float(t.n_bins)] for t in trials]).reshape(-1, 1)


def _baselines(store: Store, trials: Sequence[TrialInfo]) -> np.ndarray:
    """Mean of the first and last bins of each trial, in SD of its block. (trials, C)"""
    rows = []
    for trial in trials:
        bins, statistics = store.read_bins(trial), store.block_statistics(trial)
        edges = np.concatenate([bins[:_EDGE_BINS], bins[-_EDGE_BINS:]]).mean(axis=0)
        rows.append(edges / np.maximum(statistics.sd, 1e-3))
    return np.array(rows).reshape(len(rows), store.n_channels)


def _identified(
    name: str,
    known_features: np.ndarray,
    known: Sequence[str],
    features: np.ndarray,
    texts: Sequence[str],
    rng: np.random.Generator,
) -> Shortcut:
    """Share of trials whose nearest training trial has the same sentence, among those whose sentence occurs there."""
    recurring = [i for i, text in enumerate(texts) if text in set(known)]
    if len(recurring) < _MIN_TRIALS:
        return Shortcut(name, None, None, len(recurring), False)
    distances = np.abs(features[recurring][:, None, :] - known_features[None, :, :]).mean(axis=2)
    numbers = {text: k for k, text in enumerate(dict.fromkeys(known))}
    sentence = np.array([numbers[text] for text in known])
    target = np.array([numbers[texts[i]] for i in recurring])
    ties = np.abs(distances - distances.min(axis=1, keepdims=True)) < 1e-9  # several trials may have the same length
    votes = ties / ties.sum(axis=1, keepdims=True)

    def share_of(labels: np.ndarray) -> float:
        return float((votes * (sentence[None, :] == labels[:, None])).sum(axis=1).mean())

    share = share_of(target)
    chance = np.array([share_of(rng.permutation(target)) for _ in range(_N_PERMUTATIONS)])
    flagged = share > _MAX_IDENTIFIED and share > float(np.quantile(chance, 0.995))
    return Shortcut(name, share, float(chance.mean()), len(recurring), flagged)
