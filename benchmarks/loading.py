"""Time to load a batch from the store, compared with a training step of the demo model: one worker, CPU time.

python benchmarks/loading.py --data data/demo/store
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from arcuate.data.batching import PlannedBatches, make_plan, padding_waste
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.training.optim import make_optimizer, set_learning_rates
from arcuate.training.step import encode_for_training, forward

BLOCK = 5  # batches read ahead, as a worker would


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, store = load_recipe("tiny"), Store.open(arguments.data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec)
    model = build_model(recipe, store, selection)
    optimizer = make_optimizer(model, recipe.optimizer)
    loading, training = [], []
    for first in range(0, arguments.batches, BLOCK):  # in turns, so that a busy machine slows both alike
        start = time.process_time()
        batches = [planned[position] for position in range(first, first + BLOCK)]
        read = time.process_time()
        for batch in batches:
            set_learning_rates(optimizer, 1e-3, 1.0)
            outputs = forward(model, partial(encode_for_training, model), batch, recipe, recipe.loss)
            loss = weighted_loss(compute_losses(outputs, batch.tokens, batch.n_tokens, recipe.loss), recipe.loss).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        loading.append((read - start) / BLOCK)
        training.append((time.process_time() - read) / BLOCK)
    epoch = [plan.draw(p) for p in range(plan.batches_per_epoch)]
    result = {
        "loading_ms": 1000 * statistics.median(loading),
        "training_step_ms": 1000 * statistics.median(training),
        "ratio": statistics.median(training) / statistics.median(loading),
        "padding_waste": padding_waste(epoch, plan.n_bins),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"a batch of {recipe.data.batching.batch_size} trials: loaded in {result['loading_ms']:.1f} ms,")
        print(f"trained on in {result['training_step_ms']:.1f} ms: loading is {result['ratio']:.0f}x faster")
        print(f"padding waste with length buckets: {100 * result['padding_waste']:.1f} %")


if __name__ == "__main__":
    main()
