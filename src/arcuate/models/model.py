"""The model: everything deterministic between stored bins and log-probabilities.

Training, evaluation, live decoding and export all use this class, so normalisation, smoothing, patching and frame
counts cannot differ between them. Nothing random is drawn here except dropout.
"""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.config import component_class
from arcuate.data.batching import BatchStatistics
from arcuate.errors import UserError
from arcuate.models.config import (
    GRUSettings,
    ModelConfig,
    ModelSettings,
    PluginEncoderSettings,
    SSMSettings,
    TransformerSettings,
    full_session_layers,
)
from arcuate.models.denoiser import Denoiser, DenoiserState
from arcuate.models.front_end import FrontEnd, FrontEndState, SessionLayer, normalise
from arcuate.models.gru import GRU
from arcuate.models.interfaces import Encoder, EncoderState, ModelInputs, Outputs, require_causal
from arcuate.models.mode import ModeState, SpeakingMode
from arcuate.models.ssm import SSM
from arcuate.models.transducer import Transducer
from arcuate.models.transformer import Transformer


@dataclass(frozen=True)
class ModeLogits:
    """Logits of the speaking mode of complete trials."""

    per_trial: Tensor  # (B, 2)
    per_bin: Tensor  # (B, T, 2)


@dataclass(frozen=True)
class Encoded:
    """Output of the encoder, before denoiser and heads."""

    frames: Tensor  # (B, F, D)
    n_frames: Tensor  # (B,)
    mode: ModeLogits | None = None
    layers: dict[int, Tensor] = field(default_factory=dict)  # outputs of inner layers (B, F, D)
    lengths: tuple[int, ...] | None = None  # `n_frames` on the host, if known


@dataclass(frozen=True)
class StreamState:
    """State of a stream within a trial. Immutable: `step` returns a new one."""

    front_end: FrontEndState
    encoder: EncoderState
    mode: ModeState | None = None
    denoiser: DenoiserState | None = None
    precomputed: Any = None  # part of the next frame for encoders that support it


class Model(nn.Module):
    """Normalisation, smoothing, session layer, patches, encoder, linear output layer, log-softmax.

    Optional parts: a speaking mode that scales channels before the patches, a denoiser after the encoder, and a
    transducer head.

    Complete trials: `model(bins, n_bins, session, statistics)`. Training applies augmentation between the two halves,
    `encode(ModelInputs(augment(normalise(bins, statistics)), …))`. Streams: `start`, `step`, `finish`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        settings = config.settings
        causal = settings.encoder.causal
        self.front_end = FrontEnd(settings.front_end, config.n_channels, len(config.sessions), causal)
        self.encoder = make_encoder(settings, config.n_channels)
        self.head = nn.Linear(self.encoder.n_outputs, len(config.classes))
        self.transducer: Transducer | None = None
        if settings.transducer.enabled:
            self.transducer = Transducer(settings.transducer, self.encoder.n_outputs, len(config.classes))
        self.mode: SpeakingMode | None = None
        if settings.mode.enabled:
            self.mode = SpeakingMode(settings.mode, settings.front_end.patch, config.n_channels, causal)
        self.denoiser: Denoiser | None = None
        if settings.denoiser.enabled:
            self.denoiser = Denoiser(settings.denoiser, self.encoder.n_outputs, causal)
        if settings.output_init == "xavier" and not self.head.weight.is_meta:
            nn.init.xavier_uniform_(self.head.weight)

    def forward(
        self,
        bins: Tensor,  # (B, T, C)
        n_bins: Tensor,  # (B,)
        session: Tensor,  # (B,)
        statistics: BatchStatistics | None = None,
        tokens: Tensor | None = None,  # (B, U) padded
    ) -> Outputs:
        """Outputs for complete trials of stored bins; `tokens` are the targets of the transducer loss."""
        return self.encode(ModelInputs(self.normalise(bins, statistics), n_bins, session, tokens))

    def normalise(self, bins: Tensor, statistics: BatchStatistics | None = None) -> Tensor:
        """Stored bins to normalised bins. (B, T, C)"""
        self._check_inputs(bins, statistics)
        return normalise(bins, statistics, self.config.settings.front_end)[0]

    def encode(self, inputs: ModelInputs) -> Outputs:
        """Outputs for normalised bins."""
        return self.predict(self.encode_frames(inputs), inputs.tokens)

    def encode_frames(self, inputs: ModelInputs, mode: ModeLogits | None = None) -> Encoded:
        """Front end and encoder; the speaking mode is classified from the clean bins unless it is given."""
        if mode is None:
            mode = self._classify_mode(inputs.bins if inputs.clean is None else inputs.clean, inputs.n_bins)
        ready = self.front_end(inputs.bins, inputs.n_bins, inputs.session)
        if self.mode is not None and mode is not None:
            ready = self.mode.condition(ready, self.front_end.sample(mode.per_bin)[:, : ready.shape[1]])
        n_frames = self.config.settings.front_end.patch.count_frames(inputs.n_bins)
        start: EncoderState = self.encoder.start(len(inputs.bins))
        lengths = self.count_frames(inputs.lengths)
        frames, _, layers = self.encoder.forward_with_layers(ready, n_frames, start, inputs.layers, lengths)
        return Encoded(frames, n_frames, mode, layers, lengths)

    def count_frames(self, n_bins: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Number of frames of trials whose lengths are known on the host."""
        return None if n_bins is None else tuple(map(self.config.settings.front_end.patch.count_frames, n_bins))

    def predict(self, encoded: Encoded, tokens: Tensor | None = None) -> Outputs:
        """Denoiser and heads; inner layers go through the same output layer as the last one."""
        frames = encoded.frames
        if self.denoiser is not None:
            frames = self.denoiser(frames, encoded.n_frames)
        mode = None if encoded.mode is None else encoded.mode.per_trial
        outputs = self._apply_heads(frames, encoded.n_frames, tokens, mode)
        intermediate = {i: self._ctc_log_probs(inner) for i, inner in encoded.layers.items()}
        return replace(outputs, intermediate=intermediate, lengths=encoded.lengths)

    def start(self, session: int, statistics: BatchStatistics | None = None) -> StreamState:
        """State of a stream before the first bin of a trial; `statistics` as for a batch of one."""
        require_causal(self.config.settings.encoder.causal)
        self._check_inputs(None, statistics)
        like = self.head.weight.new_zeros(1, 0, 0)
        front_end = self.front_end.start(torch.tensor([session]), statistics, like)
        mode = None if self.mode is None else self.mode.start(like)
        denoiser = None if self.denoiser is None else self.denoiser.start(like)
        return StreamState(front_end, self.encoder.start(1), mode, denoiser)

    def step(self, state: StreamState, bins: Tensor) -> tuple[Outputs, StreamState]:
        """Next stored bins (1, t, C), any number -> outputs of the frames they complete, and the state after them."""
        self._check_inputs(bins, state.front_end.statistics)
        normalised, front_end = self.front_end.normalise(state.front_end, bins)
        frames, state = self._step_normalised(replace(state, front_end=front_end), normalised, normalised)
        return self._stream_outputs(frames, state), state

    def precompute(self, state: StreamState) -> StreamState:
        """The same state with the part of the next frame computed that needs no further bins; reduces latency."""
        precompute = getattr(self.encoder, "precompute", None)
        if precompute is None:
            return state
        ready = self.front_end.sample(state.front_end.ready)
        precomputed = precompute(state.encoder, ready, state.precomputed)
        return replace(state, precomputed=precomputed)

    def finish(self, state: StreamState) -> Outputs:
        """Outputs of the frames held back for smoothing or for a complete patch, at the end of a trial."""
        padding, beyond = self.front_end.final_padding(state.front_end)
        frames, state = self._step_normalised(state, torch.cat([padding, beyond], dim=1), padding)
        held = self.encoder.finish(state.encoder)
        if self.denoiser is not None and state.denoiser is not None and held.shape[1]:
            held = self.denoiser.step(state.denoiser, held)[0]
        return self._stream_outputs(torch.cat([frames, held], dim=1), state)

    def _classify_mode(self, bins: Tensor, n_bins: Tensor) -> ModeLogits | None:
        """Speaking mode of complete trials, padded to one patch as in the front end."""
        if self.mode is None:
            return None
        patch_bins = self.config.settings.front_end.patch.bins
        bins = F.pad(bins, (0, 0, 0, max(patch_bins - bins.shape[1], 0)))
        is_padding = torch.arange(bins.shape[1], device=bins.device) >= n_bins[:, None]
        return ModeLogits(*self.mode(bins.masked_fill(is_padding[..., None], 0.0), n_bins.clamp(min=patch_bins)))

    def _step_normalised(self, state: StreamState, bins: Tensor, trial_bins: Tensor) -> tuple[Tensor, StreamState]:
        """Pass normalised bins through all components; `trial_bins` are those of the trial, without padding."""
        ready, front_end = self.front_end.step(state.front_end, bins)
        mode = state.mode
        if self.mode is not None and mode is not None:
            mode = self.mode.step(mode, trial_bins)
            ready = self.mode.condition(ready, mode.pending[:, : ready.shape[1]])
            mode = replace(mode, pending=mode.pending[:, ready.shape[1] :])
        patches, front_end = self.front_end.take_patches(front_end, ready)
        frames, encoder = self._encode_patches(patches, state)
        precomputed = None if frames.shape[1] else state.precomputed
        denoiser = state.denoiser
        if self.denoiser is not None and denoiser is not None:
            frames, denoiser = self.denoiser.step(denoiser, frames)
        return frames, StreamState(front_end, encoder, mode, denoiser, precomputed)

    def _encode_patches(self, bins: Tensor, state: StreamState) -> tuple[Tensor, EncoderState]:
        if bins.shape[1] < self.config.settings.front_end.patch.sampled.bins:
            return bins.new_zeros(1, 0, self.encoder.n_outputs), state.encoder
        precomputed = () if state.precomputed is None else (state.precomputed,)
        return self.encoder.step(state.encoder, bins, *precomputed)

    def _stream_outputs(self, frames: Tensor, state: StreamState) -> Outputs:
        mode = None if state.mode is None else state.mode.logits[:, 0]
        return self._apply_heads(frames, torch.full((1,), frames.shape[1], device=frames.device), None, mode)

    def _apply_heads(self, frames: Tensor, n_frames: Tensor, tokens: Tensor | None, mode: Tensor | None) -> Outputs:
        joint = None
        if self.transducer is not None and tokens is not None:
            joint = self.transducer(frames, tokens)
        return Outputs(frames, n_frames, {"ctc": self._ctc_log_probs(frames)}, joint, mode)

    def _ctc_log_probs(self, frames: Tensor) -> Tensor:
        return F.log_softmax(self.head(frames), dim=-1)

    def _check_inputs(self, bins: Tensor | None, statistics: BatchStatistics | None) -> None:
        n_channels = self.config.n_channels
        if bins is not None and (bins.ndim != 3 or bins.shape[-1] != n_channels):
            raise UserError(
                f"bins have shape {tuple(bins.shape)}; the model expects (trials, bins, {n_channels}): pass"
                f" {n_channels} channels, or train a model on this data"
            )
        kind = self.config.settings.front_end.normalise
        if kind != "none" and statistics is None:
            raise UserError(
                f"the model normalises its input (front_end.normalise={kind}); pass the statistics of"
                f" {'the block' if kind == 'block' else 'the bins before each trial'} as well"
            )


def make_encoder(settings: ModelSettings, n_channels: int) -> Encoder:
    patch = settings.front_end.patch.sampled
    match settings.encoder:
        case GRUSettings() as encoder:
            return GRU(encoder, patch, n_channels)
        case SSMSettings() as encoder:
            return SSM(encoder, patch, n_channels)
        case TransformerSettings() as encoder:
            return Transformer(encoder, patch, n_channels)
        case PluginEncoderSettings() as encoder:
            made = component_class("encoders", encoder.kind)(encoder, patch, n_channels)
            if not isinstance(made, Encoder):
                raise UserError(f"the encoder {encoder.kind!r} is not a subclass of arcuate.models.interfaces.Encoder")
            return made


_BIAS_GROUP_PREFIXES = ("encoder.", "front_end.stem.", "transducer.", "mode.", "denoiser.")


def parameter_groups(model: Model) -> dict[str, list[nn.Parameter]]:
    """Parameters grouped as in the official recipes: biases and gains of the network, session layers, the rest."""
    groups: dict[str, list[nn.Parameter]] = {"bias": [], "session": [], "rest": []}
    for name, parameter in model.named_parameters():
        if name.startswith("front_end.session_layer.") and ".layer_norm." not in name:
            groups["session"].append(parameter)
        elif name == "head.bias" or (name.startswith(_BIAS_GROUP_PREFIXES) and parameter.ndim < 2):
            groups["bias"].append(parameter)
        else:
            groups["rest"].append(parameter)
    return groups


def build_on_meta(config: ModelConfig) -> Model:
    """The model on the meta device: with shapes but without memory, at any size."""
    with torch.device("meta"):
        return Model(config)


def count_parameters(config: ModelConfig) -> int:
    return sum(p.numel() for p in build_on_meta(config).parameters())


# Sessions the model was not trained on.


def copy_session_layer(model: Model, like: str) -> tuple[Tensor, Tensor]:
    """Copy of weight (C, C) and bias (C,) of a known session, or of the mean over sessions for "mean"."""
    layer = model.front_end.session_layer
    device = model.head.weight.device
    if not layer.settings.enabled:
        n = model.config.n_channels
        return torch.eye(n, device=device), torch.zeros(n, device=device)
    with torch.no_grad():
        if like == "mean":
            return torch.stack(list(layer.weights)).mean(0), torch.stack(list(layer.biases)).mean(0)
        index = model.config.sessions.index(like)
        return layer.weights[index].detach().clone(), layer.biases[index].detach().clone()


def enable_session_layers(settings: ModelSettings) -> ModelSettings:
    """The same settings with one full map per session."""
    return settings.model_copy(update={"front_end": full_session_layers(settings.front_end)})


def add_session(model: Model, session: str, like: str) -> Model:
    """Copy of the model with one more session, whose layer starts as that of `like` (or the mean)."""
    if session in model.config.sessions:
        raise UserError(f"the model already has a session {session}; choose another name")
    layers = [copy_session_layer(model, known) for known in model.config.sessions]
    layers.append(copy_session_layer(model, like))
    return _replace_session_layers(copy.deepcopy(model), (*model.config.sessions, session), layers)


def single_session_model(model: Model, session: str, weight: Tensor, bias: Tensor) -> Model:
    """The model with this layer as its only session; all other weights are shared with the original."""
    shared = copy.copy(model)
    shared._modules = dict(model._modules)
    shared.front_end = copy.copy(model.front_end)
    shared.front_end._modules = dict(model.front_end._modules)
    return _replace_session_layers(shared, (session,), [(weight, bias)])


def _replace_session_layers(model: Model, sessions: tuple[str, ...], layers: list[tuple[Tensor, Tensor]]) -> Model:
    old = model.front_end.session_layer
    settings = enable_session_layers(model.config.settings)
    model.config = ModelConfig(**{**dict(model.config), "settings": settings, "sessions": sessions})
    with torch.device("meta"):
        new = SessionLayer(settings.front_end.session_layer, model.config.n_channels, len(sessions))
    new.weights = nn.ParameterList(nn.Parameter(weight) for weight, _ in layers)
    new.biases = nn.ParameterList(nn.Parameter(bias) for _, bias in layers)
    new.layer_norm = old.layer_norm
    model.front_end.settings = settings.front_end
    model.front_end.session_layer = new.train(old.training)
    return model
