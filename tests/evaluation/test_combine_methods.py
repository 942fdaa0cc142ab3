"""System combination: laws of the methods, methods against plain recursions, and malformed lists."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.decoding.frame_files import FrameLogProbs, write_frames
from arcuate.errors import UserError
from arcuate.evaluation.candidates import (
    CandidateList,
    agreement_weights,
    attach_references,
    confusion_network,
    expected_errors,
    mbr,
    merge_decoders,
    read_candidates,
    rover,
    vote_weights,
)
from arcuate.evaluation.combine import average, choose_by_vote, mean_frames, read_frames, summarise_combination
from arcuate.evaluation.linear import (
    FittingExample,
    assign_folds,
    choose_linear,
    cross_fit,
    feature_weights,
    fit_weights,
)
from arcuate.evaluation.metrics import score
from support.cases import cases

texts = st.lists(st.sampled_from("abcd"), max_size=5).map(" ".join)
lists_of_texts = st.lists(texts, min_size=1, max_size=6)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@given(lists_of_texts, st.data())
def test_expected_errors_are_the_expected_edit_distance(candidates: list[str], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(candidates), max_size=len(candidates)))
    found = expected_errors(candidates, weights, letter_cost=0.0)
    for text, errors in zip(found.texts, found.errors, strict=True):
        pairs = zip(candidates, weights, strict=True)
        expected = sum(w * score(other.split(), text.split()).errors for other, w in pairs)
        assert errors == pytest.approx(expected / sum(weights))


@given(lists_of_texts)
def test_unanimous_texts_win_and_order_decides_only_ties(candidates: list[str]) -> None:
    assert mbr([candidates[0]] * 3) == candidates[0] == rover([candidates[0]] * 3)
    found = expected_errors(candidates, np.ones(len(candidates)))
    reversed_ = expected_errors(candidates[::-1], np.ones(len(candidates)))
    assert found.errors[found.best] == pytest.approx(reversed_.errors[reversed_.best])
    assert mbr(candidates) in candidates


def test_a_text_close_to_all_others_wins_against_a_majority() -> None:
    candidates = ["not to cancel", "not to cancel", "not too controversial", "not too control", "now too controversial"]
    assert mbr(candidates) == "not too controversial"


def test_ties_in_words_are_broken_by_letters() -> None:
    assert mbr(["the bat", "the cart", "the cat"]) == "the cat"


@given(lists_of_texts)
@settings(max_examples=cases(5))
def test_rover_uses_only_words_of_the_candidates(candidates: list[str]) -> None:
    assert set(rover(candidates).split()) <= {word for text in candidates for word in text.split()}


def test_confusion_network_counts_votes_in_every_slot() -> None:
    slots = confusion_network(["a b c", "a b c", "a c", "a b d"], [2, 1, 1, 1])
    shares = [{word: round(5 * vote, 6) for word, vote in slot.items()} for slot in slots]
    assert shares == [{"a": 5}, {"b": 4, "": 1}, {"c": 4, "d": 1}]
    assert confusion_network([]) == []


def test_rover_can_join_parts_of_several_candidates() -> None:
    assert rover(["a b c x", "a b y d", "z b c d"]) == "a b c d"
    assert rover(["a b", "a c b", "a c b"]) == "a c b"
    assert rover(["", "", "a"]) == ""


def test_no_candidates_give_an_empty_text() -> None:
    assert mbr([]) == "" == rover([])


def test_votes_are_weighted() -> None:
    assert mbr(["a", "b"], [1, 3]) == "b"
    scored = [CandidateList("1", ("a", "b", "c"), scores=(-5.0, -1.0, -9.0))]
    assert choose_by_vote(mbr, scored, vote_weights(scored)) == ["b"]


def test_agreement_finds_the_worst_system_without_references() -> None:
    rng = np.random.default_rng(1)
    words = "one two three four five six".split()
    lists = []
    for i in range(60):
        reference = [str(rng.choice(words)) for _ in range(6)]
        systems = [[w if rng.random() > p else "noise" for w in reference] for p in (0.05, 0.05, 0.4)]
        lists.append(CandidateList(str(i), tuple(" ".join(words) for words in systems)))
    weights = agreement_weights(lists)
    assert weights[2] < 0.5 * min(weights[:2])


def informative(seed: int, n: int = 120) -> list[FittingExample]:
    """The first feature predicts the errors, the second is noise."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        errors = rng.integers(0, 4, size=5).astype(float)
        made.append(FittingExample(np.stack([-errors + rng.normal(0, 0.3, 5), rng.normal(0, 1, 5)], axis=1), errors, 6))
    return made


def test_fitting_finds_the_informative_feature() -> None:
    weights = fit_weights(informative(0), [0.5, 0.5])
    assert weights[0] > 1 and abs(weights[1]) < 0.2 * weights[0]
    fresh = informative(7)
    chosen = sum(c.errors[int(np.argmax(c.features @ weights))] for c in fresh)
    assert chosen < 0.3 * sum(c.errors[0] for c in fresh)


def test_fitting_is_deterministic_and_handles_uninformative_examples() -> None:
    assert np.array_equal(fit_weights(informative(0), [0.5, 0.5]), fit_weights(informative(0), [0.5, 0.5]))
    assert fit_weights([], [2.0, 1.0]).tolist() == [2.0, 1.0]
    same = [FittingExample(np.ones((3, 2)), np.array([0.0, 1.0, 2.0]), 3)]
    assert np.isfinite(fit_weights(same, [1.0, 1.0])).all()


def test_a_trial_does_not_influence_its_own_weights() -> None:
    choices = informative(3, 40)
    folds = assign_folds([None] * 40, 4)
    by_trial, _ = cross_fit(choices, folds, [0.5, 0.5])
    changed = [*choices]
    changed[0] = FittingExample(choices[0].features * -50, choices[0].errors, 6)
    again, _ = cross_fit(changed, folds, [0.5, 0.5])
    assert np.array_equal(by_trial[0], again[0]) and not np.array_equal(by_trial[-1], again[-1])


def test_folds_keep_sessions_together() -> None:
    sessions = ["a", "a", "b", "b", "c", "c", "d"]
    folds = assign_folds(sessions, 2)
    assert len({(s, f) for s, f in zip(sessions, folds.tolist(), strict=True)}) == 4
    assert sorted(set(assign_folds([None] * 10, 5).tolist())) == [0, 1, 2, 3, 4]


def test_candidates_are_normalised_and_keep_their_reference(tmp_path: Path) -> None:
    path = write(
        tmp_path / "l.jsonl",
        {"id": "x", "text": "Yes, I do.", "candidates": ["Yes I do!", "", "yes"], "in_lm_text": True},
        {"id": 7, "text": "no", "nbest": [{"text": "no", "score": -1.5}, {"text": "now", "score": -2}]},
    )
    first, second = read_candidates(path)
    assert first.texts == ("yes i do", "", "yes") and first.reference == "Yes, I do." and first.in_lm_text
    assert second.id == "7" and second.scores == (-1.5, -2.0)
    assert second.reference is None  # `text` of a line with n-best is the decoded text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "x"}, ["line 2", "candidates"]),
        ({"id": "x", "candidates": "yes"}, ["line 2", "list"]),
        ({"id": "x", "candidates": ["a", None]}, ["line 2", "entry 2"]),
        ({"id": "x", "candidates": ["a", 3]}, ["line 2", "entry 2"]),
        ({"id": "x", "candidates": ["a"], "scores": [1.0, 2.0]}, ["line 2", "1 candidates", "2 scores"]),
        ({"id": "x", "candidates": ["a"], "scores": [float("nan")]}, ["line 2", "finite"]),
        ({"id": "x", "candidates": ["a"], "scores": ["1"]}, ["line 2", "finite"]),
        ({"id": "x", "candidates": ["a"], "text": 5}, ["line 2", "reference"]),
        ({"id": "first", "candidates": ["a"]}, ["line 2", "already on line 1", "first"]),
        ({"id": ["x"], "candidates": ["a"]}, ["line 2", "id"]),
        ({"id": "x", "nbest": [{"text": "a", "score": 1.0}, {"text": "b"}]}, ["line 2", "entry 2"]),
        ({"id": "x", "nbest": {"text": "a"}}, ["line 2", "list"]),
    ],
)
def test_errors_name_the_malformed_line(tmp_path: Path, row: object, words: list[str]) -> None:
    path = write(tmp_path / "l.jsonl", {"id": "first", "candidates": ["a"]}, row)
    with pytest.raises(UserError) as caught:
        read_candidates(path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_without_candidates_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jsonl", "binary.jsonl", "absent.jsonl", "."):
        with pytest.raises(UserError):
            read_candidates(tmp_path / name)


def test_references_are_found_by_id(tmp_path: Path) -> None:
    lists = [CandidateList("a", ("x",)), CandidateList("b", ("y",))]
    path = write(tmp_path / "r.jsonl", {"id": "b", "text": "y", "session": "s", "in_lm_text": False})
    attached = attach_references(lists, path)
    assert attached[0].reference is None and attached[1].reference == "y" and attached[1].session == "s"
    with pytest.raises(UserError, match="none of the trials"):
        attach_references([CandidateList("z", ())], path)
    twice = write(tmp_path / "t.jsonl", {"id": "b", "text": "y"}, {"id": "b", "text": "y"})
    with pytest.raises(UserError, match="twice"):
        attach_references(lists, twice)


def test_summary_counts_empty_lists_as_errors_and_names_the_best_system() -> None:
    lists = [
        CandidateList("1", ("a b", "a c"), reference="a b"),
        CandidateList("2", ("d", "d"), reference="d"),
        CandidateList("3", ("e", "f"), reference="e"),
    ]
    summary = summarise_combination(lists, ["a b", "d", "f"], lm=None).to_dict()
    assert summary["single_wer"] == [0.0, 0.5] and summary["best_single"] == 1
    assert summary["wer"] == 0.25 and summary["oracle_wer"] == 0.0
    ragged = [*lists, CandidateList("4", (), reference="g h")]
    summary = summarise_combination(ragged, ["a b", "d", "e", ""], lm=None).to_dict()
    assert summary["deletions"] == 2 and summary["n_empty"] == 1 and "single_wer" not in summary


def test_lists_of_different_length_are_combined() -> None:
    lists = [CandidateList("1", ("a", "a", "b")), CandidateList("2", ("c",)), CandidateList("3", ())]
    assert choose_linear(lists, vote_weights(lists, "agreement"), weights=np.ones(4)).texts == ["a", "c", ""]


def test_every_decoder_has_one_vote_whatever_its_list_length() -> None:
    many = [CandidateList("1", ("a",) + ("b",) * 3, scores=(0.0, -9.0, -9.0, -9.0), reference="a")]
    one = [CandidateList("1", ("a",))]
    (merged,) = merge_decoders([Path("x"), Path("y")], [many, one])
    assert merged.scores is not None and np.exp(merged.scores).sum() == pytest.approx(2)
    assert choose_by_vote(mbr, [merged], vote_weights([merged])) == ["a"]
    with pytest.raises(UserError, match="same trials"):
        merge_decoders([Path("x"), Path("y")], [many, [CandidateList("2", ("a",))]])
    with pytest.raises(UserError, match="disagree"):
        merge_decoders([Path("x"), Path("y")], [many, [CandidateList("1", ("a",), reference="b")]])


def normalised(seed: int, n_frames: int = 4) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(n_frames, 3))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def test_mean_frames_are_normalised_and_preserve_equal_models() -> None:
    for mean in ("arithmetic", "geometric"):
        pooled = mean_frames([normalised(0), normalised(1)], mean)
        assert np.exp(pooled).sum(axis=1) == pytest.approx(np.ones(4), abs=1e-5)
        assert mean_frames([normalised(0)] * 3, mean) == pytest.approx(normalised(0), abs=1e-5)
    both = mean_frames([normalised(0), normalised(1)], "arithmetic")
    assert np.exp(both) == pytest.approx((np.exp(normalised(0)) + np.exp(normalised(1))) / 2, abs=1e-6)


def frame_scores(path: Path, *frames: np.ndarray, trials: tuple[str, ...] = ("t1",)) -> FrameLogProbs:
    return FrameLogProbs(("BLANK", "A", "B"), frames, trials, str(path))


def test_averaging_requires_the_same_trials_and_frame_counts(tmp_path: Path) -> None:
    a = frame_scores(Path("a"), normalised(0))
    with pytest.raises(UserError, match="same trials"):
        average([a, frame_scores(Path("b"), normalised(0), trials=("t2",))], "arithmetic")
    with pytest.raises(UserError, match="4 frames in a and 5 in b"):
        average([a, frame_scores(Path("b"), normalised(0, 5))], "arithmetic")
    write_frames(tmp_path / "a.npz", a)
    back = read_frames(tmp_path / "a.npz")
    assert back.ids == a.ids and back.trials[0] == pytest.approx(a.trials[0], abs=2e-3)


def test_malformed_frame_files_are_rejected(tmp_path: Path) -> None:
    good = {
        "logp": normalised(0).astype(np.float16),
        "lengths": np.array([4], np.int32),
        "classes": np.array(["BLANK", "A", "B"]),
        "trials": np.array(["t1"]),
    }
    for change in (
        {"lengths": np.array([5], np.int32)},
        {"lengths": np.array([-4, 8], np.int32), "trials": np.array(["t1", "t2"])},
        {"classes": np.array(["BLANK"])},
        {"trials": np.array(["t1", "t1"]), "lengths": np.array([2, 2], np.int32)},
        {"trials": np.array([{}], dtype=object)},
    ):
        np.savez(tmp_path / "broken.npz", **{**good, **change})
        with pytest.raises(UserError):
            read_frames(tmp_path / "broken.npz")
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("text.npz", "absent.npz"):
        with pytest.raises(UserError):
            read_frames(tmp_path / name)


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
    lists = read_candidates(path)
    votes = vote_weights(lists)
    by_mbr = summarise_combination(lists, choose_by_vote(mbr, lists, votes), lm=None)
    assert by_mbr.words.wer is not None and by_mbr.words.wer <= mbr_wer
    linear = choose_linear(lists, votes, weights=np.array(feature_weights(())[1])).texts
    combined = summarise_combination(lists, linear, lm=None).to_dict()
    assert combined["wer"] <= packaged
    assert combined["against_best_single"]["p"] < 0.01 and combined["against_best_single"]["high"] < 0
