"""Splits: content hashes, leakage, and a dev split that keeps sentences together."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.quality import find_leakage, hash_bins, hash_trial
from arcuate.data.selection import dev_split
from support.recordings import noise


@dataclass(frozen=True)
class LabelledTrial:
    id: str
    session: str
    text: str | None
    split: str = "train"
    tokens: tuple[int, ...] | None = None


def cohort(n_sessions: int = 4, n_trials: int = 50, n_texts: int = 150) -> list[LabelledTrial]:
    rng = np.random.default_rng(1)
    return [
        LabelledTrial(f"{s}/{i}", f"session {s}", f"Sentence number {chr(97 + t % 26)} {'x' * (t // 26)}.")
        for s in range(n_sessions)
        for i, t in enumerate(rng.integers(n_texts, size=n_trials))
    ]


def test_a_hash_changes_with_each_part_of_the_content() -> None:
    bins = hash_bins(noise())
    hashes = {
        hash_trial(bins, (1, 2), "a"),
        hash_trial(hash_bins(noise(seed=1)), (1, 2), "a"),
        hash_trial(bins, (1, 3), "a"),
        hash_trial(bins, None, "a"),
        hash_trial(bins, (1, 2), None),
        hash_trial(bins, (1, 2), "b"),
    }
    assert len(hashes) == 6
    assert hash_trial(hash_bins(noise().copy(order="F")), [1, 2], "a") in hashes
    assert hash_bins(np.zeros((2, 3), "f4")) != hash_bins(np.zeros((3, 2), "f4"))


def test_leakage_counts_recordings_and_sentences() -> None:
    recordings = {"train": [b"1", b"2"], "val": [b"2", b"3"], "test": [b"4"]}
    texts = {"train": ["Bring it.", "Yes."], "val": ["bring it", "No.", "Maybe.", "YES!"], "test": []}
    leakage = find_leakage(recordings, texts)
    assert leakage["trials"] == {"train-val": 1, "train-test": 0, "val-test": 0}
    assert leakage["texts"]["val in train"] == {"n": 2, "of": 4, "share": 0.5}
    assert leakage["texts"]["test in train"] == {"n": 0, "of": 0, "share": None}


def test_the_dev_split_has_its_fraction_of_every_session() -> None:
    trials = cohort()
    dev = dev_split(trials, 0.2, seed=1)
    for session in {trial.session for trial in trials}:
        n_dev = sum(trial.id in dev for trial in trials if trial.session == session)
        assert 7 <= n_dev <= 13, session


@given(st.floats(0.0, 0.5), st.integers(0, 5))
def test_a_sentence_is_never_on_both_sides(fraction: float, seed: int) -> None:
    trials = cohort(n_texts=40)
    dev = dev_split(trials, fraction, seed)
    texts = {trial.text for trial in trials if trial.id in dev}
    assert all(trial.id in dev for trial in trials if trial.text in texts)
    assert len(dev) <= fraction * len(trials) + 12


def test_the_dev_split_is_repeatable_and_depends_on_the_seed() -> None:
    trials = cohort()
    assert dev_split(trials, 0.1, 3) == dev_split(trials, 0.1, 3)
    assert dev_split(trials, 0.1, 3) != dev_split(trials, 0.1, 4)
    assert dev_split(trials, 0.0, 3) == set()


def test_later_sessions_do_not_move_earlier_trials() -> None:
    trials = cohort()
    early = [trial for trial in trials if trial.session in ("session 0", "session 1")]
    ids = {trial.id for trial in early}
    assert dev_split(early, 0.2, 1) == dev_split(trials, 0.2, 1) & ids
