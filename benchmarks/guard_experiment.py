"""Effect of the guard: learning rates at which `tiny` diverges, with and without the guard, and the healthy recipe.

python benchmarks/guard_experiment.py --data data/demo/store --out runs/guard

Complete runs in --out are not trained again. `pictures.py` draws them.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from arcuate.files import read_jsonl
from arcuate.run import Run


@dataclass(frozen=True)
class Arm:
    name: str
    label: str
    colour: str
    overrides: tuple[str, ...] = ()


NO_WARMUP = "schedule={kind: warmup_cosine, peak_lr: 0.02, min_lr: 0.00003}"
ARMS = (
    Arm("healthy", "tiny unchanged (peak 0.003)", "#2b6cb0"),
    Arm("wild", "peak 0.02, no warm-up, guard", "#2f855a", (NO_WARMUP,)),
    Arm("wild-warmup", "peak 0.03, guard", "#b7791f", ("schedule.peak_lr=0.03",)),
    Arm("wild-off", "peak 0.02, no warm-up, no guard", "#c53030", (NO_WARMUP, "guard.enabled=false")),
)


def train(arm: Arm, data: Path, out: Path) -> Run:
    run = Run(out / arm.name)
    command = ["arcuate", "train", "tiny", "--data", str(data), "--run", str(run.path), "--resume"]
    subprocess.run([sys.executable, "-m", *command, *arm.overrides], check=True)
    return run


def validations(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], 100 * row["per"]) for row in rows if row.get("per") is not None]


def draw(runs: dict[Arm, Run], path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "arcuate"
    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    for arm, run in runs.items():
        steps, rates = zip(*validations(read_jsonl(run.metrics_file)), strict=True)
        axes.plot(steps, rates, color=arm.colour, label=arm.label, marker="o", markersize=3)
        for row in read_jsonl(run.incidents_file):
            undone = validations(row.get("rows", []))
            if undone:
                axes.plot(*zip(*undone, strict=True), color=arm.colour, linestyle=":", marker="x")
                axes.annotate(
                    f"stuck: rewound to step {row['rewound_to']}, learning rate × {row['lr_scale']:g}",
                    undone[-1],
                    textcoords="offset points",
                    xytext=(6, -16 if arm.name == "wild" else 12),
                    fontsize=8,
                    color=arm.colour,
                )
    axes.set(xlabel="kept optimizer steps", ylabel="validation PER, %", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    args = parser.parse_args()
    runs = {arm: train(arm, args.data, args.out) for arm in ARMS}
    last = {arm: validations(read_jsonl(run.metrics_file))[-1] for arm, run in runs.items()}
    healthy = last[ARMS[0]][1]
    print("| | steps kept | PER | relative to healthy |\n|---|---|---|---|")
    for arm, (step, per) in last.items():
        print(f"| {arm.label} | {step} | {per:.1f} % | {100 * (per / healthy - 1):+.0f} % |")


if __name__ == "__main__":
    main()
