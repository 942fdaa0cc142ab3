"""Overhead of guard, logging and the measured size of updates per training step. One thread, interleaved, CPU time.

python benchmarks/guard_overhead.py --data data/demo/store [--recipe tiny] [--steps 60] [key=value …]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from arcuate.data.batching import Batch, PlannedBatches, make_plan
from arcuate.data.seeds import derive_seed
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model
from arcuate.files import append_jsonl
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.run import create_run
from arcuate.training.environment import Distributed
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.optim import set_learning_rates
from arcuate.training.state import TrainingState
from arcuate.training.step import apply_update, compute_gradients, encode_for_training, finish_step, forward

CPU = torch.device("cpu")
JUDGING: list[float] = []  # CPU seconds of the guard's verdicts alone


def guarded_step(state: TrainingState, batch: Batch, measure: bool = False) -> None:
    """One step as in the loop: guard, interval metrics, and a metrics row at the interval of the recipe."""
    learning_rates = set_learning_rates(state.optimizer, 1e-3, 1.0)
    metrics = compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, Distributed()).read()
    state.record_update_ratio(metrics.update_ratio)
    start = time.process_time()
    verdict = state.guard.judge(metrics, learning_rates["rest"], state.n_left)
    JUDGING.append(time.process_time() - start)
    apply_update(state, measure)
    finish_step(state)
    progress = state.progress
    progress.step += 1
    progress.interval.add(metrics, batch.n_counted, None if verdict.applies_update else verdict.kind)
    if progress.step % state.recipe.train.log_every == 0:
        append_jsonl(state.run.metrics_file, progress.interval.to_row(progress.step, learning_rates, {}))
        progress.interval = IntervalMetrics()


def bare_step(state: TrainingState, batch: Batch) -> None:
    """The same update without guard and metrics."""
    recipe = state.recipe
    set_learning_rates(state.optimizer, 1e-3, 1.0)
    state.optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(derive_seed(recipe.train.seed, "dropout", batch.position, 0))
    outputs = forward(state.model, partial(encode_for_training, state.model), batch, recipe, recipe.loss)
    weighted_loss(compute_losses(outputs, batch.tokens, batch.n_tokens, recipe.loss), recipe.loss).mean().backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), recipe.train.clip_norm or float("inf"))
    state.optimizer.step()
    state.progress.step += 1


STEPS: dict[str, Callable[[TrainingState, Batch], None]] = {
    "bare": bare_step,
    "guarded": guarded_step,
    "measured": partial(guarded_step, measure=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of the recipe")
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, store = load_recipe(arguments.recipe, arguments.overrides), Store.open(arguments.data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec)
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        states = {}
        for name in STEPS:
            run = create_run(Path(folder) / name, recipe, {})
            states[name] = TrainingState(build_model(recipe, store, selection), recipe, run, "fp32")
        for position in range(arguments.steps):
            batch = planned[position]
            names = list(STEPS)
            for name in names[position % 3 :] + names[: position % 3]:
                start = time.process_time()
                STEPS[name](states[name], batch)
                seconds[name].append(time.process_time() - start)

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(seconds[a][5:], seconds[b][5:], strict=True)) - 1

    measured = ratio("measured", "guarded")
    result = {
        **{f"{name}_ms": 1000 * statistics.median(values) for name, values in seconds.items()},
        "overhead": ratio("guarded", "bare"),
        "verdict": statistics.median(JUDGING) / statistics.median(seconds["bare"]),
        "measured_step": measured,  # of one step whose update is measured
        "measured_per_step": measured / recipe.train.log_every,  # one step per row is
        "log_every": recipe.train.log_every,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"bare step {result['bare_ms']:.1f} ms, with guard and logging {result['guarded_ms']:.1f} ms:")
    print(f"{100 * result['overhead']:.1f} % more (median of {arguments.steps - 5} pairs)")
    print(f"the verdict of the guard alone: {100 * result['verdict']:.2f} % of a step")
    print(f"measuring the update: {100 * measured:.1f} % of a step, once per row of {recipe.train.log_every} steps:")
    print(f"{100 * result['measured_per_step']:.2f} % on average")


if __name__ == "__main__":
    main()
