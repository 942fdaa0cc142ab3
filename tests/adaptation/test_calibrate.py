"""Adding a day to a trained model: what it learns, what it leaves alone, and what it refuses."""

import hashlib
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate.adaptation.calibration import MixedBatches, curve_sizes, split_session
from arcuate.adaptation.config import Calibration
from arcuate.data.alphabet import CLASSES
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.calibrate import calibrate, derive_recipe
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.models.config import ModelConfig, Patch
from arcuate.models.io import load_model
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME, SECOND, UNLABELLED
from support.forking import start

FEW = ("--set", "steps=60", "--set", "lr=0.02")


def contents(folder: Path) -> dict[str, str]:
    """Every file of a run folder but its results, by hash."""
    files = [p for p in folder.rglob("*") if p.is_file() and "results" not in p.parts]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def calibrated(new_days: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    before = contents(new_days / "run")
    run = tmp_path_factory.mktemp("calibrated") / "run"
    done = arcuate(
        *("calibrate", new_days / "run", "--data", new_days / "store", "--session", DRIFTED, "--run", run),
        *("--sentences", 20, "--curve", "5,20", "--json", *FEW),
    )
    assert done.returncode == 0, done.stderr
    assert contents(new_days / "run") == before, "the parent was touched"
    return run, one_object(done.stdout)


def test_sentences_close_most_of_the_gap(calibrated: tuple[Path, dict]) -> None:
    _, result = calibrated
    without, few, many = result["curve"]
    assert [p["sentences"] for p in result["curve"]] == [0, 5, 20]
    assert without["per"] > 0.15 and many["per"] < 0.7 * without["per"]
    assert many["gain"] == pytest.approx(without["per"] - many["per"])
    assert few["low"] < few["per"] < few["high"] and few["n_trials"] == 60


def test_the_run_names_its_parent_and_knows_the_day(calibrated: tuple[Path, dict], new_days: Path) -> None:
    run, _ = calibrated
    assert Run(run).environment()["parent"].startswith(f"{new_days / 'run'}@")
    config = load_model(find_checkpoint(run)).config
    assert config.sessions == (FIRST, SECOND, DRIFTED)
    assert run_recipe(Run(run)).data.sessions == config.sessions
    assert not (run.parent / ".run.part").exists() and Run(run).lock_file.exists()
    listed = arcuate("runs", run.parent, "--json")
    assert listed.returncode == 0, listed.stderr


def test_the_parent_is_found_from_any_folder(new_days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(new_days)
    words = ("--data", "store", "--session", SAME, "--run", tmp_path / "run", "--sentences", 2)
    done = arcuate("calibrate", "run", *words, "--curve", "none", "--set", "steps=2")
    assert done.returncode == 0, done.stderr
    assert Path(Run(tmp_path / "run").environment()["parent"].partition("@")[0]).is_absolute()


def test_its_report_begins_with_what_calibration_was_worth(calibrated: tuple[Path, dict], tmp_path: Path) -> None:
    run, _ = calibrated
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("results"))
    assert arcuate("report", copy).returncode == 0
    page = (copy / "report.html").read_text()
    assert "Not evaluated yet" not in page and f"of {DRIFTED}, after calibration with" in page
    (copy / "calibration.json").write_text('{"curve": "damaged"}')
    assert arcuate("report", copy).returncode == 0
    assert "Not evaluated yet" in (copy / "report.html").read_text()


def test_the_calibrated_run_is_an_ordinary_one(calibrated: tuple[Path, dict], new_days: Path) -> None:
    run, _ = calibrated
    done = arcuate("evaluate", run, "--data", new_days / "store", "--json")
    assert set(one_object(done.stdout)["per_by_session"]) == {FIRST, SECOND, DRIFTED}
    assert arcuate("report", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "Calibrated to session" in page and "calibration sentences" in page


def test_ordinary_training_cannot_go_on_with_it(calibrated: tuple[Path, dict], new_days: Path) -> None:
    """It would begin where calibration began and write other weights over the calibrated ones."""
    run, _ = calibrated
    before = contents(run)
    words = (run / "recipe.yaml", "--data", new_days / "store", "--run", run, "--resume")
    assert_refused(arcuate("train", *words), "calibrate", f"--from {run}")
    assert contents(run) == before


def test_layers_of_known_days_stay_as_they_were(calibrated: tuple[Path, dict], new_days: Path) -> None:
    old, new = load_model(find_checkpoint(new_days / "run")), load_model(find_checkpoint(calibrated[0]))
    layers = old.front_end.session_layer, new.front_end.session_layer
    for i in range(2):
        assert torch.equal(layers[0].weights[i], layers[1].weights[i])
    assert not torch.equal(layers[1].weights[2], layers[1].weights[1])
    assert not torch.equal(old.head.weight, new.head.weight)


def test_frozen_means_frozen(new_days: Path, tmp_path: Path) -> None:
    done = arcuate(
        *("calibrate", new_days / "run", "--data", new_days / "store", "--session", SAME, "--curve", "none"),
        *("--run", tmp_path / "run", "--sentences", 3),
        *("--set", "other_lr_factor=0", "--set", "init=mean", "--set", "steps=5"),
    )
    assert done.returncode == 0, done.stderr
    old, new = load_model(find_checkpoint(new_days / "run")), load_model(find_checkpoint(tmp_path / "run"))
    theirs, ours = old.state_dict(), new.state_dict()
    changed = [name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name])]
    assert changed == ["front_end.session_layer.weights.2", "front_end.session_layer.biases.2"]


def test_the_same_again_gives_the_same_weights(new_days: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        done = arcuate(
            *("calibrate", new_days / "run", "--data", new_days / "store", "--session", SAME, "--curve", "none"),
            *("--run", tmp_path / name, "--sentences", 3, "--set", "steps=4"),
        )
        assert done.returncode == 0, done.stderr
    files = [(tmp_path / n / "checkpoints/last/model.safetensors").read_bytes() for n in ("a", "b")]
    assert files[0] == files[1]


def test_a_dry_run_writes_nothing(new_days: Path, tmp_path: Path) -> None:
    words = ("--data", new_days / "store", "--session", DRIFTED, "--run", tmp_path / "run", "--dry-run", "--json")
    result = one_object(arcuate("calibrate", new_days / "run", *words).stdout)
    assert result["dry_run"] and result["initialised_from"] == SECOND and result["held_out"] == 60
    assert list(tmp_path.iterdir()) == []


def test_one_writer_at_a_time_and_a_stopped_calibration_leaves_nothing(new_days: Path, tmp_path: Path) -> None:
    words = ["calibrate", new_days / "run", "--data", new_days / "store", "--session", DRIFTED]
    command = [*words, "--run", tmp_path / "run", "--set", "steps=100000"]
    process = start(*command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".run.part/*/metrics.jsonl")) and process.poll() is None:
        time.sleep(0.2)
    second = arcuate(*words, "--run", tmp_path / "run", "--set", "steps=1")
    assert_refused(second, "another process is training into", "choose another --run")
    assert list(tmp_path.glob(".run.part/*/metrics.jsonl"))  # of the first one, left alone
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "nothing was written" in said and list(tmp_path.iterdir()) == []


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--session", SECOND), ("already has session",)),
        (("--session", "t15.2031.01.01"), ("no session t15.2031.01.01",)),
        (("--session", SAME, "--sentences", "0"), ("nothing to calibrate on", "at least 1")),
        (("--session", SAME, "--sentences", "-3"), ("--sentences -3", "at least 1")),
        (("--session", DEAD), ("every channel", "flat")),
        (("--session", UNLABELLED), ("no labelled training sentence", "--adapt")),
        (("--session", SAME, "--set", "speed=1"), ("no setting 'speed'",)),
        (("--session", SAME, "--curve", "a,b"), ("numbers of sentences",)),
        (("--session", SAME, "--curve", "50"), ("between 0 and", "20")),
    ],
)
def test_errors_are_reported_before_anything_is_written(
    new_days: Path, tmp_path: Path, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    base = ("calibrate", new_days / "run", "--data", new_days / "store", "--run", tmp_path / "run")
    assert_refused(arcuate(*base, *words), *said)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_the_parent(new_days: Path) -> None:
    before = contents(new_days / "run")
    words = ("--data", new_days / "store", "--session", SAME, "--run", new_days / "run" / "day")
    assert_refused(arcuate("calibrate", new_days / "run", *words), "is inside the parent run")
    assert contents(new_days / "run") == before


def test_a_folder_that_holds_something_is_left_alone(new_days: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UserError, match=r"is not empty; choose another --run$"):
        calibrate(new_days / "run", new_days / "store", SAME, out=tmp_path)


def test_other_channels_are_refused(new_days: Path, cohort_store: Path, tmp_path: Path) -> None:
    session = Store.open(cohort_store).sessions[0]
    words = ("--data", cohort_store, "--session", session, "--run", tmp_path / "run")
    assert_refused(arcuate("calibrate", new_days / "run", *words), "12 channels", "32")


def test_reordered_channels_are_reported_but_can_be_calibrated(new_days: Path, tmp_path: Path) -> None:
    words = ("--data", new_days / "store", "--session", PERMUTED, "--run", tmp_path / "run", "--curve", "none")
    done = arcuate("calibrate", new_days / "run", *words, *FEW, "--json")
    assert f"the channels of {PERMUTED} look re-ordered" in done.stderr
    curve = one_object(done.stdout)["curve"]
    assert curve[0]["per"] > 0.5 and curve[-1]["per"] < 0.8 * curve[0]["per"]


def test_more_sentences_than_there_are(new_days: Path, tmp_path: Path) -> None:
    words = ("--data", new_days / "store", "--session", PERMUTED, "--run", tmp_path / "run", "--dry-run")
    done = arcuate("calibrate", new_days / "run", *words, "--sentences", 500)
    assert done.returncode == 0 and "500 sentences were requested, the session has 20" in done.stderr


# --- parts -------------------------------------------------------------------------------------------------------


def test_a_day_is_split_in_the_order_of_recording(new_days: Path) -> None:
    store = Store.open(new_days / "store")
    day = split_session(store, DRIFTED, 20, Patch(bins=4, stride=2))
    assert [t.number for t in day.calibration] == list(range(20)) and {t.split for t in day.calibration} == {"train"}
    assert len(day.held_out) == 60 and not {t.id for t in day.calibration} & {t.id for t in day.held_out}
    assert min(t.number for t in day.held_out if t.split == "train") == 20


def test_batches_mix_old_and_new() -> None:
    plan = MixedBatches(n_new=3, n_known=50, batch_size=8, known_fraction=0.5, seed=0)
    drawn = [plan.draw(i) for i in range(40)]
    assert all(len(d) == 8 and sum(i >= 3 for i in d) == 4 for d in drawn)
    assert all({0, 1, 2} <= set(d) for d in drawn)  # every sentence before any comes twice
    assert plan.draw(7) == drawn[7] and len({i for d in drawn for i in d}) > 40
    assert all(i < 3 for i in MixedBatches(3, 0, 8, 0.0, 0).draw(0))


def test_curve_points_are_few_and_rise() -> None:
    assert curve_sizes(20) == (0, 5, 10, 20)
    assert curve_sizes(1) == (0, 1)


def test_the_derived_recipe_keeps_the_model_and_learns_gently(new_days: Path) -> None:
    parent = run_recipe(Run(new_days / "run"))
    config = load_model(find_checkpoint(new_days / "run")).config
    recipe = derive_recipe(parent, config, DRIFTED, Calibration(other_lr_factor=0.1, lr=0.01))
    assert recipe.encoder == parent.encoder and recipe.augment == parent.augment
    assert recipe.session_schedule is not None and recipe.session_schedule.peak_lr == 0.01
    assert recipe.schedule.peak_lr == pytest.approx(0.001)


def test_calibration_json_is_plain_numbers(calibrated: tuple[Path, dict]) -> None:
    run, result = calibrated
    kept = json.loads((run / "calibration.json").read_text())
    assert kept["curve"] == result["curve"] and all(np.isfinite(p["per"]) for p in kept["curve"])


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["mode-ssm-small", "tiny-transformer"])
def test_every_kind_of_model_can_be_calibrated_and_followed(new_days: Path, tmp_path: Path, recipe: str) -> None:
    """Stages, modes, a bridge and models without session layers included."""
    store, run = new_days / "store", tmp_path / "run"
    small = ["encoder.width=16", "train.log_every=4", "data.batching.batch_size=8", "train.steps=4"]
    known = f"data.sessions=[{FIRST}, {SECOND}]"
    done = arcuate("train", recipe, "--data", store, "--run", run, *small, known)
    assert done.returncode == 0, done.stderr
    done = arcuate(
        *("calibrate", run, "--data", store, "--session", DRIFTED, "--sentences", 3, "--curve", "none"),
        *("--run", tmp_path / "new", "--set", "steps=2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert run_recipe(Run(tmp_path / "new")).stages == ()
    done = arcuate("evaluate", run, "--data", store, "--adapt", "one-step", "--json")
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)["per"] is not None


def test_the_lower_bound_on_reductions_follows_the_calibration_rate() -> None:
    parent = load_recipe("diary-run07")
    assert parent.guard.adaptive.min_lr == 0.0005 > Calibration().lr * Calibration().other_lr_factor
    config = ModelConfig(settings=parent.model, n_channels=512, sessions=("t15.2023.08.11",), classes=CLASSES)
    for factor in (Calibration().other_lr_factor, 0.0):
        settings = Calibration(other_lr_factor=factor)
        adaptive = derive_recipe(parent, config, "t15.2023.08.13", settings).guard.adaptive
        assert adaptive.threshold == 10.0
        expected = 0.0005 * factor * settings.lr / parent.schedule.peak_lr
        assert adaptive.min_lr == pytest.approx(expected)
