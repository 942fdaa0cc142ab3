"""fp16 on the CPU's loss scaler: an overflow is the scaler's business, and the guard only sees what it cannot mend."""

import math
from pathlib import Path

import pytest
import torch

from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe
from arcuate.files import read_jsonl
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.checkpoint import load_checkpoint
from arcuate.training.config import Precision
from arcuate.training.environment import choose_precision
from arcuate.training.loop import train
from arcuate.training.state import TrainingState
from support.training import make_recipe, make_state, planned_batches

CPU = torch.device("cpu")
STEPS = 6
SMALL = [
    *("train.steps=6", "train.log_every=1", "train.validate_every=100", "train.checkpoint_every=100"),
    *("data.batching.batch_size=4", "train.precision.kind=fp16"),
]


def fp16_state(store: Store, folder: Path, *overrides: str, **scaler: float) -> TrainingState:
    state = make_state(store, make_recipe(*SMALL, *overrides), folder, "fp16")
    state.set_scaler(torch.amp.GradScaler("cpu", **scaler))  # type: ignore[arg-type]
    return state


def run(state: TrainingState, store: Store, stop_after: int | None = None) -> list[dict]:
    """Train to the end, or stop with a checkpoint; return the rows."""
    stop = Stop()

    class StopAt(Callback):
        def on_step(self, step: int) -> None:
            if stop_after is not None and step >= stop_after:
                stop.request()

    batches = planned_batches(store, state.recipe)
    remaining = (batches[p] for p in range(state.progress.position, 1000))
    train(state, remaining, None, CPU, StopAt(), stop)
    return read_jsonl(state.run.metrics_file)


@pytest.mark.parametrize("guard", ["true", "false"])
def test_an_overflow_is_counted_and_is_not_an_incident(guard: str, cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    # Gradients times 2^40 are infinite in fp16; the scale falls until they are not.
    scaler = {"init_scale": 2.0**40, "backoff_factor": 2.0**-12}
    state = fp16_state(store, tmp_path / "run", f"guard.enabled={guard}", **scaler)
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    rows = run(state, store)
    skipped = [row["skipped"].get("overflow", 0) for row in rows]
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert [row["loss"] is None for row in rows] == [n == 1 for n in skipped]
    assert read_jsonl(state.run.incidents_file) == []
    assert state.guard.memory.n_rewinds == state.guard.memory.n_skipped == 0
    assert state.scaler.get_scale() == 2.0 ** (40 - 12 * sum(skipped))
    assert any(not torch.equal(before[n], p) for n, p in state.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in state.model.parameters())


def test_many_overflows_do_not_add_up_to_a_rewind(cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    state = fp16_state(store, tmp_path / "run", init_scale=2.0**127, backoff_factor=0.99)
    rows = run(state, store)
    assert [row["skipped"] for row in rows] == [{"overflow": 1}] * STEPS
    assert read_jsonl(state.run.incidents_file) == []


def _break_gradients(state: TrainingState) -> None:
    """Every gradient is NaN with a finite loss, whatever the scale."""
    for parameter in state.model.parameters():
        parameter.register_hook(lambda gradient: gradient * math.nan)


def test_at_the_minimum_scale_an_overflow_is_an_incident(cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    state = fp16_state(store, tmp_path / "run", "guard.max_rewinds=0", "train.steps=20", init_scale=4.0)
    _break_gradients(state)
    with pytest.raises(UserError, match="grad_norm not finite for 10 consecutive steps"):
        run(state, store)
    incidents = read_jsonl(state.run.incidents_file)
    assert [i["kind"] for i in incidents] == ["non_finite"] * 10
    assert [i["metrics"]["loss_scale"] for i in incidents[:2]] == [1.0, 0.5]
    assert [row["skipped"] for row in read_jsonl(state.run.metrics_file)][:2] == [{"overflow": 1}] * 2


def test_without_the_guard_broken_gradients_end_the_run_and_never_reach_the_weights(
    cohort_store: Path, tmp_path: Path
) -> None:
    store = Store.open(cohort_store)
    state = fp16_state(store, tmp_path / "run", "guard.enabled=false", init_scale=2.0)
    _break_gradients(state)
    with pytest.raises(UserError, match="grad_norm became NaN"):
        run(state, store)
    assert all(torch.isfinite(p).all() for p in state.model.parameters())


def test_resumed_in_the_middle_of_the_growth_of_the_scale(cohort_store: Path, tmp_path: Path) -> None:
    """The scale doubles after three steps without overflow; the run stops after two of them."""
    store, growth = Store.open(cohort_store), {"init_scale": 1024.0, "growth_interval": 3}
    straight = fp16_state(store, tmp_path / "straight", **growth)
    expected = run(straight, store)
    stopped = fp16_state(store, tmp_path / "stopped", **growth)
    run(stopped, store, stop_after=1)
    assert stopped.progress.step == 2
    resumed = make_state_in(stopped, store)
    resumed.restore(load_checkpoint(stopped.run.checkpoints / "last"))
    rows = run(resumed, store)
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()
    assert resumed.scaler.get_scale() == 4096.0
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def make_state_in(stopped: TrainingState, store: Store) -> TrainingState:
    """A new state in the run folder of another; its scaler starts with torch's defaults."""
    assert isinstance(stopped.recipe, Recipe)
    state = make_state(store, stopped.recipe, stopped.run.path.with_name("other"), "fp16")
    state.run = stopped.run
    return state


def test_the_scale_does_not_change_before_mixed_precision_starts(cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    precision = "train.precision={kind: fp16, below_per: 0.5}"
    state = fp16_state(store, tmp_path / "run", precision, init_scale=1024.0, growth_interval=1)
    run(state, store)
    assert state._fp16_scaler.get_scale() == 1024.0
    assert not state.scaler.is_enabled()


def test_bf16_falls_back_to_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs before Ampere torch emulates bf16, which is slower than fp32. A resumed run keeps its precision."""
    cuda, bf16 = torch.device("cuda"), Precision(kind="bf16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert choose_precision(bf16, cuda).kind == "bf16"
    assert choose_precision(bf16, cuda, previous="fp16").kind == "fp16"
    assert choose_precision(bf16, cuda, previous="fp32").kind == choose_precision(bf16, CPU).kind == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    choice = choose_precision(bf16, cuda)
    assert choice.kind == "fp16" and "emulates bf16" in (choice.note or "")
