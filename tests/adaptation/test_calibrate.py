"""Adding a session to a trained model: what it learns, what it leaves alone, and what it refuses."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import calibrate, evaluate, train
from arcuate.adaptation.calibration import MixedBatches, curve_sizes, split_session
from arcuate.adaptation.config import Calibration
from arcuate.data.alphabet import CLASSES
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.calibrate import CalibrationResult, derive_recipe
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.models.config import ModelConfig, Patch
from arcuate.models.io import load_model
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME, SECOND, UNLABELLED

FEW = Calibration(steps=60, lr=0.02)


def contents(folder: Path) -> dict[str, str]:
    """Every file of a run folder but its results, by hash."""
    files = [p for p in folder.rglob("*") if p.is_file() and "results" not in p.parts]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def calibrated(new_days: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationResult:
    before, out = contents(new_days / "run"), tmp_path_factory.mktemp("calibrated") / "run"
    result = calibrate(new_days / "run", new_days / "store", DRIFTED, out=out, curve=(5, 20), settings=FEW)
    assert contents(new_days / "run") == before, "the parent was touched"
    return result


def test_sentences_close_most_of_the_gap(calibrated: CalibrationResult) -> None:
    without, few, many = calibrated.curve
    assert [p.sentences for p in calibrated.curve] == [0, 5, 20] and few.n_trials == 60
    assert without.per > 0.15 and many.per < 0.7 * without.per
    assert many.gain == pytest.approx(without.per - many.per) and few.low < few.per < few.high


def test_the_run_names_its_parent_and_knows_the_session(calibrated: CalibrationResult, new_days: Path) -> None:
    run = calibrated.run
    assert run.environment()["parent"].startswith(f"{(new_days / 'run').resolve()}@")
    config = load_model(find_checkpoint(run)).config
    assert config.sessions == run_recipe(run).data.sessions == (FIRST, SECOND, DRIFTED)
    assert not (run.path.parent / ".run.part").exists() and run.lock_file.exists()
    kept = json.loads(run.calibration_file.read_text())
    assert kept["curve"] == calibrated.to_dict()["curve"] and all(np.isfinite(p["per"]) for p in kept["curve"])


def test_the_calibrated_run_is_an_ordinary_one(calibrated: CalibrationResult, new_days: Path) -> None:
    run, before = calibrated.path, contents(calibrated.path)
    page = (Path(one_object(arcuate("report", run, "--json").stdout)["report"])).read_text()
    assert "Not evaluated yet" not in page and f"of {DRIFTED}, after calibration with" in page
    done = arcuate("evaluate", run, "--data", new_days / "store", "--json")
    assert set(one_object(done.stdout)["per_by_session"]) == {FIRST, SECOND, DRIFTED}
    resumed = arcuate("train", run / "recipe.yaml", "--data", new_days / "store", "--run", run, "--resume")
    assert_refused(resumed, "calibrate", f"--from {run}")  # it would write over the calibrated weights
    changed = {name for name, value in contents(run).items() if before.get(name) != value}
    assert changed <= {"report.html"}


def test_layers_of_known_sessions_stay_as_they_were(calibrated: CalibrationResult, new_days: Path) -> None:
    old, new = load_model(find_checkpoint(new_days / "run")), load_model(find_checkpoint(calibrated))
    layers = old.front_end.session_layer, new.front_end.session_layer
    for i in range(2):
        assert torch.equal(layers[0].weights[i], layers[1].weights[i])
    assert not torch.equal(layers[1].weights[2], layers[1].weights[1])
    assert not torch.equal(old.head.weight, new.head.weight)


def test_frozen_means_frozen_and_the_same_again_gives_the_same_weights(new_days: Path, tmp_path: Path) -> None:
    settings = Calibration(other_lr_factor=0, steps=4)
    for name in ("a", "b"):
        calibrate(new_days / "run", new_days / "store", SAME, out=tmp_path / name, sentences=3, settings=settings)
    files = [(tmp_path / n / "checkpoints/last/model.safetensors").read_bytes() for n in ("a", "b")]
    assert files[0] == files[1]
    ours, theirs = (load_model(find_checkpoint(p)).state_dict() for p in (tmp_path / "a", new_days / "run"))
    changed = [name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name])]
    assert changed == ["front_end.session_layer.weights.2", "front_end.session_layer.biases.2"]


def test_one_writer_at_a_time_and_a_stopped_calibration_leaves_nothing(new_days: Path, tmp_path: Path) -> None:
    run, store, out = new_days / "run", new_days / "store", tmp_path / "run"
    code = (
        "import sys\nfrom arcuate import calibrate\nfrom arcuate.adaptation.config import Calibration\n"
        f"result = calibrate({str(run)!r}, {str(store)!r}, {DRIFTED!r}, out={str(out)!r},"
        " settings=Calibration(steps=100_000))\n"
        "sys.exit(3 if result.interrupted else 0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".run.part/*/metrics.jsonl")) and process.poll() is None:
        time.sleep(0.05)
    second = arcuate("calibrate", run, "--data", store, "--session", DRIFTED, "--out", out)
    assert_refused(second, "another process is training into", "choose another --run")
    assert list(tmp_path.glob(".run.part/*/metrics.jsonl"))  # of the first one, left alone
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert list(tmp_path.iterdir()) == []


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--session", SECOND), ("already has session",)),
        (("--session", "t15.2031.01.01"), ("no session t15.2031.01.01",)),
        (("--session", SAME, "--sentences", "0"), ("--sentences", ">= 1")),
        (("--session", DEAD), ("every channel", "flat")),
        (("--session", UNLABELLED), ("no labelled training sentence", "--adapt")),
        (("--session", SAME, "--curve", "a,b"), ("whole numbers",)),
        (("--session", SAME, "--curve", "50"), ("between 0 and", "20")),
    ],
)
def test_errors_are_reported_before_anything_is_written(
    new_days: Path, tmp_path: Path, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    base = ("calibrate", new_days / "run", "--data", new_days / "store", "--out", tmp_path / "run")
    assert_refused(arcuate(*base, *words), *said)
    assert list(tmp_path.iterdir()) == []


def test_other_folders_and_channels_are_refused(new_days: Path, cohort_store: Path, tmp_path: Path) -> None:
    run, store = new_days / "run", new_days / "store"
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UserError, match=r"is not empty; choose another --run$"):
        calibrate(run, store, SAME, out=tmp_path)
    with pytest.raises(UserError, match="is inside the parent run"):
        calibrate(run, store, SAME, out=run / "day")
    with pytest.raises(UserError, match="12 channels"):
        calibrate(run, cohort_store, Store.open(cohort_store).sessions[0], out=tmp_path / "run")


def test_reordered_channels_are_reported_but_can_be_calibrated(
    new_days: Path, tmp_path: Path, messages: list[str]
) -> None:
    result = calibrate(
        new_days / "run", new_days / "store", PERMUTED, out=tmp_path / "run", sentences=500, curve=(), settings=FEW
    )
    assert any(f"the channels of {PERMUTED} look re-ordered" in m for m in messages)
    assert any("500 sentences were requested, the session has 20" in m for m in messages)
    before, after = result.curve[0].per, result.curve[-1].per
    assert before > 0.5 and after < 0.8 * before


# --- parts -------------------------------------------------------------------------------------------------------


def test_a_session_is_split_in_the_order_of_recording(new_days: Path) -> None:
    store = Store.open(new_days / "store")
    day = split_session(store, DRIFTED, 20, Patch(bins=4, stride=2))
    assert [t.number for t in day.calibration] == list(range(20)) and {t.split for t in day.calibration} == {"train"}
    assert len(day.held_out) == 60 and not {t.id for t in day.calibration} & {t.id for t in day.held_out}
    assert min(t.number for t in day.held_out if t.split == "train") == 20


def test_batches_mix_old_and_new() -> None:
    plan = MixedBatches(n_new=6, n_known=50)
    drawn = [plan.draw(i) for i in range(40)]
    assert all(len(d) == 16 and sum(i >= 6 for i in d) == 8 for d in drawn)
    assert all(set(range(6)) <= set(d) for d in drawn)  # every sentence before any comes twice
    assert plan.draw(7) == drawn[7] and len({i for d in drawn for i in d}) > 40
    assert all(i < 3 for i in MixedBatches(3, 0).draw(0))
    assert curve_sizes(20) == (0, 5, 10, 20) and curve_sizes(1) == (0, 1)


def test_the_derived_recipe_keeps_the_model_and_learns_gently(new_days: Path) -> None:
    parent = run_recipe(Run(new_days / "run"))
    config = load_model(find_checkpoint(new_days / "run")).config
    recipe = derive_recipe(parent, config, DRIFTED, Calibration(other_lr_factor=0.1, lr=0.01))
    assert recipe.encoder == parent.encoder and recipe.augment == parent.augment
    assert recipe.schedule.peak_lr * recipe.optimizer.session_lr_factor == pytest.approx(0.01)
    assert recipe.schedule.peak_lr == pytest.approx(0.001)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["mode-ssm-small", "tiny-transformer"])
def test_every_kind_of_model_can_be_calibrated_and_adapted(new_days: Path, tmp_path: Path, recipe: str) -> None:
    """Stages, modes, a bridge and models without session layers included."""
    store, run = new_days / "store", tmp_path / "run"
    small = ["encoder.width=16", "train.log_every=4", "data.batching.batch_size=8", "train.steps=4"]
    train(recipe, store, run, overrides=[*small, f"data.sessions=[{FIRST}, {SECOND}]"])
    new = calibrate(run, store, DRIFTED, out=tmp_path / "new", sentences=3, curve=(), settings=Calibration(steps=2))
    assert run_recipe(Run(tmp_path / "new")).stages == () and len(new.curve) == 2
    assert evaluate(run, data=store, adapt=True).per is not None


def test_the_lower_bound_on_reductions_follows_the_calibration_rate() -> None:
    parent = load_recipe("diary-run07")
    assert parent.guard.adaptive.min_lr == 0.0005 > Calibration().lr * Calibration().other_lr_factor
    config = ModelConfig(settings=parent.model, n_channels=512, sessions=("t15.2023.08.11",), classes=CLASSES)
    for factor in (Calibration().other_lr_factor, 0.0):
        settings = Calibration(other_lr_factor=factor)
        adaptive = derive_recipe(parent, config, "t15.2023.08.13", settings).guard.adaptive
        assert adaptive.threshold == 10.0
        expected = 0.0005 * (factor or 1.0) * settings.lr / parent.schedule.peak_lr
        assert adaptive.min_lr == pytest.approx(expected)
