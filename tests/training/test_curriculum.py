"""Curriculum: stages as data, transitions, trained components, optimizer state, and resuming."""

import json
import random
from pathlib import Path

import pytest
import torch

from arcuate.cli.console import TrainingDisplay
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.experiments.train import train
from arcuate.models.io import load_model
from arcuate.progress import Progress
from arcuate.run import Run, create_run
from arcuate.training.config import find_ineffective_settings
from arcuate.training.curriculum import Stage, StageLosses, StageProgress, resolve_epochs
from arcuate.training.start import check_same_recipe
from support.cases import cases
from support.kill_checks import assert_kills_leave_no_trace
from support.killing import train_and_kill

SMALL = [
    *("encoder.width=8", "encoder.depth=1", "encoder.n_heads=2", "encoder.state_dim=4", "transducer.width=8"),
    *("denoiser.width=4", "data.batching.batch_size=4", "front_end.patch={bins: 8, stride: 8}"),
    *("train.log_every=2", "train.validate_every=4", "train.checkpoint_every=3", "ema.decay=0.9"),
]
STEPS = ["stages.ctc.steps=4", "stages.1.steps=4", "stages.mode.steps=3", "stages.3.steps=3"]


def train_stages(store: Path, run: Path, *more: str, progress: Progress | None = None) -> Path:
    display = TrainingDisplay()
    overrides = [*SMALL, *STEPS, *more]
    train("mode-ssm-small", store, run, overrides=overrides, callbacks=[display], progress=progress or display.report)
    return run


@pytest.fixture(scope="module")
def uninterrupted(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stages(cohort_store, tmp_path_factory.mktemp("stages") / "run")


def rows_of(run: Path, split: str) -> list[dict]:
    return [row for row in Run(run).metrics() if row["split"] == split]


def test_overrides_by_index_and_by_name() -> None:
    recipe = load_recipe("mode-ssm-small", ["stages.0.epochs=2", "stages.joint.steps=50"])
    assert (recipe.stages[0].epochs, recipe.stages[0].steps) == (2, None)
    assert recipe.stages[1].steps == 50
    assert load_recipe("mode-ssm-small").stages[0].steps == 150  # the packaged recipe is unchanged


def test_run_length_is_the_total_of_its_stages() -> None:
    recipe = load_recipe("mode-ssm-small", ["stages.0.steps=50"])
    assert recipe.train.steps == sum(stage.steps or 0 for stage in recipe.stages)
    assert load_recipe("mode-ssm-small", ["train.steps=7"]).train.steps == 7


@pytest.mark.parametrize("name", ["mode-ssm", "mode-ssm-small"])
def test_one_setting_switches_the_denoise_stage_off(name: str) -> None:
    without = load_recipe(name, ["denoiser.enabled=false"])
    assert [stage.name for stage in without.stages] == ["ctc", "joint", "mode"]
    assert [stage.name for stage in load_recipe(name).stages] == ["ctc", "joint", "mode", "denoise"]
    again = load_recipe(load_recipe(name), {"denoiser.enabled": False})  # of a resolved recipe too
    assert again == without
    if name == "mode-ssm-small":
        assert without.train.steps == load_recipe(name).train.steps - 100


def test_runs_whose_stages_had_no_requirement_are_resumed(tmp_path: Path) -> None:
    recipe = load_recipe("mode-ssm-small")
    run = create_run(tmp_path / "run", recipe, {})
    lines = run.recipe_file.read_text().splitlines(keepends=True)
    run.recipe_file.write_text("".join(line for line in lines if "requires:" not in line))
    check_same_recipe(run, recipe)
    with pytest.raises(UserError, match="stages"):
        check_same_recipe(run, load_recipe("mode-ssm-small", ["denoiser.enabled=false"]))


def test_epochs_are_converted_to_steps() -> None:
    recipe = resolve_epochs(load_recipe("mode-ssm"), steps_per_epoch=10.4)
    assert [s.steps for s in recipe.stages] == [104, 156, 104, 52]
    assert [s.epochs for s in recipe.stages] == [None] * 4
    assert recipe.train.steps == 416
    assert resolve_epochs(recipe, 3.0) == recipe


@pytest.mark.parametrize("name", ["mode-ssm", "mode-ssm-small"])
def test_weights_match_the_description(name: str) -> None:
    weights = [stage.losses.active for stage in load_recipe(name).stages]
    assert weights == [
        {"ctc": 1.0},
        {"ctc": 0.3, "rnnt": 1.0},
        {"ctc": 0.3, "rnnt": 1.0, "mode": 0.1},
        {"ctc": 0.3, "rnnt": 1.0, "mode": 0.1, "denoise": 0.05},
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stages.7.steps=2"], "0 (ctc), 1 (joint)"),
        (["stages.nosuch.steps=2"], "nosuch"),
        (["stages.0.losses.ctc=0"], "all losses of stage 'ctc' have weight 0"),
        (["denoiser.enabled=false", "stages.denoise.requires=null"], "stages.denoise.losses.denoise=0"),
        (["denoiser.enabled=false", "stages.0.train=[denoiser, ctc]"], "does not have"),
        (["stages.denoise.requires=memory"], "requires"),
        (["stages.0.train=[memory]"], "stages.0.train"),
        (["stages.0.train=[transducer]"], "reaches; add one of front_end, encoder, ctc"),
        (["stages.0.stps=4"], "did you mean 'stages.0.steps'"),
        (["stages.0.losses.foo=1"], "stages.0.losses has ctc, denoise, mode, rnnt"),
        (["stages=[]"], "set train.steps"),
        (["stages.0={name: a, losses: {ctc: 1.0}}"], "needs exactly one of steps and epochs"),
        (["stages.1.name=ctc"], "two stages are called 'ctc'"),
        (
            ["schedule.warmup_fraction=0", "schedule.warmup_steps=160", "stages.2.schedule=restart"],
            "stage 'mode' of 150 steps",
        ),
        (["stages.0.epochs=0"], "stages.0.epochs"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_sentence(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=r".*") as error:
        load_recipe("mode-ssm-small", overrides)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_ineffective_loss_weights_are_reported() -> None:
    changed = load_recipe("mode-ssm-small", ["loss.ctc.weight=0.5"])
    (line,) = find_ineffective_settings(changed, True, "cpu")
    assert "loss.ctc.weight 0.5 has no effect" in line
    for name in ("mode-ssm", "mode-ssm-small"):
        assert not list(find_ineffective_settings(resolve_epochs(load_recipe(name), 10.0), True, "cuda"))


def test_stage_ends_by_length_or_patience() -> None:
    stage = Stage(name="a", steps=10, patience=2, min_improvement=0.1, losses=StageLosses(ctc=1.0))
    progress = StageProgress(0, began=5)
    assert not progress.is_over(stage, 14)
    assert progress.is_over(stage, 15)
    for per, over in ((0.5, False), (0.46, False), (0.40, False), (0.39, False), (0.38, True)):
        progress = progress.after_validation(stage, per)
        assert progress.is_over(stage, 6) == over
    assert progress.after_validation(stage, None) == progress


def test_rows_name_their_stage(uninterrupted: Path) -> None:
    assert [(r["step"], r["stage"]) for r in rows_of(uninterrupted, "val")] == [
        (4, "ctc"),
        (8, "joint"),
        (11, "mode"),
        (12, "denoise"),
        (14, "denoise"),
    ]
    heads = {r["stage"]: set(r["losses"]) for r in rows_of(uninterrupted, "train")}
    assert heads == {
        "ctc": {"ctc"},
        "joint": {"ctc", "rnnt"},
        "mode": {"ctc", "rnnt", "mode"},
        "denoise": {"ctc", "rnnt", "mode", "denoise"},
    }
    assert all(
        row["stage_index"] == ["ctc", "joint", "mode", "denoise"].index(row["stage"])
        for row in Run(uninterrupted).metrics()
    )


def test_best_checkpoint_of_every_stage_is_linked(uninterrupted: Path) -> None:
    steps = {p.name: int(p.readlink().name[5:]) for p in (uninterrupted / "checkpoints").iterdir() if p.is_symlink()}
    assert {k: v for k, v in steps.items() if k.startswith("stage-")}.keys() == {
        *("stage-ctc", "stage-joint", "stage-mode", "stage-denoise")
    }
    assert steps["stage-ctc"] == 4
    assert steps["stage-joint"] == 8
    assert steps["best"] == steps["stage-denoise"] in (12, 14)  # all its components are trained


def test_only_named_components_are_trained(cohort_store: Path, tmp_path: Path) -> None:
    run = train_stages(
        cohort_store,
        tmp_path / "run",
        *("stages.ctc.train=[ctc]", "train.steps=4", "train.keep_checkpoints=9", "ema.decay=0"),
    )
    first, last = (load_model(run / "checkpoints" / f"step-{n:08d}").state_dict() for n in (0, 3))
    changed = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert changed == {"head"}


def test_optimizer_state_is_transferred(cohort_store: Path, tmp_path: Path) -> None:
    """Parameters that stay trainable have counted all steps, those added in the last stage only its own."""
    run = train_stages(cohort_store, tmp_path / "run", "stages.ctc.train=[encoder, ctc]", "train.steps=8")
    from safetensors.torch import load_file

    tensors = load_file(run / "checkpoints/last/training.safetensors")
    counts = {int(t) for name, t in tensors.items() if name.endswith(".step")}
    assert 8 in counts
    assert counts - {8} <= {1, 2, 3, 4}  # session layers count only the batches with their trials


def test_stage_ends_early_without_improvement(
    cohort_store: Path, tmp_path: Path, messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    reported: list[tuple[str, int, int]] = []
    run = train_stages(
        cohort_store, tmp_path / "run",
        *("stages.0.patience=1", "stages.0.min_improvement=0.99", "stages.0.steps=40"),
        *("train.validate_every=2", "train.log_every=3"),
        progress=lambda done, total, activity: reported.append((activity, done, total)),
    )  # fmt: skip
    rows = rows_of(run, "val")
    assert [r["step"] for r in rows if r["stage"] == "ctc"] == [2, 4]
    assert [r["step"] for r in rows_of(run, "train") if r["stage"] == "ctc"] == [3, 4]
    assert json.loads((run / "checkpoints/last/state.json").read_text())["curriculum"]["index"] == 4
    logged = "\n".join(messages)
    assert "stages, in steps: ctc 40 or fewer, joint 4, mode 3, denoise 3" in logged
    assert "training trials silent, all labelled" in logged
    shown = capsys.readouterr().err
    ends = [line.split(" stage ")[1] for line in shown.splitlines() if " stage " in line and " complete" in line]
    assert ends[0].startswith("ctc complete, 1 validation without improvement, best PER ")
    assert ends[0].endswith("; next stage: joint")
    assert [line.split()[0] for line in ends] == ["ctc", "joint", "mode", "denoise"]
    assert "without" not in ends[1] and "next" not in ends[3]
    assert reported[-1] == ("training", 14, 14)  # the bar ends where the run does


def test_schedules_span_the_run_or_the_stage(cohort_store: Path, tmp_path: Path) -> None:
    more = [
        "schedule={kind: linear, peak_lr: 0.001, min_lr: 0.0}",
        "train.log_every=1",
        "stages.2.lr_factor=0.5",
        "stages.3.lr_factor=1",
    ]
    more += [f"stages.{i}.schedule={how}" for i, how in enumerate(["restart", "restart", "restart", "continue"])]
    learning_rates = [r["lr"] for r in rows_of(train_stages(cohort_store, tmp_path / "run", *more), "train")]
    assert learning_rates[:5] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-3])
    assert learning_rates[8] == pytest.approx(0.5e-3)
    assert learning_rates[11:] == pytest.approx([1e-3 * (1 - n / 14) for n in (11, 12, 13)])


def test_accumulation_counts_epochs_in_optimizer_steps(cohort_store: Path, tmp_path: Path) -> None:
    run = train_stages(
        cohort_store, tmp_path / "run",
        *("train.accumulate=2", "data.batching.batch_size=16", "stages.ctc.epochs=1", "train.steps=6"),
    )  # fmt: skip
    n_train = run_recipe(Run(run)).stages[0].steps
    assert n_train == 3  # 96 trials in batches of 16, two of them for a step
    state = json.loads((run / "checkpoints/last/state.json").read_text())
    assert (state["step"], state["position"], state["curriculum"]["index"]) == (6, 12, 1)


@pytest.mark.thorough
def test_killed_between_and_inside_stages(cohort_store: Path, tmp_path: Path) -> None:
    arguments = ["mode-ssm-small", *SMALL, *STEPS, "--data", str(cohort_store)]
    [(_, n_operations)] = train_and_kill(arguments, [(tmp_path / "uninterrupted", None)])
    points = sorted(random.Random(1).sample(range(13, n_operations), cases(0.25)))
    assert_kills_leave_no_trace(arguments, tmp_path, points)
    links = [
        {p.name: p.readlink() for p in (tmp_path / name / "checkpoints").glob("stage-*")}
        for name in ("uninterrupted", *(f"at-{n}" for n in points))
    ]
    assert all(found == links[0] for found in links)
    assert len(links[0]) == 4


def test_stages_that_are_not_a_list_are_refused() -> None:
    with pytest.raises(UserError, match="expected a list"):
        load_recipe("tiny", ["stages=7"])
