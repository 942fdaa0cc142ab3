"""Parts of the training loop: gradients, optimizer groups, averages, precision."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from arcuate.data.batching import Batch
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.train import train
from arcuate.files import read_json, read_jsonl
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.config import Precision
from arcuate.training.environment import Distributed, choose_precision
from arcuate.training.loop import _find_bad_bins
from arcuate.training.loop import train as run_loop
from arcuate.training.optim import WeightAverage, fill_absent_gradients, make_optimizer, set_learning_rates
from arcuate.training.state import TrainingState
from arcuate.training.step import compute_gradients, encode_for_training
from support.training import make_recipe, make_state, planned_batches

CPU = torch.device("cpu")


def gradients(state: TrainingState, drawn: list[Batch]) -> dict[str, torch.Tensor]:
    compute_gradients(state, partial(encode_for_training, state.model), drawn, CPU, Distributed())
    return {n: p.grad.clone() for n, p in state.model.named_parameters() if p.grad is not None}


def test_accumulation_weights_every_trial_equally(cohort_store: Path, tmp_path: Path) -> None:
    """Two batches of different size give the gradient of the mean over all their trials, not of their means."""
    store, recipe = Store.open(cohort_store), make_recipe("data.batching.batch_size=6")
    planned = planned_batches(store, recipe)
    drawn = [planned[p] for p in range(planned.plan.batches_per_epoch)][:8]
    drawn = sorted(drawn, key=lambda b: b.n_counted)
    few, many = drawn[0], drawn[-1]
    state = make_state(store, recipe, tmp_path / "run")
    together = gradients(state, [few, many])
    apart = [(b.n_counted, gradients(state, [b])) for b in (few, many)]
    n_trials = sum(n for n, _ in apart)
    for name, gradient in together.items():
        weighted = sum(n * g[name] for n, g in apart if name in g) / n_trials
        torch.testing.assert_close(gradient, weighted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("absent", "moves"), [("skip", False), ("decay", True)])
def test_absent_sessions_are_skipped_or_updated_by_momentum(
    cohort_store: Path, tmp_path: Path, absent: str, moves: bool
) -> None:
    store = Store.open(cohort_store)
    recipe = make_recipe(
        f"optimizer.absent_sessions={absent}", "data.batching={kind: sessions, n_sessions: 1, n_trials: 2}"
    )
    state, planned = make_state(store, recipe, tmp_path / "run"), planned_batches(store, recipe)
    first = planned[0]
    other = next(b for b in (planned[p] for p in range(1, 50)) if b.session[0] != first.session[0])
    layer = state.model.front_end.session_layer.weights[int(first.session[0])]
    for batch in (first, other):
        gradients(state, [batch])
        if absent == "decay":
            fill_absent_gradients(state.optimizer)
        set_learning_rates(state.optimizer, 0.003, 1.0)
        before = layer.detach().clone()
        state.optimizer.step()
    assert bool((layer != before).any()) is moves


def test_session_layers_have_a_learning_rate_of_their_own(cohort_store: Path, tmp_path: Path) -> None:
    state = make_state(Store.open(cohort_store), make_recipe(), tmp_path / "run")
    assert set_learning_rates(state.optimizer, 0.1, 0.5) == {"bias": 0.1, "session": 0.05, "rest": 0.1}


def test_the_average_of_the_weights_starts_with_a_small_decay() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
        average, expected = WeightAverage(model, 0.25), 0.0
        for n, value in enumerate([1.0, 2.0, 3.0, 4.0], start=1):
            model.weight.fill_(value)
            average.update(model)
            decay = min(0.25, (1 + n) / (10 + n))
            expected = decay * expected + (1 - decay) * value
    assert average.tensors()["ema.weight"].item() == pytest.approx(expected)
    where = model.weight.data_ptr()
    with average.applied(model):
        assert model.weight.data_ptr() == where  # cuDNN needs the weights of a GRU where they are
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 4.0


def test_a_cpu_trains_in_fp32() -> None:
    """Which precision is used must not depend on how busy the machine is: the same recipe gives the same weights."""
    choice = choose_precision(Precision(kind="bf16"), CPU)
    assert choice.kind == "fp32" and "bf16 is slow" in (choice.note or "")
    with pytest.raises(UserError, match="fp16"):
        choose_precision(Precision(kind="fp16"), CPU)


def test_mixed_precision_starts_below_its_threshold(cohort_store: Path, tmp_path: Path) -> None:
    recipe = make_recipe("train.precision={kind: bf16, below_per: 0.5}")
    state = make_state(Store.open(cohort_store), recipe, tmp_path / "run")
    state.mixed_precision = "bf16"
    assert state.precision == "fp32"
    state.record_validation(0.6)
    assert state.precision == "fp32"
    state.record_validation(0.4)
    assert state.precision == "bf16"


def test_the_reason_for_another_precision_is_kept(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    def stop(*arguments: Any) -> None:
        raise UserError("before the first step")

    monkeypatch.setattr("arcuate.experiments.train.train_loop", stop)
    with pytest.raises(UserError, match="before the first step"):
        train("tiny", cohort_store, tmp_path / "run", overrides=["train.precision.kind=bf16", "data.workers=0"])
    kept = read_json(tmp_path / "run" / "environment.json")
    assert kept["precision"] == "fp32" and "bf16 is slow on CPUs" in kept["precision_reason"]


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_optimizer_settings(cohort_store: Path, tmp_path: Path, kind: str) -> None:
    recipe = make_recipe(f"optimizer={{kind: {kind}, eps: 0.1, weight_decay: {{weights: 0.01}}}}")
    state = make_state(Store.open(cohort_store), recipe, tmp_path / "run")
    optimizer = make_optimizer(state.model, recipe.optimizer)
    decays = {g["name"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {"bias": 0.0, "session": 0.0, "rest": 0.01}
    assert optimizer.param_groups[0]["eps"] == 0.1


TOO_HIGH = {"schedule": {"kind": "warmup_cosine", "peak_lr": 1.0, "warmup_steps": 30}}
EPS_TOO_LARGE = {"optimizer.eps": 1.0, "train.steps": 90, "guard.stuck.patience": 50}


@pytest.mark.parametrize(
    ("changes", "eps"), [(TOO_HIGH, None), pytest.param(EPS_TOO_LARGE, 1e-8, marks=pytest.mark.thorough)]
)
def test_run_stopped_within_a_learning_rate_search_resumes_exactly(
    cohort_store: Path, tmp_path: Path, changes: dict[str, Any], eps: float | None
) -> None:
    """The guard rewinds, lowers eps if it is the cause, and tries learning rates; stopping in one changes nothing."""
    settings = {
        "train": {"steps": 60, "log_every": 5, "validate_every": 60, "checkpoint_every": 10, "clip_norm": None},
        "encoder.width": 16,
        "data.batching.batch_size": 4,
        "guard.stuck.patience": 50,
        "runtime.threads": 1,
        **changes,
    }
    stop = Stop()

    class StopInTrial(Callback):
        def on_incident(self, row: dict[str, Any]) -> None:
            if row["kind"] == "search":
                stop.request()

    def outcome(run: Path) -> tuple[Any, ...]:
        rows = [read_jsonl(run / name) for name in ("metrics.jsonl", "incidents.jsonl", "predictions.jsonl")]
        for row in [*rows[0], *(undone for i in rows[1] for undone in i.get("rows", []))]:
            row.pop("cost")
        return (*rows, (run / "checkpoints/last/model.safetensors").read_bytes())

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train("tiny", cohort_store, whole, overrides=settings)
    train("tiny", cohort_store, stopped, overrides=settings, callbacks=[StopInTrial()], stop=stop)
    assert stop.requested
    train("tiny", cohort_store, stopped, overrides=settings, resume=True)
    assert outcome(stopped) == outcome(whole)
    kinds = [row["kind"] for row in read_jsonl(whole / "incidents.jsonl")]
    assert kinds.count("search") >= 3  # two further trials, and the choice
    assert read_json(whole / "checkpoints/last/state.json")["guard"]["eps"] == eps


def test_bad_bins_of_an_incident_are_named(cohort_store: Path) -> None:
    store, recipe = Store.open(cohort_store), make_recipe("data.batching.batch_size=4")
    batch = planned_batches(store, recipe)[0]
    assert _find_bad_bins([batch]) == []
    bins = batch.bins.clone()
    bins[0, 3, :2] = float("nan")
    bins[1] = 0.0
    first, second = (batch.trials[i].id for i in (0, 1))
    assert _find_bad_bins([replace(batch, bins=bins)]) == [
        f"trial {first}: 2 values are not finite",
        f"trial {second}: all bins are the same",
    ]


def test_run_with_every_second_gradient_not_finite_is_stopped(cohort_store: Path, tmp_path: Path) -> None:
    """Consecutive steps never fail, so only the share of skipped updates ends the run; no bad update is applied."""
    store = Store.open(cohort_store)
    small = ["train.log_every=2", "train.validate_every=100", "train.checkpoint_every=2", "data.batching.batch_size=4"]
    recipe = make_recipe(*small, "data.seed=1")
    state = make_state(store, recipe, tmp_path / "run")
    batches = planned_batches(store, recipe)
    drawn: list[int] = []

    def draw() -> Iterator[Batch]:
        for position in range(1000):
            drawn.append(position)
            yield batches[position]

    for parameter in state.model.parameters():
        parameter.register_hook(lambda gradient: gradient * math.nan if drawn[-1] % 2 else gradient)
    with pytest.raises(UserError, match=r"of the last \d+ updates skipped, after a lower learning rate and a rewind"):
        run_loop(state, draw(), None, CPU, Callback(), Stop())
    rows = list(read_jsonl(state.run.incidents_file))
    incidents = [row for row in rows if row["kind"] == "skips"]
    assert [row["action"] for row in incidents] == ["reduce_lr", "rewind", "stop"]
    assert incidents[0]["lr_scale"] == 0.8
    assert len(drawn) < 400
    assert all(bool(p.isfinite().all()) for p in state.model.parameters())


AVERAGED = ["ema.decay=0.999", "data.workers=0", "encoder.width=16"]


def test_averages_start_from_the_weights_that_training_starts_from(
    cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the parent (--from), and the mode head as it is initialised from the data, instead of random ones."""
    parent = make_state(Store.open(cohort_store), make_recipe("mode.enabled=true", *AVERAGED), tmp_path / "parent")
    with torch.no_grad():
        for parameter in parent.model.parameters():
            parameter.add_(1.0)
        parent.average = WeightAverage(parent.model, 0.999)
    parent.save()
    states: list[TrainingState] = []

    def loop(state: TrainingState, *arguments: Any) -> None:
        states.append(state)
        raise UserError("started")

    monkeypatch.setattr("arcuate.experiments.train.train_loop", loop)
    with pytest.raises(UserError, match="started"):
        train(parent.recipe, cohort_store, tmp_path / "run", from_=f"{parent.run.path}@last")  # type: ignore[arg-type]
    weights, averages = dict(states[0].model.named_parameters()), states[0].average.tensors()
    for name, weight in weights.items():
        assert torch.equal(averages[f"ema.{name}"], weight), name
    assert torch.equal(weights["head.bias"], dict(parent.model.named_parameters())["head.bias"])
    assert not torch.equal(
        weights["mode.classifier.weight"], dict(parent.model.named_parameters())["mode.classifier.weight"]
    )
