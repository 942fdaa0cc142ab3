"""Adaptation without labels: gains where days drift, no harm where they do not, bounds, causality, fall-back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.adaptation import stream as following_days
from arcuate.adaptation.config import METHODS, Adaptation, Method, Safety
from arcuate.adaptation.online import OnlineAdapter, make_adapter, matched, move, read, within
from arcuate.adaptation.safety import compare, fall_back, track_confidence, fallback_reason, need, is_usable
from arcuate.adaptation.state import SessionState, ExpectedConfidence, DecodedTrial, AffineLayer, Moments, InputStatistics, ModelComparison, confidence
from arcuate.adaptation.evaluate import (
    AdaptedSession,
    expected_confidence,
    follow,
    recording_order,
    measure_confidence,
    normalised_bins,
    start_session,
    summarise_courses,
)
from arcuate.adaptation.pseudo_labels import say, word_labeller
from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.config import AugmentationConfig
from arcuate.data.prepare import prepare
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.decoding.word_search.search import build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.metrics import total
from arcuate.experiments.recipe import run_recipe
from arcuate.language.lexicon import make_lexicon
from arcuate.models.io import load_model
from arcuate.models.model import add_session, copy_session_layer, single_session_model
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME, SECOND, speak
from support.fabricate import Made, write_hdf5
from support.forking import arcuate
from support.live_parts import small_ngram, small_search, write_words

ONE, EMPTY, HALF = "t15.2030.02.01", "t15.2030.02.02", "t15.2030.02.03"
LEARNING: tuple[Method, ...] = ("one-step", "replay")


def adapter_of(folder: Path, method: Method, **settings: object) -> OnlineAdapter:
    noise = run_recipe(Run(folder / "run")).augment
    tree = {"method": method, **settings}
    return make_adapter(load_model(find_checkpoint(folder / "run")), Adaptation.model_validate(tree), noise)


def trials_of(store: Store, session: str, split: str = "train") -> list[TrialInfo]:
    return [t for t in store.trials if t.session == session and t.split == split]


def followed(folder: Path, method: Method, session: str, split: str = "train", **settings: object) -> AdaptedSession:
    store = Store.open(folder / "store")
    return adapt_sessions(adapter_of(folder, method, **settings), store, trials_of(store, session, split))[0]


def rates(course: AdaptedSession) -> tuple[float, float]:
    """Error rates unadapted and adapted."""
    plain = total(f.unadapted for f in course.trials if f.unadapted).rate
    adapted = total(f.result.score for f in course.trials if f.result.score).rate
    assert plain is not None and adapted is not None
    return plain, adapted


# --- what it is for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LEARNING)
def test_a_drifted_day_is_read_better(new_days: Path, method: Method) -> None:
    plain, adapted = rates(followed(new_days, method, DRIFTED, lr=0.01))
    assert plain > 0.15 and adapted < 0.9 * plain


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("session", [SAME, SECOND])
def test_no_drift_no_harm(new_days: Path, method: Method, session: str) -> None:
    """A day like those of training, known or not: never worse by more than 2 % relative."""
    split = "train" if session == SAME else "val"
    plain, adapted = rates(followed(new_days, method, session, split))
    assert adapted <= 1.02 * plain


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_drifted_day_is_never_read_much_worse(new_days: Path, method: Method) -> None:
    plain, adapted = rates(followed(new_days, method, DRIFTED))
    assert adapted <= 1.02 * plain


def test_none_is_the_nearest_days_layer(new_days: Path) -> None:
    store, model = Store.open(new_days / "store"), load_model(find_checkpoint(new_days / "run"))
    adapter = adapter_of(new_days, "none")
    trial = trials_of(store, DRIFTED)[0]
    bins = normalised_bins(adapter, store, trial)
    second = torch.tensor([model.config.sessions.index(SECOND)])
    with torch.inference_mode():
        expected = model.encode(bins[None], torch.tensor([len(bins)]), second).log_probs["ctc"][0]
    course = adapt_sessions(adapter, store, [trial], keep_log_probs=True)[0]
    assert course.state.init_session == SECOND and not course.known
    np.testing.assert_allclose(course.trials[0].result.log_probs, expected.numpy(), atol=1e-6)


# --- causal, bounded, reversible -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_later_trials_change_nothing_before_them(new_days: Path, method: Method) -> None:
    store = Store.open(new_days / "store")
    trials = recording_order(trials_of(store, DRIFTED), store.sessions)[:6]
    whole = adapt_sessions(adapter_of(new_days, method), store, trials, keep_log_probs=True)[0]
    part = adapt_sessions(adapter_of(new_days, method), store, trials[:4], keep_log_probs=True)[0]
    for a, b in zip(part.trials, whole.trials, strict=False):
        assert a.result.log_probs is not None
        np.testing.assert_array_equal(a.result.log_probs, b.result.log_probs)


@pytest.mark.parametrize("method", LEARNING)
def test_labels_of_the_trials_are_never_seen(new_days: Path, method: Method) -> None:
    store = Store.open(new_days / "store")
    trials = recording_order(trials_of(store, DRIFTED), store.sessions)[:5]
    hidden = [replace(t, tokens=None, text=None) for t in trials]
    with_labels = adapt_sessions(adapter_of(new_days, method), store, trials)[0]
    without = adapt_sessions(adapter_of(new_days, method), store, hidden)[0]
    assert [f.result.tokens for f in with_labels.trials] == [f.result.tokens for f in without.trials]
    torch.testing.assert_close(with_labels.day.layer.weight, without.day.layer.weight, rtol=0, atol=0)


def test_the_model_itself_is_never_changed(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "replay", lr=0.05)
    before = {name: tensor.clone() for name, tensor in adapter.model.state_dict().items()}
    adapt_sessions(adapter, store, trials_of(store, DRIFTED)[:5])
    for name, tensor in adapter.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_day_can_be_taken_back(new_days: Path) -> None:
    """A day is a value: what was read with it before is read the same after others were made from it."""
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step", lr=0.05)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    start = adapter.start(DRIFTED)
    first = read(adapter.adapted_model(start), bins)
    later, _ = adapter.update(start, DecodedTrial(bins, first, tuple(greedy(first))))
    assert later.n_steps == 1 and not np.array_equal(read(adapter.adapted_model(later), bins), first)
    np.testing.assert_array_equal(read(adapter.adapted_model(start), bins), first)


def test_no_weight_moves_further_than_the_rate_and_the_layer_not_beyond_its_reach() -> None:
    layer = AffineLayer(torch.eye(4), torch.zeros(4))
    gradients = [torch.full((4, 4), 1e9), torch.full((4,), float("nan"))]
    moved, moments = move(layer, AdamMoments.zero(layer), gradients, layer, 0.01, 10.0)
    assert float((moved.weight - layer.weight).abs().max()) <= 0.01 + 1e-7
    assert torch.equal(moved.bias, layer.bias)
    for _ in range(200):
        moved, moments = move(moved, moments, gradients, layer, 0.01, 0.2)
    assert moved.distance(layer) <= 0.2 + 1e-5


def test_being_drawn_back_into_reach_moves_no_weight_faster_either() -> None:
    """One weight has used up the reach; a step of all others must not throw it back at once."""
    start = AffineLayer(torch.eye(20), torch.zeros(20))
    weight = start.weight.clone()
    weight[0, 0] += 0.2 * 20**0.5  # as far as it may go
    layer, gradients = AffineLayer(weight, start.bias), (torch.ones(20, 20), torch.zeros(20))
    moved, _ = move(layer, AdamMoments.zero(layer), gradients, start, 0.01, 0.2)
    assert float((moved.weight - layer.weight).abs().max()) <= 0.01 + 1e-6
    assert 0.19 < moved.distance(start) <= 0.2 + 1e-6


def test_entropy_moves_gains_and_offsets_and_turns_nothing(new_days: Path) -> None:
    """Every column of the layer keeps its direction, however long the day."""
    course = followed(new_days, "entropy", DRIFTED, lr=0.01)
    before, after = course.state.initial.weight, course.state.layer.weight
    gains = (before * after).sum(0) / before.square().sum(0)
    assert course.state.n_steps > 5 and float((gains - 1).abs().max()) > 0.005
    torch.testing.assert_close(after, before * gains, atol=1e-5, rtol=0)


def test_within_leaves_what_is_near() -> None:
    start = AffineLayer(torch.eye(3), torch.zeros(3))
    near = AffineLayer(1.05 * torch.eye(3), torch.zeros(3))
    assert within(near, start, 0.1) is near
    assert within(AffineLayer(2 * torch.eye(3), torch.zeros(3)), start, 0.1).distance(start) == pytest.approx(0.1)


# --- safety -------------------------------------------------------------------------------------------------


def scores(sure: float, n: int = 10) -> np.ndarray:
    """Frames that alternate between two classes with this probability. (n, 3)"""
    probabilities = np.full((n, 3), (1 - sure) / 2)
    probabilities[np.arange(n), 1 + np.arange(n) % 2] = sure
    return np.log(probabilities)


def test_confidence_counts_frames_that_say_something() -> None:
    assert confidence(scores(0.8)) == pytest.approx(0.8)
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    assert confidence(silent) == 0.0


def test_unsure_empty_and_flat_trials_teach_nothing() -> None:
    settings, bins = Safety(min_confidence=0.5), torch.randn(20, 3)
    said = (1, 2, 1)
    assert is_usable(DecodedTrial(bins, scores(0.8, 3), said), settings)
    assert not is_usable(DecodedTrial(bins, scores(0.4, 3), said), settings)
    assert not is_usable(DecodedTrial(bins, scores(0.8, 1), (1,)), settings)
    assert not is_usable(DecodedTrial(torch.zeros(20, 3), scores(0.8, 3), said), settings)
    assert not is_usable(DecodedTrial(torch.zeros(0, 3), scores(0.8, 3), said), settings)


@pytest.mark.parametrize(("n_edits", "teaches"), [(0, True), (4, True), (5, False)])
def test_a_sentence_far_from_the_phonemes_heard_teaches_nothing(n_edits: int, teaches: bool) -> None:
    heard, bins = scores(0.8, 10), torch.randn(20, 3)
    said = ((1, 2) * 5)[n_edits:]
    assert is_usable(DecodedTrial(bins, heard, said), Safety(max_disagreement=0.4)) is teaches
    assert is_usable(DecodedTrial(bins, heard, said), Safety(max_disagreement=1.0))


@pytest.mark.parametrize(
    ("adapted", "unadapted", "falls"), [(0.9, 0.8, False), (0.75, 0.8, True), (0.79, 0.8, False)]
)
def test_it_falls_back_when_confidence_drops(adapted: float, unadapted: float, falls: bool) -> None:
    settings, trust = Safety(window=3, max_confidence_drop=0.02), ModelComparison()
    for i in range(3):
        assert fallback_reason(trust, settings) is None, i
        trust = compare(trust, scores(adapted), scores(unadapted), settings)
    assert (fallback_reason(trust, settings) is not None) == falls


def test_it_falls_back_when_it_stops_reading() -> None:
    settings, trust = Safety(window=2), ModelComparison()
    for _ in range(2):
        trust = compare(trust, scores(0.99, 4), scores(0.9, 12), settings)
    assert "tokens" in (fallback_reason(trust, settings) or "")


def test_trials_in_which_nobody_reads_anything_are_no_reason_to_fall_back() -> None:
    silent, settings, trust = np.log(np.array([[0.98, 0.01, 0.01]] * 5)), Safety(window=3), ModelComparison()
    for frames in (silent, silent, scores(0.8)):
        trust = compare(trust, frames, frames, settings)
    assert fallback_reason(trust, settings) is None


def test_one_long_reading_does_not_hide_that_the_others_stopped() -> None:
    """Tokens are added up over trials; a mean of shares would let one trial speak for all."""
    silent, settings, trust = (
        np.log(np.array([[0.98, 0.01, 0.01]] * 5)),
        Safety(window=4, max_confidence_drop=1.0),
        ModelComparison(),
    )
    trust = compare(trust, scores(0.8, 8), silent, settings)
    for _ in range(3):
        trust = compare(trust, silent, scores(0.8, 20), settings)
    assert "0.13 of the tokens" in (fallback_reason(trust, settings) or "")


def test_silence_that_both_hear_is_no_reason_to_fall_back() -> None:
    settings, trust = Safety(window=2), ModelComparison()
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    for _ in range(2):
        trust = compare(trust, silent, silent, settings)
    assert fallback_reason(trust, settings) is None
    trust = compare(compare(trust, silent, scores(0.9), settings), silent, scores(0.9), settings)
    assert fallback_reason(trust, settings) is not None, "but silence where the other one reads is"


def test_a_ruined_layer_is_given_up_for_the_one_the_day_began_with(new_days: Path) -> None:
    """Steps far too long ruin the layer; the day ends no worse than a few windows of trials can cost."""
    settings = {"lr": 0.1, "max_distance": 10.0, "safety": {"window": 3, "max_fallbacks": 1}}
    course = followed(new_days, "one-step", DRIFTED, **settings)
    assert sum(f.fell_back is not None for f in course.trials) >= 1
    plain, adapted = rates(replace(course, trials=course.trials[-10:]))
    assert adapted <= plain + 0.1


def test_need_is_nothing_on_a_day_as_sure_as_known_ones() -> None:
    layer = AffineLayer(torch.eye(2), torch.zeros(2))
    day = SessionState("x", "x", layer, layer, AdamMoments.zero(layer), expected=ExpectedConfidence(0.8), plain=(0.85, 0.8))
    assert need(day, Safety()) == 0.0
    assert need(replace(day, plain=(0.7,)), Safety(full_step_uncertainty=0.5)) == pytest.approx(1.0)
    assert need(replace(day, plain=(0.75,)), Safety(full_step_uncertainty=0.5)) == pytest.approx(0.5)
    assert need(replace(day, expected=None), Safety()) == 1.0


def test_what_chance_explains_is_no_reason_to_learn() -> None:
    layer = AffineLayer(torch.eye(2), torch.zeros(2))
    day = SessionState("x", "w", layer, layer, AdamMoments.zero(layer), expected=ExpectedConfidence(0.8, 0.01, 0.04))
    sure = Safety(min_standard_errors=2.0)
    assert need(replace(day, plain=(0.75,)), sure) == 0.0, "one trial may be so"
    assert need(replace(day, plain=(0.75,) * 20), sure) == pytest.approx(0.5), "not twenty"
    assert need(replace(day, plain=(0.785,) * 1000), sure) == 0.0, "a day may be so"
    assert need(replace(day, plain=(0.785,)), Safety(min_standard_errors=0.0)) == pytest.approx(0.15)
    known = replace(day, like="x", plain=(0.75,) * 20)
    assert need(known, Safety(min_standard_errors=1.0)) == pytest.approx(0.5), "a known day needs three times as much"
    assert need(known, Safety(min_standard_errors=1.3)) == 0.0
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    assert track_confidence(replace(day, plain=(0.75,)), silent).plain == (0.75,), "nothing was read"
    for _ in range(50):
        day = track_confidence(day, scores(0.8))
    assert day.plain == pytest.approx((0.8,) * 40)


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_day_like_known_ones_is_read_as_it_began_whatever_was_learned(
    new_days: Path, method: Method
) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, method)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    day = start_session(adapter, store, DRIFTED, {FIRST: (0.9, 0.8), SECOND: (0.85,)})
    moved = AffineLayer(day.initial.weight * 1.1, day.initial.bias)
    for sure, is_start in ((0.85, True), (0.5, False), (0.849, True)):
        day = replace(day, layer=moved, plain=(sure,) * 20)
        assert (adapter.layer(day, bins).distance(day.initial) == 0.0) is is_start


def test_how_sure_known_days_are_is_measured_on_trials_apart_from_training(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step")
    own = [trials_of(store, s, "val")[:12] for s in (FIRST, SECOND)]
    sure = []
    for session, trials in zip((FIRST, SECOND), own, strict=True):
        model = single_session_model(adapter.model, session, *copy_session_layer(adapter.model, session))
        sure.append([confidence(read(model, normalised_bins(adapter, store, t))) for t in trials])
    found = measure_confidence(adapter, store)
    assert list(found) == [FIRST, SECOND] and [list(found[s]) for s in found] == sure


def test_many_known_days_are_sampled_more_thinly(new_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream waits for them to be read: 45 days must not take eight times as long as six."""
    store, adapter, n_read = Store.open(new_days / "store"), adapter_of(new_days, "one-step"), []
    for most in (1000, 10, 1):
        monkeypatch.setattr(following_days, "MOST_EXPECTED", most)
        heard: list[TrialInfo] = []
        monkeypatch.setattr(
            following_days,
            "normalised_bins",
            lambda a, s, t, heard=heard: heard.append(t) or normalised_bins(a, s, t),
        )
        assert set(measure_confidence(adapter, store)) == {FIRST, SECOND}
        n_read.append(len(heard))
    assert n_read == [24, 10, 4]


def test_what_is_expected_of_a_known_day_is_measured_on_others() -> None:
    """Nothing of a day is read before its first trial, and no day is measured by itself."""
    known = {"a": (0.9,), "b": (0.7,), "c": (0.5,)}
    assert expected_confidence("new", known).confidence == pytest.approx(0.7)
    assert expected_confidence("a", known).confidence == pytest.approx(0.6)
    assert expected_confidence("a", {"a": (0.9,)}) == ExpectedConfidence(0.9, day_sd=pytest.approx(0.01))
    assert expected_confidence("a", {}) is None
    apart = {"a": (0.6, 0.8), "b": (0.8, 0.8, 0.8), "c": (0.9, 0.9)}
    assert expected_confidence("c", apart) == ExpectedConfidence(
        pytest.approx(0.75), day_sd=pytest.approx(0.1 / 2**0.5), trial_sd=pytest.approx(0.1)
    )


# --- statistics ---------------------------------------------------------------------------------------------


def test_matched_layers_give_outputs_the_mean_and_sd_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(4000, 3, generator=generator) @ torch.randn(3, 3, generator=generator)
    after = 1.7 * before + torch.tensor([0.5, -1.0, 2.0])
    start = AffineLayer(torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator))
    layer = matched(start, InputStatistics.of(before), InputStatistics.of(after))
    torch.testing.assert_close(
        after @ layer.weight + layer.bias, before @ start.weight + start.bias, atol=1e-3, rtol=1e-3
    )


def statistics_day(folder: Path, **settings: object) -> tuple[OnlineAdapter, SessionState, torch.Tensor]:
    """A day that begins, by statistics; and the bins of one of its trials."""
    store, adapter = Store.open(folder / "store"), adapter_of(folder, "statistics", **settings)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    return adapter, start_session(adapter, store, DRIFTED, {}), bins


def test_statistics_stay_within_reach(new_days: Path) -> None:
    """Whatever the input: an amplifier that jumps by a thousand SD moves the layer no further than it may."""
    adapter, day, bins = statistics_day(new_days, max_distance=0.2)
    far = bins + 1000.0
    assert adapter.layer(day, far).distance(day.initial) == pytest.approx(0.2)
    day, _ = adapter.update(day, DecodedTrial(far, read(adapter.adapted_model(day, far), far), ()))
    assert day.n_steps == 1 and adapter.layer(day).distance(day.initial) == pytest.approx(0.2)


def test_statistics_that_fell_back_begin_anew(new_days: Path) -> None:
    adapter, day, bins = statistics_day(new_days)
    for _ in range(3):
        day, _ = adapter.update(day, DecodedTrial(bins + 5.0, scores(0.8), ()))
    assert adapter.layer(day).distance(day.initial) > 0.01
    assert adapter.layer(fall_back(day)).distance(day.initial) < 1e-6


def test_flat_trials_count_in_no_statistics(new_days: Path) -> None:
    adapter, day, bins = statistics_day(new_days)
    flat = torch.full_like(bins, 3.0)
    after, _ = adapter.update(day, DecodedTrial(flat, read(adapter.adapted_model(day, flat), flat), ()))
    assert (after.seen, after.n_steps, after.n_trials) == (None, 0, 1)
    assert torch.equal(adapter.layer(day, flat).weight, adapter.layer(day).weight)


def test_how_far_statistics_moved_is_told(new_days: Path) -> None:
    course = followed(new_days, "statistics", DRIFTED)
    (told,) = summarise_courses([course])["days"]
    assert told["n_falls"] == 0 and told["moved"] > 0.001


def test_statistics_need_the_known_day(new_days: Path) -> None:
    with pytest.raises(UserError, match="nearest known day"):
        adapter_of(new_days, "statistics").start(DRIFTED)


# --- models ---------------------------------------------------------------------------------------------------


def test_a_model_without_session_layers_reads_the_same_with_them_added(
    tmp_path: Path, new_days: Path
) -> None:
    from arcuate.models.config import ModelConfig
    from arcuate.models.model import Model

    config = load_model(find_checkpoint(new_days / "run")).config
    tree = config.model_dump()
    tree["settings"]["front_end"]["session_layer"]["enabled"] = False
    torch.manual_seed(0)
    model = Model(ModelConfig.model_validate(tree)).eval()
    bins, n_bins = torch.randn(2, 30, config.n_channels), torch.tensor([30, 22])
    session = torch.tensor([0, 1])
    with torch.inference_mode():
        plain = model(bins, n_bins, session).log_probs["ctc"]
        grown = add_session(model, "t15.2030.09.09", FIRST)
        added = grown.eval()(bins, n_bins, torch.tensor([0, 2])).log_probs["ctc"]
    assert (
        grown.config.sessions[-1] == "t15.2030.09.09"
        and not model.config.settings.front_end.session_layer.enabled
    )
    torch.testing.assert_close(plain, added, atol=1e-5, rtol=0)


def test_the_adapted_model_streams_as_it_reads_whole_trials(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step", lr=0.02)
    course = adapt_sessions(adapter, store, trials_of(store, DRIFTED)[:5])[0]
    model = adapter.adapted_model(course.state)
    bins = torch.from_numpy(store.read_bins(trials_of(store, DRIFTED)[5]))
    with torch.inference_mode():
        state, parts = model.start(0), []
        for chunk in bins.split(7):
            outputs, state = model.step(state, chunk[None])
            parts.append(outputs.log_probs["ctc"])
        parts.append(model.finish(state).log_probs["ctc"])
    np.testing.assert_allclose(torch.cat(parts, 1)[0].numpy(), read(model, bins), atol=1e-5)


# --- the command ----------------------------------------------------------------------------------------------


def test_evaluate_follows_known_and_unknown_days(new_days: Path) -> None:
    words = ("--data", new_days / "store", "--session", SECOND, "--session", DRIFTED, "--set", "lr=0.01")
    done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *words, "--json")
    assert done.returncode == 0, done.stderr
    told = one_object(done.stdout)
    assert [d["known"] for d in told["days"]] == [True, False]
    assert told["days"][1]["layer_of"] == SECOND and told["days"][1]["days_later"] == 8
    assert f"{DRIFTED} is new to the model: read with the layer of {SECOND}, 8 days earlier" in done.stderr
    assert told["per_unadapted"] is not None and told["adapt"]["lr"] == 0.01
    assert (new_days / "run/results/val.adapt-one-step.jsonl").is_file()


# --- labels through words --------------------------------------------------------------------------------------


def spoken(*phonemes: str) -> np.ndarray:
    """Sure frames of these phonemes, a blank after each. (F, V)"""
    classes = [c for name in phonemes for c in (CLASSES.index(name), 0)]
    frames = np.full((len(classes), len(CLASSES)), 1e-6)
    frames[np.arange(len(classes)), classes] = 1.0
    return np.log(frames / frames.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("n_frames", [1, 1000])
def test_words_are_labelled_as_the_lexicon_says_them(n_frames: int) -> None:
    """In English "b" is said B IY; this lexicon knows better, and it is what the search has heard."""
    label = word_labeller(small_search(), n_frames)
    assert token_names(label(spoken("B", "SIL", "JH"))) == ["B", "SIL", "JH", "SIL"]
    silent = np.log(np.full((6, len(CLASSES)), 1e-6) + np.eye(len(CLASSES))[[0] * 6])
    assert label((silent - np.logaddexp.reduce(silent, axis=1)[:, None]).astype(np.float32)) == ()


def test_words_that_are_said_in_two_ways_are_said_as_their_neighbours_want() -> None:
    lexicon = make_lexicon(
        [("use", ("Y", "UW", "S")), ("use", ("Y", "UW", "Z")), ("to", ("T", "UW"))], CLASSES, "x"
    )
    search = build_word_search(lexicon, small_ngram())
    assert " ".join(say(search, ["to", "use"])) == "T UW SIL Y UW Z SIL"
    assert " ".join(say(search, ["use"])) == "Y UW S SIL"


def test_evaluate_learns_from_the_words_of_a_language_model(new_days: Path, tmp_path: Path) -> None:
    lexicon, lm = write_words(tmp_path)
    words = ("--data", new_days / "store", "--session", DRIFTED, "--set", "lr=0.01", "--set", "copies=4")
    told = {}
    for label, more in (("greedy", ()), ("words", ("--lm", lm, "--lexicon", lexicon))):
        named = ("--label", label, "--scores", tmp_path / f"{label}.npz", "--json")
        done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *words, *more, *named)
        assert done.returncode == 0, done.stderr
        told[label] = one_object(done.stdout)
    assert told["words"]["labels_by"] == f"words of {lm}" and told["greedy"]["labels_by"] == "greedy"
    assert told["words"]["days"][0]["n_steps"] > 0
    assert told["words"]["days"][0]["moved"] != told["greedy"]["days"][0]["moved"]
    assert told["words"]["per_unadapted"] == told["greedy"]["per_unadapted"]
    hyps = tmp_path / "hyps.jsonl"  # and the frames it was read with become text
    done = arcuate(
        "decode", tmp_path / "words.npz", "--lm", lm, "--lexicon", lexicon, "--out", hyps, "--json"
    )
    assert done.returncode == 0 and one_object(done.stdout)["n_trials"] == 20, done.stderr


def test_labels_without_their_parts_are_refused(new_days: Path, tmp_path: Path) -> None:
    words = ("--data", new_days / "store", "--session", DRIFTED, "--adapt", "one-step")
    done = arcuate("evaluate", new_days / "run", *words, "--lm", tmp_path / "no.arpa")
    assert_refused(done, "no.arpa")


def test_a_silent_day_and_a_replugged_one_are_read_without_learning_nonsense(new_days: Path) -> None:
    words = ("--data", new_days / "store", "--session", DEAD, "--session", PERMUTED, "--json")
    done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *words)
    told = one_object(done.stdout)
    permuted, dead = told["days"]
    assert dead["n_steps"] == dead["n_falls"] == 0 and dead["moved"] == 0.0
    assert permuted["per"] <= permuted["per_unadapted"] * 1.05 + 0.02
    assert f"every channel of {DEAD} is flat" in done.stderr
    assert f"the channels of {PERMUTED} look re-ordered" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adapt", "magic"), ("'magic' is unknown", "one-step")),
        (("--adapt", "one-step", "--set", "lr=2"), ("lr", "known settings")),
        (("--adapt", "one-step", "--set", "speed=2"), ("speed", "known settings")),
        (("--adapt", "none", "--session", "t15.2031.01.01"), ("no session t15.2031.01.01",)),
        (("--adapt", "none", "--head", "both"), ("--head ctc",)),
        (("--adapt", "one-step", "--set", "rates=2"), ("did you mean rate?",)),
        (("--adapt", "one-step", "--set", "safety.widow=2"), ("did you mean safety.window?",)),
        (("--adapt", "one-step", "--set", "lr"), ("--set 'rate'", "lr=5e-4")),
        (("--adapt", "one-step", "--set", "method=none"), ("--adapt",)),
        (("--adapt", "one-step", "--lexicon", "words.txt"), ("--lm",)),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    new_days: Path, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    assert_refused(arcuate("evaluate", new_days / "run", "--data", new_days / "store", *words), *said)


def test_other_channels_are_refused(new_days: Path, cohort_store: Path) -> None:
    done = arcuate("evaluate", new_days / "run", "--data", cohort_store, "--adapt", "none")
    assert_refused(done, "12 channels", "32")


@pytest.fixture(scope="module")
def odd_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a day of one trial, one with trials that hold no bin, and one on which half the channels died."""
    root, rng = tmp_path_factory.mktemp("odd"), np.random.default_rng(4)
    shapes = {ONE: (1, never_empty), EMPTY: (4, empty_every_third), HALF: (12, half_flat)}
    for session, (n, change) in shapes.items():
        for split in ("train", "val"):
            spoken_ = [speak(rng, np.eye(12)) for _ in range(n)]
            made = [Made(change(i, bins), tokens, "text") for i, (bins, tokens) in enumerate(spoken_)]
            write_hdf5(root / "source/hdf5_data_final" / session / f"data_{split}.hdf5", made)
    prepare(root / "source", root / "store")
    return root / "store"


def never_empty(i: int, bins: np.ndarray) -> np.ndarray:
    return bins


def empty_every_third(i: int, bins: np.ndarray) -> np.ndarray:
    return bins if i % 3 else bins[:0]


def half_flat(i: int, bins: np.ndarray) -> np.ndarray:
    return bins * (np.arange(bins.shape[1]) % 2).astype(np.float32)


@pytest.mark.parametrize("method", METHODS[2:])
def test_trials_without_a_bin_teach_nothing(new_days: Path, odd_days: Path, method: Method) -> None:
    store = Store.open(odd_days)
    course = adapt_sessions(adapter_of(new_days, method, lr=0.01), store, trials_of(store, EMPTY, "val"))[0]
    assert [f.result.trial.n_bins > 0 for f in course.trials] == [False, True, True, False]
    assert not course.trials[0].learned and not course.trials[3].learned


@pytest.mark.parametrize("method", ["none", "one-step"])
def test_a_day_of_one_trial(new_days: Path, odd_days: Path, method: str) -> None:
    done = arcuate("evaluate", new_days / "run", "--data", odd_days, "--session", ONE, "--adapt", method)
    assert done.returncode == 0, done.stderr
    assert "no interval from a single trial" in done.stdout


def test_a_day_whose_recordings_were_rejected_is_told_apart_from_one_without_labels(
    new_days: Path, odd_days: Path, tmp_path: Path
) -> None:
    words = ("--data", odd_days, "--session", HALF, "--run", tmp_path / "run")
    done = arcuate("calibrate", new_days / "run", *words)
    assert_refused(done, "none of the 12 labelled", "quality.csv")
    assert "add its labels" not in done.stderr


def test_summaries_add_up(new_days: Path) -> None:
    course = followed(new_days, "one-step", DRIFTED)
    told = summarise_courses([course])
    plain, _ = rates(course)
    assert told["per_unadapted"] == pytest.approx(plain)
    assert told["days"][0]["n_trials"] == len(course.trials)


def test_augmentation_of_the_recipe_makes_the_copies(new_days: Path) -> None:
    quiet = make_adapter(
        load_model(find_checkpoint(new_days / "run")),
        Adaptation(method="one-step", lr=0.02),
        AugmentationConfig(),
    )
    store = Store.open(new_days / "store")
    trials = trials_of(store, DRIFTED)[:4]
    noisy = adapt_sessions(adapter_of(new_days, "one-step", lr=0.02), store, trials)[0].day.layer.weight
    assert not torch.equal(noisy, adapt_sessions(quiet, store, trials)[0].day.layer.weight)
