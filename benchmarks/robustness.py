"""Robustness to corrupted input over models and seeds, with defences at test time and channel dropout in training.

python benchmarks/robustness.py --out runs/robustness --seeds 3

Per seed: one simulated cohort, and a GRU and a state-space model of `tiny` size, each trained without and with channel
dropout; all are measured with `bench_robustness`. Prints the mean corruption error by model, training and defence, with
95 % intervals over seeds (t distribution), and the ratio to the undefended model without channel dropout. Runs that
were measured before are not repeated.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy import stats

from arcuate.data.prepare import prepare_store
from arcuate.data.simulation import simulate
from arcuate.evaluation.robustness import bench_robustness
from arcuate.experiments.train import train
from arcuate.files import read_json

ENCODERS = {
    "GRU": ("encoder.width=96", "schedule.peak_lr=0.005"),
    "SSM": ("encoder.kind=ssm", "encoder.width=96", "encoder.depth=2", "encoder.n_heads=4", "encoder.state_dim=32"),
}
TRAINING = {"as in the recipe": (), "channel dropout 20 %": ("augment.channel_dropout=0.2",)}
UNDEFENDED = "undefended"


def measure(out: Path, seed: int, encoder: str, training: str, args: argparse.Namespace) -> dict[str, float]:
    """Clean PER and mean corruption error by defence, in per cent."""
    name = f"{encoder}-{'dropout' if TRAINING[training] else 'plain'}-{seed}"
    run, store = out / "runs" / name, out / f"store-{seed}"
    file = run / "results" / "robustness" / "val.json"
    if not file.exists():
        if not store.exists():
            simulate(out / f"source-{seed}", n_sessions=3, n_trials=200, n_electrodes=48, difficulty="real", seed=seed)
            prepare_store(out / f"source-{seed}", store)
        changes = [f"train.steps={args.steps}", f"train.seed={seed}", f"train.validate_every={args.steps}"]
        changes += [f"train.checkpoint_every={args.steps}", *ENCODERS[encoder], *TRAINING[training]]
        train("tiny", store, run, overrides=changes)
        bench_robustness(run, n_trials=args.trials, seed=seed)
    found = read_json(file)
    return {name: 100 * value for name, value in {"clean": found["clean_per"], **found["mce"]}.items()}


def interval(values: np.ndarray) -> str:
    """Mean with its 95 % interval over seeds."""
    if len(values) < 2:
        return f"{values.mean():.1f}"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.1f} ± {half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--trials", type=int, default=24)
    args = parser.parse_args()
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        for encoder in ENCODERS:
            for training in TRAINING:
                found.setdefault((encoder, training), []).append(measure(args.out, seed, encoder, training, args))
                print(f"seed {seed}, {encoder}, {training}: {found[encoder, training][-1]}", flush=True)
    print(
        "\n| model | training | clean PER, % | defence | mean corruption error, % | ratio |\n|---|---|---|---|---|---|"
    )
    for (encoder, training), rows in found.items():
        base = np.array([row[UNDEFENDED] for row in found[encoder, next(iter(TRAINING))]])
        for defence in rows[0]:
            if defence == "clean":
                continue
            values, clean = (np.array([row[name] for row in rows]) for name in (defence, "clean"))
            ratio = values / base
            half = "" if len(ratio) < 2 else f" ({ratio.min():.2f} to {ratio.max():.2f})"
            cells = (encoder, training, interval(clean), defence, interval(values), f"{ratio.mean():.2f}{half}")
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
