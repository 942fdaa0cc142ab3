"""Each verdict on a curve constructed for it, and on similar curves with another verdict."""

from dataclasses import replace

import numpy as np
import pytest

from arcuate.doctor.diagnose import measure
from arcuate.doctor.log_table import Series, TrainingLog
from arcuate.doctor.rules import Finding, apply_rules
from support.doctor_logs import STEPS, falling, log

GOOD = falling()
LOSS = falling(6.5, 0.8)


def judged(made: TrainingLog, dataset: str | None = "b2t24", planned: int | None = 10_000) -> list[Finding]:
    return apply_rules(measure(made, dataset, planned)[0])


def verdict(made: TrainingLog, **diagnosis: object) -> str:
    return judged(made, **diagnosis)[0].verdict  # type: ignore[arg-type]


def bent(per: np.ndarray, start: int, to: float) -> np.ndarray:
    """The same curve, rising in a straight line from one evaluation to the end."""
    out = per.copy()
    out[start:] = np.linspace(per[start], to, len(per) - start)
    return out


def test_clean_run_is_healthy() -> None:
    assert verdict(log(GOOD, LOSS)) == "healthy"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_loss_is_an_explosion_from_that_step(value: float) -> None:
    train = LOSS.copy()
    train[60:] = value
    first = judged(log(GOOD, LOSS, train))[0]
    assert (first.verdict, first.since) == ("exploded", 6000)


def test_jump_that_damages_the_error_rate_is_an_explosion() -> None:
    per, loss = GOOD.copy(), LOSS.copy()
    per[50:], loss[50:] = 0.7, 30.0
    first = judged(log(per, loss))[0]
    assert (first.verdict, first.since) == ("exploded", 5000)


def test_isolated_spike_is_not_a_failure() -> None:
    loss = LOSS.copy()
    loss[50] = 100.0
    assert verdict(log(GOOD, loss)) == "healthy"


def test_batch_noise_late_in_a_run_is_not_an_explosion() -> None:
    train = np.full(len(STEPS), 0.01)
    train[:3], train[70::7] = 7.0, 0.3  # thirty times the level, and nothing follows
    assert verdict(log(GOOD, LOSS, train)) == "healthy"


def test_gradients_of_several_hundred_at_the_first_step_are_normal() -> None:
    norms = np.full(len(STEPS), 4.0)
    norms[0] = 600.0
    made = replace(log(GOOD, LOSS), grad_norm=Series(STEPS, norms, "batches"))
    assert verdict(made) == "healthy"


def test_infinite_gradients_need_a_consequence() -> None:
    norms = np.full(len(STEPS), 4.0)
    norms[40] = np.inf
    gradients = Series(STEPS, norms, "batches")
    assert verdict(replace(log(GOOD, LOSS), grad_norm=gradients)) == "healthy"
    assert verdict(replace(log(bent(GOOD, 40, 0.7), LOSS), grad_norm=gradients)) == "exploded"


def test_constant_output_is_a_collapse_unless_the_run_escapes_later() -> None:
    assert verdict(log(np.full(40, 0.93) + 0.01 * np.sin(np.arange(40)))) == "collapsed"
    late = np.concatenate([np.full(16, 1.0), falling(n=84)])
    assert verdict(log(late)) == "healthy"


def test_one_good_evaluation_before_blank_output_is_a_collapse() -> None:
    per = np.full(50, 0.82)
    per[0], per[1] = 0.86, 0.59
    first = judged(log(per))[0]
    assert (first.verdict, first.since) == ("collapsed", 200)


def test_high_but_falling_curve_is_not_collapsed() -> None:
    assert verdict(log(np.linspace(0.99, 0.82, 12))) == "unfinished"


def test_degraded_with_the_cause_from_the_training_loss() -> None:
    per = bent(GOOD, 30, 0.4)
    rising, still_falling = bent(LOSS, 30, 3.0), LOSS
    assert verdict(log(per, LOSS)) == "degraded"
    assert "points to the learning rate" in " ".join(judged(log(per, LOSS, rising))[0].evidence)
    assert "points to the regularisation" in " ".join(judged(log(per, LOSS, still_falling))[0].evidence)


def test_temporary_rise_is_not_degraded() -> None:
    per = GOOD.copy()
    per[40:50] = 0.6
    assert verdict(log(per, LOSS)) == "healthy"


def test_rising_loss_is_overfitting_only_if_the_error_rate_rises() -> None:
    loss = bent(LOSS, 50, 1.3)
    assert verdict(log(bent(GOOD, 60, 1.06 * GOOD[60]), loss)) == "overfit"
    found = judged(log(GOOD, bent(falling(6.5, 0.8, 30), 20, 1.1)))
    assert found[0].verdict == "healthy"
    assert "overfit" in [f.verdict for f in found[1:]]


def test_plateau_depends_on_the_level() -> None:
    flat = falling(end=0.5, speed=30)
    assert verdict(log(flat)) == "plateaued"
    assert verdict(log(falling(end=0.22, speed=30))) == "healthy"
    assert verdict(log(flat), dataset=None) == "plateaued"


def test_unfinished_run_is_falling_and_stopped_early_or_far_from_the_level() -> None:
    steep = falling(end=0.3, speed=2)
    assert verdict(log(steep[:50])) == "unfinished"
    assert verdict(log(steep)) == "unfinished"
    assert verdict(log(falling(end=0.215, speed=4))) == "healthy"  # at the level, at the end of its plan


def test_few_evaluations_are_too_short_also_in_warmup() -> None:
    assert verdict(log(GOOD[:4])) == "too_short"
    assert verdict(log(GOOD[:5])) == "too_short"
    assert verdict(log(GOOD[:9])) != "too_short"
    assert verdict(log(np.empty(0), train_loss=LOSS)) == "too_short"


def test_shape_of_the_loss_decides_without_an_error_rate() -> None:
    flat = judged(log(np.empty(0), falling(1.0, 0.95, speed=20)))[0]
    assert flat.verdict == "plateaued"
    assert "without an error rate" in flat.evidence[0]
    assert verdict(log(np.empty(0), np.linspace(1.0, 0.98, 40))) == "unfinished"


def test_identical_evaluations_are_frozen() -> None:
    per = falling(end=0.4)
    per[40:] = per[40]
    first = judged(log(per))[0]
    assert first.verdict == "plateaued"
    assert "are identical" in " ".join(first.evidence)
    per = falling(end=0.6, speed=3)
    per[40:] = per[40]
    assert verdict(log(per)) == "collapsed"


def test_official_b2t25_run_is_healthy_despite_its_rising_loss() -> None:
    steps = np.arange(0, 120_001, 2000.0)
    per, loss = falling(1.2, 0.101, 12, len(steps)), falling(700, 17.5, 40, len(steps))
    loss[4:] = np.linspace(17.5, 22.5, len(steps) - 4)
    made = TrainingLog("official", Series(steps, per, "batches"), Series(steps, loss, "batches"))
    measurements, dataset, _ = measure(made)
    assert (dataset, measurements.reference, measurements.planned) == (None, 0.1, 120_000)
    assert apply_rules(measurements)[0].verdict == "healthy"


def test_run_that_stops_just_before_its_planned_end_is_finished() -> None:
    creeping = falling(end=0.215, speed=4)
    for n in (100, 99, 97):
        assert verdict(log(creeping[:n])) == "healthy", n
    assert verdict(log(creeping[:80])) == "unfinished"


def test_noise_between_evaluations_is_not_overfitting() -> None:
    rising = bent(falling(6.5, 0.8, 30), 20, 1.1)
    tail = falling(end=0.21, speed=12)
    shaken = [tail * (1 + 0.02 * np.random.default_rng(seed).standard_normal(len(STEPS))) for seed in range(20)]
    assert sum(verdict(log(per, rising)) == "overfit" for per in shaken) <= 2
    assert verdict(log(bent(tail, 60, 1.045 * tail[60]), rising)) == "overfit"


def test_loss_only_log_distinguishes_degraded_from_flat() -> None:
    nothing = np.empty(0)
    worse = bent(LOSS, 20, 3.0)
    assert verdict(log(nothing, worse, bent(LOSS, 20, 3.5))) == "degraded"
    assert verdict(log(nothing, worse, LOSS)) == "overfit"
    rest = judged(log(nothing, falling(6.5, 0.8, 30)))
    assert [f.verdict for f in rest] == ["healthy", "plateaued"]
    assert verdict(log(nothing, falling(6.5, 2.0, 2)[:40])) == "unfinished"


def test_vanished_training_loss_does_not_count_as_rising() -> None:
    train = falling(700, 0.010, 40)
    train[-15:] = 0.013  # a third more than at the best evaluation, and nothing at all
    per = bent(GOOD, 60, 1.06 * GOOD[60])
    found = judged(log(per, bent(LOSS, 50, 1.3), train))
    assert found[0].verdict == "overfit"
    assert "memorised" in " ".join(found[0].evidence)
