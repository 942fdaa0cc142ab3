"""Encoders with and without session layers: error rate at an equal budget of CPU seconds, and cost of each.

arcuate simulate data/real --sessions 6 --trials 250 --electrodes 64 --difficulty real
arcuate prepare data/real data/store
python benchmarks/encoders.py --data data/store --out runs/encoders --budget 75 --width 64 --seeds 3

Steps are timed first, in CPU time of one thread, so that other programs on the machine do not count; every run then
gets as many steps as fit into the budget, with a schedule of that length. Each run is an ordinary run folder, scored
once, at its end. The same command resumes where it stopped; --table only prints existing results.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import arcuate, percent, table

from arcuate.data.batching import Batch, BatchStatistics, PlannedBatches, make_plan
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import Recipe, load_recipe, run_recipe
from arcuate.experiments.train import build_model
from arcuate.files import read_json, write_json
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.optim import make_optimizer
from arcuate.training.step import encode_for_training, forward

N_TIMED, N_REPEATED = 6, 6  # batches, and how often each is timed


@dataclass(frozen=True)
class Arm:
    """One encoder, with session layers or without."""

    kind: str
    recipe: str
    session_layers: bool
    width: int
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}-{'sessions' if self.session_layers else 'shared'}"

    @property
    def overrides(self) -> list[str]:
        layers = f"front_end.session_layer.enabled={str(self.session_layers).lower()}"
        return [layers, f"encoder.width={self.width}", "runtime.threads=1", *self.extra]


RECIPES = {"gru": "tiny", "ssm": "mode-ssm-small", "transformer": "tiny-transformer"}


ALONE = ("stages=[]", "train.steps=600", "transducer.enabled=false", "mode.enabled=false", "denoiser.enabled=false")


def make_arms(width: int) -> list[Arm]:
    """Every encoder with session layers and without."""
    pairs = ((kind, recipe, layers) for kind, recipe in RECIPES.items() for layers in (True, False))
    return [Arm(kind, recipe, layers, width, ALONE if kind == "ssm" else ()) for kind, recipe, layers in pairs]


def seconds_per_step(arm: Arm, data: Path) -> float:
    """CPU seconds of a step: the minimum over repetitions, which other programs slow down, averaged over batches."""
    torch.set_num_threads(1)
    recipe, store = load_recipe(arm.recipe, arm.overrides), Store.open(data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    batches = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec, (0, 1))
    model = build_model(recipe, store, selection).train()
    optimizer = make_optimizer(model, recipe.optimizer)
    step(model, optimizer, recipe, batches[0])  # warms up
    best = [min(step(model, optimizer, recipe, batches[i]) for _ in range(N_REPEATED)) for i in range(N_TIMED)]
    return statistics.mean(best)


def step(model: Model, optimizer: torch.optim.Optimizer, recipe: Recipe, batch: Batch) -> float:
    """CPU seconds of one optimizer step."""
    started = time.process_time()
    outputs = forward(model, partial(encode_for_training, model), batch, recipe, recipe.loss)
    losses = weighted_loss(compute_losses(outputs, batch.tokens, batch.n_tokens, recipe.loss), recipe.loss)
    optimizer.zero_grad(set_to_none=True)
    losses.mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return time.process_time() - started


def timed(arm: Arm, data: Path, out: Path) -> float:
    """Measured once and stored, so that a resumed run keeps its number of steps."""
    file = out / arm.name / "cost.json"
    if not file.exists():
        write_json(file, {"seconds_per_step": seconds_per_step(arm, data)})
    return float(read_json(file)["seconds_per_step"])


def train(arm: Arm, seed: int, n_steps: int, data: Path, out: Path) -> Run:
    """Train one run to its end; complete runs are left unchanged."""
    run = Run(out / arm.name / f"seed-{seed}")
    state = run.checkpoints / "last" / "state.json"
    if not state.is_file() or read_json(state)["step"] < n_steps:
        # validated once, at the end: nothing is selected
        steps = [f"train.steps={n_steps}", f"train.validate_every={n_steps}", "train.checkpoint_every=100"]
        seeds = [f"train.seed={seed}", f"data.seed={seed}"]
        arcuate("train", arm.recipe, "--data", data, "--run", run.path, "--resume", *arm.overrides, *steps, *seeds)
    return run


def streaming_cost(run: Run, data: Path, n_frames: int = 300) -> float:
    """CPU milliseconds of a streamed frame: median over the last fifty of a stream, minimum of several streams."""
    torch.set_num_threads(1)
    model, store = load_model(run.checkpoints / "last"), Store.open(data)
    stride = model.config.settings.front_end.patch.stride
    trial = max((t for t in store.trials if t.split == "val"), key=lambda t: t.n_bins)
    bins = torch.from_numpy(store.read_bins(trial)).float()[None]
    block = BatchStatistics(bins.mean(1), bins.std(1), torch.tensor([bins.shape[1]]))
    medians = []
    for _ in range(N_REPEATED):
        cost, state = [], model.start(0, block)
        for i in range(n_frames):
            chunk = bins[:, (i * stride) % (bins.shape[1] - stride) :][:, :stride]
            started = time.process_time()
            with torch.inference_mode():
                _, state = model.step(state, chunk)
            cost.append(time.process_time() - started)
        medians.append(1000 * statistics.median(cost[-50:]))
    return min(medians)


def final_per(run: Run) -> float | None:
    rows = [r for r in run.metrics() if r["split"] == "val"]
    return rows[-1]["per"] if rows else None


def results(arms: list[Arm], data: Path, out: Path, n_seeds: int) -> str:
    """What has been trained so far, as a Markdown table."""
    rows = []
    for arm in arms:
        runs = [Run(out / arm.name / f"seed-{seed}") for seed in range(n_seeds)]
        found = [(run, per) for run in runs if run.metrics_file.is_file() and (per := final_per(run)) is not None]
        if not found:
            continue
        run, pers = found[0][0], [per for _, per in found]
        sd = percent(statistics.stdev(pers)) if len(pers) > 1 else "–"
        cells = [f"{arm.kind} (`{arm.recipe}`)", "on" if arm.session_layers else "off"]
        cells += [f"{run.environment()['n_parameters']:,}", percent(statistics.mean(pers)), sd, str(len(pers))]
        cost = f"{timed(arm, data, out):.3f}", f"{streaming_cost(run, data):.2f}"
        rows.append([*cells, run_recipe(run).train.steps, *cost])
    head = ["encoder", "session layers", "parameters", "PER", "SD", "seeds", "steps", "CPU s per step", "ms per frame"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/store"))
    parser.add_argument("--out", type=Path, default=Path("runs/encoders"))
    parser.add_argument("--budget", type=float, default=25.0, help="CPU seconds of training per run")
    parser.add_argument("--width", type=int, default=64, help="of every encoder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arms = make_arms(args.width)
    if not args.table:
        steps = {arm: max(20, round(args.budget / timed(arm, args.data, args.out))) for arm in arms}
        for seed in range(args.seeds):  # seed by seed, so that what is there can be compared at any time
            for arm in arms:
                run = train(arm, seed, steps[arm], args.data, args.out)
                shown = percent(final_per(run))
                print(f"{arm.name} seed {seed}: {steps[arm]} steps, PER {shown}", file=sys.stderr, flush=True)
    print(results(arms, args.data, args.out, args.seeds))


if __name__ == "__main__":
    main()
