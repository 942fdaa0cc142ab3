"""Model: everything deterministic between stored bins and token scores, with the config that describes it."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.data.batching import BatchStatistics
from arcuate.errors import UserError
from arcuate.models.config import GRUSettings, ModelConfig, ModelSettings, SSMSettings, TransformerSettings
from arcuate.models.denoiser import Denoiser, DenoiserState
from arcuate.models.front_end import FrontEnd, FrontEndState, normalise
from arcuate.models.gru import GRU
from arcuate.models.interfaces import EncoderState, Flow, Outputs, require_causal
from arcuate.models.mode import ModeState, SpeakingMode
from arcuate.models.session_layer import SessionLayer
from arcuate.models.ssm import SSM
from arcuate.models.transducer import Transducer
from arcuate.models.transformer import Transformer


@dataclass(frozen=True)
class StreamState:
    """A trial half heard. A value: `step` returns a new one and leaves the old one as it was."""

    front_end: FrontEndState
    encoder: EncoderState
    mode: ModeState | None = None
    denoiser: DenoiserState | None = None
    ahead: Any = None  # work done for the next frame already, where the encoder can


class Model(nn.Module):
    """Normalise, smooth, session layer, patches, encoder, linear head, log-softmax.

    Where asked for: a speaking mode that scales channels before the patches, a denoiser after the encoder, and a
    transducer.

    Whole trials: `model(bins, n_bins, session, statistics)`. Training puts its augmentation between the two
    halves, `encode(augment(normalise(bins, statistics)), ...)`. Streams: `start`, `step`, `finish`.
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
        return self.encode(self.normalise(bins, statistics), n_bins, session, tokens)

    def normalise(self, bins: Tensor, statistics: BatchStatistics | None = None) -> Tensor:
        """Source bins to normalised bins, as the config says. (B, T, C)"""
        self._check(bins, statistics)
        return normalise(bins, statistics, self.config.settings.front_end)[0]

    def encode(
        self,
        bins: Tensor,
        n_bins: Tensor,
        session: Tensor,
        tokens: Tensor | None = None,
        clean: Tensor | None = None,
        match: bool = False,
        layers: Collection[int] = (),
    ) -> Outputs:
        """Normalised bins to outputs; `tokens` are what a transducer's loss is to be computed for.

        `clean` (B, T, C) are the same bins without augmentation: the mode is told from them, and with `match` the
        denoiser is led towards what the encoder makes of them. `layers` of the encoder (1 = the first) are read by
        the same head, for losses on the way.
        """
        n_frames = self.config.settings.front_end.patch.count_frames(n_bins)
        mode = self._tell_mode(bins if clean is None else clean, n_bins)
        frames, inner = self._frames(bins, n_bins, session, mode, layers)
        flow = None
        if self.denoiser is not None:
            if clean is not None and match:
                flow = self._match(self.denoiser, frames, clean, n_bins, session, mode)
            frames = self.denoiser(frames, n_frames)
        outputs = self._outputs(frames, n_frames, tokens, None if mode is None else mode[0], flow)
        return replace(outputs, intermediate={i: self._scores(said) for i, said in inner.items()})

    def _tell_mode(self, bins: Tensor, n_bins: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logits of each trial and for every bin; bins of short trials as the front end fills them up."""
        if self.mode is None:
            return None
        least = self.config.settings.front_end.patch.bins
        bins = F.pad(bins, (0, 0, 0, max(least - bins.shape[1], 0)))
        beyond = torch.arange(bins.shape[1], device=bins.device) >= n_bins[:, None]
        return self.mode(bins.masked_fill(beyond[..., None], 0.0), n_bins.clamp(min=least))

    def _frames(
        self,
        bins: Tensor,
        n_bins: Tensor,
        session: Tensor,
        mode: tuple[Tensor, Tensor] | None,
        layers: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        ready = self.front_end(bins, n_bins, session)
        if self.mode is not None and mode is not None:
            ready = self.mode.condition(ready, mode[1][:, : ready.shape[1]])
        n_frames = self.config.settings.front_end.patch.count_frames(n_bins)
        start: EncoderState = self.encoder.start(len(bins))
        frames, _, inner = self.encoder.layered(ready, n_frames, start, layers)
        return frames, inner

    def _match(
        self,
        denoiser: Denoiser,
        noisy: Tensor,
        clean: Tensor,
        n_bins: Tensor,
        session: Tensor,
        mode: tuple[Tensor, Tensor] | None,
    ) -> Flow:
        """The denoiser somewhere between noisy frames and those of clean bins, made without dropout."""
        times = torch.rand(len(noisy), device=noisy.device, dtype=noisy.dtype)
        training = self.training
        self.eval()
        with torch.no_grad():
            target, _ = self._frames(clean.clone(), n_bins, session, mode)
        self.train(training)
        n_frames = self.config.settings.front_end.patch.count_frames(n_bins)
        return denoiser.match(noisy, target, n_frames, times)

    def start(self, session: int, statistics: BatchStatistics | None = None) -> StreamState:
        """A stream of one trial; `statistics` as for a batch of one."""
        require_causal(self.config.settings.encoder.causal)
        self._check(None, statistics)
        which = torch.tensor([session], device=self.head.weight.device)
        front_end, like = self.front_end.start(which, statistics), self.head.weight.new_zeros(1, 0, 0)
        mode = None if self.mode is None else self.mode.start(like)
        denoiser = None if self.denoiser is None else self.denoiser.start(like)
        return StreamState(front_end, self.encoder.start(1), mode, denoiser)

    def step(self, state: StreamState, bins: Tensor) -> tuple[Outputs, StreamState]:
        """The next bins (1, t, C), any number -> the frames they complete, and the state after them."""
        self._check(bins, state.front_end.statistics)
        normalised, front_end = self.front_end.normalise(state.front_end, bins)
        frames, state = self._take(replace(state, front_end=front_end), normalised, normalised)
        return self._streamed(frames, state), state

    def ahead(self, state: StreamState) -> StreamState:
        """The same state with all work done that needs no bins to come: the next frame is then sooner there."""
        work = getattr(self.encoder, "ahead", None)
        if work is None:
            return state
        return replace(state, ahead=work(state.encoder, state.front_end.ready, state.ahead))

    def finish(self, state: StreamState) -> Outputs:
        """The frames that waited for bins which never came; the trial ends here."""
        missing, beyond = self.front_end.missing(state.front_end), self.front_end.beyond(state.front_end)
        frames, state = self._take(state, torch.cat([missing, beyond], dim=1), missing)
        held = self.encoder.finish(state.encoder)
        if self.denoiser is not None and state.denoiser is not None and held.shape[1]:
            held = self.denoiser.step(state.denoiser, held)[0]
        return self._streamed(torch.cat([frames, held], dim=1), state)

    def _take(self, state: StreamState, normalised: Tensor, heard: Tensor) -> tuple[Tensor, StreamState]:
        """Bins through all parts; `heard` are those among them that belong to the trial."""
        fresh, front_end = self.front_end.step(state.front_end, normalised)
        mode = state.mode
        if self.mode is not None and mode is not None:
            mode = self.mode.step(mode, heard)
            fresh = self.mode.condition(fresh, mode.waiting[:, : fresh.shape[1]])
            mode = replace(mode, waiting=mode.waiting[:, fresh.shape[1] :])
        ready, front_end = self.front_end.cut(front_end, fresh)
        frames, encoder = self._encode_ready(ready, state)
        ahead = None if frames.shape[1] else state.ahead
        denoiser = state.denoiser
        if self.denoiser is not None and denoiser is not None:
            frames, denoiser = self.denoiser.step(denoiser, frames)
        return frames, StreamState(front_end, encoder, mode, denoiser, ahead)

    def _encode_ready(self, ready: Tensor, state: StreamState) -> tuple[Tensor, EncoderState]:
        if ready.shape[1] < self.config.settings.front_end.patch.bins:
            return ready.new_zeros(1, 0, self.encoder.n_outputs), state.encoder
        done = () if state.ahead is None else (state.ahead,)
        return self.encoder.step(state.encoder, ready, *done)

    def _streamed(self, frames: Tensor, state: StreamState) -> Outputs:
        mode = None if state.mode is None else state.mode.logits[:, 0]
        return self._outputs(frames, torch.tensor([frames.shape[1]], device=frames.device), None, mode)

    def _outputs(
        self,
        frames: Tensor,
        n_frames: Tensor,
        tokens: Tensor | None = None,
        mode: Tensor | None = None,
        flow: Flow | None = None,
    ) -> Outputs:
        joint = None
        if self.transducer is not None and tokens is not None:
            joint = self.transducer(frames, tokens)
        log_probs = {"ctc": self._scores(frames)}
        return Outputs(frames, n_frames, log_probs, joint, mode, flow)

    def _scores(self, frames: Tensor) -> Tensor:
        return F.log_softmax(self.head(frames), dim=-1)

    def _check(self, bins: Tensor | None, statistics: BatchStatistics | None) -> None:
        if bins is not None and (bins.ndim != 3 or bins.shape[-1] != self.config.n_channels):
            raise UserError(
                f"The model reads bins of shape (trials, bins, {self.config.n_channels}) but was given "
                f"{tuple(bins.shape)}; give it {self.config.n_channels} channels or train a model on these."
            )
        how = self.config.settings.front_end.normalise
        if how != "none" and statistics is None:
            raise UserError(
                f"The model normalises its bins (front_end.normalise={how}); pass the statistics of the "
                f"{'block' if how == 'block' else 'bins before each trial'} with them."
            )


def make_encoder(settings: ModelSettings, n_channels: int) -> GRU | SSM | Transformer:
    match settings.encoder:
        case GRUSettings() as encoder:
            return GRU(encoder, settings.front_end.patch, n_channels)
        case SSMSettings() as encoder:
            return SSM(encoder, settings.front_end.patch, n_channels)
        case TransformerSettings() as encoder:
            return Transformer(encoder, settings.front_end.patch, n_channels)


VECTORS = (
    "encoder.",
    "front_end.stem.",
    "transducer.",
    "mode.",
    "denoiser.",
)  # parts whose biases and gains make up the bias group


def parameter_groups(model: Model) -> dict[str, list[nn.Parameter]]:
    """Parameters as the official recipes divide them: biases of encoder and head, session maps, the rest."""
    groups: dict[str, list[nn.Parameter]] = {"bias": [], "session": [], "rest": []}
    for name, parameter in model.named_parameters():
        if name.startswith(("front_end.session_layer.weights.", "front_end.session_layer.biases.")):
            groups["session"].append(parameter)
        elif name == "head.bias" or (name.startswith(VECTORS) and parameter.ndim < 2):
            groups["bias"].append(parameter)
        else:
            groups["rest"].append(parameter)
    return groups


def build_on_meta(config: ModelConfig) -> Model:
    """The model of a config with shapes but no memory, whatever size the config claims."""
    with torch.device("meta"):
        return Model(config)


def count_parameters(config: ModelConfig) -> int:
    return sum(p.numel() for p in build_on_meta(config).parameters())


# Days a model was not trained on: a model with a layer for one more, or as one day reads it.


def copy_session_layer(model: Model, like: str) -> tuple[Tensor, Tensor]:
    """Weight (C, C) and bias (C,) of a known session, or of their mean for "mean"; a copy."""
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
    """The same settings with session layers switched on."""
    layer = settings.front_end.session_layer.model_copy(update={"enabled": True})
    front_end = settings.front_end.model_copy(update={"session_layer": layer})
    return settings.model_copy(update={"front_end": front_end})


def add_session(model: Model, session: str, like: str) -> Model:
    """A model of its own that knows one session more, whose layer starts as that of `like` (or the mean)."""
    if session in model.config.sessions:
        raise UserError(f"the model knows session {session} already")
    layers = [copy_session_layer(model, known) for known in model.config.sessions] + [
        copy_session_layer(model, like)
    ]
    return _replace_layers(copy.deepcopy(model), (*model.config.sessions, session), layers)


def single_session_model(model: Model, session: str, weight: Tensor, bias: Tensor) -> Model:
    """The model as one day reads it: session 0 has this layer; all other weights are shared with the model."""
    shared = copy.copy(model)
    shared._modules = dict(model._modules)
    shared.front_end = copy.copy(model.front_end)
    shared.front_end._modules = dict(model.front_end._modules)
    return _replace_layers(shared, (session,), [(weight, bias)])


def _replace_layers(model: Model, sessions: tuple[str, ...], layers: list[tuple[Tensor, Tensor]]) -> Model:
    old = model.front_end.session_layer
    settings = enable_session_layers(model.config.settings)
    model.config = ModelConfig(
        settings=settings, n_channels=model.config.n_channels, sessions=sessions, classes=model.config.classes
    )
    with torch.device("meta"):
        new = SessionLayer(settings.front_end.session_layer, model.config.n_channels, len(sessions))
    new.weights = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight, _ in layers)
    new.biases = torch.nn.ParameterList(torch.nn.Parameter(bias) for _, bias in layers)
    new.layer_norm = old.layer_norm
    model.front_end.settings = settings.front_end
    model.front_end.session_layer = new.train(old.training)
    return model
