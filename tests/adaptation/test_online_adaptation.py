"""Online adaptation: gains on drifted sessions, no loss on others, bounds, causality, fall-back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import evaluate
from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.known_sessions import expected_confidence, measure_confidence, normalised_bins
from arcuate.adaptation.online import OnlineAdapter, adam_step, compute_log_probs, make_adapter, words_label
from arcuate.adaptation.state import (
    MAX_DISTANCE,
    MAX_FALLBACKS,
    WINDOW,
    AdamMoments,
    AffineLayer,
    DecodedTrial,
    ExpectedConfidence,
    ModelComparison,
    SessionState,
    compare,
    confidence,
    fallback_reason,
    is_usable,
    step_factor,
    track_confidence,
)
from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.config import AugmentationConfig
from arcuate.data.prepare import prepare
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.evaluation.adapted import AdaptedSession, adapt_sessions, recording_order
from arcuate.evaluation.metrics import total
from arcuate.experiments.recipe import run_recipe
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.io import load_model
from arcuate.models.model import Model, add_session
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, N_CHANNELS, PERMUTED, SAME, SECOND, speak
from support.recordings import FakeTrial, write_hdf5

SILENT = np.log(np.array([[0.98, 0.01, 0.01]] * 5))


def adapter_of(folder: Path, **settings: object) -> OnlineAdapter:
    augmentation = run_recipe(Run(folder / "run")).augment
    return make_adapter(load_model(find_checkpoint(folder / "run")), Adaptation.model_validate(settings), augmentation)


def trials_of(store: Store, session: str, split: str = "train") -> list[TrialInfo]:
    return recording_order([t for t in store.trials if t.session == session and t.split == split], store.sessions)


def adapt(folder: Path, session: str, split: str = "train", **settings: object) -> AdaptedSession:
    store = Store.open(folder / "store")
    return adapt_sessions(adapter_of(folder, **settings), store, trials_of(store, session, split))[0]


def error_rates(adapted: AdaptedSession) -> tuple[float, float]:
    """Unadapted and adapted error rate."""
    before = total(t.unadapted for t in adapted.trials if t.unadapted).rate
    after = total(t.result.score for t in adapted.trials if t.result.score).rate
    assert before is not None and after is not None
    return before, after


# --- benefit ---------------------------------------------------------------------------------------


def test_a_drifted_session_is_decoded_better(new_days: Path) -> None:
    before, after = error_rates(adapt(new_days, DRIFTED, lr=0.01))
    assert before > 0.15 and after < 0.9 * before


@pytest.mark.parametrize(("session", "split"), [(SAME, "train"), (SECOND, "val"), (DRIFTED, "train")])
def test_no_session_is_decoded_much_worse(new_days: Path, session: str, split: str) -> None:
    """A session like those of training, known or new, and a drifted one: at most 2 % worse, relative."""
    before, after = error_rates(adapt(new_days, session, split))
    assert after <= 1.02 * before


# --- causal, bounded, reversible -----------------------------------------------------------------------------


def test_later_trials_and_labels_do_not_affect_the_output(new_days: Path) -> None:
    store = Store.open(new_days / "store")
    trials = trials_of(store, DRIFTED)[:6]
    hidden = [replace(t, tokens=None, text=None) for t in trials[:4]]
    complete = adapt_sessions(adapter_of(new_days, lr=0.01), store, trials)[0]
    part = adapt_sessions(adapter_of(new_days, lr=0.01), store, hidden)[0]
    assert complete.trials[0].updated
    for a, b in zip(part.trials, complete.trials, strict=False):
        assert a.result.log_probs is not None
        np.testing.assert_array_equal(a.result.log_probs, b.result.log_probs)


def test_states_are_values_and_the_model_is_never_changed(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days, lr=0.05)
    weights = {name: tensor.clone() for name, tensor in adapter.model.state_dict().items()}
    bins = normalised_bins(adapter, store, trials_of(store, DRIFTED)[0])
    start = adapter.start(DRIFTED)
    first = compute_log_probs(adapter.adapted_model(start), bins)
    later, _ = adapter.update(start, DecodedTrial(bins, first, tuple(greedy(first))))
    assert later.n_steps == 1 and not np.array_equal(compute_log_probs(adapter.adapted_model(later), bins), first)
    np.testing.assert_array_equal(compute_log_probs(adapter.adapted_model(start), bins), first)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in adapter.model.state_dict().items())


def test_steps_and_total_distance_are_bounded() -> None:
    layer = AffineLayer(torch.eye(4), torch.zeros(4))
    gradients = [torch.full((4, 4), 1e9), torch.full((4,), float("nan"))]
    moved, moments = adam_step(layer, AdamMoments.zero(layer), gradients, layer, 0.01)
    assert float((moved.weight - layer.weight).abs().max()) <= 0.01 + 1e-7
    assert torch.equal(moved.bias, layer.bias)
    for _ in range(200):
        moved, moments = adam_step(moved, moments, gradients, layer, 0.01)
    assert MAX_DISTANCE - 0.02 < moved.distance(layer) <= MAX_DISTANCE + 1e-5
    weight = torch.eye(20)
    weight[0, 0] += MAX_DISTANCE * 20**0.5  # at the maximum distance; a step of the others must not pull it back
    start, far = AffineLayer(torch.eye(20), torch.zeros(20)), AffineLayer(weight, torch.zeros(20))
    moved, _ = adam_step(far, AdamMoments.zero(far), (torch.ones(20, 20), torch.zeros(20)), start, 0.01)
    assert float((moved.weight - far.weight).abs().max()) <= 0.01 + 1e-6
    assert MAX_DISTANCE - 0.02 < moved.distance(start) <= MAX_DISTANCE + 1e-6


@pytest.mark.parametrize(
    ("encoder", "has_layers"),
    [
        ({"kind": "gru", "width": 12, "depth": 1}, True),
        ({"kind": "gru", "width": 12, "depth": 1, "bidirectional": True}, True),
        ({"kind": "ssm", "width": 8, "depth": 1, "n_heads": 2, "state_dim": 3}, False),
        ({"kind": "transformer", "width": 8, "depth": 1, "n_heads": 2, "context": 16}, True),
    ],
)
def test_every_encoder_is_adapted(new_days: Path, encoder: dict[str, object], has_layers: bool) -> None:
    """Also without session layers, and for complete trials only."""
    torch.manual_seed(1)
    layer, patch = {"enabled": has_layers}, {"bins": 4, "stride": 2}
    front_end = {"normalise": "none", "smoothing": {"sd": 0.0}, "session_layer": layer, "patch": patch}
    settings = ModelSettings.model_validate({"front_end": front_end, "encoder": encoder})
    model = Model(ModelConfig(settings=settings, n_channels=N_CHANNELS, sessions=(FIRST, SECOND), classes=CLASSES))
    with torch.no_grad():
        model.head.weight.mul_(40.0)  # untrained but confident
    store, augmentation = Store.open(new_days / "store"), AugmentationConfig(white_noise_sd=0.2)
    adapter = make_adapter(model, Adaptation(lr=0.01, copies=2), augmentation)
    state = adapter.start(DRIFTED)
    for trial in trials_of(store, DRIFTED)[:4]:
        bins = normalised_bins(adapter, store, trial)
        log_probs = compute_log_probs(adapter.adapted_model(state), bins)
        after, _ = adapter.update(state, DecodedTrial(bins, log_probs, tuple(greedy(log_probs))))
        assert float((after.layer.weight - state.layer.weight).abs().max()) <= 0.01 + 1e-6
        state = after
    assert state.n_steps == 4 and state.layer.distance(state.initial) > 0


def test_adding_session_layers_does_not_change_the_output(new_days: Path) -> None:
    config = load_model(find_checkpoint(new_days / "run")).config
    tree = config.model_dump()
    tree["settings"]["front_end"]["session_layer"]["enabled"] = False
    torch.manual_seed(0)
    model = Model(ModelConfig.model_validate(tree)).eval()
    bins, n_bins = torch.randn(2, 30, config.n_channels), torch.tensor([30, 22])
    with torch.inference_mode():
        plain = model(bins, n_bins, torch.tensor([0, 1])).log_probs["ctc"]
        grown = add_session(model, "t15.2030.09.09", FIRST)
        added = grown.eval()(bins, n_bins, torch.tensor([0, 2])).log_probs["ctc"]
    assert grown.config.sessions[-1] == "t15.2030.09.09" and not model.config.settings.front_end.session_layer.enabled
    torch.testing.assert_close(plain, added, atol=1e-5, rtol=0)


# --- safety -------------------------------------------------------------------------------------------------


def log_probs_with(probability: float, n: int = 10) -> np.ndarray:
    """Frames that alternate between two classes with this probability. (n, 3)"""
    values = np.full((n, 3), (1 - probability) / 2)
    values[np.arange(n), 1 + np.arange(n) % 2] = probability
    return np.log(values)


def compared(*pairs: tuple[np.ndarray, np.ndarray]) -> ModelComparison:
    comparison = ModelComparison()
    for adapted, unadapted in pairs:
        comparison = compare(comparison, adapted, unadapted)
    return comparison


BINS, ZEROS = torch.randn(20, 3), torch.zeros(20, 3)


@pytest.mark.parametrize(
    ("bins", "probability", "n_frames", "label", "used"),
    [
        (BINS, 0.8, 3, (1, 2, 1), True),
        (BINS, 0.34, 3, (1, 2, 1), False),  # uncertain
        (BINS, 0.8, 1, (1,), False),  # short
        (ZEROS, 0.8, 3, (1, 2, 1), False),  # flat
        (ZEROS[:0], 0.8, 3, (1, 2, 1), False),
        (BINS, 0.8, 10, (1, 2) * 3, True),  # 4 edits from the greedy phonemes
        (BINS, 0.8, 10, ((1, 2) * 3)[1:], False),
    ],
)
def test_only_clear_trials_are_used(
    bins: torch.Tensor, probability: float, n_frames: int, label: tuple[int, ...], used: bool
) -> None:
    assert is_usable(DecodedTrial(bins, log_probs_with(probability, n_frames), label)) is used


@pytest.mark.parametrize(
    ("adapted", "unadapted", "reason"),
    [
        (log_probs_with(0.9), log_probs_with(0.8), None),
        (log_probs_with(0.79), log_probs_with(0.8), None),
        (log_probs_with(0.75), log_probs_with(0.8), "confidence fell to 0.75"),
        (log_probs_with(0.99, 4), log_probs_with(0.9, 12), "of the tokens"),
        (SILENT, SILENT, None),
        (SILENT, log_probs_with(0.9), "confidence fell to 0.00"),
    ],
)
def test_it_falls_back_when_confidence_drops_or_the_output_shrinks(
    adapted: np.ndarray, unadapted: np.ndarray, reason: str | None
) -> None:
    pairs = [(adapted, unadapted)] * WINDOW
    assert fallback_reason(compared(*pairs[1:])) is None, "the window is not full"
    found = fallback_reason(compared(*pairs))
    assert found is None if reason is None else reason in (found or "")
    # Tokens are summed over trials; a mean of ratios would let one long output hide that the others shrank.
    long, short = (log_probs_with(0.8, 8), SILENT), (log_probs_with(0.9, 2), log_probs_with(0.5, 20))
    assert "of the tokens" in (fallback_reason(compared(long, *[short] * (WINDOW - 1))) or "")


def test_a_ruined_layer_is_replaced_until_adaptation_ends(new_days: Path) -> None:
    """Very large steps ruin the layer; the loss is limited to a few windows of trials."""
    adapted = adapt(new_days, DRIFTED, lr=0.1)
    assert sum(f.fallback is not None for f in adapted.trials) >= 1
    before, after = error_rates(replace(adapted, trials=adapted.trials[-10:]))
    assert after <= before + 0.1
    adapter, ended = adapter_of(new_days), replace(adapted.state, comparison=ModelComparison(n_fallbacks=9))
    assert MAX_FALLBACKS < 9 and adapter.layer(ended) is ended.initial


def drifting_state(init_session: str, expected: ExpectedConfidence | None, *confidences: float) -> SessionState:
    layer = AffineLayer(torch.eye(2), torch.zeros(2))
    moments = AdamMoments.zero(layer)
    return SessionState("x", init_session, layer, layer, moments, expected, unadapted_confidence=confidences)


@pytest.mark.parametrize(
    ("init_session", "expected", "confidences", "factor"),
    [
        ("x", ExpectedConfidence(0.8), (0.85, 0.8), 0.0),
        ("x", ExpectedConfidence(0.8), (0.7,), 1.0),
        ("x", ExpectedConfidence(0.8), (0.75,), 0.5),
        ("x", None, (0.85, 0.8), 1.0),
        ("w", ExpectedConfidence(0.8, 0.01, 0.06), (0.75,), 0.0),  # one trial
        ("w", ExpectedConfidence(0.8, 0.01, 0.06), (0.75,) * 20, 0.5),
        ("w", ExpectedConfidence(0.8, 0.02, 0.0), (0.785,) * 1000, 0.0),  # within the variation of sessions
        ("x", ExpectedConfidence(0.8, 0.02, 0.0), (0.75,) * 20, 0.0),  # a known session: three times the errors
    ],
)
def test_steps_grow_with_drift_that_chance_does_not_explain(
    init_session: str, expected: ExpectedConfidence | None, confidences: tuple[float, ...], factor: float
) -> None:
    assert step_factor(drifting_state(init_session, expected, *confidences)) == pytest.approx(factor)


def test_confidence_of_the_last_40_trials_that_are_not_blank_is_tracked() -> None:
    assert confidence(log_probs_with(0.8)) == pytest.approx(0.8) and confidence(SILENT) == 0.0
    state = track_confidence(drifting_state("w", ExpectedConfidence(0.8), 0.75), SILENT)
    assert state.unadapted_confidence == (0.75,)
    for _ in range(50):
        state = track_confidence(state, log_probs_with(0.8))
    assert state.unadapted_confidence == pytest.approx((0.8,) * 40)


def test_without_drift_the_initial_layer_is_used(new_days: Path) -> None:
    adapter = adapter_of(new_days)
    state = adapter.start(DRIFTED, expected_confidence(DRIFTED, {FIRST: (0.9, 0.8), SECOND: (0.85,)}))
    moved = AffineLayer(state.initial.weight * 1.1, state.initial.bias)
    for value, is_initial in ((0.85, True), (0.5, False), (0.849, True)):
        state = replace(state, layer=moved, unadapted_confidence=(value,) * 20)
        assert (adapter.layer(state).distance(state.initial) == 0.0) is is_initial


def test_confidence_on_known_sessions_is_measured_on_validation_trials(new_days: Path) -> None:
    store, adapter = Store.open(new_days / "store"), adapter_of(new_days)
    found = measure_confidence(adapter, store)
    assert list(found) == [FIRST, SECOND]
    for session, values in found.items():
        model = adapter.unadapted_model(adapter.start(session))
        trials = trials_of(store, session, "val")[:12]
        expected = [confidence(compute_log_probs(model, normalised_bins(adapter, store, t))) for t in trials]
        assert list(values) == expected


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


def test_words_are_labelled_as_in_training() -> None:
    """With a silence after every word; homographs are pronounced in context."""
    label = lambda *words: " ".join(token_names(words_label(Hypothesis((), words=words), CLASSES)))
    assert label("to", "use") == "T UW SIL Y UW Z SIL"
    assert label("use") == "Y UW S SIL" and label() == ""


# --- evaluation -------------------------------------------------------------------------------------------


def test_evaluate_adapts_to_known_and_new_sessions(new_days: Path) -> None:
    done = arcuate("evaluate", new_days / "run", "--adapt", "--data", new_days / "store", "--json")
    assert done.returncode == 0, done.stderr
    result = one_object(done.stdout)
    rows = {row["session"]: row for row in result["sessions"]}
    assert rows[SECOND]["known"] and not rows[DRIFTED]["known"]
    assert rows[DRIFTED]["init_session"] == SECOND and rows[DRIFTED]["days_later"] == 8
    assert result["per_unadapted"] is not None and result["p"] is not None
    assert rows[DEAD]["n_steps"] == rows[DEAD]["n_fallbacks"] == 0 and rows[DEAD]["layer_distance"] == 0.0
    assert rows[PERMUTED]["per"] <= rows[PERMUTED]["per_unadapted"] * 1.05 + 0.02
    for message in (
        f"{DRIFTED} is new to the model: decoded with the layer of {SECOND}, 8 days earlier",
        f"every channel of {DEAD} is flat",
        f"the channels of {PERMUTED} look re-ordered",
    ):
        assert message in done.stderr
    assert (new_days / "run/results/val.adapt-one-step.jsonl").is_file()


def test_adaptation_refuses_other_heads_and_channels(new_days: Path, cohort_store: Path) -> None:
    given = ("evaluate", new_days / "run", "--adapt", "--data")
    assert_refused(arcuate(*given, new_days / "store", "--head", "both"), "--head ctc")
    assert_refused(arcuate(*given, cohort_store), "12 channels", "32")


def test_one_trial_and_trials_without_bins(new_days: Path, tmp_path: Path) -> None:
    rng, one, empty = np.random.default_rng(4), "t15.2030.02.01", "t15.2030.02.02"
    for session, n in ((one, 1), (empty, 4)):
        spoken = [speak(rng, np.eye(12)) for _ in range(n)]
        made = [FakeTrial(b if i % 3 or session == one else b[:0], t, "text") for i, (b, t) in enumerate(spoken)]
        for split in ("train", "val"):
            write_hdf5(tmp_path / "source/hdf5_data_final" / session / f"data_{split}.hdf5", made)
    prepare(tmp_path / "source", tmp_path / "store")
    store = Store.open(tmp_path / "store")
    adapted = adapt_sessions(adapter_of(new_days, lr=0.01), store, trials_of(store, empty, "val"))[0]
    assert [f.result.trial.n_bins > 0 for f in adapted.trials] == [False, True, True, False]
    assert not adapted.trials[0].updated and not adapted.trials[3].updated
    assert evaluate(new_days / "run", data=store, adapt=True, label="odd").metrics.n_trials == 5


def test_copies_use_the_augmentation_of_the_recipe(new_days: Path) -> None:
    store = Store.open(new_days / "store")
    trials, adapter = trials_of(store, DRIFTED)[:4], adapter_of(new_days, lr=0.02)
    without = make_adapter(adapter.model, adapter.settings, AugmentationConfig())
    augmented, plain = (adapt_sessions(a, store, trials)[0].state.layer.weight for a in (adapter, without))
    assert not torch.equal(augmented, plain)
