import pytest
import torch

from arcuate.errors import UserError
from arcuate.recipe import load_recipe
from arcuate.training.schedule import PlateauState, after_validation, rate_at
from arcuate.training.settings import HoldDecay, Linear, OneCycle, Plateau, Restarts, StepDecay


def torch_rates(make, n_steps: int, rate: float) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, rates = make(optimizer), []
    for _ in range(n_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


LR = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "make", "rate"),
    [
        (OneCycle(peak=0.01, cycle_steps=61), lambda o: LR.OneCycleLR(o, 0.01, total_steps=61), 0.01),
        (Linear(peak=0.02, floor=0.005), lambda o: LR.LinearLR(o, 1.0, 0.25, total_iters=60), 0.02),
        (
            Restarts(peak=0.1, floor=0.01, period=7, multiply=2),
            lambda o: LR.CosineAnnealingWarmRestarts(o, 7, 2, 0.01),
            0.1,
        ),
        (StepDecay(peak=0.1, factor=0.3, every=11), lambda o: LR.StepLR(o, 11, 0.3), 0.1),
        (StepDecay(peak=0.1, factor=0.3, at=(5, 40)), lambda o: LR.MultiStepLR(o, [5, 40], 0.3), 0.1),
    ],
)
def test_rates_equal_those_of_torch(schedule, make, rate: float) -> None:  # type: ignore[no-untyped-def]
    assert [rate_at(schedule, s, 60) for s in range(60)] == pytest.approx(
        torch_rates(make, 60, rate), abs=1e-12
    )


def test_plateau_equals_that_of_torch() -> None:
    pers = [0.9, 0.7, 0.71, 0.72, 0.7, 0.69, 0.7, 0.7, 0.7, 0.7, 0.7, 0.68, 0.9, 0.9, 0.9, 0.9]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = LR.ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.0, cooldown=1)
    schedule, state = Plateau(peak=0.1, factor=0.5, patience=2, cooldown=1), PlateauState()
    for per in pers:
        theirs.step(per)
        state = after_validation(schedule, state, per)
        assert rate_at(schedule, 0, 1, state) == pytest.approx(optimizer.param_groups[0]["lr"])
    assert state.scale < 0.5


def test_hold_then_decay() -> None:
    schedule = HoldDecay(peak=1.0, floor=0.1, hold=10)
    assert [rate_at(schedule, s, 20) for s in (0, 9, 10, 15, 20, 30)] == pytest.approx(
        [1, 1, 1, 0.55, 0.1, 0.1]
    )


@pytest.mark.parametrize(
    "override",
    [
        "schedule={kind: step_decay, peak: 0.1}",
        "schedule={kind: step_decay, peak: 0.1, at: [3], every: 3}",
        "schedule={kind: warmup_cosine, peak: 0.1, floor: 0.2}",
        "schedule={kind: warmup_cosine, peak: 0.1, warmup: 3, warmup_share: 0.1}",
        "optimizer={kind: adam, momentum: 0.9}",
        "optimizer={kind: sgd, nesterov: true}",
        "ema.decay=1.0",
        "augment.time_masks.n_masks=3",
    ],
)
def test_settings_that_contradict_each_other_are_refused(override: str) -> None:
    with pytest.raises(UserError):
        load_recipe("tiny", [override])
