"""Fabricated run folders with a recipe, a log and results of given error rates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.files import append_jsonl, write_json, write_jsonl
from arcuate.run import Run, create_run

N_TRIALS = 80
HASHES = {"train": "a" * 64, "val": "b" * 64, "test": "c" * 64}


def make_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    per: float = 0.3,
    minute: int = 0,
    results: bool = True,
    seed: int = 0,
    n_trials: int = N_TRIALS,
    recipe: str = "tiny",
    **environment: Any,
) -> Run:
    """A run whose PER falls from 1 to `per`, by default evaluated on val."""
    facts: dict[str, Any] = {
        "arcuate": "0.1.0",
        "started": f"2030-01-01T00:{minute:02d}:00+00:00",
        "selected_on": "val",
        "data": {"path": "/nowhere", "hashes": HASHES, "sessions": ["s1", "s2"]},
        "parent": None,
    }
    run = create_run(path, load_recipe(recipe, overrides), facts | environment)
    write_log(run, per)
    if results:
        write_val(run, per, seed, n_trials)
    return run


def stuck_run(path: Path, overrides: list[str], loss: np.ndarray, grad: float, lr: float, n_parameters: int) -> Run:
    """A run whose output stayed blank, with the given training rows."""
    run = make_run(path, overrides, results=False, n_parameters=n_parameters)
    rows: list[dict[str, Any]] = []
    for i, value in enumerate(loss):
        step = round(600 * (i + 1) / len(loss))
        rows.append({"step": step, "split": "train", "loss": float(value), "grad_norm": grad, "lr": lr})
        if i % 2:
            rows.append({"step": step, "split": "val", "loss": 3.2, "per": 1.0})
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def write_log(run: Run, per: float) -> None:
    steps = run_recipe(run).train.steps
    for i in range(1, 25):
        share, step = i / 24, round(steps * i / 24)
        append_jsonl(
            run.metrics_file,
            {
                "step": step,
                "split": "train",
                "loss": 4.0 * (1 - share) + 0.4 * share,
                "grad_norm": 1.0,
                "lr": 0.003,
                "cost": {"seconds_per_step": 0.1},
            },
        )
        rate = per + (1 - per) * np.exp(-6 * share)
        append_jsonl(run.metrics_file, {"step": step, "split": "val", "loss": 2 * rate, "per": float(rate)})


def write_words(run: Run, wer: float, split: str = "val", step: int = 600) -> None:
    """What `arcuate decode` keeps in a run folder: two sentences and their summary."""
    rows = [
        {"id": "s1/val/0001", "reference": "Bring it closer.", "text": "bring it closer", "errors": 0, "n_words": 3},
        {
            "id": "s1/val/0002",
            "reference": "not too <b>controversial</b>",
            "text": "not two",
            "errors": 2,
            "n_words": 3,
        },
    ]
    write_jsonl(run.results_file(split, "words"), rows)
    summary = {"wer": wer, "wer_low": wer - 0.02, "wer_high": wer + 0.02, "lm": "small 3-gram", "n_trials": 2}
    write_json(run.results_file(split, "words", "json"), summary | {"split": split, "step": step})


def write_val(
    run: Run,
    per: float,
    seed: int = 0,
    n_trials: int = N_TRIALS,
    split: str = "val",
    label: str | None = None,
) -> None:
    """Results whose trials are the same for every run; `seed` draws the errors."""
    lengths = np.random.default_rng(1).integers(15, 40, size=n_trials)
    hard = np.random.default_rng(2).uniform(0.6, 1.4, size=n_trials)
    errors = np.random.default_rng(1000 + seed).binomial(lengths, np.clip(per * hard, 0, 1))
    rows = [
        {
            "trial": f"s{1 + i % 2}/{split}/{i:04d}",
            "session": f"s{1 + i % 2}",
            "substitutions": int(e),
            "insertions": 0,
            "deletions": 0,
            "n_tokens": int(n),
        }
        for i, (e, n) in enumerate(zip(errors, lengths, strict=True))
    ]
    write_jsonl(run.results_file(split, label), rows)
    rate = float(errors.sum() / lengths.sum())
    summary = {
        "per": rate,
        "per_low": rate - 0.02,
        "per_high": rate + 0.02,
        "split": split,
        "label": label,
        "n_trials": n_trials,
    }
    more = {"selected_on": "val", "step": 600, "data_hash": HASHES[split], "search": "greedy"}
    write_json(run.results_file(split, label, "json"), summary | more)
