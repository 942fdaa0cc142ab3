"""Model: everything deterministic between stored bins and token scores, with the card that describes it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.batches.statistics import BatchStatistics
from arcuate.errors import UserError
from arcuate.models.encoder import EncoderState, refuse_both_ways
from arcuate.models.front_end import FrontEnd, FrontEndState, count_frames, normalise
from arcuate.models.gru import GRU
from arcuate.models.outputs import Outputs
from arcuate.models.settings import GRUEncoder, ModelCard, ModelSettings, SSMEncoder, TransformerEncoder
from arcuate.models.ssm import SSM
from arcuate.models.transducer import Transducer
from arcuate.models.transformer import Transformer


@dataclass(frozen=True)
class State:
    """A trial half heard. A value: `step` returns a new one and leaves the old one as it was."""

    front_end: FrontEndState
    encoder: EncoderState
    ahead: Any = None  # work done for the next frame already, where the encoder can


class Model(nn.Module):
    """Normalise, smooth, session layer, patches, encoder, linear head, log-softmax; a transducer where asked for.

    Whole trials: `model(bins, n_bins, session, statistics)`. Training puts its augmentation between the two
    halves, `encode(augment(normalise(bins, statistics)), ...)`. Streams: `start`, `step`, `finish`.
    """

    def __init__(self, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        settings = card.settings
        causal = settings.encoder.causal
        self.front_end = FrontEnd(settings.front_end, card.n_channels, len(card.sessions), causal)
        self.encoder = make_encoder(settings, card.n_channels)
        self.head = nn.Linear(self.encoder.n_outputs, len(card.classes))
        self.transducer: Transducer | None = None
        if settings.transducer.enabled:
            self.transducer = Transducer(settings.transducer, self.encoder.n_outputs, len(card.classes))
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
        """Source bins to normalised bins, as the card says. (B, T, C)"""
        self._check(bins, statistics)
        return normalise(bins, statistics, self.card.settings.front_end)[0]

    def encode(
        self,
        bins: Tensor,
        n_bins: Tensor,
        session: Tensor,
        tokens: Tensor | None = None,
        layers: Collection[int] = (),
    ) -> Outputs:
        """Normalised bins to outputs; `tokens` are what a transducer's loss is to be computed for.

        `layers` of the encoder (1 = the first) are read by the same head, for losses on the way.
        """
        ready = self.front_end(bins, n_bins, session)
        n_frames = count_frames(n_bins, self.card.settings.front_end.patch)
        start: EncoderState = self.encoder.start(len(bins))
        frames, _, inner = self.encoder.layered(ready, n_frames, start, layers)
        outputs = self._outputs(frames, n_frames, tokens)
        return replace(outputs, intermediate={i: self._scores(said) for i, said in inner.items()})

    def start(self, session: int, statistics: BatchStatistics | None = None) -> State:
        """A stream of one trial; `statistics` as for a batch of one."""
        refuse_both_ways(self.card.settings.encoder.causal)
        self._check(None, statistics)
        which = torch.tensor([session], device=self.head.weight.device)
        return State(self.front_end.start(which, statistics), self.encoder.start(1))

    def step(self, state: State, bins: Tensor) -> tuple[Outputs, State]:
        """The next bins (1, t, C), any number -> the frames they complete, and the state after them."""
        self._check(bins, state.front_end.statistics)
        ready, front_end = self.front_end.step(state.front_end, bins)
        frames, encoder = self._encode_ready(ready, state)
        return self._streamed(frames), State(front_end, encoder, None if frames.shape[1] else state.ahead)

    def ahead(self, state: State) -> State:
        """The same state with all work done that needs no bins to come: the next frame is then sooner there."""
        work = getattr(self.encoder, "ahead", None)
        if work is None or getattr(self, "mode", None) is not None:  # a mode may still change the bins
            return state
        return replace(state, ahead=work(state.encoder, state.front_end.ready, state.ahead))

    def finish(self, state: State) -> Outputs:
        """The frames that waited for bins which never came; the trial ends here."""
        ready, _ = self.front_end.finish(state.front_end)
        frames, encoder = self._encode_ready(ready, state)
        return self._streamed(torch.cat([frames, self.encoder.finish(encoder)], dim=1))

    def _encode_ready(self, ready: Tensor, state: State) -> tuple[Tensor, EncoderState]:
        if ready.shape[1] < self.card.settings.front_end.patch.bins:
            return ready.new_zeros(1, 0, self.encoder.n_outputs), state.encoder
        done = () if state.ahead is None else (state.ahead,)
        return self.encoder.step(state.encoder, ready, *done)

    def _streamed(self, frames: Tensor) -> Outputs:
        return self._outputs(frames, torch.tensor([frames.shape[1]], device=frames.device))

    def _outputs(self, frames: Tensor, n_frames: Tensor, tokens: Tensor | None = None) -> Outputs:
        joint = None
        if self.transducer is not None and tokens is not None:
            joint = self.transducer(frames, tokens)
        return Outputs(frames, n_frames, {"ctc": self._scores(frames)}, joint)

    def _scores(self, frames: Tensor) -> Tensor:
        return F.log_softmax(self.head(frames), dim=-1)

    def _check(self, bins: Tensor | None, statistics: BatchStatistics | None) -> None:
        if bins is not None and (bins.ndim != 3 or bins.shape[-1] != self.card.n_channels):
            raise UserError(
                f"The model reads bins of shape (trials, bins, {self.card.n_channels}) but was given "
                f"{tuple(bins.shape)}; give it {self.card.n_channels} channels or train a model on these."
            )
        how = self.card.settings.front_end.normalise
        if how != "none" and statistics is None:
            raise UserError(
                f"The model normalises its bins (front_end.normalise={how}); pass the statistics of the "
                f"{'block' if how == 'block' else 'bins before each trial'} with them."
            )


def make_encoder(settings: ModelSettings, n_channels: int) -> GRU | SSM | Transformer:
    match settings.encoder:
        case GRUEncoder() as encoder:
            return GRU(encoder, settings.front_end.patch, n_channels)
        case SSMEncoder() as encoder:
            return SSM(encoder, settings.front_end.patch, n_channels)
        case TransformerEncoder() as encoder:
            return Transformer(encoder, settings.front_end.patch, n_channels)


VECTORS = (
    "encoder.",
    "front_end.stem.",
    "transducer.",
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


def outline(card: ModelCard) -> Model:
    """The model of a card with shapes but no memory, whatever size the card claims."""
    with torch.device("meta"):
        return Model(card)


def count_parameters(card: ModelCard) -> int:
    return sum(p.numel() for p in outline(card).parameters())
