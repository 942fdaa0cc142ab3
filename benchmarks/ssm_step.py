"""The state-space encoder against the GRU at equal width and depth, on one thread: training steps and streaming.

A training step is forward, loss, backward, clipping and optimizer of a complete model; the models alternate, so that
a busy machine affects all alike. Streaming is timed after a short and after a long history.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from arcuate.data.alphabet import CLASSES
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.config import FrontEndSettings, GRUSettings, ModelConfig, ModelSettings, Patch, SSMSettings
from arcuate.models.gru import GRU
from arcuate.models.model import Model
from arcuate.models.ssm import SSM

WIDTH, N_CHANNELS, N_TOKENS = 512, 512, 40
PATCH = Patch(bins=14, stride=4)


class TorchGRU(GRU):
    """The same encoder with torch.nn.GRU's own recurrence, as on other devices."""

    def forward_with_layers(self, bins: Any, n_frames: Any, state: Any, layers: Any, lengths: Any = None) -> Any:
        return self._forward_torch(bins, n_frames, state, layers, lengths)


def make_model(side: str, depth: int) -> Model:
    encoder = (
        SSMSettings(width=WIDTH, depth=depth, dropout=0.1)
        if side == "ssm"
        else GRUSettings(width=WIDTH, depth=depth, dropout=0.1)
    )
    settings = ModelSettings(front_end=FrontEndSettings(patch=PATCH), encoder=encoder)
    model = Model(ModelConfig(settings=settings, n_channels=N_CHANNELS, sessions=("s",), classes=CLASSES))
    if side == "torch gru":
        assert isinstance(encoder, GRUSettings)
        model.encoder = TorchGRU(encoder, PATCH, N_CHANNELS)
    return model


def training_step(side: str, n_trials: int, n_frames: int, depth: int) -> Callable[[], float]:
    torch.manual_seed(0)
    n_bins = PATCH.bins + PATCH.stride * (n_frames - 1)
    bins, lengths = torch.randn(n_trials, n_bins, N_CHANNELS), torch.full((n_trials,), n_bins)
    tokens = torch.randint(1, len(CLASSES), (n_trials, N_TOKENS))
    model = make_model(side, depth).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        outputs = model(bins, lengths, torch.zeros(n_trials, dtype=torch.int64))
        n_tokens = torch.full((n_trials,), N_TOKENS)
        loss = ctc_loss(outputs.log_probs["ctc"], outputs.n_frames, tokens, n_tokens, CTCSettings()).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return loss.item()

    return step


def layer_step(side: str, n_trials: int, n_frames: int) -> Callable[[], None]:
    """Two layers of a stack, which is what a deep encoder consists of; no patches, no head."""
    torch.manual_seed(0)
    frames, patch = torch.randn(n_trials, n_frames, WIDTH), Patch(bins=1, stride=1)
    encoder: GRU | SSM
    if side == "ssm":
        encoder = SSM(SSMSettings(width=WIDTH, depth=2, dropout=0.1), patch, WIDTH)
    else:
        kind = TorchGRU if side == "torch gru" else GRU
        encoder = kind(GRUSettings(width=WIDTH, depth=2, dropout=0.1), patch, WIDTH)

    def step() -> None:
        encoder(frames, None, encoder.start(n_trials))[0].square().sum().backward()

    return step


def cpu_seconds(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {side: [] for side in steps}
    for repeat in range(repeats + 1):
        for side, step in steps.items():
            start = time.process_time()
            step()
            if repeat:
                times[side].append(time.process_time() - start)
    return {side: statistics.median(values) for side, values in times.items()}


def streaming_ms(side: str, past: int, depth: int, repeats: int = 60) -> float:
    """Median CPU milliseconds per frame after `past` frames."""
    torch.manual_seed(0)
    encoder: Any = make_model(side, depth).eval().encoder
    bins = torch.randn(1, PATCH.bins, N_CHANNELS)
    with torch.inference_mode():
        _, state = encoder.step(encoder.start(1), torch.randn(1, PATCH.bins + PATCH.stride * (past - 1), N_CHANNELS))
        times = []
        for _ in range(repeats):
            start = time.process_time()
            _, state = encoder.step(state, bins)
            times.append(time.process_time() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides, size = ("gru", "torch gru", "ssm"), (arguments.trials, arguments.frames)
    model = cpu_seconds({s: training_step(s, *size, arguments.depth) for s in sides}, arguments.repeats)
    layers = cpu_seconds({s: layer_step(s, *size) for s in sides}, arguments.repeats)
    result: dict[str, Any] = {
        "step_s": model,
        "step_ratio": {s: model["ssm"] / model[s] for s in sides},
        "layers_s": layers,
        "layers_ratio": {s: layers["ssm"] / layers[s] for s in sides},
        "stream_ms": {s: {n: streaming_ms(s, n, arguments.depth) for n in (10, 2000)} for s in ("gru", "ssm")},
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"width {WIDTH}, depth {arguments.depth}, {size[0]} trials x {size[1]} frames, one thread, CPU seconds")
    for name, seconds in (("training step", model), ("two layers", layers)):
        shown = ", ".join(f"{s} {t:.2f} (ssm is {seconds['ssm'] / t:.2f} of it)" for s, t in seconds.items())
        print(f"{name}: {shown}")
    for side, by_past in result["stream_ms"].items():
        print(f"streaming, {side}: " + ", ".join(f"{ms:.2f} ms after {n} frames" for n, ms in by_past.items()))


if __name__ == "__main__":
    main()
