"""Size of the CTC and transducer losses of an untrained model by reduction, and the effect of padded label lengths.

The first part evaluates an untrained `mode-ssm-small` with a transducer on batches of a store; the second computes
both losses at chance level (all classes equally likely) with true label lengths and with padding counted as labels.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import collate
from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe
from arcuate.losses.combined import compute_losses, ctc_loss
from arcuate.losses.config import CTCSettings, LossSettings, RNNTSettings
from arcuate.losses.rnnt import chunked_rnnt_loss
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model

PAIRS = (
    ("mean_per_token", "mean_per_token"),
    ("sum_per_trial", "sum_per_trial"),
    ("mean_per_token", "sum_per_trial"),
    ("mean_per_token", "half_mean_frames"),
)


@torch.no_grad()
def show_fresh(store: Store, bins: int, stride: int, n_trials: int) -> None:
    torch.manual_seed(0)
    patch = f"front_end.patch={{bins: {bins}, stride: {stride}}}"
    recipe = load_recipe("mode-ssm-small", ["transducer.enabled=true", patch])
    config = ModelConfig(settings=recipe.model, n_channels=store.n_channels, sessions=store.sessions, classes=CLASSES)
    model = Model(config).eval()
    trials = [t for t in store.trials if t.split == "train"][:n_trials]
    places = {session: i for i, session in enumerate(store.sessions)}
    batch = collate(store, trials, places, recipe.front_end.statistics_spec)
    outputs = model(batch.bins, batch.n_bins, batch.session, batch.statistics, batch.tokens)
    n_frames, n_tokens = outputs.n_frames.float().mean(), batch.n_tokens.float().mean()
    print(f"untrained model, patches {bins}/{stride}: {n_frames:.0f} frames, {n_tokens:.0f} tokens on average")
    for ctc, rnnt in PAIRS:
        settings = LossSettings(ctc=CTCSettings(reduction=ctc), rnnt=RNNTSettings(reduction=rnnt))
        losses = {
            k: float(v.mean()) for k, v in compute_losses(outputs, batch.tokens, batch.n_tokens, settings).items()
        }
        ratio = losses["rnnt"] / losses["ctc"]
        print(f"  CTC {ctc} {losses['ctc']:.2f}, RNN-T {rnnt} {losses['rnnt']:.2f}: ratio {ratio:.2f}")


def show_ignorant(n_frames: int, n_tokens: int) -> None:
    log_probs = torch.zeros(1, n_frames, len(CLASSES)).log_softmax(-1)
    tokens = (torch.arange(n_tokens) % 40 + 1)[None]
    lengths = torch.tensor([n_frames]), torch.tensor([n_tokens])
    per_token = CTCSettings(reduction="mean_per_token", zero_infinity=True)
    ctc = ctc_loss(log_probs, lengths[0], tokens, lengths[1], per_token).item()
    join = lambda f, p: torch.zeros(1, f.shape[1], p.shape[1], len(CLASSES))
    sides = torch.zeros(1, n_frames, 1), torch.zeros(1, n_tokens + 1, 1)
    rnnt = chunked_rnnt_loss(join, *sides, tokens, *lengths).item()
    print(f"  {n_frames} frames, {n_tokens} tokens: CTC per token {ctc:.2f}, RNN-T sum per trial {rnnt:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = Store.open(arguments.data)
    show_fresh(store, 14, 4, arguments.trials)
    show_fresh(store, 1, 1, arguments.trials)
    print("chance level")
    for sizes in ((1000, 35), (1000, 500), (300, 500)):
        show_ignorant(*sizes)


if __name__ == "__main__":
    main()
