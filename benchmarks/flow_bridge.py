"""Fraction of the effect of noise on an encoder's frames that a flow bridge removes.

    python benchmarks/flow_bridge.py --data data/demo/store --run runs/mode-ssm/ssm-ctc-mode-s0 [--width 64]

Frames of augmented and clean bins by a trained encoder; a new bridge is trained on some batches, scored on others.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from arcuate.data.augmentation import augment
from arcuate.data.batching import PlannedBatches, make_plan
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import run_recipe
from arcuate.losses.combined import flow_loss
from arcuate.models.config import DenoiserSettings
from arcuate.models.denoiser import Denoiser
from arcuate.models.interfaces import ModelInputs
from arcuate.models.io import load_model
from arcuate.run import Run, find_checkpoint

N_TRAIN, N_HELD_OUT, N_STEPS = 44, 6, 160
Pair = tuple[Tensor, Tensor, Tensor]  # noisy frames, clean frames (B, F, D), their number (B,)


@torch.no_grad()
def make_pairs(run: Path, data: Path) -> list[Pair]:
    recipe, model = run_recipe(Run(run)), load_model(find_checkpoint(run, "last"))
    store = Store.open(data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    batches = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec)
    pairs = []
    for position in range(400, 400 + N_TRAIN + N_HELD_OUT):
        batch = batches[position]
        clean = model.normalise(batch.bins, batch.statistics)
        ids = [t.id for t in batch.trials]
        noisy, n_bins = augment(clean, batch.n_bins, ids, recipe.augment, 0, position)
        clean = clean[:, clean.shape[1] - noisy.shape[1] :]
        frames = [
            model.encode(ModelInputs(bins, n_bins, batch.session, clean=clean)).frames
            for bins in (noisy, clean.clone())
        ]
        pairs.append((frames[0], frames[1], recipe.front_end.patch.count_frames(n_bins)))
    return pairs


def distance(a: Tensor, b: Tensor, n_frames: Tensor) -> float:
    true = torch.arange(a.shape[1]) < n_frames[:, None]
    return float((a - b)[true].square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    pairs = make_pairs(args.run, args.data)
    apart = [distance(noisy, clean, n) for noisy, clean, n in pairs]
    size = [float(clean.var()) for _, clean, _ in pairs]
    print(f"noise changes {100 * sum(apart) / sum(size):.1f} % of the frames' variance")
    torch.manual_seed(0)
    bridge = Denoiser(DenoiserSettings(enabled=True, width=args.width), pairs[0][0].shape[-1], causal=True)
    optimizer = torch.optim.AdamW(bridge.parameters(), lr=3e-3)
    for step in range(N_STEPS):
        noisy, clean, n = pairs[step % N_TRAIN]
        loss = flow_loss(bridge.match(noisy, clean, n, torch.rand(len(noisy))), n).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        left = [distance(bridge(noisy, n), clean, n) for noisy, clean, n in pairs[N_TRAIN:]]
    print(f"held out: {sum(left) / sum(apart[N_TRAIN:]):.3f} of the squared difference remains")


if __name__ == "__main__":
    main()
