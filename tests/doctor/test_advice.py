"""Advice is never dangerous: checked on all real logs and on run folders of many recipes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.config import to_tree
from arcuate.doctor import Diagnosis, diagnose
from arcuate.doctor.log_table import TrainingLog
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.run import Run, create_run
from support.doctor_logs import falling

OFFICIAL = {"b2t24": "b2t24-gru", "b2t25": "b2t25-gru", None: "b2t25-gru"}
RAISING_WORDS = ("four times the learning rate", "ten times higher", "updates have to become larger")
LR_KEYS = ("schedule.lr", "schedule.peak_lr")


def gradients_are_bad(log: TrainingLog) -> bool:
    """Not finite, or at least twice as large in the last third as in the middle."""
    values = log.grad_norm.values
    if len(values) and not np.isfinite(values).all():
        return True
    if any(not np.isfinite(s.values).all() for s in (log.train_loss, log.val_loss, log.per)):
        return True
    third = len(values) // 3
    return third >= 4 and bool(np.median(values[2 * third :]) > 2 * np.median(values[third : 2 * third]) > 0)


def new_lr(settings: Mapping[str, Any]) -> float | None:
    schedule = settings.get("schedule") or {}
    return next((v for v in (*map(settings.get, LR_KEYS), schedule.get("peak_lr"), schedule.get("lr")) if v), None)


def current_lr(log: TrainingLog) -> float | None:
    stated = new_lr(log.settings)
    return stated or (float(np.nanmax(log.lr.finite.values)) if len(log.lr.finite) else None)


def assert_safe(diagnosis: Diagnosis) -> None:
    log = diagnosis.log
    assert log is not None
    verdicts = {diagnosis.primary, *diagnosis.secondary}
    unstable = gradients_are_bad(log) or "exploded" in verdicts
    for cause in diagnosis.causes:
        lr, current = new_lr(cause.settings), current_lr(log)
        raises = any(words in cause.change for words in RAISING_WORDS)
        raises = raises or (lr is not None and (current is None or lr > 1.01 * current))
        eps, old = cause.settings.get("optimizer.eps"), log.settings.get("optimizer.eps")
        raises = raises or (eps is not None and old is not None and eps < old and old > 1e-4)
        assert not (raises and unstable), (diagnosis.name, cause)
        steps = cause.settings.get("train.steps")
        if steps is not None and log.last_step is not None:
            assert not (steps > log.last_step and verdicts & {"overfit", "degraded"}), (diagnosis.name, cause)
            assert not (steps < log.last_step and "unfinished" in verdicts), (diagnosis.name, cause)
        weaker = [k for k in ("encoder.dropout", "augment.white_noise_sd") if cause.settings.get(k, 1.0) <= 0.2]
        assert not (weaker and "overfit" in verdicts), (diagnosis.name, cause)
        if not log.settings:  # the settings exist in the official recipe of the data set, with its kind of schedule
            recipe = OFFICIAL[diagnosis.dataset]
            is_low = recipe == "b2t25-gru" and "schedule.peak_lr" in cause.settings  # its min_lr would be above
            load_recipe(recipe, {"schedule.min_lr": 0.0} | dict(cause.settings) if is_low else cause.settings)


@pytest.mark.shared
def test_advice_on_all_real_logs_is_safe(shared: Path) -> None:
    logs = shared / "real" / "logs"
    if not logs.is_dir():
        pytest.skip("the labelled logs (../shared/real/logs) are not available")
    files = [*sorted((logs / "runs").glob("*.jsonl")), *sorted(p for p in (logs / "raw").rglob("*") if p.is_file())]
    n_judged = 0
    for file in files:
        if file.name in ("manifest.csv", "formats.md"):
            continue
        try:
            diagnosis = diagnose(file)
        except UserError:  # not a log
            continue
        for run in diagnosis.runs or (diagnosis,):
            assert_safe(run)
            n_judged += 1
    assert n_judged >= 98


CURVES = {
    "healthy": (falling(end=0.2, n=24), falling(5, 0.5, n=24), np.ones(24)),
    "stuck": (np.ones(24), np.full(24, 3.2), np.ones(24)),
    "exploding": (np.r_[falling(end=0.3, n=12), np.ones(12)], np.r_[falling(5, 1, n=12), [np.nan] * 12], np.ones(24)),
    "degrading": (np.r_[falling(end=0.3, n=8), np.linspace(0.3, 0.7, 16)],
                  np.r_[falling(5, 1, n=8), np.linspace(1, 3, 16)], np.linspace(1, 9, 24)),
    "overfit": (np.r_[falling(end=0.3, n=12), np.linspace(0.3, 0.37, 12)], falling(5, 0.01, n=24), np.ones(24)),
    "plateau": (np.r_[falling(end=0.5, n=8), np.full(16, 0.5)],
                np.r_[falling(5, 1.5, n=8), np.full(16, 1.5)], np.ones(24)),
    "falling": (np.linspace(1, 0.45, 24), np.linspace(5, 2, 24), np.ones(24)),
    "short": (np.array([0.9, 0.7]), falling(5, 2, n=24), np.ones(24)),
}  # fmt: skip
RECIPES = (
    *("tiny", "tiny-transformer", "b2t24-gru", "b2t25-gru", "b2t24-transformer", "mode-ssm-small"),
    *("diary-run04", "diary-run07", "diary-run11", "diary-run13"),
)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer.eps": 0.1, "optimizer.weight_decay.weights": 1.0},
    {"train.clip_norm": 1e-3, "augment.time_masks": {"n_masks": 30, "max_bins": 200}, "encoder.dropout": 0.8},
    {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": True}, "train.precision": {"kind": "bf16"}},
    {
        "schedule": {"kind": "constant", "lr": 0.3},
        "session_schedule": {"kind": "linear", "peak_lr": 0.2, "min_lr": 0.1},
    },
    {"schedule": {"kind": "one_cycle", "peak_lr": 1e-5, "pct_start": 0.9}},
    {"schedule": {"kind": "hold_decay", "peak_lr": 0.5, "min_lr": 0.4, "hold_steps": 10, "decay_steps": 50}},
)


def run_folders(folder: Path, name: str) -> Iterator[tuple[str, Run]]:
    """Every curve once, each with another change of the recipe, which differs between recipes."""
    for i, (curve, (per, loss, grad)) in enumerate(CURVES.items()):
        change = CHANGES[(i + RECIPES.index(name)) % len(CHANGES)]
        try:
            recipe = load_recipe(name, change)
        except UserError:  # this recipe does not allow the change
            recipe = load_recipe(name)
        environment = {"data": {"path": "/nowhere", "sessions": ["a", "b"], "n_channels": 64}, "n_parameters": 10_000}
        run = create_run(folder / curve, recipe, environment)
        write_rows(run, per, loss, grad, recipe.schedule.peak_lr, recipe.train.steps)
        yield f"{name} {change} {curve}", run


def write_rows(run: Run, per: np.ndarray, loss: np.ndarray, grad: np.ndarray, lr: float, n_steps: int) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(len(loss)):
        step = round(n_steps * (i + 1) / len(loss))
        finite = bool(np.isfinite(loss[i]))
        train = {
            "loss": loss[i] if finite else None,
            "grad_norm": grad[i] if finite else None,
            "lr": lr,
            "n_trials": 16,
        }
        rows.append({"step": step, "split": "train", **train})
        if i < len(per):
            rows.append({"step": step, "split": "val", "loss": float(1 + per[i]), "per": float(per[i])})
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", RECIPES)
def test_remedies_of_run_folders_are_valid_recipes_and_safe(tmp_path: Path, name: str) -> None:
    n_remedies = 0
    for described, run in run_folders(tmp_path, name):
        diagnosis = diagnose(run.path)
        assert_safe(diagnosis)
        remedy = diagnosis.fix()
        cured = to_tree(load_recipe(run.path, remedy.overrides))
        assert (cured != to_tree(load_recipe(run.path))) == bool(remedy), described
        assert remedy or remedy.message, described
        n_remedies += bool(remedy)
        for cause in diagnosis.causes:  # also the advice that is not part of the remedy
            load_recipe(run.path, cause.settings)
    assert n_remedies >= 4
