"""Choice between candidates: laws of MBR and of fitted weights, and the packaged weights on real lists."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.choose import Candidates, cross_fit, expected_errors, fit_weights, mbr, session_folds
from arcuate.evaluation.combine import (
    choose_linear,
    merge_decoders,
    summarise_combination,
    vote_weights,
)
from arcuate.evaluation.metrics import score
from arcuate.evaluation.sentences import Sentence, read_decodings

texts = st.lists(st.sampled_from("abcd"), max_size=5).map(" ".join)
CLOSE = "not too controversial"  # to all others, against a majority
lists_of_texts = st.lists(texts, min_size=1, max_size=6)


def sentence(identity: str, *candidates: str, scores: tuple[float, ...] = (), reference: str | None = None) -> Sentence:
    totals = scores or [None] * len(candidates)
    n_best = (Hypothesis((), {}, tuple(t.split()), total=s) for t, s in zip(candidates, totals, strict=True))
    return Sentence(identity, tuple(n_best), reference)


@given(lists_of_texts, st.data())
def test_expected_errors_are_the_expected_edit_distance(candidates: list[str], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(candidates), max_size=len(candidates)))
    found = expected_errors(candidates, weights, letter_cost=0.0)
    for text, errors in zip(found.texts, found.errors, strict=True):
        pairs = zip(candidates, weights, strict=True)
        expected = sum(w * score(other.split(), text.split()).errors for other, w in pairs)
        assert errors == pytest.approx(expected / sum(weights))
    reversed_ = expected_errors(candidates[::-1], weights[::-1], letter_cost=0.0)
    assert found.errors[found.best] == pytest.approx(reversed_.errors[reversed_.best])  # order decides only ties


@pytest.mark.parametrize(
    ("candidates", "weights", "chosen"),
    [
        (["not to cancel"] * 2 + ["not too controversial", "not too control", "now too controversial"], None, CLOSE),
        (["the bat", "the cart", "the cat"], None, "the cat"),  # equal in words, decided by letters
        (["a", "b"], [1, 3], "b"),
        ([], None, ""),
    ],
)
def test_mbr(candidates: list[str], weights: list[int] | None, chosen: str) -> None:
    assert mbr(candidates, weights) == chosen


def test_scores_are_votes_and_every_decoder_has_one() -> None:
    scored = sentence("1", "a", "b", "c", scores=(-5.0, -1.0, -9.0))
    assert mbr(scored.texts, vote_weights(scored)) == "b"
    many = [sentence("1", "a", "b", "b", "b", scores=(0.0, -9.0, -9.0, -9.0), reference="a")]
    (merged,) = merge_decoders([Path("x"), Path("y")], [many, [sentence("1", "a")]])
    assert merged.totals is not None and np.exp(merged.totals).sum() == pytest.approx(2)
    assert mbr(merged.texts, vote_weights(merged)) == "a"
    for other, message in ((sentence("2", "a"), "same trials"), (sentence("1", "a", reference="b"), "disagree")):
        with pytest.raises(UserError, match=message):
            merge_decoders([Path("x"), Path("y")], [many, [other]])


def informative(seed: int, n: int = 120) -> list[Candidates]:
    """The first feature predicts the errors, the second is noise."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        errors = rng.integers(0, 4, size=5).astype(float)
        features = np.stack([-errors + rng.normal(0, 0.3, 5), rng.normal(0, 1, 5)], axis=1)
        made.append(Candidates(tuple("abcde"), features, errors, 6))
    return made


def test_fitting_finds_the_informative_feature() -> None:
    weights = fit_weights(informative(0), [0.5, 0.5])
    assert weights[0] > 1 and abs(weights[1]) < 0.2 * weights[0]
    fresh = informative(7)
    chosen = sum(t.errors["abcde".index(t.choose(weights))] for t in fresh if t.errors is not None)
    assert chosen < 0.3 * sum(t.errors[0] for t in fresh if t.errors is not None)
    assert np.array_equal(weights, fit_weights(informative(0), [0.5, 0.5]))
    assert fit_weights([], [2.0, 1.0]).tolist() == [2.0, 1.0]
    same = [Candidates(("a", "b"), np.ones((2, 2)), np.array([0.0, 1.0]), 3)]
    assert np.isfinite(fit_weights(same, [1.0, 1.0])).all()


def test_a_trial_does_not_influence_its_own_weights() -> None:
    trials = informative(3, 40)
    before = cross_fit(trials, [None] * 40, [0.5, 0.5], n_folds=4).by_trial
    trials[0] = Candidates(trials[0].texts, trials[0].features * -50, trials[0].errors, 6)
    after = cross_fit(trials, [None] * 40, [0.5, 0.5], n_folds=4).by_trial
    assert np.array_equal(before[0], after[0]) and not np.array_equal(before[-1], after[-1])


def test_folds_keep_sessions_together() -> None:
    sessions = ["a", "a", "b", "b", "c", "c", "d"]
    folds = session_folds(sessions, 2)
    assert len({(s, f) for s, f in zip(sessions, folds.tolist(), strict=True)}) == 4
    assert sorted(set(session_folds([None] * 10, 5).tolist())) == [0, 1, 2, 3, 4]


def test_summary_counts_empty_lists_as_errors_and_names_the_best_system() -> None:
    lists = [
        sentence("1", "a b", "a c", reference="a b"),
        sentence("2", "d", "d", reference="d"),
        sentence("3", "e", "f", reference="e"),
    ]
    summary = summarise_combination(lists, ["a b", "d", "f"]).to_dict()
    assert summary["single_wer"] == [0.0, 0.5] and summary["best_single"] == 1
    assert summary["wer"] == 0.25 and summary["oracle_wer"] == 0.0
    ragged = [*lists, sentence("4", reference="g h")]
    summary = summarise_combination(ragged, ["a b", "d", "e", ""]).to_dict()
    assert summary["deletions"] == 2 and summary["n_empty"] == 1 and "single_wer" not in summary
    assert choose_linear(ragged).texts == ["a b", "d", "e", ""]


@pytest.mark.thorough
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "mbr_wer", "packaged"),
    [
        ("t15_val_bi", 0.0305, 0.0295),
        ("t15_val_uni", 0.0369, 0.0360),
        ("t12_test_bi", 0.0886, 0.0850),
        ("t12_test_uni", 0.1002, 0.0995),
    ],
)
def test_real_ten_seed_lists(shared: Path, name: str, mbr_wer: float, packaged: float) -> None:
    """At or below what plain word-MBR and ROVER reach on the same lists."""
    path = shared / "real" / "words" / "ensembles" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    sentences = read_decodings(path)
    by_mbr = summarise_combination(sentences, [mbr(s.texts) for s in sentences])
    assert by_mbr.wer is not None and by_mbr.wer <= mbr_wer
    combined = summarise_combination(sentences, choose_linear(sentences).texts).to_dict()
    assert combined["wer"] <= packaged
    assert combined["against_best_single"]["p"] < 0.01 and combined["against_best_single"]["high"] < 0
