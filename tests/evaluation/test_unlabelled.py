"""Estimates of the error rate without labels."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.metrics import Score
from arcuate.evaluation.unlabelled import (
    MEASURES,
    ErrorReference,
    estimate_error,
    make_reference,
    measure_trial,
    read_reference,
)
from arcuate.run import Run


def frames(path: list[int], certainty: float, n_classes: int = 5) -> np.ndarray:
    """Log-probabilities of frames whose best classes are `path`, with this probability."""
    rest = (1 - certainty) / (n_classes - 1)
    probabilities = np.full((len(path), n_classes), rest)
    probabilities[np.arange(len(path)), path] = certainty
    return np.log(probabilities)


def test_measures_of_a_trial() -> None:
    log_probs = frames([0, 1, 1, 0, 2, 0, 2, 3], 0.9)  # 4 tokens
    log_probs[1] = frames([1], 0.6)[0]  # the token's other frame is more certain
    entropy, *others = measure_trial(log_probs).tolist()
    peak = (7 * np.log(0.9) + np.log(0.6)) / 8
    assert others == pytest.approx([peak, np.log(0.9), np.log(0.9), np.log(4.5 / 8)])
    flat = measure_trial(np.log(np.full((6, 5), 0.2)))[0]
    assert flat == pytest.approx(1.0) and flat > entropy > measure_trial(frames([0, 1, 2], 0.999))[0]


@pytest.mark.parametrize("log_probs", [np.zeros((0, 5)), np.where(np.eye(5)[:2] > 0, 0.0, -np.inf), np.zeros((3, 5))])
def test_extreme_frames_are_measured(log_probs: np.ndarray) -> None:
    measures = measure_trial(log_probs)
    assert measures.shape == (len(MEASURES),) and np.isfinite(measures).all()


def test_estimate_is_the_reference_for_equal_trials_and_higher_for_less_certain_ones() -> None:
    paths = np.random.default_rng(0).integers(0, 5, (12, 40)).tolist()
    known = [measure_trial(frames(path, 0.95)) for path in paths]
    reference = make_reference(known, Score(20, 10, 18, 480))
    assert reference is not None
    found = [estimate_error([measure_trial(frames(p, c)) for p in paths], reference) for c in (0.95, 0.9, 0.7, 0.5)]
    rates = [estimate.error_rate for estimate in found if estimate is not None]
    assert rates[0] == pytest.approx(0.1) and rates == sorted(set(rates)) and len(rates) == 4
    assert all(0 < e.low < e.error_rate < e.high < 1 for e in found if e is not None)


def test_too_few_trials_give_no_estimate() -> None:
    one = measure_trial(frames([0, 1, 2], 0.9))
    assert make_reference([one] * 2, Score(2, 0, 0, 6)) is None
    assert make_reference([one] * 5, Score(0, 0, 0, 0)) is None
    reference = make_reference([one] * 5, Score(0, 0, 0, 15))
    assert reference is not None and estimate_error([one, one], reference) is None
    found = estimate_error([one] * 3, reference)
    assert found is not None and 0 < found.error_rate < 0.01  # no error in the reference


def test_the_reference_is_read_from_the_results(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert read_reference(run) is None
    file = run.results_file("val", ending="json")
    file.parent.mkdir()
    file.write_text(json.dumps({"per": 0.1}))
    assert read_reference(run) is None  # results of an earlier version
    reference = ErrorReference(0.1, 20, tuple(float(i) for i in range(len(MEASURES))))
    file.write_text(json.dumps({"error_reference": reference.to_dict()}))
    assert read_reference(run) == reference
    for damage in ({"means": [1.0]}, {"error_rate": "x"}, {"means": None}, {"n_trials": float("nan")}):
        file.write_text(json.dumps({"error_reference": {**reference.to_dict(), **damage}}))
        with pytest.raises(UserError, match="error_reference is damaged"):
            read_reference(run)


def hide_labels(store: Path, split: str) -> Store:
    opened = Store.open(store)
    hidden = (replace(t, tokens=None, text=None) if t.split == split else t for t in opened.trials)
    opened.trials = tuple(hidden)
    opened.check_unchanged = lambda *_: None  # the hashes include the labels
    return opened


def test_evaluation_estimates_what_it_cannot_measure(short_run: Path, cohort_store: Path) -> None:
    labelled = evaluate(short_run)
    assert labelled.estimate is None and labelled.error_reference is not None
    assert labelled.error_reference.error_rate == pytest.approx(min(labelled.per or 0.0, 1.0))
    assert read_reference(Run(short_run)) == labelled.error_reference
    found = evaluate(short_run, data=hide_labels(cohort_store, "val"), label="hidden")
    assert found.per is None and found.error_reference is None
    estimate = found.estimate  # of the same trials as the reference
    assert estimate is not None and estimate.error_rate == pytest.approx(labelled.error_reference.error_rate, abs=0.003)
    assert "PER needs labels\nestimated PER without labels" in found.summary()
    stored = json.loads(found.results_file.with_suffix(".json").read_text())
    assert stored["estimate"]["n_trials"] == estimate.n_trials == found.metrics.n_trials


def test_sessions_without_labels_are_estimated_one_by_one(short_run: Path, cohort_store: Path) -> None:
    found = evaluate(short_run, split="test", data=hide_labels(cohort_store, "test"), adapt=True)
    assert found.per is None and found.adaptation is not None
    sessions = found.adaptation.sessions
    assert all(s.estimate is not None for s in sessions) and found.summary().count("estimated PER") == len(sessions)
    assert json.loads(json.dumps(found.to_dict()))["sessions"][0]["estimate"]["n_trials"] > 0
