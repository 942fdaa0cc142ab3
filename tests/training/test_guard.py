import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.training.checkpoint import check_like
from arcuate.training.config import Adaptive, Collapse, Spike, Stuck
from arcuate.training.config import Guard as Settings
from arcuate.training.guard import KEEP, Guard, Numbers, Verdict


def speaking(loss: float, grad_norm: float = 1.0) -> Numbers:
    return Numbers(loss, grad_norm, ignorance=0.3, blank_share=0.6, n_distinct=35, length_ratio=0.95)


def silent(loss: float = 3.0) -> Numbers:
    return Numbers(loss, 1.0, ignorance=0.9, blank_share=1.0, n_distinct=0, length_ratio=0.0)


def healthy_losses(n_steps: int, seed: int = 0) -> list[float]:
    """As real runs look: a steep start, a long tail, and the scatter of batches of different length."""
    rng = random.Random(seed)
    return [
        (0.3 + 4 * math.exp(-i / 150) + 1.5 / (1 + i / 100)) * rng.lognormvariate(0, 0.15)
        for i in range(n_steps)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_left_alone(seed: int) -> None:
    """First gradient norms of several hundred and single spikes included."""
    guard, rng, n_healthy = Guard(Settings()), random.Random(seed), 0
    for i, loss in enumerate(healthy_losses(3000, seed)):
        norm = 400 * math.exp(-i / 20) + rng.lognormvariate(0, 0.5) * (30 if i % 400 == 77 else 1)
        numbers = silent(loss) if i < 700 else speaking(loss * (6 if i % 500 == 33 else 1), norm)
        assert guard.judge(numbers, 1e-3) == KEEP
        n_healthy += guard.healthy
    assert n_healthy > 2900


def test_nonfinite_steps_are_skipped_and_then_rewound() -> None:
    guard = Guard(Settings(max_skips=3))
    assert guard.judge(speaking(math.nan), 1e-3).action == "skip"
    assert guard.judge(speaking(1.0), 1e-3) == KEEP
    actions = [guard.judge(speaking(1.0, math.inf), 1e-3).action for _ in range(3)]
    assert actions == ["skip", "skip", "rewind"]


def test_a_loss_that_rises_and_stays_is_rewound_and_finally_stopped() -> None:
    guard = Guard(Settings(max_rewinds=1, spike=Spike(patience=5)))
    for loss in healthy_losses(600):
        guard.judge(speaking(loss), 1e-3)
    actions = [guard.judge(speaking(3.0), 1e-3).action for _ in range(5)]
    assert actions == ["keep"] * 4 + ["rewind"]
    assert not guard.healthy
    guard.rewound()
    assert [guard.judge(speaking(3.0), 1e-3).action for _ in range(5)][-1] == "stop"


def test_a_loss_on_its_way_up_makes_no_good_checkpoint() -> None:
    guard = Guard(Settings())
    for loss in healthy_losses(800):
        guard.judge(speaking(loss), 1e-3)
    assert guard.healthy
    for _ in range(30):
        assert guard.judge(speaking(0.85), 1e-3) == KEEP  # half as much again: not enough to act
    assert not guard.healthy


def test_a_slow_rise_does_not_drag_the_measure_along() -> None:
    guard = Guard(Settings())
    for loss in healthy_losses(800):
        guard.judge(speaking(loss), 1e-3)
    actions = [guard.judge(speaking(0.5 * 1.004**i), 1e-3).action for i in range(600)]
    assert "rewind" in actions


def test_blanks_from_the_start_are_no_collapse() -> None:
    """PER 1.0 for the first 500 to 1,600 steps is normal."""
    guard = Guard(Settings())
    assert all(guard.judge(silent(), 1e-3) == KEEP for _ in range(2000))


def test_a_loss_that_never_leaves_guessing_is_stuck() -> None:
    guard = Guard(Settings(stuck=Stuck(patience=120)))
    falling = [6 * math.exp(-i / 40) + 3.2 for i in range(400)]
    verdicts = [guard.judge(silent(loss), 1e-3) for loss in falling]
    first = next(i for i, v in enumerate(verdicts) if v.action == "rewind")
    assert verdicts[first].kind == "stuck" and 200 < first < 400
    guard.rewound(to_start=True)
    assert all(guard.judge(silent(loss), 1e-3) == KEEP for loss in falling[:150])  # judged as a new run


def test_a_run_that_has_learned_may_stand_still() -> None:
    guard = Guard(Settings(stuck=Stuck(patience=120)))
    assert all(guard.judge(speaking(1.0), 1e-3) == KEEP for _ in range(1000))
    assert guard.learned


def test_a_stage_that_reads_nothing_teaches_nothing_of_reading() -> None:
    """A loss of modes or of the denoiser alone may stand still, and proves nothing for the stage after it."""
    guard = Guard(Settings(stuck=Stuck(patience=120)))
    babble = Numbers(1.0, 1.0, ignorance=None, blank_share=0.1, n_distinct=38, length_ratio=3.0)
    assert all(guard.judge(babble, 1e-3) == KEEP for _ in range(400))
    assert not guard.learned and not guard.spoke
    guard.new_stage()
    assert "stuck" in [guard.judge(silent(), 1e-3).kind for _ in range(300)]


def test_masks_that_keep_the_loss_high_do_not_make_a_reader_stuck() -> None:
    """Half of the bins hidden: the loss of a model that reads half of the phonemes falls slowly, and jumps about."""
    guard, rng = Guard(Settings(stuck=Stuck(patience=120))), np.random.default_rng(0)
    for i in range(1500):
        level = 1.95 + 1.3 * math.exp(-i / 120)  # 3.25, 2.2 after 200 steps, 1.95 in the end
        loss = level * math.exp(rng.normal(0, 0.1))
        guess = math.log(41)
        numbers = Numbers(loss, 1.0, loss / guess, blank_share=0.75, n_distinct=27, length_ratio=0.54)
        assert guard.judge(numbers, 1e-3) == KEEP
    assert guard.learned


def test_slow_learning_is_not_stuck() -> None:
    guard = Guard(Settings(stuck=Stuck(patience=120)))
    assert all(guard.judge(silent(3.2 * 0.999**i), 1e-3) == KEEP for i in range(1000))


def test_an_untrained_model_that_utters_anything_has_not_begun_to_speak() -> None:
    """Argmax over random scores names many phonemes; the blanks that follow are the normal beginning."""
    guard = Guard(Settings())
    babble = Numbers(9.0, 300.0, ignorance=2.0, blank_share=0.1, n_distinct=38, length_ratio=3.0)
    assert all(guard.judge(babble, 1e-3) == KEEP for _ in range(20))
    assert all(guard.judge(silent(), 1e-3) == KEEP for _ in range(1500))


@pytest.mark.parametrize("action", ["warn", "rewind", "stop"])
def test_collapse_is_found_within_300_steps_of_its_onset(action: str) -> None:
    guard = Guard(Settings(collapse=Collapse(action=action)))
    for loss in healthy_losses(500):
        guard.judge(speaking(loss), 1e-3)
    verdicts = [guard.judge(silent(0.4), 1e-3) for _ in range(300)]
    found = [v for v in verdicts if v.kind == "collapse"]
    assert len(found) == 1 if action != "rewind" else found
    assert found[0].action == action
    assert "blank" in found[0].reason


def test_constant_output_is_a_collapse_too() -> None:
    guard = Guard(Settings())
    for loss in healthy_losses(500):
        guard.judge(speaking(loss), 1e-3)
    constant = Numbers(0.4, 1.0, ignorance=0.3, blank_share=0.5, n_distinct=2, length_ratio=0.5)
    assert any(guard.judge(constant, 1e-3).kind == "collapse" for _ in range(300))


def test_adaptive_reduction_keeps_to_its_threshold_floor_and_number() -> None:
    settings = Adaptive(threshold=10.0, window=10, factor=0.8, floor=5e-4, max_times=5)
    guard, rate = Guard(Settings(adaptive=settings)), 1.5e-3
    for i in range(500):
        verdict = guard.judge(speaking(1.0, 15.0 if i > 100 else 5.0), rate)
        if verdict.action == "cool":
            assert i > 100
            rate *= settings.factor
    assert guard.n_adapted == 4  # a fifth would fall below the floor
    assert rate == pytest.approx(1.5e-3 * 0.8**4)
    off = Guard(Settings())
    assert all(off.judge(speaking(1.0, 500.0), 1e-3) == KEEP for _ in range(300))


@pytest.mark.parametrize("n_steps", [0, 40, 400])
def test_a_saved_state_is_like_that_of_a_new_guard(n_steps: int) -> None:
    """Else a run could not be resumed."""
    guard = Guard(Settings())
    for loss in healthy_losses(n_steps):
        guard.judge(silent(loss), 1e-3)
    check_like(Guard(Settings()).to_json(), json.loads(json.dumps(guard.to_json())), "guard")


STEPS = st.lists(
    st.builds(
        Numbers,
        loss=st.sampled_from([0.3, 1.0, 3.0, 30.0, math.nan]),
        grad_norm=st.sampled_from([0.5, 5.0, 500.0, math.inf]),
        ignorance=st.sampled_from([0.2, 0.7, 1.0]),
        blank_share=st.sampled_from([0.5, 1.0]),
        n_distinct=st.sampled_from([0, 1, 35]),
        length_ratio=st.sampled_from([0.0, 1.0]),
    ),
    min_size=30,
    max_size=120,
)


@given(STEPS, st.integers(0, 120))
def test_a_guard_saved_and_restored_judges_as_if_nothing_had_happened(steps: list[Numbers], at: int) -> None:
    settings = Settings(
        max_skips=3,
        max_rewinds=4,
        spike=Spike(warmup=10, patience=3),
        stuck=Stuck(patience=50),
        collapse=Collapse(patience=5, action="rewind"),
        adaptive=Adaptive(threshold=20.0, window=5, max_times=2),
    )

    def judge(guard: Guard, numbers: Numbers) -> Verdict:
        verdict = guard.judge(numbers, 1e-3)
        if verdict.action == "rewind":
            guard.rewound(to_start=verdict.kind == "stuck")
        return verdict

    whole, before, after = Guard(settings), Guard(settings), Guard(settings)
    first = [judge(before, n) for n in steps[:at]]
    saved = json.loads(json.dumps(before.to_json(), allow_nan=False))
    check_like(after.to_json(), saved, "guard")
    after.restore(saved)
    assert [*first, *(judge(after, n) for n in steps[at:])] == [judge(whole, n) for n in steps]
    assert after.to_json() == whole.to_json()


def test_off_means_off() -> None:
    guard = Guard(Settings(enabled=False))
    assert guard.judge(speaking(math.nan), 1e-3) == KEEP
