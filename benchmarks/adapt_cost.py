"""Cost of one adapted trial at full size: CPU seconds of one thread and memory, compared with decoding it.

python benchmarks/adapt_cost.py

A trial of six seconds (300 bins) and 24 phonemes; random weights, which do not affect the cost. Each row is a separate
process, so that memory peaks are separate. The published one-step method reports 18 ms and 1.3 GiB for a
Transformer, 28 ms and 2.9 GiB for a GRU, with 64 copies on a GPU (arXiv 2507.02800).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from arcuate.adaptation.config import Adaptation, Safety
from arcuate.adaptation.online import compute_log_probs, make_adapter
from arcuate.adaptation.state import DecodedTrial
from arcuate.data.alphabet import CLASSES
from arcuate.evaluation.transcribe import peak_rss_mb
from arcuate.experiments.recipe import load_recipe
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model, count_parameters

RECIPES = ("tiny", "b2t24-gru", "b2t25-gru", "b2t24-transformer", "b2t25-transformer", "mode-ssm")
EVERY = Safety(min_confidence=0.0, max_disagreement=10.0)
N_BINS, N_TOKENS, N_TIMED = 300, 24, 3


def cost(name: str, n_copies: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = load_recipe(name)
    n_channels = 128 if name == "tiny" else recipe.data.published.channels
    config = ModelConfig(settings=recipe.model, n_channels=n_channels, sessions=("a",), classes=CLASSES)
    generator = torch.Generator().manual_seed(0)
    settings = Adaptation(method="one-step", copies=n_copies, safety=EVERY)
    adapter = make_adapter(Model(config), settings, recipe.augment)
    bins = torch.randn(N_BINS, n_channels, generator=generator)
    label = tuple(torch.randint(1, len(CLASSES), (N_TOKENS,), generator=generator).tolist())
    state = adapter.start("a")
    decoding, adaptation, before = [], [], 0.0
    for _ in range(N_TIMED + 1):  # the first warms up
        started = time.process_time()
        log_probs = compute_log_probs(adapter.adapted_model(state), bins)
        decoding.append(time.process_time() - started)
        before = before or peak_rss_mb()
        started = time.process_time()
        state, _ = adapter.update(state, DecodedTrial(bins, log_probs, label), log_probs)
        adaptation.append(time.process_time() - started)
    if state.n_steps != N_TIMED + 1:
        sys.exit(f"{name}: {state.n_steps} steps instead of {N_TIMED + 1}")
    return {
        "parameters": count_parameters(config),
        "decoding": statistics.median(decoding[1:]),
        "adaptation": statistics.median(adaptation[1:]),
        "memory_mb": peak_rss_mb() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--copies", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--one", action="store_true", help="only the first of each, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(cost(args.recipes[0], args.copies[0])))
        return
    print("| recipe | parameters | copies | s to decode a trial | s to adapt to it | additional MB |")
    print("|---|---|---|---|---|---|")
    for name in args.recipes:
        for n in args.copies:
            command = [sys.executable, __file__, "--one", "--recipes", name, "--copies", str(n)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            result = json.loads(done.stdout)
            print(
                f"| `{name}` | {result['parameters']:,} | {n} | {result['decoding']:.2f} | {result['adaptation']:.2f} |"
                f" {result['memory_mb']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
