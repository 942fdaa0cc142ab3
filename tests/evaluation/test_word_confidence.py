"""Calibration of confidences, its measures, and the commands that use it."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_decode import ARPA, LEXICON, fake_log_probs

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.confidence import SessionWords, probability
from arcuate.decoding.config import ConfidenceConfig, Logistic, read_decoding_config
from arcuate.decoding.options import SearchOptions
from arcuate.evaluation.confidence import (
    accept_threshold,
    are_correct,
    fit_logistic,
    measure_reliability,
)
from arcuate.evaluation.decode import decode
from arcuate.evaluation.tune import tune


def test_calibration_and_discrimination_of_known_confidences() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(size=20_000)
    right = rng.uniform(size=20_000) < p
    good = measure_reliability(p, right)
    assert good.ece < 0.015
    assert good.auroc == pytest.approx(5 / 6, abs=0.01)
    assert measure_reliability(np.full(10, 0.9), np.zeros(10, bool)).ece == pytest.approx(0.9)
    ties = np.array([0.9, 0.8, 0.8, 0.1]), np.array([True, True, False, False])
    assert measure_reliability(*ties).auroc == pytest.approx((2 + 1 + 0.5) / 4)
    assert measure_reliability(ties[0], np.ones(4, bool)).auroc is None
    assert good.risk_coverage[-1] == (1.0, pytest.approx(1 - right.mean()))
    assert good.risk_coverage[0][1] < good.risk_coverage[-1][1]


def test_logistic_regression_finds_the_model_of_its_data() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20_000, 2)) * [1.0, 10.0] + [0.0, 3.0]
    truth = Logistic(intercept=0.5, weights=(1.5, -0.1))
    fitted = fit_logistic(x, rng.uniform(size=len(x)) < probability(truth.log_odds(x)))
    assert fitted.weights == pytest.approx(truth.weights, rel=0.1)
    assert fitted.intercept == pytest.approx(0.5, abs=0.1)
    assert np.isfinite(fit_logistic(x[:60], np.ones(60, bool)).weights).all()


def test_accepted_words_keep_the_promised_accuracy() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(4, 1, size=8000)
    right = rng.uniform(size=8000) < p
    accepted = p[4000:] >= accept_threshold(p[:4000], right[:4000], 0.95)
    assert accepted.mean() > 0.2 and right[4000:][accepted].mean() == pytest.approx(0.95, abs=0.02)
    values = np.linspace(0.1, 0.9, 100)
    assert accept_threshold(values, np.ones(100, bool), 0.95) == 0.0
    assert accept_threshold(values, np.zeros(100, bool), 0.95) == 1.0


def test_acceptance_follows_the_difficulty_of_a_session() -> None:
    rng = np.random.default_rng(0)
    calibration = rng.normal(2.5, 2.0, 4000)
    right = rng.random(4000) < probability(calibration)
    fixed = accept_threshold(probability(calibration), right, 0.95)
    quantiles = tuple(np.quantile(calibration, (np.arange(20) + 0.5) / 20))
    model = ConfidenceConfig(log_odds=quantiles, accept_above=fixed)
    session, shifts, accepted, outcomes, plain = SessionWords(model, weight=0.0), [], [], [], []
    for _ in range(400):  # sentences of a harder session
        words = rng.normal(0.5, 2.0, 10)
        shift, threshold = session.add(words)
        shifts.append(shift)
        accepted += (probability(words + shift) >= threshold).tolist()
        plain += (probability(words) >= fixed).tolist()
        outcomes += (rng.random(10) < probability(words)).tolist()
    assert set(shifts) == {0.0}
    assert np.mean(np.array(outcomes)[plain]) < 0.93  # the fixed threshold is too low here
    assert np.mean(np.array(outcomes)[accepted]) == pytest.approx(0.95, abs=0.015)


def test_sessions_are_shifted_by_their_mean_and_start_with_the_calibration() -> None:
    model = ConfidenceConfig(log_odds=(1.0, 2.0, 3.0))
    session = SessionWords(model, weight=0.5)
    assert session.add(np.empty(0)) == (0.0, pytest.approx(float(probability(np.array(3.0)))))
    assert session.add(np.full(10, -2.0))[0] == pytest.approx(-0.5 * ((25 * 2.0 + 10 * -2.0) / 35 - 2.0) ** 2)
    assert SessionWords(ConfidenceConfig(log_odds=(), accept_above=0.7)).add(np.zeros(3)) == (0.0, 0.7)


def test_words_are_right_where_the_alignment_leaves_them() -> None:
    assert are_correct("I see the dog.", ["i", "see", "a", "dog", "dog"]) in (
        [True, True, False, True, False],
        [True, True, False, False, True],
    )


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty sentences, with noise that causes errors in some."""
    folder, rng = tmp_path_factory.mktemp("noisy"), np.random.default_rng(0)
    words = sorted(LEXICON)
    texts = [" ".join(rng.choice(words, size=rng.integers(2, 6))) for _ in range(40)]
    trials = []
    for i, text in enumerate(texts):
        logits = fake_log_probs(text, i) + rng.normal(scale=3.5, size=(1, 1)) * rng.normal(
            size=(2 * sum(len(LEXICON[w].split()) + 1 for w in text.split()), len(CLASSES))
        )
        trials.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    np.savez(folder / "scores.npz", logp=np.concatenate(trials), lengths=[len(t) for t in trials], classes=CLASSES)
    (folder / "lexicon.txt").write_text("".join(f"{w}\t{p}\n" for w, p in LEXICON.items()))
    (folder / "lm.arpa").write_text(ARPA)
    rows = [{"id": str(i), "text": text, "session": f"day{i % 4}"} for i, text in enumerate(texts)]
    (folder / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_tune_calibrates_and_decode_uses_the_calibration(noisy: Path, tmp_path: Path) -> None:
    options, references = SearchOptions(lexicon=noisy / "lexicon.txt", lm=noisy / "lm.arpa"), noisy / "refs.jsonl"
    scores, weights = noisy / "scores.npz", tmp_path / "weights.yaml"
    tuned = tune(scores, weights, options, references=references, budget=0, confidence=True)
    settings, record = read_decoding_config(weights)
    assert settings == tuned.settings
    assert settings.confidence.calibrated_on == "scores.npz" and record["kept_start"]
    before = decode(scores, options, references=references)
    fitted = options.model_copy(update={"config": weights})
    after = decode(scores, fitted, references=references, out=tmp_path / "words.jsonl")
    assert [t.text for t in before] == [t.text for t in after]
    assert before.metrics.confidence is not None and after.metrics.confidence is not None
    assert after.metrics.confidence.words.ece < 0.1
    assert after.metrics.confidence.words.brier < before.metrics.confidence.words.brier
    rows = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    for row, transcript in zip(rows, after, strict=True):
        assert 0.0 <= row["probability"] <= 1.0
        best = transcript.n_best[0]
        assert [word["accepted"] for word in row["words"]] == [p >= best.accept_above for p in best.confidences]
    assert len({t.n_best[0].accept_above for t in after}) > 4  # it follows the words of each of the four sessions
    assert yaml.safe_load(weights.read_text())["confidence"]["word"]["weights"]


def test_rejected_sentences_are_marked_and_counted(noisy: Path, tmp_path: Path) -> None:
    options, out = SearchOptions(lexicon=noisy / "lexicon.txt", lm=noisy / "lm.arpa"), tmp_path / "words.jsonl"
    transcription = decode(noisy / "scores.npz", options, references=noisy / "refs.jsonl", out=out, reject_below=0.5)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["rejected"] for row in rows] == [row["probability"] < 0.5 for row in rows]
    assert 0 < transcription.n_rejected == sum(row["rejected"] for row in rows) < len(rows)
    assert transcription.wer_accepted is not None and transcription.wer is not None
    assert transcription.wer_accepted < transcription.wer
    assert f"{transcription.n_rejected} of 40 sentences rejected" in transcription.summary()
