import pytest
import torch

from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.training.config import find_ineffective_settings
from arcuate.training.schedule import (
    Linear,
    OneCycle,
    Plateau,
    PlateauState,
    StepDecay,
    learning_rate,
    update_plateau,
)
from arcuate.training.step_size import damping, expected, lower_eps, measured


def torch_learning_rates(make, n_steps: int, lr: float) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, learning_rates = make(optimizer), []
    for _ in range(n_steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return learning_rates


LR = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "make", "lr"),
    [
        (OneCycle(peak_lr=0.01), lambda o: LR.OneCycleLR(o, 0.01, total_steps=60), 0.01),
        (Linear(peak_lr=0.02, min_lr=0.005), lambda o: LR.LinearLR(o, 1.0, 0.25, total_iters=60), 0.02),
        (
            StepDecay(peak_lr=0.1, factor=0.3, milestones=(5, 40)),
            lambda o: LR.MultiStepLR(o, [5, 40], 0.3),
            0.1,
        ),
    ],
)
def test_learning_rates_equal_those_of_torch(schedule, make, lr: float) -> None:  # type: ignore[no-untyped-def]
    assert [learning_rate(schedule, s, 60) for s in range(60)] == pytest.approx(
        torch_learning_rates(make, 60, lr), abs=1e-12
    )


def test_plateau_equals_reduce_lr_on_plateau() -> None:
    pers = [0.9, 0.7, 0.71, 0.72, 0.7, 0.69, 0.7, 0.7, 0.7, 0.7, 0.7, 0.68, 0.9, 0.9, 0.9, 0.9]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = LR.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.0)
    schedule, state = Plateau(peak_lr=0.1, factor=0.5, patience=2), PlateauState()
    for per in pers:
        theirs.step(per)
        state = update_plateau(schedule, state, per)
        assert learning_rate(schedule, 0, 1, state) == pytest.approx(optimizer.param_groups[0]["lr"])
    assert state.scale < 0.5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["schedule={kind: step_decay, peak_lr: 0.1}"], ["schedule.milestones"]),
        (["schedule={kind: step_decay, peak_lr: 0.1, milestones: [9, 3]}"], ["strictly increasing"]),
        (["schedule={kind: warmup_cosine, peak_lr: 0.1, warmup_steps: 3, warmup_fraction: 0.1}"], ["exclusive"]),
        (["ema.decay=1.0"], ["ema.decay"]),
        (["augment.time_masks.n_masks=3"], ["max_bins", "max_fraction"]),
        *(
            ([f"schedule={{kind: {kind}, peak_lr: 0.1, min_lr: 0.2}}"], ["min_lr 0.2 is above peak_lr 0.1"])
            for kind in ("linear", "warmup_cosine", "plateau", "step_decay, milestones: [3]")
        ),
        (
            ["schedule={kind: warmup_cosine, peak_lr: 0.1, warmup_steps: 601}"],
            ["schedule.warmup_steps", "train.steps"],
        ),
        (
            ["schedule={kind: warmup_cosine, peak_lr: 0.1, warmup_steps: 9, decay_steps: 8}"],
            ["warmup", "decay_steps"],
        ),
        (["train.precision.kind=fp16", "runtime.device=cpu"], ["train.precision.kind", "runtime.device"]),
        (["train.precision.below_per=0.5"], ["below_per", "kind"]),
        (["runtime.device=cpu", "runtime.compile=true"], ["compile", "device"]),
        (["guard.adaptive={threshold: 10, min_lr: 0.1}"], ["guard.adaptive.min_lr", "0.003"]),
        (["ema.decay=0.9", "train.steps=0"], ["train.steps"]),
        (["loss.ctc.weight=0", "train.select_by=wer"], ["nothing would be learnt", "validate.lm"]),
    ],
)
def test_mistakes_name_the_settings(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_recipe("tiny", overrides)
    assert all(word in str(error.value) for word in words), error.value
    assert str(error.value).startswith("recipe tiny: ")


def test_ineffective_settings_are_reported() -> None:
    cut = load_recipe("b2t25-gru", ["train.steps=20"])
    assert any("schedule.warmup_steps 1000" in line for line in find_ineffective_settings(cut, True, "cuda"))
    plateau = load_recipe("tiny", ["schedule={kind: plateau, peak_lr: 0.1}", "runtime.tf32=true"])
    found = find_ineffective_settings(plateau, False, "cpu")
    assert ["plateau" in line or "tf32" in line for line in found] == [True, True]
    assert not list(find_ineffective_settings(load_recipe("tiny"), False, "cpu"))
    for name, n_found in (("b2t25-gru", 1), ("mode-ssm", 1), ("b2t25-transformer", 0)):
        compiled = load_recipe(name, ["runtime.compile=true"])
        assert sum("compile" in line for line in find_ineffective_settings(compiled, True, "cuda")) == n_found


def test_eps_that_leaves_no_updates_is_reported() -> None:
    """`tiny` at eps 0.1 cannot learn in 600 steps; the same eps with a summed loss and many steps is the '25 recipe."""
    small = expected(load_recipe("tiny", ["optimizer.eps=0.1"]), 500_000)
    assert small.direction == "too_small" and small.eps_limits
    assert "optimizer.eps 0.1" in small.reason and "multiply the learning rate" in small.reason
    for changes in ([], ["optimizer.eps=0.1", "schedule.peak_lr=0.3"]):
        assert expected(load_recipe("tiny", changes), 500_000).direction == "unclear"
    for changes in (["schedule.peak_lr=0.02"], ["optimizer.eps=0.1", "schedule.peak_lr=2", "train.clip_norm=null"]):
        large = expected(load_recipe("tiny", changes), 500_000)
        assert large.direction == "too_large" and "lower the learning rate" in large.reason
    for name in ("b2t25-gru", "b2t24-gru", "official-exact", "mode-ssm", "b2t25-transformer"):
        assert not expected(load_recipe(name), 50_000_000).reason, name


@pytest.mark.parametrize(
    ("ratio", "n_steps", "eps", "gradient", "direction"),
    [
        (None, 600, 1e-8, 1e-3, "unclear"),
        (0.002, 10_000, 1e-8, 1e-3, "too_small"),  # whatever limits them
        (0.005, 100, 0.1, 1e-3, "too_small"),  # eps limits them, and the run is short
        (0.005, 100, 1e-8, 1e-3, "unclear"),
        (0.005, 600, 0.1, 1e-3, "unclear"),
        (0.09, 600, None, None, "too_large"),
    ],
)
def test_measured_updates_are_judged(
    ratio: float | None, n_steps: int, eps: float | None, gradient: float | None, direction: str
) -> None:
    assert measured(ratio, n_steps, eps, gradient).direction == direction


def test_a_lowered_eps_no_longer_limits_updates() -> None:
    for gradient in (1e-2, 1e-6, 1e-9):
        assert damping(gradient, lower_eps(0.1, gradient)) > 0.9
