"""Contribution of each component of MODE-SSM on simulated recordings at an equal budget.

    python benchmarks/mode_ssm.py --data data/demo/store --out runs/mode-ssm [--seeds 0 1 2] [--only ssm-ctc ...]

Every row is an ordinary run folder below OUT; complete runs are not repeated, so the command can be
stopped and resumed. The recordings are those of `arcuate demo` (six sessions, 64 electrodes, difficulty real).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from arcuate.data.alphabet import CLASSES
from arcuate.experiments.recipe import load_recipe
from arcuate.models.config import ModelConfig
from arcuate.models.interfaces import ModelInputs
from arcuate.models.model import Model, count_parameters
from arcuate.run import Run
from arcuate.training.step import encode_for_training

STEPS = 600
SSM = [
    *(
        "encoder.kind=ssm",
        "encoder.width=128",
        "encoder.depth=3",
        "encoder.n_heads=4",
        "encoder.state_dim=32",
    ),
    *("encoder.conv_kernel=4", "encoder.dropout=0.1"),
]
BOTH = ["transducer.enabled=true", "transducer.width=128", "loss.ctc.weight=0.3"]
MODE = ["mode.enabled=true", "mode.labels=ignore"]
FLOW = ["denoiser.enabled=true"]
STAGES = """stages=[
 {name: ctc, steps: 150, losses: {ctc: 1.0}, train: [front_end, encoder, ctc], schedule: "on"},
 {name: transducer, steps: 200, losses: {ctc: 0.3, rnnt: 1.0}, train: [front_end, encoder, ctc, transducer],
  schedule: "on"},
 {name: mode, steps: 150, losses: {ctc: 0.3, rnnt: 1.0, mode: 0.1},
  train: [front_end, encoder, ctc, transducer, mode], schedule: "on"},
 {name: denoise, steps: 100, losses: {ctc: 0.3, rnnt: 1.0, mode: 0.1, denoise: 0.05}, lr_factor: 0.3}]"""
VARIANTS = {
    "gru-ctc": [],
    "gru-both": BOTH,
    "ssm-ctc": SSM,
    "ssm-both": [*SSM, *BOTH],
    "ssm-curriculum": [*SSM, *BOTH[:2], *MODE, *FLOW, STAGES],
    "ssm-ctc-mode": [*SSM, *MODE],
    "ssm-ctc-flow": [*SSM, *FLOW],
    "ssm-ctc-deeper": [*SSM, "encoder.depth=4"],  # is the bridge more than another layer?
}
ARCUATE = [sys.executable, "-m", "arcuate"]
DECODINGS = {  # name: how it is args for
    "ctc": ("--head", "ctc"),
    "ctc-beam": ("--head", "ctc", "--beam", "20"),
    "transducer": ("--head", "transducer"),
    "both": ("--head", "both"),
}


def arguments(variant: str, seed: int) -> list[str]:
    return [f"train.seed={seed}", f"train.steps={STEPS}", "runtime.threads=1", *VARIANTS[variant]]


def train(variant: str, seed: int, data: Path, out: Path) -> None:
    """Train one run, or resume it."""
    args = ["--data", str(data), "--run", str(out / f"{variant}-s{seed}"), "--resume"]
    subprocess.run([*ARCUATE, "train", "tiny", *args, *arguments(variant, seed)], check=True)


def evaluate(variant: str, seed: int, reading: str, data: Path, out: Path) -> None:
    """The weights of the last step, so that nothing is selected on the trials that are scored."""
    folder = out / f"{variant}-s{seed}"
    has_head = reading.startswith("ctc") or "transducer.enabled=true" in VARIANTS[variant]
    if has_head and not Run(folder).results_file("val", reading, "json").exists():
        args = ["--data", str(data), *DECODINGS[reading], "--label", reading]
        subprocess.run([*ARCUATE, "evaluate", f"{folder}@last", *args], check=True, stdout=subprocess.DEVNULL)


def costs(variant: str, n_steps: int = 6) -> tuple[int, float, float]:
    """Parameters, seconds per training step (batch 16, 500 bins, 35 tokens) and milliseconds per streamed frame."""
    from arcuate.losses.combined import compute_losses, weighted_loss

    torch.set_num_threads(1)
    recipe = load_recipe("tiny", arguments(variant, 0))
    config = ModelConfig(settings=recipe.model, n_channels=128, sessions=tuple("abcdef"), classes=CLASSES)
    torch.manual_seed(0)
    model = Model(config)
    bins, tokens = torch.randn(16, 500, 128), torch.randint(1, 41, (16, 35))
    n_bins, n_tokens, session = (
        torch.full((16,), 500),
        torch.full((16,), 35),
        torch.zeros(16, dtype=torch.int64),
    )
    seconds = []
    for _ in range(n_steps):
        started = time.process_time()
        outputs = encode_for_training(model, ModelInputs(bins, n_bins, session, tokens, bins), match_flow=True)
        wanted = torch.full((16, 2), 0.5)
        weighted_loss(compute_losses(outputs, tokens, n_tokens, recipe.loss, wanted), recipe.loss).mean().backward()
        seconds.append(time.process_time() - started)
    return count_parameters(config), min(seconds), stream_ms(model.eval())


@torch.inference_mode()
def stream_ms(model: Model, n_bins: int = 800) -> float:
    """CPU time of one frame, four bins at a time, after the first hundred bins."""
    from arcuate.data.batching import BatchStatistics

    state = model.start(0, BatchStatistics(torch.zeros(1, 128), torch.ones(1, 128), torch.tensor([1000])))
    bins, spent = torch.randn(1, n_bins, 128), []
    for first in range(0, n_bins, 4):
        started = time.process_time()
        _, state = model.step(state, bins[:, first : first + 4])
        spent.append(time.process_time() - started)
    return 1000 * statistics.median(spent[25:])


def summary(folder: Path, reading: str) -> dict | None:
    file = Run(folder).results_file("val", reading, "json")
    return json.loads(file.read_text()) if file.exists() else None


def spread(values: list[float]) -> str:
    if not values:
        return "–"
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def table(out: Path, seeds: list[int]) -> str:
    lines = [
        "| | seeds | CTC | CTC, beam 20 | transducer | both | silent | vocalised | mode accuracy |"
        " parameters | s/step | ms/frame |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        found = {r: [s for n in seeds if (s := summary(out / f"{variant}-s{n}", r))] for r in DECODINGS}
        ctc = found["ctc"]
        modes = [spread([s["per_by_mode"][m] for s in ctc]) for m in ("silent", "vocalised")]
        accuracy = spread([s["mode_accuracy"] for s in ctc if "mode_accuracy" in s])
        n, step, frame = costs(variant)
        cells = [
            variant,
            str(len(ctc)),
            *(spread([s["per"] for s in found[r]]) for r in DECODINGS),
            *modes,
            accuracy,
        ]
        lines.append("| " + " | ".join([*cells, f"{n:,}", f"{step:.2f}", f"{frame:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--table", action="store_true", help="only the table of what is there")
    args = parser.parse_args()
    for seed in () if args.table else args.seeds:
        for variant in args.only:
            train(variant, seed, args.data, args.out)
            evaluate(variant, seed, "ctc", args.data, args.out)
    for reading in list(DECODINGS)[1:] if not args.table else ():
        for seed in args.seeds:
            for variant in args.only:
                evaluate(variant, seed, reading, args.data, args.out)
    print(table(args.out, args.seeds))


if __name__ == "__main__":
    main()
