"""Statistics of the simulation: sentences, movements, spikes, drift, and a linear probe."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from arcuate.data.alphabet import PHONEMES
from arcuate.data.simulation import TRUTH_FILE, simulate
from arcuate.data.simulation.articulation import Timing, articulate, draw_onsets
from arcuate.data.simulation.cortex import (
    MODES,
    SignalModel,
    SimulatedArray,
    drift_electrodes,
    implant_electrodes,
    motor_features,
    record_trial,
)
from arcuate.data.simulation.sentences import CORPORA, make_sentence
from arcuate.data.text import pronounce

ARRAYS = (
    SimulatedArray(24, 1.0, 5),
    SimulatedArray(24, 0.9, 3),
    SimulatedArray(24, 0.55, 6),
    SimulatedArray(24, 0.3, 4),
)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    rng = np.random.default_rng(0)
    return [make_sentence(corpus, rng) for corpus in rng.choice(CORPORA, 3000, p=(0.7, 0.24, 0.06))]


def test_sentences_are_varied(sentences: list[str]) -> None:
    words = [text.strip(".?!").lower().split() for text in sentences]
    assert len(set(sentences)) > 2500
    assert len({word for sentence in words for word in sentence}) > 1500
    assert 5.8 < np.mean([len(sentence) for sentence in words]) < 6.8
    assert np.mean([text in set(sentences[:1200]) for text in sentences[1200:]]) < 0.2


def test_sentences_cover_the_alphabet(sentences: list[str]) -> None:
    pronunciations = [pronounce(text) for text in sentences]
    names = [name for pronunciation in pronunciations for name in pronunciation.names]
    assert 26 < len(names) / len(pronunciations) < 31
    assert min(names.count(phoneme) for phoneme in PHONEMES) >= 20
    assert sum(bool(pronunciation.unknown) for pronunciation in pronunciations) < 0.01 * len(pronunciations)


def test_coarticulation() -> None:
    """The tongue body during B depends on the next vowel; the lips, for which B has a target, do not."""
    onsets = np.array([10.0, 22.0, 34.0, 46.0])
    bee, boo = (articulate(["AH", "B", vowel, "SIL"], onsets, 60) for vowel in ("IY", "AO"))
    during = slice(30, 33)
    assert abs(bee[during, 6] - boo[during, 6]).mean() > 0.3
    assert abs(bee[during, 0] - boo[during, 0]).mean() < 0.05
    assert np.abs(np.diff(bee, axis=0)).max() < 1.0  # no jumps


def test_silent_speech_has_less_voicing_and_is_faster() -> None:
    path = articulate(["B", "IY", "SIL"], np.array([10.0, 22.0, 34.0]), 50)
    loud, quiet = motor_features(path, MODES["vocalised"]), motor_features(path, MODES["silent"])
    assert abs(quiet[:, 11]).max() < 0.5 * abs(loud[:, 11]).max()
    np.testing.assert_array_equal(loud[:, 0], quiet[:, 0])
    assert MODES["silent"].tempo < MODES["vocalised"].tempo


def simulate_trials(
    n: int, signal: SignalModel, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Counts, power and the jaw's path of some sentences in one session."""
    rng = np.random.default_rng(seed)
    electrodes = implant_electrodes(ARRAYS, np.random.default_rng(9))
    counts, power, jaw = [], [], []
    for _ in range(n):
        names = pronounce(make_sentence("conversation", rng)).names
        path = articulate(names, *draw_onsets(names, Timing(0.205, 0.4, 0.3), rng))
        crossings, spike_power = record_trial(electrodes, path, MODES["vocalised"], signal, np.zeros(96), rng)
        counts.append(crossings[:, ~electrodes.dead].astype(float))
        power.append(spike_power[:, ~electrodes.dead].astype(float))
        jaw.append(path[:, 2])
    return counts, power, jaw


def test_spike_statistics_match_real_recordings() -> None:
    counts, power, _ = simulate_trials(12, SignalModel.from_noise(1.0))
    crossings, spike_power = np.concatenate(counts), np.concatenate(power)
    rates = crossings.mean(axis=0) / 0.02
    assert 18 < np.median(rates) < 36
    assert np.quantile(rates, 0.05) < 12
    assert np.quantile(rates, 0.95) > 50
    assert 1.05 < np.median(crossings.var(axis=0) / crossings.mean(axis=0)) < 1.4
    assert crossings.max() < 25

    def lag(x: np.ndarray, k: int) -> float:
        centred = x - x.mean(axis=0)
        return float(np.median((centred[k:] * centred[:-k]).mean(axis=0) / x.var(axis=0)))

    assert -0.03 < lag(crossings, 1) < 0.10
    assert 0.02 < lag(crossings, 5) < 0.12
    assert 0.02 < lag(spike_power, 1) < 0.25
    together = [np.corrcoef(a, b)[0, 1] for a, b in zip(crossings.T, spike_power.T, strict=True)]
    assert 0.65 < np.median(together) < 0.9
    assert 0.4 < np.median(spike_power.std(axis=0) / spike_power.mean(axis=0)) < 0.85


def probe(signal: SignalModel) -> float:
    """Correlation of the jaw with its least-squares prediction from smoothed crossings of held-out sentences."""

    def smoothed(trials: list[np.ndarray]) -> np.ndarray:
        kernel = np.ones(7) / 7
        rows = [np.apply_along_axis(np.convolve, 0, trial, kernel, mode="same") for trial in trials]
        return np.concatenate([np.c_[row, np.ones(len(row))] for row in rows])

    train, _, jaw = simulate_trials(24, signal, seed=1)
    test, _, target = simulate_trials(12, signal, seed=2)
    weights = np.linalg.lstsq(smoothed(train), np.concatenate(jaw), rcond=None)[0]
    return float(np.corrcoef(smoothed(test) @ weights, np.concatenate(target))[0, 1])


def test_more_noise_is_harder_to_decode() -> None:
    little, real, much = (probe(SignalModel.from_noise(noise)) for noise in (0.25, 1.0, 4.0))
    assert little > real + 0.03
    assert real > much + 0.15
    assert much > 0.1
    assert probe(SignalModel.from_noise(1e4)) < 0.1  # only noise


def test_tuning_drifts_over_days() -> None:
    first = implant_electrodes(ARRAYS, np.random.default_rng(0))
    soon = drift_electrodes(first, 2, np.random.default_rng(1))
    later = drift_electrodes(first, 30, np.random.default_rng(1))
    alike = [float((first.tuning * day.tuning).sum(axis=1).mean()) for day in (soon, later)]
    assert 0.8 < alike[0] < 1.0
    assert 0.1 < alike[1] < 0.5


def test_baselines_shift_between_blocks_and_electrodes_die(tmp_path: Path) -> None:
    simulate(tmp_path, layout="b2t25", n_sessions=4, n_trials=24, n_electrodes=64, seed=5)
    lines = [json.loads(line) for line in (tmp_path / TRUTH_FILE).read_text(encoding="utf-8").splitlines()]
    dead = {line["session"]: line["dead"] for line in lines}
    assert any(dead.values())
    assert max(len(electrodes) for electrodes in dead.values()) <= 6  # below a tenth
    assert {line["mode"] for line in lines} == {"vocalised", "silent"}
    for session, electrodes in dead.items():
        with h5py.File(tmp_path / "hdf5_data_final" / session / "data_train.hdf5") as file:
            bins = file["trial_0000/input_features"][:]
        assert not bins[:, electrodes].any()
        assert bins[:, [i for i in range(64) if i not in electrodes]].any(axis=0).mean() > 0.95
        assert abs(bins.std(axis=0)[64:] - 1).max() < 0.3  # power is never zero
