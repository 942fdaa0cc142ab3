"""Overhead of guard and logging per training step of the demo model. One thread, interleaved, CPU time.

python benchmarks/guard_overhead.py --data data/demo/store
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from arcuate.data.batching import Batch, PlannedBatches, make_plan
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model
from arcuate.files import append_jsonl
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.run import create_run
from arcuate.seeds import derive_seed
from arcuate.training.environment import Distributed
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.optim import set_learning_rates
from arcuate.training.state import TrainingState, memory_mb
from arcuate.training.step import compute_gradients, encode_for_training, forward

CPU = torch.device("cpu")


def guarded_step(state: TrainingState, batch: Batch) -> None:
    """One step as in the loop: guard, interval metrics, and a metrics row at the interval of the recipe."""
    learning_rates = set_learning_rates(state.optimizer, state.recipe, state.step)
    metrics = compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, Distributed()).read()
    verdict = state.guard.judge(metrics, learning_rates["rest"])
    state.optimizer.step()
    state.step += 1
    state.interval.add(metrics, batch.n_counted, 0.0, None if verdict.applies_update else verdict.kind)
    if state.step % state.recipe.train.log_every == 0:
        append_jsonl(state.run.metrics_file, state.interval.to_row(state.step, learning_rates, memory_mb(CPU)))
        state.interval = IntervalMetrics()


def bare_step(state: TrainingState, batch: Batch) -> None:
    """The same update without guard and metrics."""
    recipe = state.recipe
    set_learning_rates(state.optimizer, recipe, state.step)
    state.optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(derive_seed(recipe.train.seed, "dropout", batch.position, 0))
    outputs = forward(state.model, partial(encode_for_training, state.model), batch, recipe, recipe.loss)
    weighted_loss(compute_losses(outputs, batch.tokens, batch.n_tokens, recipe.loss), recipe.loss).mean().backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), recipe.train.clip_norm or float("inf"))
    state.optimizer.step()
    state.step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, store = load_recipe("tiny"), Store.open(arguments.data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec)
    seconds: dict[str, list[float]] = {"guarded": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        states = {}
        for name in seconds:
            run = create_run(Path(folder) / name, recipe, {})
            states[name] = TrainingState(build_model(recipe, store, selection), recipe, run, "fp32")
        steps = {"guarded": guarded_step, "bare": bare_step}
        for position in range(arguments.steps):
            batch = planned[position]
            order = ("guarded", "bare") if position % 2 else ("bare", "guarded")
            for name in order:
                start = time.process_time()
                steps[name](states[name], batch)
                seconds[name].append(time.process_time() - start)
    ratios = [g / b for g, b in zip(seconds["guarded"][5:], seconds["bare"][5:], strict=True)]
    result = {
        "guarded_ms": 1000 * statistics.median(seconds["guarded"]),
        "bare_ms": 1000 * statistics.median(seconds["bare"]),
        "overhead": statistics.median(ratios) - 1,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"bare step {result['bare_ms']:.1f} ms, with guard and logging {result['guarded_ms']:.1f} ms:")
        print(f"{100 * result['overhead']:.1f} % more (median of {len(ratios)} pairs)")


if __name__ == "__main__":
    main()
