"""Overhead of guard and logging per training step. One thread, interleaved, CPU time.

python benchmarks/guard_overhead.py --data data/demo/store [--recipe tiny] [--steps 60] [key=value …]
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path

import torch
from common import in_turns, percent

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


def guarded_step(state: TrainingState, batch: Batch) -> None:
    """One step as in the loop: guard, interval metrics, and a metrics row at the interval of the recipe."""
    progress, learning_rates = state.progress, set_learning_rates(state.optimizer, 1e-3, 1.0)
    metrics = compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, Distributed()).read()
    state.record_update_ratio(metrics.update_ratio)
    start = time.process_time()
    verdict = state.guard.judge(metrics, learning_rates["rest"], state.n_left)
    JUDGING.append(time.process_time() - start)
    apply_update(state, progress.step % state.recipe.train.log_every == 0)
    finish_step(state)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of the recipe")
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, store = load_recipe(arguments.recipe, arguments.overrides), Store.open(arguments.data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec)
    with tempfile.TemporaryDirectory() as folder:
        states, positions = {}, {"bare": count(), "guarded": count()}
        for name in positions:
            run = create_run(Path(folder) / name, recipe, {})
            states[name] = TrainingState(build_model(recipe, store, selection), recipe, run, "fp32")
        work = {
            "bare": lambda: bare_step(states["bare"], planned[next(positions["bare"])]),
            "guarded": lambda: guarded_step(states["guarded"], planned[next(positions["guarded"])]),
        }
        seconds = in_turns(work, arguments.steps)
    bare, guarded = seconds["bare"], seconds["guarded"]
    overhead = statistics.median(a / b for a, b in zip(guarded, bare, strict=True)) - 1
    verdict = statistics.median(JUDGING) / statistics.median(bare)
    print(f"bare step with loading {1000 * statistics.median(bare):.1f} ms; guard and logging add {percent(overhead)}")
    print(f"the verdict of the guard alone: {percent(verdict, 2)} of a step")


if __name__ == "__main__":
    main()
