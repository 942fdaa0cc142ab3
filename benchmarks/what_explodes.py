"""What explodes: eps, learning rate, clipping or loss reduction? A factorial experiment without the guard.

python benchmarks/what_explodes.py --out runs/explodes [--families 24,25] [--seeds 3] [--table]

Two families of small GRUs (one layer of 64 units, CTC) on a simulated cohort. `24` has the settings of the official
'24 baseline (constant learning rate 0.02, eps 0.1, no clipping, loss per token, Adam), `25` those of the '25 baseline
(warm-up of 1,000 steps to 0.005, eps 0.1, clipping at 10, loss per trial, AdamW) with the augmentation of the public
run that exploded. All combinations of the factors are trained side by side as one stacked model, so that they share
weights at the start, batches, noise and dropout masks; a cell whose loss or gradient is not finite stops. Input frames
are the 64 principal components of standardised patches of 12 bins. Each finished cell is one line of OUT/cells.jsonl;
finished seeds are not trained again.

A run has *exploded* if a gradient norm (before clipping) exceeded ten times the largest one of the run with the
official eps and learning rate and the same clipping, reduction and seed, or became non-finite. It is *at chance level*
if the mean training loss of its last 100 steps was above 0.8 of that of a uniform output.
"""

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sabotage import make_store
from torch import Tensor
from torch.nn import functional

from arcuate.data.alphabet import BLANK, N_CLASSES
from arcuate.data.seeds import derive_seed
from arcuate.data.store import Store
from arcuate.decoding.hypothesis import greedy
from arcuate.evaluation.metrics import score, total
from arcuate.evaluation.significance import holm
from arcuate.files import append_jsonl, read_jsonl

BATCH, WIDTH, INPUTS, BINS, STRIDE = 4, 64, 64, 12, 6
MAX_FRAMES = 48  # longer trials are left out, because the time of a step is that of its longest trial
DROPOUT = 0.4
LOG_EVERY = 20
EXPLODED = 10.0  # smallest explosion: gradient norm / largest one at the official eps and learning rate
AT_CHANCE = 0.8  # loss / chance level at or above which a run has learnt nothing
FACTORS = ("eps", "rate", "clip", "reduction")


@dataclass(frozen=True)
class Family:
    """Settings of an official baseline in a small model; the first level of each factor is official."""

    steps: int
    noise: float
    offset: float
    weight_decay: float
    decoupled: bool  # AdamW
    warmup: int
    levels: dict[str, tuple[Any, ...]]


FAMILIES = {
    "24": Family(
        1000,
        0.8,
        0.2,
        1e-5,
        False,
        0,
        {
            "eps": (0.1, 1e-8),
            "rate": (0.02, 0.08),
            "clip": (None, 1.0),
            "reduction": ("mean_per_token", "sum_per_trial"),
        },
    ),
    "25": Family(
        4000,
        0.25,
        0.05,
        1e-3,
        True,
        1000,
        {
            "eps": (0.1, 1e-8),
            "rate": (0.005, 0.02),
            "clip": (10.0, None),
            "reduction": ("sum_per_trial", "mean_per_token"),
        },
    ),
}


@dataclass(frozen=True)
class Data:
    """Frames and tokens of the trials of one split."""

    frames: list[Tensor]  # (F, INPUTS) each
    tokens: list[tuple[int, ...]]


def load_data(store_path: Path) -> dict[str, Data]:
    """Read a store into principal components of patches, fitted on the training trials."""
    store = Store.open(store_path)
    trials = [t for t in store.trials if t.usable and t.tokens and t.split in ("train", "val")]
    patches = []
    for trial in trials:
        statistics = store.block_statistics(trial)
        bins = (store.read_bins(trial) - statistics.mean) / np.maximum(statistics.sd, 1e-3)
        windows = np.lib.stride_tricks.sliding_window_view(bins, BINS, axis=0)[::STRIDE]  # (F, C, BINS)
        patches.append(windows.reshape(len(windows), -1).astype(np.float32))
    training = np.concatenate([p for p, t in zip(patches, trials, strict=True) if t.split == "train"])
    mean = training.mean(0)
    _, vectors = np.linalg.eigh(np.cov(training.T))
    components = vectors[:, -INPUTS:]
    sd = ((training - mean) @ components).std(0)
    found = {"train": Data([], []), "val": Data([], [])}
    for patch, trial in zip(patches, trials, strict=True):
        if len(trial.tokens or ()) < len(patch) <= MAX_FRAMES:
            found[trial.split].frames.append(torch.from_numpy(((patch - mean) @ components / sd).astype(np.float32)))
            found[trial.split].tokens.append(trial.tokens or ())
    return found


# --- the stacked model: every tensor has one slice per cell ---------------------------------------------------------


def make_weights(n_cells: int, seed: int) -> dict[str, Tensor]:
    """Return one GRU layer and an output layer, initialised as in PyTorch, the same for every cell."""
    rng, bound = torch.Generator().manual_seed(derive_seed(seed, "weights", 0)), 1 / math.sqrt(WIDTH)
    shapes = {
        "input": (INPUTS, 3 * WIDTH),
        "input_bias": (1, 3 * WIDTH),
        "recurrent": (WIDTH, 3 * WIDTH),
        "recurrent_bias": (1, 3 * WIDTH),
        "output": (WIDTH, N_CLASSES),
        "output_bias": (1, N_CLASSES),
    }
    one = {name: (2 * torch.rand(shape, generator=rng) - 1) * bound for name, shape in shapes.items()}
    return {name: value.expand(n_cells, *value.shape).clone().requires_grad_() for name, value in one.items()}


def encode(weights: dict[str, Tensor], frames: Tensor, keep: Tensor | None) -> Tensor:
    """Return log-probabilities (cells, B, T, V) of frames (B, T, INPUTS)."""
    n_cells, (n_batch, n_frames, _) = weights["input"].shape[0], frames.shape
    flat = frames.reshape(1, -1, INPUTS).expand(n_cells, -1, -1)
    projected = torch.baddbmm(weights["input_bias"], flat, weights["input"]).reshape(n_cells, n_batch, n_frames, -1)
    state, states = torch.zeros(n_cells, n_batch, WIDTH), []
    for t in range(n_frames):
        recurrent = torch.baddbmm(weights["recurrent_bias"], state, weights["recurrent"])
        x = projected[:, :, t]
        gates = torch.sigmoid(x[..., : 2 * WIDTH] + recurrent[..., : 2 * WIDTH])
        reset, update = gates[..., :WIDTH], gates[..., WIDTH:]
        new = torch.tanh(x[..., 2 * WIDTH :] + reset * recurrent[..., 2 * WIDTH :])
        state = new + update * (state - new)
        states.append(state)
    outputs = torch.stack(states, 2)
    if keep is not None:
        outputs = outputs * keep
    logits = torch.baddbmm(weights["output_bias"], outputs.reshape(n_cells, -1, WIDTH), weights["output"])
    return logits.reshape(n_cells, n_batch, n_frames, N_CLASSES).log_softmax(-1)


def train_seed(name: str, seed: int, data: dict[str, Data], steps: int | None) -> list[dict[str, Any]]:
    """Train all cells of a family and return their outcomes."""
    family, started = FAMILIES[name], time.process_time()
    steps = steps or family.steps
    cells = [dict(zip(FACTORS, levels, strict=True)) for levels in itertools.product(*family.levels.values())]
    n = len(cells)
    column = {
        "eps": torch.tensor([c["eps"] for c in cells]),
        "rate": torch.tensor([c["rate"] for c in cells]),
        "clip": torch.tensor([math.inf if c["clip"] is None else c["clip"] for c in cells]),
    }
    by_token = torch.tensor([c["reduction"] == "mean_per_token" for c in cells])
    weights = make_weights(n, seed)
    moments = {key: [torch.zeros_like(w), torch.zeros_like(w)] for key, w in weights.items()}
    alive = torch.ones(n, dtype=torch.bool)
    rows: list[list[tuple[float, float]]] = [[] for _ in cells]  # mean loss in chance levels, largest gradient norm
    sums, highest = torch.zeros(n), torch.zeros(n)
    train, rng = data["train"], np.random.default_rng(derive_seed(seed, "batches", 0))
    noise = torch.Generator().manual_seed(derive_seed(seed, "noise", 0))
    for step in range(1, steps + 1):
        chosen = rng.choice(len(train.frames), BATCH, replace=False)
        frames = torch.nn.utils.rnn.pad_sequence([train.frames[i] for i in chosen], batch_first=True)
        tokens = [train.tokens[i] for i in chosen]
        frames = frames + family.noise * torch.randn(frames.shape, generator=noise)
        frames = frames + family.offset * torch.randn(BATCH, 1, INPUTS, generator=noise)
        keep = (torch.rand(BATCH, frames.shape[1], WIDTH, generator=noise) >= DROPOUT) / (1 - DROPOUT)
        log_probs = encode(weights, frames, keep)
        lengths = torch.tensor([len(t) for t in tokens])
        losses = functional.ctc_loss(
            log_probs.permute(2, 0, 1, 3).reshape(frames.shape[1], n * BATCH, N_CLASSES),
            torch.tensor([token for _ in cells for t in tokens for token in t]),
            torch.tensor([len(train.frames[i]) for i in chosen]).repeat(n),
            lengths.repeat(n),
            blank=BLANK,
            reduction="none",
            zero_infinity=True,
        ).reshape(n, BATCH)
        per_token, per_trial = (losses / lengths).mean(1), losses.mean(1)
        loss = torch.where(by_token, per_token, per_trial)
        gradients = dict(zip(weights, torch.autograd.grad(loss.sum(), list(weights.values())), strict=True))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        alive &= loss.detach().isfinite() & norms.isfinite()
        factor = torch.where(alive, (column["clip"] / (norms + 1e-6)).clamp(max=1.0), torch.zeros(n))
        rate = column["rate"] * min(1.0, (step - 1) / family.warmup if family.warmup else 1.0)
        _update(weights, gradients, moments, factor, rate, column["eps"], alive, step, family)
        sums += torch.where(alive, per_token.detach(), torch.zeros(n))
        highest = torch.maximum(highest, torch.where(alive, norms, torch.zeros(n)))
        if step % LOG_EVERY == 0:
            for i in range(n):
                if alive[i]:
                    rows[i].append((float(sums[i]) / LOG_EVERY / math.log(N_CLASSES), float(highest[i])))
            sums, highest = torch.zeros(n), torch.zeros(n)
    pers = validate(weights, data["val"])
    seconds = time.process_time() - started
    return [
        {
            **{"family": name, "seed": seed, **cell, "steps": steps, "per": pers[i] if alive[i] else None},
            "cpu_seconds": seconds / n,
            "losses": [float(f"{loss:.4g}") for loss, _ in rows[i]],
            "norms": [float(f"{norm:.4g}") for _, norm in rows[i]],
        }
        for i, cell in enumerate(cells)
    ]


@torch.no_grad()
def _update(
    weights: dict[str, Tensor],
    gradients: dict[str, Tensor],
    moments: dict[str, list[Tensor]],
    factor: Tensor,
    rate: Tensor,
    eps: Tensor,
    alive: Tensor,
    step: int,
    family: Family,
) -> None:
    """Apply Adam or AdamW with a learning rate, an eps and a clipping factor for each cell."""
    for name, weight in weights.items():
        gradient = torch.where(alive[:, None, None], gradients[name], 0.0) * factor[:, None, None]
        if not family.decoupled:
            gradient = gradient + family.weight_decay * weight
        first, second = moments[name]
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (second / (1 - 0.999**step)).sqrt_().add_(eps[:, None, None])
        step_size = torch.where(alive, rate, torch.zeros_like(rate))[:, None, None]
        if family.decoupled and not name.endswith("bias"):
            weight.mul_(1 - step_size * family.weight_decay)
        weight.sub_(step_size * (first / (1 - 0.9**step)) / scale)


@torch.no_grad()
def validate(weights: dict[str, Tensor], data: Data) -> list[float | None]:
    """Return the PER of every cell."""
    scores: list[list[Any]] = [[] for _ in weights["input"]]
    order = sorted(range(len(data.frames)), key=lambda i: len(data.frames[i]))
    for start in range(0, len(order), 8):
        chosen = order[start : start + 8]
        frames = torch.nn.utils.rnn.pad_sequence([data.frames[i] for i in chosen], batch_first=True)
        log_probs = encode(weights, frames, None).numpy()
        for cell, found in enumerate(scores):
            for row, i in enumerate(chosen):
                found.append(score(data.tokens[i], greedy(log_probs[cell, row, : len(data.frames[i])])))
    return [total(found).rate for found in scores]


def judge(records: Sequence[dict[str, Any]]) -> None:
    """Add `exploded_at`, the step of the first explosion, and `lowest_loss` and `last_loss` over 100 steps."""
    official = {
        (r["family"], r["seed"], r["clip"], r["reduction"]): max(r["norms"])
        for r in records
        if all(r[name] == FAMILIES[r["family"]].levels[name][0] for name in ("eps", "rate"))
    }
    for r in records:
        limit = EXPLODED * official[r["family"], r["seed"], r["clip"], r["reduction"]]
        high = [i for i, norm in enumerate(r["norms"]) if norm > limit]
        if len(r["norms"]) < r["steps"] // LOG_EVERY:
            high.append(len(r["norms"]))  # not finite
        r["exploded_at"] = LOG_EVERY * (high[0] + 1) if high else None
        r["share"] = len(high) / (r["steps"] // LOG_EVERY)
        means = [float(np.mean(r["losses"][i : i + 5])) for i in range(len(r["losses"]) - 4)]
        r["lowest_loss"], r["last_loss"] = (min(means), means[-1]) if means else (None, None)


# --- tables --------------------------------------------------------------------------------------------------------


def print_tables(records: Sequence[dict[str, Any]]) -> None:
    for name in FAMILIES:
        found = [r for r in records if r["family"] == name]
        if found:
            print(f"\nfamily {name}: {len(found)} runs of {found[0]['steps']} steps")
            _print_cells(name, found)
            _print_effects(name, found)


def _print_cells(name: str, records: Sequence[dict[str, Any]]) -> None:
    header = [
        *FACTORS,
        "exploded (95 %)",
        "first at step",
        "share of steps",
        "at chance level",
        "PER in %, mean (seeds)",
    ]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for levels in itertools.product(*FAMILIES[name].levels.values()):
        runs = [r for r in records if tuple(r[f] for f in FACTORS) == levels]
        if not runs:
            continue
        n, k = len(runs), sum(map(_exploded, runs))
        low, high = wilson(k, n)
        steps = [r["exploded_at"] for r in runs if _exploded(r)]
        pers = [100 * _per(r) for r in runs]
        values = [*map(_level, levels), f"{k} of {n} ({100 * low:.0f} to {100 * high:.0f} %)"]
        values += [str(min(steps)) if steps else "–", f"{100 * np.mean([r['share'] for r in runs]):.0f} %"]
        values.append(str(sum(r["last_loss"] is None or r["last_loss"] > AT_CHANCE for r in runs)))
        values.append(f"{sum(pers) / n:.1f} ({', '.join(f'{p:.0f}' for p in pers)})")
        print(f"| {' | '.join(values)} |")


def _print_effects(name: str, records: Sequence[dict[str, Any]]) -> None:
    """Print the effect of each factor over pairs of runs that differ in this factor only."""
    effects = []
    for factor, levels in FAMILIES[name].levels.items():
        keys = [key for key in (*FACTORS, "seed") if key != factor]
        by_level = {level: {tuple(r[k] for k in keys): r for r in records if r[factor] == level} for level in levels}
        for a, b in itertools.pairwise(levels):
            pairs = [(by_level[a][key], by_level[b][key]) for key in sorted(by_level[a], key=str) if key in by_level[b]]
            more = sum(_exploded(y) and not _exploded(x) for x, y in pairs)
            fewer = sum(_exploded(x) and not _exploded(y) for x, y in pairs)
            by_seed = [
                np.mean([100 * (_per(y) - _per(x)) for x, y in pairs if x["seed"] == seed])
                for seed in sorted({x["seed"] for x, _ in pairs})
            ]
            effects.append((f"{factor} {_level(a)} → {_level(b)}", len(pairs), more, fewer, by_seed))
    adjusted = holm([_sign_test(more, fewer) for _, _, more, fewer, _ in effects])
    print("\n| change | pairs | explodes only after it | only before | p (Holm) | PER in points, by seed |")
    print("|---|---|---|---|---|---|")
    for (change, n, more, fewer, by_seed), p in zip(effects, adjusted, strict=True):
        points = ", ".join(f"{value:+.1f}" for value in by_seed)
        print(f"| {change} | {n} | {more} | {fewer} | {p:.2g} | {np.mean(by_seed):+.1f} ({points}) |")


def _exploded(record: dict[str, Any]) -> bool:
    return record["exploded_at"] is not None


def _per(record: dict[str, Any]) -> float:
    """PER at the last step; 1 for a run that ended with non-finite numbers."""
    return 1.0 if record["per"] is None else record["per"]


def _level(value: Any) -> str:
    return "none" if value is None else value.split("_")[0] if isinstance(value, str) else f"{value:g}"


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share (Wilson 1927)."""
    centre, half = (k + z * z / 2) / (n + z * z), z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _sign_test(more: int, fewer: int) -> float:
    """Return the two-sided p-value of the exact McNemar test on discordant pairs."""
    n = more + fewer
    tail = sum(math.comb(n, i) for i in range(min(more, fewer) + 1)) / 2**n
    return min(1.0, 2 * tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of data and results")
    parser.add_argument("--families", default=",".join(FAMILIES), help="24, 25 or both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="shorter runs, to try the script")
    parser.add_argument("--table", action="store_true", help="only summarise finished cells")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, families = args.out / "cells.jsonl", args.families.split(",")
    records = read_jsonl(results) if results.exists() else []
    if not args.table:
        data = load_data(make_store(args.out, "demo"))
        for seed, name in itertools.product(range(args.seeds), families):
            if any((r["family"], r["seed"]) == (name, seed) for r in records):
                continue
            found = train_seed(name, seed, data, args.steps)
            append_jsonl(results, *found)
            records += found
            print(f"{name} seed {seed}: {sum(r['cpu_seconds'] for r in found):.0f} CPU seconds", flush=True)
    judge(records)
    print_tables([r for r in records if r["family"] in families])


if __name__ == "__main__":
    main()
