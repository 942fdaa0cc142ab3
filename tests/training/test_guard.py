import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from arcuate.training.config import (
    Adaptive,
    Collapse,
    GuardSettings,
    Stuck,
)
from arcuate.training.guard import KEEP, Guard, GuardMemory, Rewind, Verdict
from arcuate.training.metrics import StepMetrics


def decoding(loss: float, grad_norm: float = 1.0) -> StepMetrics:
    return StepMetrics(loss, grad_norm, normalised_loss=0.3, blank_share=0.6, n_distinct=35, length_ratio=0.95)


def all_blank(loss: float = 3.0) -> StepMetrics:
    return StepMetrics(loss, 1.0, normalised_loss=0.9, blank_share=1.0, n_distinct=0, length_ratio=0.0)


def healthy_losses(n_steps: int, seed: int = 0) -> list[float]:
    """Losses as in real runs: a steep start, a long tail, and scatter between batches."""
    rng = random.Random(seed)
    return [(0.3 + 4 * math.exp(-i / 150) + 1.5 / (1 + i / 100)) * rng.lognormvariate(0, 0.15) for i in range(n_steps)]


@pytest.mark.parametrize("seed", range(5))
def test_healthy_run_is_kept(seed: int) -> None:
    """Initial gradient norms of several hundred and single spikes are part of a healthy run."""
    guard, rng, n_healthy = Guard(GuardSettings()), random.Random(seed), 0
    for i, loss in enumerate(healthy_losses(3000, seed)):
        norm = 400 * math.exp(-i / 20) + rng.lognormvariate(0, 0.5) * (30 if i % 400 == 77 else 1)
        metrics = all_blank(loss) if i < 700 else decoding(loss * (6 if i % 500 == 33 else 1), norm)
        assert guard.judge(metrics, 1e-3) == KEEP
        n_healthy += guard.is_healthy
    assert n_healthy > 2900


def test_nonfinite_steps_are_skipped_then_rewound() -> None:
    guard = Guard(GuardSettings())
    assert guard.judge(decoding(math.nan), 1e-3).action == "skip"
    assert guard.judge(decoding(1.0), 1e-3) == KEEP
    actions = [guard.judge(decoding(1.0, math.inf), 1e-3).action for _ in range(10)]
    assert actions == ["skip"] * 9 + ["rewind"]


def test_lasting_rise_of_the_loss_rewinds_and_finally_stops() -> None:
    guard = Guard(GuardSettings(max_rewinds=1, stuck=Stuck(patience=50)))
    for loss in healthy_losses(600):
        guard.judge(decoding(loss), 1e-3)
    actions = [guard.judge(decoding(3.0), 1e-3).action for _ in range(10)]
    assert actions == ["keep"] * 9 + ["rewind"]
    assert not guard.is_healthy
    guard.after_rewind()
    assert [guard.judge(decoding(3.0), 1e-3).action for _ in range(10)][-1] == "stop"


def test_rising_loss_is_not_healthy() -> None:
    guard = Guard(GuardSettings())
    for loss in healthy_losses(800):
        guard.judge(decoding(loss), 1e-3)
    assert guard.is_healthy
    for _ in range(30):
        assert guard.judge(decoding(0.85), 1e-3) == KEEP  # 1.5 times as high: not enough to act
    assert not guard.is_healthy


def test_slow_rise_does_not_move_the_limit() -> None:
    guard = Guard(GuardSettings())
    for loss in healthy_losses(800):
        guard.judge(decoding(loss), 1e-3)
    actions = [guard.judge(decoding(0.5 * 1.004**i), 1e-3).action for i in range(600)]
    assert "rewind" in actions


def test_blanks_from_the_start_are_not_a_collapse() -> None:
    """PER 1.0 for the first 500 to 1,600 steps is normal."""
    guard = Guard(GuardSettings())
    assert all(guard.judge(all_blank(), 1e-3) == KEEP for _ in range(2000))


def test_loss_that_stays_at_chance_level_is_stuck() -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    falling = [6 * math.exp(-i / 40) + 3.2 for i in range(400)]
    verdicts = [guard.judge(all_blank(loss), 1e-3) for loss in falling]
    first = next(i for i, v in enumerate(verdicts) if v.action == "rewind")
    assert verdicts[first].kind == "stuck" and 200 < first < 400
    guard.after_rewind(to_start=True)
    assert all(guard.judge(all_blank(loss), 1e-3) == KEEP for loss in falling[:150])  # judged like a new run


def test_constant_loss_after_learning_is_kept() -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    assert all(guard.judge(decoding(1.0), 1e-3) == KEEP for _ in range(1000))
    assert guard.memory.has_learnt


def test_stage_without_token_loss_is_no_evidence_of_learning() -> None:
    """Mode and denoising losses may be constant, and say nothing about the stage that follows."""
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    random_output = StepMetrics(1.0, 1.0, normalised_loss=None, blank_share=0.1, n_distinct=38, length_ratio=3.0)
    assert all(guard.judge(random_output, 1e-3) == KEEP for _ in range(400))
    assert not guard.memory.has_learnt and not guard.memory.left_blank
    guard.start_stage()
    assert "stuck" in [guard.judge(all_blank(), 1e-3).kind for _ in range(300)]


def test_high_loss_under_heavy_masking_is_not_stuck() -> None:
    """With half of the bins masked, the loss of a model at 50 % PER falls slowly and scatters."""
    guard, rng = Guard(GuardSettings(stuck=Stuck(patience=120))), np.random.default_rng(0)
    for i in range(1500):
        level = 1.95 + 1.3 * math.exp(-i / 120)  # 3.25, 2.2 after 200 steps, 1.95 in the end
        loss = level * math.exp(rng.normal(0, 0.1))
        metrics = StepMetrics(loss, 1.0, loss / math.log(41), blank_share=0.75, n_distinct=27, length_ratio=0.54)
        assert guard.judge(metrics, 1e-3) == KEEP
    assert guard.memory.has_learnt


def test_slow_learning_is_not_stuck() -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    assert all(guard.judge(all_blank(3.2 * 0.999**i), 1e-3) == KEEP for i in range(1000))


def test_output_of_random_weights_has_not_left_the_all_blank_solution() -> None:
    """The argmax over random logits has many phonemes; the blanks that follow are the normal start."""
    guard = Guard(GuardSettings())
    random_output = StepMetrics(9.0, 300.0, normalised_loss=2.0, blank_share=0.1, n_distinct=38, length_ratio=3.0)
    assert all(guard.judge(random_output, 1e-3) == KEEP for _ in range(20))
    assert all(guard.judge(all_blank(), 1e-3) == KEEP for _ in range(1500))


@pytest.mark.parametrize("action", ["warn", "rewind", "stop"])
def test_collapse_is_detected_within_300_steps(action: str) -> None:
    guard = Guard(GuardSettings(collapse=Collapse(action=action)))
    for loss in healthy_losses(500):
        guard.judge(decoding(loss), 1e-3)
    verdicts = [guard.judge(all_blank(0.4), 1e-3) for _ in range(300)]
    found = [v for v in verdicts if v.kind == "collapse"]
    assert len(found) == 1 if action != "rewind" else found
    assert found[0].action == action
    assert "blank" in found[0].reason


def test_adaptive_reduction_respects_threshold_minimum_and_number() -> None:
    settings = Adaptive(threshold=10.0, factor=0.8, min_lr=5e-4, max_reductions=5)
    guard, lr = Guard(GuardSettings(adaptive=settings)), 1.5e-3
    for i in range(900):
        verdict = guard.judge(decoding(1.0, 15.0 if i > 100 else 5.0), lr)
        if verdict.action == "reduce_lr":
            assert i > 100
            lr *= verdict.lr_factor
    assert guard.memory.n_reductions == 5
    assert lr == pytest.approx(settings.min_lr)  # 1.5e-3 × 0.8^5 would be below it
    off = Guard(GuardSettings())
    assert all(off.judge(decoding(1.0, 500.0), 1e-3) == KEEP for _ in range(300))


STEPS = st.lists(
    st.builds(
        StepMetrics,
        loss=st.sampled_from([0.3, 1.0, 3.0, 30.0, math.nan]),
        grad_norm=st.sampled_from([0.5, 5.0, 500.0, math.inf]),
        normalised_loss=st.sampled_from([0.2, 0.7, 1.0]),
        blank_share=st.sampled_from([0.5, 1.0]),
        n_distinct=st.sampled_from([0, 1, 35]),
        length_ratio=st.sampled_from([0.0, 1.0]),
    ),
    min_size=30,
    max_size=120,
)


@given(STEPS, st.integers(0, 120))
def test_saved_and_restored_guard_judges_identically(steps: list[StepMetrics], at: int) -> None:
    settings = GuardSettings(
        max_rewinds=4,
        stuck=Stuck(patience=50),
        collapse=Collapse(action="rewind"),
        adaptive=Adaptive(threshold=20.0, max_reductions=2),
    )

    def judge(guard: Guard, metrics: StepMetrics) -> Verdict:
        verdict = guard.judge(metrics, 1e-3)
        if verdict.action == "rewind" and verdict.lr_scale is None:
            guard.after_rewind(verdict.kind == "stuck", 1.0, 30)
        return verdict

    uninterrupted, before = Guard(settings), Guard(settings)
    first = [judge(before, n) for n in steps[:at]]
    saved = json.loads(json.dumps(asdict(before.memory), allow_nan=False))
    after = Guard(settings, TypeAdapter(GuardMemory).validate_python(saved))
    assert [*first, *(judge(after, n) for n in steps[at:])] == [judge(uninterrupted, n) for n in steps]
    assert after.memory == uninterrupted.memory


@pytest.mark.parametrize("every", [2, 5])
def test_scattered_nonfinite_steps_reduce_the_learning_rate_then_rewind_then_stop(every: int) -> None:
    """Never `max_skips` in a row, but too large a share of the window."""
    guard, actions = Guard(GuardSettings()), []
    for i in range(3000):
        verdict = guard.judge(decoding(math.nan if i % every == 0 else 1.0), 1e-3)
        if verdict.kind == "skips":
            assert not verdict.applies_update
            assert verdict.lr_factor == (0.8 if verdict.action == "reduce_lr" else 1.0)
            actions.append(verdict.action)
        if verdict.action == "rewind":
            guard.after_rewind()
        if verdict.action == "stop":
            break
    assert actions == ["reduce_lr", "rewind", "stop"]
    assert i < 3 * 200


def run_stuck(guard: Guard, update_ratio: float) -> Verdict:
    """Return the first verdict on a loss that stays at chance level with updates of this size."""
    for _ in range(1000):
        guard.record_update_ratio(update_ratio)
        verdict = guard.judge(all_blank(), 1e-3)
        if verdict != KEEP:
            return verdict
    raise AssertionError("the guard kept every step")


@pytest.mark.parametrize(("update_ratio", "remedy", "raises"), [(2e-4, "raise", True), (0.05, "lower", False)])
def test_stuck_run_is_judged_by_the_size_of_its_updates(update_ratio: float, remedy: str, raises: bool) -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=120), max_rewinds=1))
    verdict = run_stuck(guard, update_ratio)
    assert (verdict.action, verdict.kind, verdict.remedy) == ("rewind", "stuck", remedy)
    assert ("too small" in verdict.reason) == raises
    assert (guard.after_rewind(True, 1.0) > 1) == raises  # without trials: the fixed factor
    assert run_stuck(guard, update_ratio).remedy == remedy
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    run_stuck(guard, update_ratio)
    guard.after_rewind(True, 1.0, 1000)
    assert (max(guard.memory.search.scales) > 1) == raises and (min(guard.memory.search.scales) < 1) != raises


def test_loss_above_chance_level_is_stuck_even_if_it_falls() -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=60)))
    losses = [6.0 * 0.997**i for i in range(200)]
    verdicts = [guard.judge(StepMetrics(v, 1.0, v / math.log(41), 0.3, 20, 2.0), 1e-3) for v in losses]
    assert "stuck" in [v.kind for v in verdicts[:100]]


@pytest.mark.parametrize(("update_ratio", "kind"), [(0.05, ""), (0.12, "stuck")])
def test_excessive_updates_are_stuck_if_nothing_was_learnt_yet(update_ratio: float, kind: str) -> None:
    """The loss falls, but slowly: only the size of the updates tells that the learning rate is too high."""
    guard = Guard(GuardSettings(stuck=Stuck(patience=60)))
    guard.record_update_ratio(update_ratio)
    losses = [3.2 * 0.9975**i for i in range(90)]
    verdicts = [guard.judge(StepMetrics(v, 1.0, v / math.log(41), 0.5, 25, 0.6), 1e-3) for v in losses]
    assert {v.kind for v in verdicts} == {"", kind}


@pytest.mark.parametrize(("n_steps", "eps_limits", "kind"), [(160, True, "stuck"), (400, True, ""), (160, False, "")])
def test_eps_that_keeps_weights_from_moving_by_their_norm_makes_updates_too_small(
    n_steps: int, eps_limits: bool, kind: str
) -> None:
    """The loss falls, but too slowly for the length of the run: eps 0.01 with a loss per token, not a large model."""
    guard = Guard(GuardSettings(stuck=Stuck(patience=60)))
    guard.memory.eps_limits = eps_limits
    guard.record_update_ratio(0.01)
    losses = [3.2 * 0.9975**i for i in range(90)]
    verdicts = [
        guard.judge(StepMetrics(v, 1.0, v / math.log(41), 0.5, 25, 0.6), 1e-3, n_steps - i)
        for i, v in enumerate(losses)
    ]
    assert {v.kind for v in verdicts} == {"", kind}
    if kind:
        verdict = next(v for v in verdicts if v.kind)
        assert (verdict.remedy, "too small to learn in 160 steps" in verdict.reason) == ("raise", True)
        assert guard.lower_eps(0.01, 4e-4) == 1e-8
    else:
        assert guard.lower_eps(0.01, 4e-4) is None


def trial_losses(guard: Guard, best: float, scale: float) -> Verdict:
    """Run one trial of a search: the loss is lowest at the scale `best`."""
    while True:
        verdict = guard.judge(decoding(2.0 + abs(math.log(scale / best))), 1e-3)
        if verdict != KEEP:
            return verdict


@pytest.mark.parametrize("best", [1.0, 0.3, 0.1, 0.03])
def test_search_takes_the_learning_rate_with_the_lowest_loss(best: float) -> None:
    guard = Guard(GuardSettings())
    scale, tried = guard.after_rewind(False, 1.0, 500), []
    while guard.memory.search.is_active:
        assert not guard.is_healthy  # a trial is not a checkpoint to return to
        tried.append(scale)
        verdict = trial_losses(guard, best, scale)
        assert (verdict.action, verdict.kind) == ("rewind", "search")
        assert verdict.lr_scale is not None
        scale = verdict.lr_scale
    assert tried == [1.0, 0.3, 0.1, 0.03]
    assert scale == best
    assert guard.memory.n_rewinds == 1  # trials do not count
    assert guard.judge(decoding(2.0), 1e-3) == KEEP


@pytest.mark.parametrize(
    ("n_left", "best_of_long_trials", "chosen"),
    [(900, 0.3, 0.3), (900, 0.1, 0.1), (300, 0.3, 0.1)],  # too few steps for longer trials: the rate below the best
)
def test_early_search_decides_by_longer_trials(n_left: int, best_of_long_trials: float, chosen: float) -> None:
    guard, lengths = Guard(GuardSettings()), []
    scale = guard.after_rewind(True, 1.0, n_left)
    while guard.memory.search.is_active:
        lengths.append(guard.memory.search.n_steps)
        verdict = trial_losses(guard, best_of_long_trials if guard.memory.search.is_final else 0.3, scale)
        assert verdict.lr_scale is not None
        scale = verdict.lr_scale
    assert lengths == [200] * 4 + ([600, 600] if n_left > 500 else [])
    assert scale == chosen
    assert guard.memory.n_judged == 0  # judged like a new run


@pytest.mark.parametrize(
    ("kind", "tried_before", "to"),
    [
        ("spike", None, 200),  # the last healthy checkpoint
        ("spike", 200, 150),  # which was tried already
        ("rise", None, 100),  # half the last healthy step
        ("stuck", None, 0),  # the first of the run
    ],
)
def test_the_checkpoint_to_return_to_depends_on_what_happened(kind: str, tried_before: int | None, to: int) -> None:
    guard = Guard(GuardSettings(), GuardMemory(targets=[0, 100, 150, 200], rewound_to=tried_before, lr_scale=0.5))
    rewind = guard.plan_rewind(Verdict("rewind", kind), 230, (0, 1000), lambda step: 1e-3, 1e-8)
    assert rewind == Rewind(to, 0.5, None)  # the first test run of the search has the present rate
    assert guard.memory.targets[-1:] == [to] and guard.memory.rewound_to == to
    search = guard.plan_rewind(Verdict("rewind", "search", lr_scale=0.15), 230, (0, 1000), lambda step: 1e-3, 1e-8)
    assert search == Rewind(to, 0.15, None)  # test runs stay at their checkpoint


@pytest.mark.parametrize(
    ("update_ratio", "eps", "gradient", "lowered"),
    [
        (2e-4, 0.1, 1e-3, 1e-8),
        (2e-4, 1e-4, 1e-7, 1e-9),  # gradients clipped to a small norm
        (2e-4, 1e-8, 1e-3, None),  # eps is not the cause
        (2e-4, 0.1, 0.0, None),  # no gradient at all
        (0.05, 0.1, 1e-3, None),  # updates are not small
    ],
)
def test_eps_is_lowered_where_it_makes_updates_small(
    update_ratio: float, eps: float, gradient: float, lowered: float | None
) -> None:
    guard = Guard(GuardSettings(stuck=Stuck(patience=120)))
    run_stuck(guard, update_ratio)
    assert guard.lower_eps(eps, gradient) == (None if lowered is None else pytest.approx(lowered))
    if lowered is not None:
        guard.after_rewind(True, 1.0, 1000, eps_lowered=True)
        assert guard.memory.search.scales == [1.0, 0.3, 0.1, 0.03]  # the learning rate was chosen for another eps


def test_trial_that_explodes_or_is_not_finite_ends_early_and_is_not_taken() -> None:
    guard = Guard(GuardSettings())
    guard.after_rewind(False, 1.0, 500)
    steps = [guard.judge(decoding(math.nan), 1e-3) for _ in range(3)]
    assert [v.action for v in steps] == ["skip", "skip", "rewind"]
    losses = [2.0] * 5 + [9.0] * 6
    assert [guard.judge(decoding(v), 1e-3).action for v in losses].count("rewind") == 1
    assert trial_losses(guard, 0.1, 0.1).kind == "search"
    assert trial_losses(guard, 0.1, 0.03).lr_scale == 0.1


def test_slow_rise_rewinds() -> None:
    guard = Guard(GuardSettings())
    for loss in healthy_losses(800):
        guard.judge(decoding(loss), 1e-3)
    assert {guard.judge(decoding(0.85), 1e-3).kind for _ in range(100)} == {"", "rise"}


def test_risen_loss_at_the_last_step_rewinds() -> None:
    guard = Guard(GuardSettings())
    for loss in healthy_losses(800):
        guard.judge(decoding(loss), 1e-3)
    verdicts = [guard.judge(decoding(0.85), 1e-3, n_left) for n_left in range(25, 0, -1)]
    assert [v.kind for v in verdicts] == [""] * 24 + ["rise"]
