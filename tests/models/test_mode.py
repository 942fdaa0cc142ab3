"""Speaking mode: evidence over true frames, inference without labels, and channel conditioning."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.trials import decode_trials, summarise
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model, train
from arcuate.losses.combined import mode_loss
from arcuate.models.config import Patch, SpeakingModeSettings
from arcuate.models.mode import MODES, SpeakingMode
from arcuate.run import Run
from arcuate.training.modes import (
    Modes,
    fit_mixture,
    infer_modes,
)

SMALL = [
    *(
        "encoder.width=8",
        "encoder.depth=1",
        "data.batching.batch_size=8",
        "front_end.patch={bins: 8, stride: 4}",
    ),
    *("train.steps=6", "train.log_every=3", "train.validate_every=6", "mode.enabled=true"),
]


def blocks(rng: np.random.Generator, n_blocks: int = 20, per_block: int = 15) -> tuple:
    """Energies of loud and quiet blocks, with a spread much larger than their difference."""
    loud = np.arange(n_blocks) % 3 > 0
    truth = np.repeat(loud, per_block)
    energy = np.where(truth, 0.2, -0.2) + 0.25 * rng.standard_normal(len(truth))
    return energy, [f"b{i}" for i in np.repeat(np.arange(n_blocks), per_block)], truth


def test_inferred_without_labels() -> None:
    energy, groups, truth = blocks(np.random.default_rng(0))
    unknown = np.full(len(energy), np.nan)
    vocalised = fit_mixture(energy, groups, unknown)
    assert ((vocalised > 0.5) == truth).all()
    alone = fit_mixture(energy, [str(i) for i in range(len(energy))], unknown)
    assert 0.7 < ((alone > 0.5) == truth).mean() < 1.0  # one trial is weaker evidence than a block


def test_labels_are_kept_and_determine_their_block() -> None:
    energy, groups, truth = blocks(np.random.default_rng(1))
    known = np.full(len(energy), np.nan)
    known[0] = 1.0 - truth[0]  # one label of the first block, against its energy
    vocalised = fit_mixture(energy, groups, known)
    first = np.array(groups) == groups[0]
    assert vocalised[0] == known[0]
    assert (np.round(vocalised[first]) == known[0]).all()
    assert ((vocalised > 0.5) == truth)[~first].all()


@pytest.mark.parametrize("known", [[np.nan] * 3, [0.0, np.nan, 1.0], [0.0, 0.0, 0.0]])
def test_equal_energies_are_not_an_error(known: list[float]) -> None:
    vocalised = fit_mixture(np.zeros(3), ["a", "b", "c"], np.array(known))
    assert np.isfinite(vocalised).all()
    labelled = ~np.isnan(known)
    assert (vocalised[labelled] == np.array(known)[labelled]).all()
    assert len(fit_mixture(np.zeros(1), ["a"], np.array([np.nan]))) == 1


def test_modes_are_balanced_and_unknown_trials_ignored() -> None:
    modes = Modes({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0})
    target = modes.targets(["a", "d", "unknown"], torch.device("cpu"))
    assert target.tolist() == [[0.0, pytest.approx(2 / 3)], [pytest.approx(2.0), 0.0], [0.0, 0.0]]
    logits = torch.randn(3, 2, requires_grad=True)
    losses = mode_loss(logits, target)
    losses.sum().backward()
    assert losses[2] == 0 and (logits.grad[2] == 0).all() and (logits.grad[:2] != 0).all()


def test_evidence_ignores_padding() -> None:
    head = SpeakingMode(SpeakingModeSettings(enabled=True), Patch(bins=8, stride=4), 2, causal=False)
    bins = torch.randn(1, 43, 2)
    padded = torch.cat([bins, torch.full((1, 9, 2), 7.0)], dim=1)
    n = torch.tensor([43])
    torch.testing.assert_close(head.mean_evidence(bins, n), head.mean_evidence(padded, n))
    frames = bins[0, :40].reshape(10, 4, 2).mean(1)
    by_hand = torch.cat([(frames[lag:] * frames[: 10 - lag]).sum(0) / 10 for lag in range(5)])
    torch.testing.assert_close(head.mean_evidence(bins, n)[0].float(), by_hand)


def test_conditioning_scales_channels_and_detaches_the_mode() -> None:
    head = SpeakingMode(SpeakingModeSettings(enabled=True), Patch(), 3, causal=True)
    bins, logits = torch.randn(1, 4, 3), torch.tensor([[[20.0, -20.0]]]).expand(1, 4, 2).requires_grad_()
    torch.testing.assert_close(head.condition(bins, logits), bins)  # initially the identity
    with torch.no_grad():
        head.gain[MODES.index("silent")] = torch.tensor([0.5, 0.0, -0.5])
    scaled = head.condition(bins, logits)
    torch.testing.assert_close(scaled, bins * torch.tensor([1.5, 1.0, 0.5]))
    scaled.sum().backward()
    assert logits.grad is None and head.gain.grad is not None


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mode") / "run"
    train("tiny", cohort_store, path, overrides=[*SMALL, "mode.labels=ignore"])
    return path


@pytest.mark.thorough
def test_simulated_modes_are_inferred_without_labels(tmp_path: Path) -> None:
    """At the difficulty of real recordings: per block for training trials, per trial for others."""
    from arcuate.data.prepare import prepare
    from arcuate.data.simulation import simulate

    simulate(tmp_path / "source", layout="b2t25", n_sessions=4, n_trials=250, n_electrodes=64, seed=11)
    prepare(tmp_path / "source", tmp_path / "store")
    store = Store.open(tmp_path / "store")
    recipe = load_recipe("tiny", ["mode.enabled=true", "mode.labels=ignore"])
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    model = build_model(recipe, store, selection)
    modes = infer_modes(model, store, selection.train)
    right = [(modes.vocalised[t.id] > 0.5) == (t.mode == "vocalised") for t in selection.train]
    assert np.mean(right) >= 0.95
    others = [t for t in store.trials if t.split != "train"]
    summary = summarise(decode_trials(model, store, others), n_resamples=10).to_dict()
    assert summary["mode_accuracy"] >= 0.85
    assert summary["mode_accuracy_pooled"] >= 0.9


def test_evaluate_reports_modes_where_they_are_known(run: Path, cohort_store: Path) -> None:
    summary = evaluate(run).to_dict()
    assert 0.0 <= summary["mode_accuracy"] <= 1.0
    assert summary["per_by_mode"].keys() <= set(MODES)
    counted = [json_row["mode_predicted"] for json_row in rows(run)]
    assert set(counted) <= set(MODES)
    validated = [r for r in Run(run).metrics() if r["split"] == "val"]
    assert validated[-1]["mode_accuracy"] == pytest.approx(summary["mode_accuracy"])


def rows(run: Path) -> list[dict]:
    from arcuate.files import read_jsonl

    return read_jsonl(Run(run).results_file("val", None))


def test_recordings_without_any_mode(tmp_path: Path, cohort_store: Path) -> None:
    """As in the real releases: no labels, all modes inferred."""
    store = Store.open(cohort_store)
    recipe = load_recipe("tiny", SMALL)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    trials = tuple(replace(t, mode=None) for t in selection.train)
    modes = infer_modes(build_model(recipe, store, selection), store, trials)
    assert len(modes.vocalised) == len(trials)
