"""One training step of the '25 model against the plain formulation, on one thread: time and peak memory.

Plain means: depthwise convolution, session weights gathered per trial, patches written out, torch.nn.GRU. `ssm` is the
'25 model with the state-space encoder. All use the same batch, loss, clipping and optimizer.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import child, in_turns
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.data.alphabet import CLASSES
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.config import (
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SessionLayerSettings,
    SmoothingSettings,
    SSMSettings,
)
from arcuate.models.front_end import gaussian_kernel
from arcuate.models.model import Model

SIDES = ("plain", "ours", "ssm")
N_TRIALS, N_BINS, N_CHANNELS, N_SESSIONS, N_TOKENS = 8, 800, 512, 45, 40
PATCH = Patch(bins=14, stride=4)
SMOOTHING = SmoothingSettings(sd=2.0, taps=9)


class Plain(nn.Module):
    """The same network as one would first write it down."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(N_CHANNELS)) for _ in range(N_SESSIONS))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(1, N_CHANNELS)) for _ in range(N_SESSIONS))
        self.gru = nn.GRU(N_CHANNELS * PATCH.bins, 768, 5, batch_first=True, dropout=0.4)
        self.h0 = nn.Parameter(torch.zeros(1, 1, 768))
        self.head = nn.Linear(768, len(CLASSES))
        self.kernel: Tensor
        self.register_buffer("kernel", torch.tensor(gaussian_kernel(SMOOTHING)).repeat(N_CHANNELS, 1, 1))

    def forward(self, bins: Tensor, session: Tensor) -> Tensor:
        x = F.conv1d(bins.permute(0, 2, 1), self.kernel, padding=SMOOTHING.taps // 2, groups=N_CHANNELS).permute(
            0, 2, 1
        )
        weights = torch.stack([self.weights[s] for s in session.tolist()])
        biases = torch.stack([self.biases[s] for s in session.tolist()])
        x = F.dropout(F.softsign(torch.einsum("btc,bcd->btd", x, weights) + biases), 0.2, self.training)
        x = x.unfold(1, PATCH.bins, PATCH.stride).transpose(2, 3).flatten(2)  # (B, F, bins * C)
        x, _ = self.gru(x, self.h0.expand(5, len(x), 768).contiguous())
        return F.log_softmax(self.head(x), dim=-1)


def make_ours(encoder: GRUSettings | SSMSettings) -> Model:
    settings = ModelSettings(
        front_end=FrontEndSettings(smoothing=SMOOTHING, session_layer=SessionLayerSettings(dropout=0.2), patch=PATCH),
        encoder=encoder,
        output_init="xavier",
    )
    sessions = tuple(f"session-{i:02d}" for i in range(N_SESSIONS))
    return Model(ModelConfig(settings=settings, n_channels=N_CHANNELS, sessions=sessions, classes=CLASSES))


def make_step(side: str) -> Callable[[], float]:
    """One closure that trains one step on a fixed batch and returns the loss."""
    torch.manual_seed(0)
    bins = torch.randn(N_TRIALS, N_BINS, N_CHANNELS)
    n_bins = torch.full((N_TRIALS,), N_BINS)
    session = torch.arange(N_TRIALS) // 2
    tokens = torch.randint(1, len(CLASSES), (N_TRIALS, N_TOKENS))
    n_tokens = torch.full((N_TRIALS,), N_TOKENS)
    encoder = (SSMSettings if side == "ssm" else GRUSettings)(width=768, depth=5, dropout=0.4)
    model = (Plain() if side == "plain" else make_ours(encoder)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=0.1, weight_decay=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        if isinstance(model, Model):
            outputs = model(bins, n_bins, session)
            log_probs, n_frames = outputs.log_probs["ctc"], outputs.n_frames
        else:
            log_probs, n_frames = model(bins, session), PATCH.count_frames(n_bins)
        loss = ctc_loss(log_probs, n_frames, tokens, n_tokens, CTCSettings()).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=True, foreach=True)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        step = make_step(arguments.memory)
        for _ in range(3):
            step()
        return
    peak_mb = {side: child(sys.executable, __file__, "--memory", side).peak_mb for side in SIDES}
    timed = in_turns({side: make_step(side) for side in SIDES}, arguments.repeats)
    seconds = {side: statistics.median(values) for side, values in timed.items()}
    print(f"'25 model, {N_TRIALS} trials x {N_BINS} bins, one thread, median of {arguments.repeats}")
    for name, values in (("seconds/step", seconds), ("peak MB", peak_mb)):
        shown = [f"{side} {value:.2f} ({value / values['plain']:.2f} x plain)" for side, value in values.items()]
        print(f"{name:14}{', '.join(shown)}")


if __name__ == "__main__":
    main()
