"""Causes of faults in the programs of other groups: the right direction, or the tests that would tell causes apart."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.doctor import Diagnosis, diagnose
from arcuate.doctor.log_table import Series, TrainingLog
from support.doctor_logs import write_jsonl
from support.fabricate_runs import make_run

STEPS = np.arange(0, 401, 20.0)


def made_log(per: np.ndarray, val: np.ndarray, train: np.ndarray | None = None, **more: np.ndarray) -> TrainingLog:
    series = {"per": per, "val_loss": val, "train_loss": train, **more}
    steps = {name: STEPS[: len(values)] for name, values in series.items() if values is not None}
    return TrainingLog("log", **{name: Series(steps[name], series[name], "steps") for name in steps})


def diagnosed(tmp_path: Path, log: TrainingLog) -> Diagnosis:
    return diagnose(write_jsonl(tmp_path / "log.jsonl", log))


def curve(*points: tuple[float, float]) -> np.ndarray:
    """A curve through points of (step, value)."""
    return np.interp(STEPS, *zip(*points, strict=True))


def fall(*points: tuple[float, float], start: float = 160.0) -> np.ndarray:
    """A loss that falls from its untrained level within 40 steps, then goes through the points."""
    return curve((0, start), (20, 0.75 * points[0][1] + 0.25 * start), (40, points[0][1]), *points)


NOISE = np.sin(np.arange(len(STEPS)) * 2.5)
BLANK_HALF = ((0, 1.2), (20, 0.95), (40, 1), (140, 0.97))
# PER, validation loss and training loss of a run with one fault, what the first cause says, and what it must not say.
FAULTS = {
    "small updates": (
        curve((0, 1.2), (40, 0.87), (120, 0.94), (200, 1)),
        curve((0, 160), (40, 149), (200, 60), (400, 57)),
        curve((0, 165), (40, 154), (200, 61), (400, 58)),
        "too low",
        "too high",
    ),
    "large updates": (0.9 + 0.08 * NOISE, fall((60, 3.5), start=8) * (1 + 0.08 * NOISE), None, "too high", "too low"),
    "labels of other trials": (
        curve((0, 1.2), (40, 0.95), (140, 0.9), (200, 0.78), (240, 0.76)),
        fall((60, 57), (400, 52.5)),
        fall((60, 60), (400, 55)),
        "labels",
        "regularisation",
    ),
    "wrong lengths, blank": (
        curve((0, 0.8), (20, 0.97), (60, 1)),
        fall((60, 3.6), (400, 3.4), start=8.4),
        None,
        "labels",
        "too low",
    ),
    "lengths of one split": (
        curve((0, 1.2), (60, 0.76), (200, 0.7), (400, 0.75)),
        fall((60, 67), (100, 75), (400, 81)),
        fall((60, 60), (400, 42)),
        "lengths",
        "regularisation",
    ),
    "wrong blank index": (
        curve((0, 0.82), (20, 0.95), (80, 0.95), (240, 0.52)),
        fall((60, 2.2), (240, 0.5), (360, 0.28), start=7.7),
        None,
        "blank index",
        "regularisation",
    ),
    "wrong day": (
        curve((0, 0.77), (60, 1), (80, 1), (240, 0.55), (400, 0.535)),
        fall((60, 3.0), (200, 2.0), (400, 2.05), start=8.4),
        None,
        "wrong day layer",
        "too much regularisation",
    ),
    "features without normalisation": (
        curve((0, 1.3), (80, 0.88), (240, 0.59), (400, 0.575)),
        fall((60, 56), (200, 40), (400, 38)),
        fall((60, 60), (400, 27)),
        "normalis",
        "too much",
    ),
    "too much dropout": (
        curve(*BLANK_HALF, (200, 0.83), (280, 0.775), (400, 0.76)),
        fall((60, 60), (400, 45.7)),
        fall((60, 63), (400, 51)),
        "too much regularisation",
        "too little",
    ),
    "few trials": (
        curve((0, 0.76), (20, 0.89), (80, 0.8), (400, 0.79)),
        curve((0, 8.4), (20, 3.6), (200, 5.9), (400, 6.4)),
        None,
        "memorises",
        "too much",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_first_cause_of_a_fault(tmp_path: Path, fault: str) -> None:
    per, val, train, right, wrong = FAULTS[fault]
    first = diagnosed(tmp_path, made_log(per, val, train)).causes[0]
    assert right in first.cause and wrong not in first.cause


def test_causes_that_a_log_cannot_separate_have_a_test_each_and_no_remedy(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, made_log(*FAULTS["labels of other trials"][:3]))
    assert "cannot tell 3 causes apart" in diagnosis.suggestion
    assert all(not cause.changes and "train" in cause.change for cause in diagnosis.causes[:1])
    assert not diagnosis.fix()


@pytest.mark.parametrize("lr", [0.0, 0.08])
def test_plateau_of_both_losses_is_not_blamed_on_regularisation(tmp_path: Path, lr: float) -> None:
    """A rate ten times too high: both losses fall slowly together, and the error rate stays where it was."""
    per, val = 0.75 + 0.01 * NOISE, fall((60, 3.7), (400, 3.0), start=4.0)
    rate = {"lr": np.full(len(STEPS), lr)} if lr else {}
    diagnosis = diagnosed(tmp_path, made_log(per, val, val * (1 - 0.02 * NOISE), **rate))
    first = diagnosis.causes[0]
    assert (diagnosis.primary, first.factor) == ("plateaued", "learning_rate")
    assert not any("too little" in cause.cause for cause in diagnosis.causes)
    if lr:  # no published recipe has such a rate
        assert "too high" in first.cause and diagnosis.fix().overrides["schedule.peak_lr"] < lr
    else:  # both directions look alike
        assert "at three times and at a third" in first.change and not diagnosis.fix()


def test_memorised_sentences_are_overfitting_although_the_error_rate_is_flat(tmp_path: Path) -> None:
    per = curve((0, 0.85), (40, 0.71), (400, 0.69))
    val = curve((0, 3.9), (40, 3.1), (200, 3.8), (400, 3.86))
    diagnosis = diagnosed(tmp_path, made_log(per, val, curve((0, 4.6), (60, 0.4), (120, 0.04), (400, 0.04))))
    assert (diagnosis.primary, diagnosis.causes[0].factor) == ("overfit", "regularisation")


def test_advised_clipping_is_the_norm_before_the_explosion(tmp_path: Path) -> None:
    norms = np.r_[2.0, 2.2, 2.1, 2.0, 2.2, 50, 1e4, np.full(14, 1e6)]
    loss = np.r_[fall((60, 5.0), start=9)[:6], 8, 30, np.full(13, 60.0)]
    per = np.r_[np.linspace(1, 0.6, 6), np.full(15, 0.97)]
    diagnosis = diagnosed(tmp_path, made_log(per, loss, loss, grad_norm=norms))
    assert "clip gradients to about 2," in diagnosis.suggestion


def test_untrained_output_is_not_something_the_run_had_reached(tmp_path: Path) -> None:
    """Random output has a lower error rate than blanks, long before the loss has fallen."""
    per, val, train, *_ = FAULTS["small updates"]
    diagnosis = diagnosed(tmp_path, made_log(per, val, train))
    assert (diagnosis.primary, diagnosis.since_step) == ("collapsed", 0)
    assert "had reached" not in " ".join(diagnosis.evidence)


def test_loss_that_falls_on_while_the_output_becomes_constant_is_not_a_collapse_from_a_high_rate(
    tmp_path: Path,
) -> None:
    """An encoder that is not trained: random output at 74 %, then nothing but the frequencies of the classes."""
    per, val = (
        curve((0, 1.07), (20, 0.74), (120, 0.79), (200, 0.89)),
        curve((0, 5.5), (60, 4.0), (120, 3.4), (200, 3.1)),
    )
    diagnosis = diagnosed(tmp_path, made_log(per, val, val * (1 + 0.01 * NOISE)))
    assert diagnosis.primary == "collapsed" and "had reached" not in " ".join(diagnosis.evidence)
    assert not any("too high" in cause.cause for cause in diagnosis.causes)


def test_non_finite_loss_without_a_rise_before_it_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    val = np.r_[8.4, np.full(20, np.nan)]
    first = diagnosed(tmp_path, made_log(np.r_[0.77, np.ones(20)], val)).causes[0]
    assert "non-finite" in first.cause and not first.changes
    rising = np.r_[fall((60, 50))[:8], 60.0, 120.0, 500.0, np.full(10, np.nan)]
    diagnosis = diagnosed(tmp_path, made_log(np.r_[np.linspace(1, 0.6, 8), np.linspace(0.7, 1, 13)], rising))
    assert "too high" in diagnosis.causes[0].cause


def test_rising_learning_rate_is_an_explosion_dated_by_its_first_departure(tmp_path: Path) -> None:
    per = np.r_[1.2, 0.87, 0.82, 0.81, 0.74, 0.75, 0.8 + 0.05 * NOISE[6:]]
    norms = np.r_[45, 40, 30, 25, 24, 22, 25, 150, 1400, np.full(12, 20_000)]
    loss = np.r_[fall((60, 50))[:7], 70, 85, 250, np.full(11, 700)]
    diagnosis = diagnosed(tmp_path, made_log(per, loss, loss, grad_norm=norms))
    assert diagnosis.primary == "exploded"
    assert diagnosis.since_step is not None and abs(diagnosis.since_step - 140) <= 20
    assert f"at step {diagnosis.since_step}" in diagnosis.evidence[0]
    assert (diagnosis.since_step, "exploded") in diagnosis.marks


def test_finite_but_exploding_gradients_are_an_explosion(tmp_path: Path) -> None:
    norms = np.r_[6.4, 4.6, 3.8, 7.7, 14.7, 52, 119, 580, 1e5, np.full(12, 7.9e8)]
    loss = np.r_[6.0, 8.0, np.full(19, 15.0)]
    assert diagnosed(tmp_path, made_log(0.8 + 0.01 * NOISE, loss, loss, grad_norm=norms)).primary == "exploded"


def test_run_that_became_unstable_late_needs_a_slightly_lower_rate_and_keeps_its_clipping(tmp_path: Path) -> None:
    """Constant rate 0.0015, norms of 2 to 17, not finite at two steps late in the run; 0.0012 was enough."""
    steps = np.arange(0, 5001, 100.0)
    norms = 2 + 15 * (steps / 5000) ** 4
    norms[[42, 48]] = np.nan
    per = np.r_[0.513 + 0.43 * np.exp(-steps[:43] / 900), np.full(8, 0.52)]
    series = {"per": per, "val_loss": 4 * per, "train_loss": 4.1 * per, "grad_norm": norms, "lr": np.full(51, 0.0015)}
    log = TrainingLog("log", **{name: Series(steps, values, "batches") for name, values in series.items()})
    diagnosis = diagnosed(tmp_path, log)
    assert (diagnosis.primary, diagnosis.since_step) == ("exploded", 4200)
    settings = diagnosis.causes[0].settings
    assert 0.001 <= settings["schedule.peak_lr"] <= 0.0014
    assert "train.clip_norm" not in settings and "or keep a lower limit" in diagnosis.suggestion


def test_plateau_begins_where_the_curve_becomes_flat(tmp_path: Path) -> None:
    per = np.r_[np.linspace(1, 0.5, 7), np.full(14, 0.5)]
    diagnosis = diagnosed(tmp_path, made_log(per, fall((60, 3.0), (120, 1.9), (400, 1.7), start=8)))
    assert (diagnosis.primary, diagnosis.since_step) == ("plateaued", 120)


def test_underfitted_run_is_too_short_and_gets_no_more_regularisation(tmp_path: Path) -> None:
    """Blank for half of the run, training loss above validation loss, schedule over."""
    per = np.r_[
        1.2, 0.94, 0.96, np.full(6, 1.0), 0.97, 0.92, 0.9, 0.84, 0.81, 0.8, 0.77, 0.755, 0.758, 0.736, 0.738, 0.74
    ]
    diagnosis = diagnosed(tmp_path, made_log(per, fall((60, 57), (400, 41.7)), fall((60, 62), (400, 47))))
    assert diagnosis.causes[0].factor == "length"
    assert not any("too little" in cause.cause for cause in diagnosis.causes)


def test_noise_of_single_batches_is_not_damage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train = fall((60, 57), (240, 25), (400, 19)) * (1 + 0.15 * rng.standard_normal(21))
    per = curve((0, 1.2), (40, 0.87), (200, 0.47), (400, 0.32))
    diagnosis = diagnosed(tmp_path, made_log(per, fall((60, 57), (240, 26), (400, 21)), train))
    assert not any(cause.factor == "batches" for cause in diagnosis.causes)


def test_short_log_has_no_data_set_and_no_reference(tmp_path: Path) -> None:
    """The names of sessions may be those of a release whose data were not used."""
    lines = []
    for i, per in enumerate(np.linspace(1.2, 0.4, 30)):
        lines += [f"Val batch {20 * i}: PER (avg): {per:.4f} CTC Loss (avg): {60 * per:.4f}"]
        lines += [f"t15.2023.08.{day} val PER: {per:.4f}" for day in (11, 18, 25)]
    (tmp_path / "training_log").write_text("\n".join(lines))
    diagnosis = diagnose(tmp_path / "training_log")
    assert diagnosis.dataset is None
    assert any("data set unknown" in sentence for sentence in diagnosis.inferences)
    assert "reference" not in " ".join(diagnosis.evidence)


def test_direction_follows_the_measured_size_of_updates_not_eps(tmp_path: Path) -> None:
    """A learning rate of 2 with eps 0.1: eps differs from the packaged recipe, but a lower one would make it worse."""
    run = make_run(tmp_path / "run", ["optimizer.eps=0.1", "schedule.peak_lr=2.0"], results=False, n_parameters=150_000)
    rows = []
    for i in range(20):
        row = {"step": 30 * (i + 1), "split": "train", "loss": 3.0, "grad_norm": 4.0, "lr": 2.0, "update_ratio": 0.1}
        rows += [row, {"step": 30 * (i + 1), "split": "val", "loss": 3.2, "per": 0.83 + 0.04 * NOISE[i]}]
    from arcuate.files import write_jsonl as write_rows

    write_rows(run.metrics_file, rows)
    overrides = diagnose(run.path).fix().overrides
    assert overrides["schedule.peak_lr"] < 1.0 and "optimizer.eps" not in overrides
