"""Online adaptation: gains on drifted sessions, no loss on others, bounds, causality, fall-back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.adaptation import known_sessions
from arcuate.adaptation.config import METHODS, Adaptation, Method, Safety
from arcuate.adaptation.evaluate import (
    AdaptedSession,
    adapt_sessions,
    compare_with_unadapted,
    recording_order,
    summarise_session,
)
from arcuate.adaptation.known_sessions import expected_confidence, measure_confidence, normalised_bins, start_session
from arcuate.adaptation.online import (
    OnlineAdapter,
    adam_step,
    clip_distance,
    compute_log_probs,
    make_adapter,
    match_statistics,
    word_labeller,
    word_phonemes,
)
from arcuate.adaptation.state import (
    AdamMoments,
    AffineLayer,
    DecodedTrial,
    ExpectedConfidence,
    InputStatistics,
    ModelComparison,
    SessionState,
    compare,
    confidence,
    fall_back,
    fallback_reason,
    is_usable,
    step_factor,
    track_confidence,
)
from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.config import AugmentationConfig
from arcuate.data.prepare import prepare
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.word_search.search import build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.metrics import total
from arcuate.experiments.recipe import run_recipe
from arcuate.language.lexicon import make_lexicon
from arcuate.models.interfaces import ModelInputs
from arcuate.models.io import load_model
from arcuate.models.model import add_session, copy_session_layer, single_session_model
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME, SECOND, speak
from support.live_parts import small_ngram, small_search, write_words
from support.recordings import FakeTrial, write_hdf5

ONE, EMPTY, HALF = "t15.2030.02.01", "t15.2030.02.02", "t15.2030.02.03"
LABEL_METHODS: tuple[Method, ...] = ("one-step", "replay")


def adapter_of(folder: Path, method: Method, **settings: object) -> OnlineAdapter:
    augmentation = run_recipe(Run(folder / "run")).augment
    tree = {"method": method, **settings}
    return make_adapter(load_model(find_checkpoint(folder / "run")), Adaptation.model_validate(tree), augmentation)


def trials_of(store: Store, session: str, split: str = "train") -> list[TrialInfo]:
    return [t for t in store.trials if t.session == session and t.split == split]


def adapt(folder: Path, method: Method, session: str, split: str = "train", **settings: object) -> AdaptedSession:
    store = Store.open(folder / "store")
    return adapt_sessions(adapter_of(folder, method, **settings), store, trials_of(store, session, split))[0]


def error_rates(adapted: AdaptedSession) -> tuple[float, float]:
    """Unadapted and adapted error rate."""
    before = total(t.unadapted for t in adapted.trials if t.unadapted).rate
    after = total(t.result.score for t in adapted.trials if t.result.score).rate
    assert before is not None and after is not None
    return before, after


# --- benefit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LABEL_METHODS)
def test_a_drifted_session_is_decoded_better(new_days: Path, method: Method) -> None:
    before, after = error_rates(adapt(new_days, method, DRIFTED, lr=0.01))
    assert before > 0.15 and after < 0.9 * before


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("session", [SAME, SECOND])
def test_a_session_without_drift_is_not_decoded_worse(new_days: Path, method: Method, session: str) -> None:
    """A session like those of training, known or new: at most 2 % worse, relative."""
    split = "train" if session == SAME else "val"
    before, after = error_rates(adapt(new_days, method, session, split))
    assert after <= 1.02 * before


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_drifted_session_is_never_decoded_much_worse(new_days: Path, method: Method) -> None:
    before, after = error_rates(adapt(new_days, method, DRIFTED))
    assert after <= 1.02 * before


def test_none_uses_the_layer_of_the_nearest_session(new_days: Path) -> None:
    store, model = Store.open(new_days / "store"), load_model(find_checkpoint(new_days / "run"))
    adapter = adapter_of(new_days, "none")
    trial = trials_of(store, DRIFTED)[0]
    bins = normalised_bins(adapter, store, trial)
    second = torch.tensor([model.config.sessions.index(SECOND)])
    with torch.inference_mode():
        expected = model.encode(ModelInputs(bins[None], torch.tensor([len(bins)]), second)).log_probs["ctc"][0]
    adapted = adapt_sessions(adapter, store, [trial], keep_log_probs=True)[0]
    assert adapted.state.init_session == SECOND and not adapted.known
    np.testing.assert_allclose(adapted.trials[0].result.log_probs, expected.numpy(), atol=1e-6)


# --- causal, bounded, reversible -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_later_trials_do_not_affect_earlier_ones(new_days: Path, method: Method) -> None:
    store = Store.open(new_days / "store")
    trials = recording_order(trials_of(store, DRIFTED), store.sessions)[:6]
    complete = adapt_sessions(adapter_of(new_days, method), store, trials, keep_log_probs=True)[0]
    part = adapt_sessions(adapter_of(new_days, method), store, trials[:4], keep_log_probs=True)[0]
    for a, b in zip(part.trials, complete.trials, strict=False):
        assert a.result.log_probs is not None
        np.testing.assert_array_equal(a.result.log_probs, b.result.log_probs)


@pytest.mark.parametrize("method", LABEL_METHODS)
def test_labels_are_never_used(new_days: Path, method: Method) -> None:
    store = Store.open(new_days / "store")
    trials = recording_order(trials_of(store, DRIFTED), store.sessions)[:5]
    hidden = [replace(t, tokens=None, text=None) for t in trials]
    with_labels = adapt_sessions(adapter_of(new_days, method), store, trials)[0]
    without = adapt_sessions(adapter_of(new_days, method), store, hidden)[0]
    assert [f.result.tokens for f in with_labels.trials] == [f.result.tokens for f in without.trials]
    torch.testing.assert_close(with_labels.state.layer.weight, without.state.layer.weight, rtol=0, atol=0)


def test_the_model_is_never_changed(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "replay", lr=0.05)
    before = {name: tensor.clone() for name, tensor in adapter.model.state_dict().items()}
    adapt_sessions(adapter, store, trials_of(store, DRIFTED)[:5])
    for name, tensor in adapter.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_earlier_state_remains_valid(new_days: Path) -> None:
    """States are immutable: a trial is decoded the same with an earlier state after an update."""
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step", lr=0.05)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    start = adapter.start(DRIFTED)
    first = compute_log_probs(adapter.adapted_model(start), bins)
    later, _ = adapter.update(start, DecodedTrial(bins, first, tuple(greedy(first))))
    assert later.n_steps == 1 and not np.array_equal(compute_log_probs(adapter.adapted_model(later), bins), first)
    np.testing.assert_array_equal(compute_log_probs(adapter.adapted_model(start), bins), first)


def test_steps_and_total_distance_are_bounded() -> None:
    layer = AffineLayer(torch.eye(4), torch.zeros(4))
    gradients = [torch.full((4, 4), 1e9), torch.full((4,), float("nan"))]
    moved, moments = adam_step(layer, AdamMoments.zero(layer), gradients, layer, 0.01, 10.0)
    assert float((moved.weight - layer.weight).abs().max()) <= 0.01 + 1e-7
    assert torch.equal(moved.bias, layer.bias)
    for _ in range(200):
        moved, moments = adam_step(moved, moments, gradients, layer, 0.01, 0.2)
    assert moved.distance(layer) <= 0.2 + 1e-5


def test_the_projection_moves_no_weight_by_more_than_the_learning_rate() -> None:
    """One weight is at the maximum distance; a step of all others must not pull it back at once."""
    start = AffineLayer(torch.eye(20), torch.zeros(20))
    weight = start.weight.clone()
    weight[0, 0] += 0.2 * 20**0.5  # maximum distance
    layer, gradients = AffineLayer(weight, start.bias), (torch.ones(20, 20), torch.zeros(20))
    moved, _ = adam_step(layer, AdamMoments.zero(layer), gradients, start, 0.01, 0.2)
    assert float((moved.weight - layer.weight).abs().max()) <= 0.01 + 1e-6
    assert 0.19 < moved.distance(start) <= 0.2 + 1e-6


def test_entropy_changes_gains_and_offsets_only(new_days: Path) -> None:
    """Every column of the layer keeps its direction."""
    adapted = adapt(new_days, "entropy", DRIFTED, lr=0.01)
    before, after = adapted.state.initial.weight, adapted.state.layer.weight
    gains = (before * after).sum(0) / before.square().sum(0)
    assert adapted.state.n_steps > 5 and float((gains - 1).abs().max()) > 0.005
    torch.testing.assert_close(after, before * gains, atol=1e-5, rtol=0)


def test_clip_distance_keeps_layers_within_the_limit() -> None:
    start = AffineLayer(torch.eye(3), torch.zeros(3))
    near = AffineLayer(1.05 * torch.eye(3), torch.zeros(3))
    assert clip_distance(near, start, 0.1) is near
    far = AffineLayer(2 * torch.eye(3), torch.zeros(3))
    assert clip_distance(far, start, 0.1).distance(start) == pytest.approx(0.1)


# --- safety -------------------------------------------------------------------------------------------------


def log_probs_with(probability: float, n: int = 10) -> np.ndarray:
    """Frames that alternate between two classes with this probability. (n, 3)"""
    values = np.full((n, 3), (1 - probability) / 2)
    values[np.arange(n), 1 + np.arange(n) % 2] = probability
    return np.log(values)


def test_confidence_is_taken_over_non_blank_frames() -> None:
    assert confidence(log_probs_with(0.8)) == pytest.approx(0.8)
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    assert confidence(silent) == 0.0


def test_uncertain_short_and_flat_trials_are_not_used() -> None:
    settings, bins = Safety(min_confidence=0.5), torch.randn(20, 3)
    label = (1, 2, 1)
    assert is_usable(DecodedTrial(bins, log_probs_with(0.8, 3), label), settings)
    assert not is_usable(DecodedTrial(bins, log_probs_with(0.4, 3), label), settings)
    assert not is_usable(DecodedTrial(bins, log_probs_with(0.8, 1), (1,)), settings)
    assert not is_usable(DecodedTrial(torch.zeros(20, 3), log_probs_with(0.8, 3), label), settings)
    assert not is_usable(DecodedTrial(torch.zeros(0, 3), log_probs_with(0.8, 3), label), settings)


@pytest.mark.parametrize(("n_edits", "used"), [(0, True), (4, True), (5, False)])
def test_pseudo_labels_far_from_the_greedy_phonemes_are_not_used(n_edits: int, used: bool) -> None:
    frames, bins = log_probs_with(0.8, 10), torch.randn(20, 3)
    label = ((1, 2) * 5)[n_edits:]
    assert is_usable(DecodedTrial(bins, frames, label), Safety(max_disagreement=0.4)) is used
    assert is_usable(DecodedTrial(bins, frames, label), Safety(max_disagreement=1.0))


@pytest.mark.parametrize(
    ("adapted", "unadapted", "falls_back"), [(0.9, 0.8, False), (0.75, 0.8, True), (0.79, 0.8, False)]
)
def test_it_falls_back_when_confidence_drops(adapted: float, unadapted: float, falls_back: bool) -> None:
    settings, comparison = Safety(window=3, max_confidence_drop=0.02), ModelComparison()
    for i in range(3):
        assert fallback_reason(comparison, settings) is None, i
        comparison = compare(comparison, log_probs_with(adapted), log_probs_with(unadapted), settings)
    assert (fallback_reason(comparison, settings) is not None) == falls_back


def test_it_falls_back_when_the_output_shrinks() -> None:
    settings, comparison = Safety(window=2), ModelComparison()
    for _ in range(2):
        comparison = compare(comparison, log_probs_with(0.99, 4), log_probs_with(0.9, 12), settings)
    assert "tokens" in (fallback_reason(comparison, settings) or "")


def test_trials_that_are_blank_for_both_models_cause_no_fallback() -> None:
    silent, settings, comparison = (np.log(np.array([[0.98, 0.01, 0.01]] * 5)), Safety(window=3), ModelComparison())
    for frames in (silent, silent, log_probs_with(0.8)):
        comparison = compare(comparison, frames, frames, settings)
    assert fallback_reason(comparison, settings) is None


def test_one_long_output_does_not_hide_that_the_others_shrank() -> None:
    """Tokens are summed over trials; a mean of ratios would let one trial dominate."""
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    settings, comparison = Safety(window=4, max_confidence_drop=1.0), ModelComparison()
    comparison = compare(comparison, log_probs_with(0.8, 8), silent, settings)
    for _ in range(3):
        comparison = compare(comparison, silent, log_probs_with(0.8, 20), settings)
    assert "0.13 of the tokens" in (fallback_reason(comparison, settings) or "")


def test_blank_output_of_the_adapted_model_alone_causes_a_fallback() -> None:
    settings, comparison = Safety(window=2), ModelComparison()
    silent = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    for _ in range(2):
        comparison = compare(comparison, silent, silent, settings)
    assert fallback_reason(comparison, settings) is None
    for _ in range(2):
        comparison = compare(comparison, silent, log_probs_with(0.9), settings)
    assert fallback_reason(comparison, settings) is not None, "the unadapted model decodes tokens"


def test_a_ruined_layer_is_replaced_by_the_initial_one(new_days: Path) -> None:
    """Very large steps ruin the layer; the loss is limited to a few windows of trials."""
    settings = {"lr": 0.1, "max_distance": 10.0, "safety": {"window": 3, "max_fallbacks": 1}}
    adapted = adapt(new_days, "one-step", DRIFTED, **settings)
    assert sum(f.fallback is not None for f in adapted.trials) >= 1
    before, after = error_rates(replace(adapted, trials=adapted.trials[-10:]))
    assert after <= before + 0.1


def drifting_state(init_session: str, expected: ExpectedConfidence) -> SessionState:
    layer = AffineLayer(torch.eye(2), torch.zeros(2))
    return SessionState("x", init_session, layer, layer, AdamMoments.zero(layer), expected=expected)


def factor(state: SessionState, confidences: tuple[float, ...], **safety: float) -> float:
    return step_factor(replace(state, unadapted_confidence=confidences), Safety.model_validate(safety))


def test_step_factor_is_0_without_drift() -> None:
    state = drifting_state("x", ExpectedConfidence(0.8))
    assert factor(state, (0.85, 0.8)) == 0.0
    assert factor(state, (0.7,), full_step_uncertainty=0.5) == pytest.approx(1.0)
    assert factor(state, (0.75,), full_step_uncertainty=0.5) == pytest.approx(0.5)
    assert factor(replace(state, expected=None), (0.85, 0.8)) == 1.0


def test_step_factor_is_0_for_differences_explained_by_chance() -> None:
    state = drifting_state("w", ExpectedConfidence(0.8, 0.01, 0.04))
    assert factor(state, (0.75,), min_standard_errors=2.0) == 0.0, "one trial"
    assert factor(state, (0.75,) * 20, min_standard_errors=2.0) == pytest.approx(0.5), "twenty trials"
    assert factor(state, (0.785,) * 1000, min_standard_errors=2.0) == 0.0, "within the variation of sessions"
    assert factor(state, (0.785,), min_standard_errors=0.0) == pytest.approx(0.15)
    known = replace(state, init_session="x")
    assert factor(known, (0.75,) * 20, min_standard_errors=1.0) == pytest.approx(0.5), "three times the standard errors"
    assert factor(known, (0.75,) * 20, min_standard_errors=1.3) == 0.0


def test_confidence_of_the_last_40_trials_that_are_not_blank_is_tracked() -> None:
    state = replace(drifting_state("w", ExpectedConfidence(0.8)), unadapted_confidence=(0.75,))
    all_blank = np.log(np.array([[0.98, 0.01, 0.01]] * 5))
    assert track_confidence(state, all_blank).unadapted_confidence == (0.75,)
    for _ in range(50):
        state = track_confidence(state, log_probs_with(0.8))
    assert state.unadapted_confidence == pytest.approx((0.8,) * 40)


@pytest.mark.parametrize("method", METHODS[1:])
def test_without_drift_the_initial_layer_is_used(new_days: Path, method: Method) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, method)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    state = start_session(adapter, store, DRIFTED, {FIRST: (0.9, 0.8), SECOND: (0.85,)})
    moved = AffineLayer(state.initial.weight * 1.1, state.initial.bias)
    for value, is_initial in ((0.85, True), (0.5, False), (0.849, True)):
        state = replace(state, layer=moved, unadapted_confidence=(value,) * 20)
        assert (adapter.layer(state, bins).distance(state.initial) == 0.0) is is_initial


def test_confidence_on_known_sessions_is_measured_on_validation_trials(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step")
    own = [trials_of(store, s, "val")[:12] for s in (FIRST, SECOND)]
    expected = []
    for session, trials in zip((FIRST, SECOND), own, strict=True):
        model = single_session_model(adapter.model, session, *copy_session_layer(adapter.model, session))
        expected.append([confidence(compute_log_probs(model, normalised_bins(adapter, store, t))) for t in trials])
    found = measure_confidence(adapter, store)
    assert list(found) == [FIRST, SECOND] and [list(found[s]) for s in found] == expected


def test_many_known_sessions_are_sampled_more_sparsely(new_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream waits for them: 45 sessions must not take eight times as long as six."""
    store, adapter, n_decoded = Store.open(new_days / "store"), adapter_of(new_days, "one-step"), []
    for max_trials in (1000, 10, 1):
        monkeypatch.setattr(known_sessions, "_MAX_TRIALS", max_trials)
        decoded: list[TrialInfo] = []
        monkeypatch.setattr(
            known_sessions,
            "normalised_bins",
            lambda a, s, t, decoded=decoded: decoded.append(t) or normalised_bins(a, s, t),
        )
        assert set(measure_confidence(adapter, store)) == {FIRST, SECOND}
        n_decoded.append(len(decoded))
    assert n_decoded == [24, 10, 4]


def test_expected_confidence_of_a_known_session_comes_from_the_others() -> None:
    """A session must not be compared with itself."""
    known = {"a": (0.9,), "b": (0.7,), "c": (0.5,)}
    assert expected_confidence("new", known).mean == pytest.approx(0.7)
    assert expected_confidence("a", known).mean == pytest.approx(0.6)
    assert expected_confidence("a", {"a": (0.9,)}) == ExpectedConfidence(0.9, session_sd=pytest.approx(0.01))
    assert expected_confidence("a", {}) is None
    apart = {"a": (0.6, 0.8), "b": (0.8, 0.8, 0.8), "c": (0.9, 0.9)}
    assert expected_confidence("c", apart) == ExpectedConfidence(
        pytest.approx(0.75), session_sd=pytest.approx(0.1 / 2**0.5), trial_sd=pytest.approx(0.1)
    )


# --- statistics ---------------------------------------------------------------------------------------------


def test_matched_layers_give_outputs_the_mean_and_sd_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(4000, 3, generator=generator) @ torch.randn(3, 3, generator=generator)
    after = 1.7 * before + torch.tensor([0.5, -1.0, 2.0])
    start = AffineLayer(torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator))
    layer = match_statistics(start, InputStatistics.of(before), InputStatistics.of(after))
    torch.testing.assert_close(
        after @ layer.weight + layer.bias, before @ start.weight + start.bias, atol=1e-3, rtol=1e-3
    )


def start_statistics(folder: Path, **settings: object) -> tuple[OnlineAdapter, SessionState, torch.Tensor]:
    """A new session with method statistics, and the bins of one of its trials."""
    store, adapter = Store.open(folder / "store"), adapter_of(folder, "statistics", **settings)
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    return adapter, start_session(adapter, store, DRIFTED, {}), bins


def test_statistics_stay_within_the_maximum_distance(new_days: Path) -> None:
    """A jump of the amplifier by a thousand SD must not exceed the limit."""
    adapter, state, bins = start_statistics(new_days, max_distance=0.2)
    far = bins + 1000.0
    assert adapter.layer(state, far).distance(state.initial) == pytest.approx(0.2)
    state, _ = adapter.update(state, DecodedTrial(far, compute_log_probs(adapter.adapted_model(state, far), far), ()))
    assert state.n_steps == 1 and adapter.layer(state).distance(state.initial) == pytest.approx(0.2)


def test_statistics_start_again_after_a_fallback(new_days: Path) -> None:
    adapter, state, bins = start_statistics(new_days)
    for _ in range(3):
        state, _ = adapter.update(state, DecodedTrial(bins + 5.0, log_probs_with(0.8), ()))
    assert adapter.layer(state).distance(state.initial) > 0.01
    assert adapter.layer(fall_back(state)).distance(state.initial) < 1e-6


def test_flat_trials_are_not_added_to_the_statistics(new_days: Path) -> None:
    adapter, state, bins = start_statistics(new_days)
    flat = torch.full_like(bins, 3.0)
    log_probs = compute_log_probs(adapter.adapted_model(state, flat), flat)
    after, _ = adapter.update(state, DecodedTrial(flat, log_probs, ()))
    assert (after.observed, after.n_steps, after.n_trials) == (None, 0, 1)
    assert torch.equal(adapter.layer(state, flat).weight, adapter.layer(state).weight)


def test_the_distance_of_statistics_is_reported(new_days: Path) -> None:
    adapted = adapt(new_days, "statistics", DRIFTED)
    result = summarise_session(adapted)
    assert result.n_fallbacks == 0 and result.layer_distance > 0.001


def test_statistics_need_the_known_session(new_days: Path) -> None:
    with pytest.raises(UserError, match="nearest known session"):
        adapter_of(new_days, "statistics").start(DRIFTED)


# --- models ---------------------------------------------------------------------------------------------------


def test_adding_session_layers_does_not_change_the_output(tmp_path: Path, new_days: Path) -> None:
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
    assert grown.config.sessions[-1] == "t15.2030.09.09" and not model.config.settings.front_end.session_layer.enabled
    torch.testing.assert_close(plain, added, atol=1e-5, rtol=0)


def test_the_adapted_model_streams_as_offline(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, "one-step", lr=0.02)
    adapted = adapt_sessions(adapter, store, trials_of(store, DRIFTED)[:5])[0]
    model = adapter.adapted_model(adapted.state)
    bins = torch.from_numpy(store.read_bins(trials_of(store, DRIFTED)[5]))
    with torch.inference_mode():
        state, parts = model.start(0), []
        for chunk in bins.split(7):
            outputs, state = model.step(state, chunk[None])
            parts.append(outputs.log_probs["ctc"])
        parts.append(model.finish(state).log_probs["ctc"])
    np.testing.assert_allclose(torch.cat(parts, 1)[0].numpy(), compute_log_probs(model, bins), atol=1e-5)


# --- command ----------------------------------------------------------------------------------------------


def test_evaluate_adapts_to_known_and_new_sessions(new_days: Path) -> None:
    options = ("--data", new_days / "store", "--session", SECOND, "--session", DRIFTED, "--set", "lr=0.01")
    done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *options, "--json")
    assert done.returncode == 0, done.stderr
    result = one_object(done.stdout)
    assert [d["known"] for d in result["sessions"]] == [True, False]
    assert result["sessions"][1]["init_session"] == SECOND and result["sessions"][1]["days_later"] == 8
    assert f"{DRIFTED} is new to the model: decoded with the layer of {SECOND}, 8 days earlier" in done.stderr
    assert result["per_unadapted"] is not None and result["adapt"]["lr"] == 0.01
    assert (new_days / "run/results/val.adapt-one-step.jsonl").is_file()


# --- pseudo-labels from words --------------------------------------------------------------------------------------


def confident_frames(*phonemes: str) -> np.ndarray:
    """Confident frames of these phonemes, a blank after each. (F, V)"""
    classes = [c for name in phonemes for c in (CLASSES.index(name), 0)]
    frames = np.full((len(classes), len(CLASSES)), 1e-6)
    frames[np.arange(len(classes)), classes] = 1.0
    return np.log(frames / frames.sum(1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("n_frames", [1, 1000])
def test_words_are_labelled_with_pronunciations_of_the_lexicon(n_frames: int) -> None:
    """In English "b" is pronounced B IY; this lexicon has another pronunciation."""
    label = word_labeller(small_search(), n_frames)
    assert token_names(label(confident_frames("B", "SIL", "JH"))) == ["B", "SIL", "JH", "SIL"]
    silent = np.log(np.full((6, len(CLASSES)), 1e-6) + np.eye(len(CLASSES))[[0] * 6])
    assert label((silent - np.logaddexp.reduce(silent, axis=1)[:, None]).astype(np.float32)) == ()


def test_homographs_are_pronounced_in_context() -> None:
    lexicon = make_lexicon([("use", ("Y", "UW", "S")), ("use", ("Y", "UW", "Z")), ("to", ("T", "UW"))], CLASSES, "x")
    search = build_word_search(lexicon, small_ngram())
    assert " ".join(word_phonemes(search, ["to", "use"])) == "T UW SIL Y UW Z SIL"
    assert " ".join(word_phonemes(search, ["use"])) == "Y UW S SIL"


@pytest.mark.thorough
def test_evaluate_with_pseudo_labels_from_a_language_model(new_days: Path, tmp_path: Path) -> None:
    lexicon, lm = write_words(tmp_path)
    options = ("--data", new_days / "store", "--session", DRIFTED, "--set", "lr=0.01", "--set", "copies=4")
    results = {}
    for label, more in (("greedy", ()), ("by_lm", ("--lm", lm, "--lexicon", lexicon))):
        named = ("--label", label, "--scores", tmp_path / f"{label}.npz", "--json")
        done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *options, *more, *named)
        assert done.returncode == 0, done.stderr
        results[label] = one_object(done.stdout)
    assert results["by_lm"]["pseudo_labels"] == f"words of {lm}" and results["greedy"]["pseudo_labels"] == "greedy"
    assert results["by_lm"]["sessions"][0]["n_steps"] > 0
    assert results["by_lm"]["sessions"][0]["layer_distance"] != results["greedy"]["sessions"][0]["layer_distance"]
    assert results["by_lm"]["per_unadapted"] == results["greedy"]["per_unadapted"]
    hyps = tmp_path / "hyps.jsonl"  # the written frames can be decoded to text
    done = arcuate("decode", tmp_path / "by_lm.npz", "--lm", lm, "--lexicon", lexicon, "--out", hyps, "--json")
    assert done.returncode == 0 and one_object(done.stdout)["n_trials"] == 20, done.stderr


def test_a_missing_language_model_is_reported(new_days: Path, tmp_path: Path) -> None:
    options = ("--data", new_days / "store", "--session", DRIFTED, "--adapt", "one-step")
    done = arcuate("evaluate", new_days / "run", *options, "--lm", tmp_path / "no.arpa")
    assert_refused(done, "no.arpa")


def test_flat_and_reordered_sessions_are_reported(new_days: Path) -> None:
    options = ("--data", new_days / "store", "--session", DEAD, "--session", PERMUTED, "--json")
    done = arcuate("evaluate", new_days / "run", "--adapt", "one-step", *options)
    result = one_object(done.stdout)
    permuted, dead = result["sessions"]
    assert dead["n_steps"] == dead["n_fallbacks"] == 0 and dead["layer_distance"] == 0.0
    assert permuted["per"] <= permuted["per_unadapted"] * 1.05 + 0.02
    assert f"every channel of {DEAD} is flat" in done.stderr
    assert f"the channels of {PERMUTED} look re-ordered" in done.stderr


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--adapt", "magic"), ("'magic' is unknown", "one-step")),
        (("--adapt", "one-step", "--set", "lr=2"), ("lr = 2 is invalid",)),
        (("--adapt", "one-step", "--set", "speed=2"), ("no setting 'speed'",)),
        (("--adapt", "none", "--session", "t15.2031.01.01"), ("no session t15.2031.01.01",)),
        (("--adapt", "none", "--head", "both"), ("--head ctc",)),
        (("--adapt", "one-step", "--set", "lrr=2"), ("did you mean 'lr'?",)),
        (("--adapt", "one-step", "--set", "safety.widow=2"), ("did you mean 'safety.window'?",)),
        (("--adapt", "one-step", "--set", "lr"), ("'lr' is not of the form",)),
        (("--adapt", "one-step", "--lexicon", "words.txt"), ("--lm",)),
    ],
)
def test_invalid_options_are_reported_in_one_sentence(
    new_days: Path, options: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    assert_refused(arcuate("evaluate", new_days / "run", "--data", new_days / "store", *options), *messages)


def test_other_channel_counts_are_rejected(new_days: Path, cohort_store: Path) -> None:
    done = arcuate("evaluate", new_days / "run", "--data", cohort_store, "--adapt", "none")
    assert_refused(done, "12 channels", "32")


@pytest.fixture(scope="module")
def odd_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of one trial, one with trials without bins, and one with half of the channels flat."""
    root, rng = tmp_path_factory.mktemp("odd"), np.random.default_rng(4)
    shapes = {ONE: (1, never_empty), EMPTY: (4, empty_every_third), HALF: (12, half_flat)}
    for session, (n, change) in shapes.items():
        for split in ("train", "val"):
            spoken = [speak(rng, np.eye(12)) for _ in range(n)]
            made = [FakeTrial(change(i, bins), tokens, "text") for i, (bins, tokens) in enumerate(spoken)]
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
def test_trials_without_bins_cause_no_update(new_days: Path, odd_days: Path, method: Method) -> None:
    store = Store.open(odd_days)
    adapted = adapt_sessions(adapter_of(new_days, method, lr=0.01), store, trials_of(store, EMPTY, "val"))[0]
    assert [f.result.trial.n_bins > 0 for f in adapted.trials] == [False, True, True, False]
    assert not adapted.trials[0].updated and not adapted.trials[3].updated


@pytest.mark.parametrize("method", ["none", "one-step"])
def test_a_session_of_one_trial(new_days: Path, odd_days: Path, method: str) -> None:
    done = arcuate("evaluate", new_days / "run", "--data", odd_days, "--session", ONE, "--adapt", method)
    assert done.returncode == 0, done.stderr
    assert "no interval from a single trial" in done.stdout


def test_rejected_recordings_and_missing_labels_have_different_messages(
    new_days: Path, odd_days: Path, tmp_path: Path
) -> None:
    options = ("--data", odd_days, "--session", HALF, "--run", tmp_path / "run")
    done = arcuate("calibrate", new_days / "run", *options)
    assert_refused(done, "none of the 12 labelled", "quality.csv")
    assert "add its labels" not in done.stderr


def test_the_unadapted_error_rate_is_summed_over_trials(new_days: Path) -> None:
    adapted = adapt(new_days, "one-step", DRIFTED)
    per_unadapted, _, _ = compare_with_unadapted([adapted])
    assert per_unadapted == pytest.approx(error_rates(adapted)[0])
    assert summarise_session(adapted).n_trials == len(adapted.trials)


def test_copies_use_the_augmentation_of_the_recipe(new_days: Path) -> None:
    without = make_adapter(
        load_model(find_checkpoint(new_days / "run")), Adaptation(method="one-step", lr=0.02), AugmentationConfig()
    )
    store = Store.open(new_days / "store")
    trials = trials_of(store, DRIFTED)[:4]
    augmented = adapt_sessions(adapter_of(new_days, "one-step", lr=0.02), store, trials)[0].state.layer.weight
    assert not torch.equal(augmented, adapt_sessions(without, store, trials)[0].state.layer.weight)
