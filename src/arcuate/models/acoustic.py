"""`TorchModel`: a model as decoders use it, with arrays in and out. Exported models have the same interface."""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from arcuate.data.batching import BatchStatistics
from arcuate.data.statistics import Statistics
from arcuate.data.trial import BIN_MS
from arcuate.models.interfaces import Outputs
from arcuate.models.layout import Frames, Layout, ModelDelay
from arcuate.models.model import Model, StreamState, build_on_meta
from arcuate.models.transducer import ArrayHead


@dataclass(frozen=True)
class TorchState:
    """State of a stream within a trial. A bidirectional model keeps the bins and computes all frames at the end."""

    model: Model  # normalises as in training, or by past bins
    stream: StreamState | None  # None for a bidirectional model
    session: int = 0
    statistics: BatchStatistics | None = None
    bins: tuple[torch.Tensor, ...] = ()  # (1, t, C) each, of a bidirectional model


@dataclass(frozen=True, eq=False)
class TorchModel:
    """Bins to frames: `start`, `step`, `finish` with an immutable state."""

    model: Model

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)

    @cached_property
    def layout(self) -> Layout:
        config, front_end = self.model.config, self.model.config.settings.front_end
        return Layout(
            config.classes,
            config.sessions,
            config.n_channels,
            front_end.patch.bins,
            front_end.patch.stride,
            self.model.front_end.right,
            front_end.normalise,
            front_end.log1p,
            front_end.rolling_bins,
            model_delay(self.model),
        )

    @cached_property
    def identity(self) -> str:
        """Hash of the weights."""
        digest = hashlib.blake2b(digest_size=20)
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def rolling(self) -> Model:
        """The same weights, normalising by past bins instead of by block."""
        settings = self.model.config.settings
        if settings.front_end.normalise != "block":
            return self.model
        front_end = settings.front_end.model_copy(update={"normalise": "rolling"})
        config = self.model.config.model_copy(update={"settings": settings.model_copy(update={"front_end": front_end})})
        rolling = build_on_meta(config)
        rolling.load_state_dict(self.model.state_dict(keep_vars=True), assign=True)
        return rolling.eval()

    @cached_property
    def transducer(self) -> ArrayHead | None:
        head = self.model.transducer
        return None if head is None else head.for_search()

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    def start(self, session: str, statistics: Statistics | None, rolling: bool = False) -> TorchState:
        """State before the first bin; `rolling` uses running statistics for a model trained on block statistics."""
        model = self.rolling if rolling else self.model
        return start_stream(model, self.layout.sessions.index(session), batch_statistics(statistics, self.device))

    def step(self, state: TorchState, bins: np.ndarray) -> tuple[Frames, TorchState]:
        """Next stored bins (t, C), any number -> the frames they complete, and the state after them."""
        tensor = torch.from_numpy(bins)[None].to(self.device)
        if state.stream is None:
            return self._no_frames, replace(state, bins=(*state.bins, tensor))
        with torch.inference_mode():
            outputs, stream = state.model.step(state.stream, tensor)
        return to_frames(outputs), replace(state, stream=stream)

    def precompute(self, state: TorchState) -> TorchState:
        """Compute the part of the next frame that does not depend on the next bins."""
        if state.stream is None:
            return state
        with torch.inference_mode():
            return replace(state, stream=state.model.precompute(state.stream))

    def finish(self, state: TorchState) -> Frames:
        """End the trial: return the frames held back so far."""
        with torch.inference_mode():
            if state.stream is not None:
                return to_frames(state.model.finish(state.stream))
            if not state.bins:
                return self._no_frames
            bins = torch.cat(state.bins, dim=1)
            n_bins, session = torch.tensor([bins.shape[1]]), torch.tensor([state.session])
            outputs = state.model(bins, n_bins.to(self.device), session.to(self.device), state.statistics)
            return to_frames(outputs)

    @property
    def _no_frames(self) -> Frames:
        return Frames(
            np.empty((0, len(self.layout.classes)), np.float32),
            np.empty((0, self.model.encoder.n_outputs), np.float32),
        )


def start_stream(model: Model, session: int, statistics: BatchStatistics | None) -> TorchState:
    """State of a trial before its first bin."""
    stream = model.start(session, statistics) if model.config.settings.encoder.causal else None
    return TorchState(model, stream, session, statistics)


def to_frames(outputs: Outputs) -> Frames:
    """Outputs of a batch of one."""
    n = int(outputs.n_frames[0])
    return Frames(
        outputs.log_probs["ctc"][0, :n].float().cpu().numpy(),
        outputs.frames[0, :n].float().cpu().numpy(),
    )


def batch_statistics(statistics: Statistics | None, device: torch.device) -> BatchStatistics | None:
    """Statistics of one trial as a batch of one."""
    if statistics is None:
        return None
    return BatchStatistics(
        torch.from_numpy(np.array(statistics.mean, dtype=np.float32))[None].to(device),
        torch.from_numpy(np.array(statistics.sd, dtype=np.float32))[None].to(device),
        torch.tensor([statistics.n_bins], device=device),
    )


def model_delay(model: Model) -> ModelDelay:
    """Delay of a model: smoothing and stride from its settings, the encoder by measurement."""
    smoothing, stride = model.front_end.right, model.config.settings.front_end.patch.stride
    if not model.config.settings.encoder.causal:
        return ModelDelay(float(smoothing * BIN_MS), float((stride - 1) * BIN_MS), math.inf)
    encoder = max(0, _measure_delay(model) - smoothing)
    return ModelDelay(*(float(n * BIN_MS) for n in (smoothing, stride - 1, encoder)))


def _measure_delay(model: Model) -> int:
    """Largest number of bins between the last bin of a patch and its frame, over a stream of zeros."""
    patch = model.config.settings.front_end.patch
    device = model.head.weight.device
    zeros = torch.zeros(1, model.config.n_channels, device=device)
    statistics = BatchStatistics(zeros, zeros + 1, torch.zeros(1, dtype=torch.int64, device=device))
    state, n_out, delay = model.start(0, statistics), 0, 0
    with torch.inference_mode():
        for n_in in range(1, patch.bins + 40 * patch.stride + model.front_end.right):
            outputs, state = model.step(state, zeros[None])
            for frame in range(n_out, n_out + outputs.frames.shape[1]):
                delay = max(delay, n_in - (frame * patch.stride + patch.bins))
            n_out += outputs.frames.shape[1]
            due = patch.count_frames(n_in) if n_in >= patch.bins else 0
            if due > n_out:  # still held back
                delay = max(delay, n_in - (n_out * patch.stride + patch.bins))
    return delay
