"""Stages without a text loss, stages that end in an explosion, and the losses of a checkpoint's own stage."""

import math
from pathlib import Path

import pytest
import torch

import arcuate
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train as train_recipe
from arcuate.files import read_jsonl
from arcuate.training import loop
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.checkpoint import checkpoint_stage, load_checkpoint
from arcuate.training.guard import KEEP, Guard
from arcuate.training.loop import train
from arcuate.training.modes import Modes
from arcuate.training.state import TrainingState
from support.training import make_recipe, make_state, planned_batches

CPU = torch.device("cpu")
SMALL = ["train.log_every=1", "train.validate_every=100", "train.checkpoint_every=2", "data.batching.batch_size=4"]


def run(state: TrainingState, store: Store) -> None:
    batches = planned_batches(store, state.recipe)  # type: ignore[arg-type]
    train(state, (batches[p] for p in range(1000)), None, CPU, Callback(), Stop())


def test_incidents_of_a_stage_without_a_text_loss_are_recorded(cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    stages = "stages=[{name: mode, steps: 14, losses: {mode: 1}}]"
    recipe = make_recipe(*SMALL, "mode.enabled=true", "guard.max_rewinds=0", stages)
    state = make_state(store, recipe, tmp_path / "run")
    state.modes = Modes({t.id: 0.5 for t in planned_batches(store, recipe).trials})
    for parameter in state.model.parameters():
        parameter.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(UserError, match="grad_norm not finite"):
        run(state, store)
    first = read_jsonl(state.run.incidents_file)[0]
    assert (first["kind"], first["metrics"]["normalised_loss"]) == ("non_finite", None)


@pytest.mark.parametrize("first_bad", [4, 5], ids=["two bad steps", "one bad step"])
def test_an_explosion_at_the_end_of_a_stage_does_not_reach_the_next(
    first_bad: int, cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(cohort_store)
    stages = "stages=[{name: one, steps: 6, losses: {ctc: 1}}, {name: two, steps: 1, losses: {ctc: 1}}]"
    state = make_state(store, make_recipe(*SMALL, stages), tmp_path / "run")
    healthy: dict[str, torch.Tensor] = {}
    judge = Guard.judge

    def explode(self, metrics, *rest):  # type: ignore[no-untyped-def]
        if state.progress.step == 4:  # after the checkpoint of step 4, which is healthy
            healthy.update({n: p.detach().clone() for n, p in state.model.named_parameters()})
        if state.progress.step >= first_bad and state.progress.curriculum.index == 0:
            with torch.no_grad():
                for parameter in state.model.parameters():
                    parameter.fill_(1e3)
            state.guard.memory.n_high += 1
            return KEEP
        return judge(self, metrics, *rest)

    monkeypatch.setattr(Guard, "judge", explode)
    started: list[dict[str, torch.Tensor]] = []
    begin = state.start_next_stage

    def record() -> None:
        started.append({n: p.detach().clone() for n, p in state.model.named_parameters()})
        begin()

    monkeypatch.setattr(state, "start_next_stage", record)
    run(state, store)
    assert all(torch.equal(started[0][n], healthy[n]) for n in healthy)
    incident = read_jsonl(state.run.incidents_file)[0]
    assert (incident["step"], incident["kind"], incident["action"]) == (6, "stage_end", "restore")
    assert "step 4" in incident["reason"]


@pytest.mark.parametrize(
    ("bad_step", "size"),
    [(5, 1e3), (5, math.nan), (4, math.nan)],
    ids=["large", "not finite", "not finite, and the last step skipped"],
)
def test_an_explosion_in_the_last_update_of_a_stage_does_not_reach_the_next(
    bad_step: int, size: float, cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is computed before its update, so no step of the stage has a high loss."""
    store = Store.open(cohort_store)
    stages = "stages=[{name: one, steps: 6, losses: {ctc: 1}}, {name: two, steps: 1, losses: {ctc: 1}}]"
    state = make_state(store, make_recipe(*SMALL, stages), tmp_path / "run")
    update, begin = loop.apply_update, state.start_next_stage
    healthy: dict[str, torch.Tensor] = {}
    started: list[dict[str, torch.Tensor]] = []

    def explode(changed: TrainingState, **options: bool) -> None:
        if changed.progress.step == 4:
            healthy.update({n: p.detach().clone() for n, p in state.model.named_parameters()})
        update(changed, **options)
        if changed.progress.step == bad_step and changed.progress.curriculum.index == 0:
            with torch.no_grad():
                for parameter in changed.model.parameters():
                    parameter.mul_(size)

    def record() -> None:
        started.append({n: p.detach().clone() for n, p in state.model.named_parameters()})
        begin()

    monkeypatch.setattr(loop, "apply_update", explode)
    monkeypatch.setattr(state, "start_next_stage", record)
    run(state, store)
    assert all(torch.equal(started[0][n], healthy[n]) for n in healthy)
    incident = next(row for row in read_jsonl(state.run.incidents_file) if row["kind"] == "stage_end")
    assert (incident["step"], incident["action"]) == (6, "restore")
    assert "step 4" in incident["reason"]


def test_a_healthy_last_update_is_kept(cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    stages = "stages=[{name: one, steps: 6, losses: {ctc: 1}}, {name: two, steps: 1, losses: {ctc: 1}}]"
    state = make_state(store, make_recipe(*SMALL, stages), tmp_path / "run")
    run(state, store)
    assert read_jsonl(state.run.incidents_file) == []


def test_evaluation_uses_the_losses_of_the_checkpoints_stage(cohort_store: Path, tmp_path: Path) -> None:
    stages = "stages=[{name: ctc, steps: 2, losses: {ctc: 1}}, {name: both, steps: 2, losses: {ctc: 0.5, rnnt: 0.25}}]"
    overrides = [
        *("encoder.width=16", "data.batching.batch_size=4", "train.log_every=1", "train.validate_every=2"),
        *("transducer={enabled: true, width: 16}", "loss.rnnt.weight=1", stages),
    ]
    result = train_recipe("tiny", cohort_store, tmp_path / "run", overrides=overrides)
    recipe = load_recipe(tmp_path / "run")
    names = {}
    for name in ("step-00000002", "step-00000004"):
        stage = checkpoint_stage(result.run.checkpoints / name, recipe.stages)
        assert stage is not None
        names[name] = stage.name
    assert names == {"step-00000002": "ctc", "step-00000004": "both"}
    validated = read_jsonl(result.run.metrics_file)
    for name, step in (("step-00000002", 2), ("last", 4)):
        loss = next(row["loss"] for row in validated if row["step"] == step and row["split"] == "val")
        scored = arcuate.evaluate(f"{result.run.path}@{name}", split="val")
        assert scored.metrics.loss == pytest.approx(loss, rel=1e-5)


def test_components_that_a_stage_freezes_keep_no_gradient(cohort_store: Path, tmp_path: Path) -> None:
    """Gradients of the stage before would count in the norm and in clipping, and not after a resume."""
    store = Store.open(cohort_store)
    stages = "stages=[{name: all, steps: 2, losses: {ctc: 1}}, {name: head, steps: 2, losses: {ctc: 1}, train: [ctc]}]"
    recipe = make_recipe(*SMALL, "train.keep_checkpoints=9", "train.clip_norm=1", stages)
    whole = make_state(store, recipe, tmp_path / "whole")
    run(whole, store)
    trained = {n for n, p in whole.model.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in whole.model.named_parameters() if n.startswith("head.")}
    resumed = make_state(store, recipe, tmp_path / "resumed")
    resumed.restore(load_checkpoint(whole.run.checkpoints / "step-00000002"))
    batches = planned_batches(store, recipe)
    train(resumed, (batches[p] for p in range(2, 1000)), None, CPU, Callback(), Stop())
    norms = [[r["grad_norm"] for r in read_jsonl(s.run.metrics_file) if r["step"] > 2] for s in (whole, resumed)]
    assert norms[0] == norms[1] and len(norms[0]) == 2
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
