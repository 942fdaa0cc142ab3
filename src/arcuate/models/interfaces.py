"""Types that connect the model to its encoders, to the losses and to the searches."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.errors import UserError
from arcuate.models.config import AnyEncoderSettings, PluginEncoderSettings

EncoderState: TypeAlias = Any  # a tensor or frozen dataclass of tensors; opaque outside its encoder


class Encoder(nn.Module):
    """Bins to frames for complete trials and as a stream."""

    settings: AnyEncoderSettings | PluginEncoderSettings

    @property
    def n_outputs(self) -> int:
        """Width D of a frame."""
        return self.settings.width

    def start(self, n_trials: int) -> EncoderState:
        """State before the first frame."""
        raise NotImplementedError

    def step(self, state: EncoderState, bins: Tensor) -> tuple[Tensor, EncoderState]:
        """Bins of complete patches (B, T, C) -> frames (B, F, D) that later bins cannot change, and the state."""
        require_causal(self.settings.causal)
        return self(bins, None, state)

    def finish(self, state: EncoderState) -> Tensor:
        """Frames held back for future context. (B, F, D)"""
        raise NotImplementedError

    def forward(self, bins: Tensor, n_frames: Tensor | None, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """Trials (B, T, C), at least one patch long, and their true lengths -> all frames (B, F, D), and the state."""
        return self.forward_with_layers(bins, n_frames, state, ())[:2]

    def forward_with_layers(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: EncoderState,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, EncoderState, dict[int, Tensor]]:
        """The same, and the outputs of some inner layers (1 = the first) as inputs for the output layer.

        `lengths` are the frame counts on the host, where some kernels need them.
        """
        raise NotImplementedError

    def blocks_to_compile(self) -> Iterable[nn.Module]:
        """Repeated parts that runtime.compile compiles; their inputs are tensors and sizes only."""
        return ()


def require_causal(causal: bool) -> None:
    """Raise a `UserError` for a model that is not causal."""
    if not causal:
        raise UserError(
            "a bidirectional model cannot stream; decode complete trials, or train with encoder.bidirectional=false"
        )


@dataclass(frozen=True)
class ModelInputs:
    """Normalised trials, and what training adds to them."""

    bins: Tensor  # (B, T, C) normalised and, in training, augmented
    n_bins: Tensor  # (B,)
    session: Tensor  # (B,)
    tokens: Tensor | None = None  # (B, U) padded targets of the transducer loss
    clean: Tensor | None = None  # (B, T, C) the same bins before augmentation, input of the speaking mode
    layers: tuple[int, ...] = ()  # encoder layers (1 = the first) with an intermediate CTC loss
    lengths: tuple[int, ...] | None = None  # `n_bins` on the host; if None, some losses and encoders read it back
    without_gradient: tuple[str, ...] = ()  # outputs (frames, log_probs.ctc, mode) that no loss uses


@dataclass(frozen=True)
class Joint:
    """Both inputs of a transducer's joiner; its logits (B, F, U + 1, V) are large and computed by the loss."""

    frames: Tensor  # (B, F, W)
    predicted: Tensor  # (B, U + 1, W) after 0, 1, … U tokens
    weight: Tensor  # (V, W)
    bias: Tensor  # (V,)

    def logits(self, frames: Tensor, predicted: Tensor) -> Tensor:
        """(B, f, W), (B, U + 1, W) -> (B, f, U + 1, V)"""
        hidden = torch.tanh(frames[:, :, None] + predicted[:, None])
        return F.linear(hidden, self.weight.to(hidden.dtype), self.bias.to(hidden.dtype))  # without autocast here


@dataclass(frozen=True)
class Flow:
    """Velocity of the denoiser at a point between noisy and clean frames, and its target."""

    predicted: Tensor  # (B, F, D)
    target: Tensor  # (B, F, D)


@dataclass(frozen=True)
class Outputs:
    """Outputs of the model for one batch: all that losses and searches use."""

    frames: Tensor  # (B, F, D) output of the encoder, denoised if the model has a denoiser
    n_frames: Tensor  # (B,) int64; frames beyond it are padding with arbitrary values
    log_probs: dict[str, Tensor]  # per head, {"ctc": (B, F, V)}
    joint: Joint | None = None  # joiner inputs of the transducer head, if tokens were given
    mode: Tensor | None = None  # (B, 2) logits of the speaking mode
    flow: Flow | None = None  # velocities of the denoiser, in training
    intermediate: dict[int, Tensor] = field(default_factory=dict)  # CTC log-probabilities of inner layers
    lengths: tuple[int, ...] | None = None  # `n_frames` on the host, if known

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Outputs":
        """The outputs with every tensor replaced by change(name, tensor)."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(name, value)
            if isinstance(value, dict):
                return {key: changed(f"{name}.{key}", part) for key, part in value.items()}
            if isinstance(value, (Joint, Flow)):
                return type(value)(**{key: change(f"{name}.{key}", part) for key, part in vars(value).items()})
            return value

        return Outputs(**{name: changed(name, value) for name, value in vars(self).items()})

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: frames, n_frames, log_probs.ctc, joint.weight, mode, flow.target, intermediate.2, …"""
        found: dict[str, Tensor] = {}
        self.map(found.setdefault)
        return found
