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
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import Batch, BatchStatistics, PlannedBatches, make_plan
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import Recipe, load_recipe, run_recipe
from arcuate.experiments.train import build_model
from arcuate.files import read_json, write_json
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.optim import make_optimizer
from arcuate.training.step import encode_for_training, forward

N_TIMED, N_REPEATED = 6, 6  # batches, and how often each is timed
PUBLISHED = ("b2t24-transformer", "b2t25-transformer", "b2t25-gru", "mode-ssm")  # read forwards only


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


HEAVY = ("augment.time_masks.max_fraction=0.075",)  # half of a trial, as in the recipes of published size
NOISE = ("augment.time_masks.n_masks=0", "augment.white_noise_sd=0.5", "augment.offset_sd=0.2")


ALONE = (
    "stages=[]",
    "train.steps=600",
    "transducer.enabled=false",
    "mode.enabled=false",
    "denoiser.enabled=false",
)


def make_arms(width: int) -> list[Arm]:
    """Every encoder with session layers and without; the Transformer also with other masks, or noise instead."""
    arms = [
        Arm(kind, recipe, layers, width, ALONE if kind == "ssm" else ())
        for kind, recipe in RECIPES.items()
        for layers in (True, False)
    ]
    others = {"heavily masked": HEAVY, "unmasked": NOISE}
    recipe = RECIPES["transformer"]
    return [*arms, *(Arm(f"transformer {how}", recipe, False, width, extra) for how, extra in others.items())]


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
    if state.is_file() and read_json(state)["step"] == n_steps:
        return run
    settings = [
        *arm.overrides,
        f"train.steps={n_steps}",
        f"train.validate_every={n_steps}",  # once, at the end: nothing is selected
        "train.checkpoint_every=100",
        f"train.seed={seed}",
        f"data.seed={seed}",
    ]
    command = ["train", arm.recipe, "--data", str(data), "--run", str(run.path), "--resume", *settings]
    log = (out / arm.name / f"seed-{seed}.log").open("ab")
    with log:
        done = subprocess.run([sys.executable, "-m", "arcuate", *command], stderr=log, check=False)
    if done.returncode:
        sys.exit(f"{run.path} failed with exit code {done.returncode}; see {log.name}")
    return run


def stream_ms(model: Model, bins: torch.Tensor, statistics_: BatchStatistics | None, n_frames: int = 300) -> float:
    """CPU milliseconds of one streamed frame, the median over the last fifty of a stream."""
    stride = model.config.settings.front_end.patch.stride
    cost = []
    with torch.inference_mode():
        state = model.start(0, statistics_)
        for i in range(n_frames):
            chunk = bins[:, (i * stride) % (bins.shape[1] - stride) :][:, :stride]
            started = time.process_time()
            outputs, state = model.step(state, chunk)
            if outputs.frames.shape[1] == 1 and i >= n_frames - 50:
                cost.append(1000 * (time.process_time() - started))
    return statistics.median(cost)


def streaming_cost(run: Run, data: Path) -> float:
    torch.set_num_threads(1)
    model, store = load_model(run.checkpoints / "last"), Store.open(data)
    trial = max((t for t in store.trials if t.split == "val"), key=lambda t: t.n_bins)
    bins = torch.from_numpy(store.read_bins(trial)).float()[None]
    n = torch.tensor([bins.shape[1]])
    block = BatchStatistics(bins.mean(1), bins.std(1), n)
    return min(stream_ms(model, bins, block) for _ in range(N_REPEATED))


def published_streams() -> None:
    """Cost of a streamed frame at full size, early and late in a stream; it does not depend on the weights."""
    torch.set_num_threads(1)
    print("| recipe | parameters | CPU ms per frame, frames 51–100 | frames 251–300 |\n|---|---|---|---|")
    for name in PUBLISHED:
        recipe = load_recipe(name, ["encoder.bidirectional=false", "front_end.normalise=none"])
        n_channels = recipe.data.size.n_channels
        config = ModelConfig(settings=recipe.model, n_channels=n_channels, sessions=("a",), classes=CLASSES)
        model = Model(config).eval()
        bins = torch.randn(1, 400, n_channels)
        early, late = (stream_ms(model, bins, None, n) for n in (100, 300))
        n_parameters = sum(p.numel() for p in model.parameters())
        print(f"| `{name}` | {n_parameters:,} | {early:.2f} | {late:.2f} |", flush=True)


def final_per(run: Run) -> float | None:
    rows = [r for r in run.metrics() if r["split"] == "val"]
    return rows[-1]["per"] if rows else None


def rows(arms: list[Arm], data: Path, out: Path, n_seeds: int) -> Iterator[dict[str, Any]]:
    for arm in arms:
        runs = [Run(out / arm.name / f"seed-{seed}") for seed in range(n_seeds)]
        pers = [per for run in runs if run.metrics_file.is_file() and (per := final_per(run)) is not None]
        if not pers:
            continue
        first = next(r for r in runs if r.metrics_file.is_file() and final_per(r) is not None)
        yield {
            "arm": arm,
            "pers": pers,
            "parameters": first.environment()["n_parameters"],
            "steps": run_recipe(first).train.steps,
            "seconds_per_step": timed(arm, data, out),
            "stream_ms": streaming_cost(first, data),
        }


def table(arms: list[Arm], data: Path, out: Path, n_seeds: int) -> str:
    lines = [
        "| encoder | session layers | parameters | PER | SD | seeds | steps | CPU s per step | CPU ms per frame |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(arms, data, out, n_seeds):
        pers, arm = row["pers"], row["arm"]
        sd = f"{100 * statistics.stdev(pers):.1f}" if len(pers) > 1 else "–"
        lines.append(
            f"| {arm.kind} (`{arm.recipe}`) | {'on' if arm.session_layers else 'off'} | {row['parameters']:,} |"
            f" {100 * statistics.mean(pers):.1f} % | {sd} | {len(pers)} | {row['steps']} |"
            f" {row['seconds_per_step']:.3f} | {row['stream_ms']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/store"))
    parser.add_argument("--out", type=Path, default=Path("runs/encoders"))
    parser.add_argument("--budget", type=float, default=25.0, help="CPU seconds of training per run")
    parser.add_argument("--width", type=int, default=64, help="of every encoder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES))
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--streaming", action="store_true", help="only time streams at the published sizes")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.streaming:
        published_streams()
        return
    arms = [arm for arm in make_arms(args.width) if arm.kind.split()[0] in args.kinds]
    if not args.table:
        steps = {arm: max(20, round(args.budget / timed(arm, args.data, args.out))) for arm in arms}
        for seed in range(args.seeds):  # seed by seed, so that what is there can be compared at any time
            for arm in arms:
                run = train(arm, seed, steps[arm], args.data, args.out)
                per = final_per(run)
                shown = "–" if per is None else f"{100 * per:.1f} %"
                print(f"{arm.name} seed {seed}: {steps[arm]} steps, PER {shown}", file=sys.stderr, flush=True)
    print(table(arms, args.data, args.out, args.seeds))


if __name__ == "__main__":
    main()
