"""Losses of all heads and their weighted sum, one value per trial; the caller sums over trials and divides once."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from arcuate.config import component_class
from arcuate.data.alphabet import BLANK
from arcuate.errors import UserError
from arcuate.losses.config import CTCSettings, CustomLossSettings, LossSettings
from arcuate.losses.rnnt import Lengths, chunked_rnnt_loss
from arcuate.models.interfaces import Flow, Joint, Outputs

LOSS_NAMES = ("ctc", "rnnt", "intermediate", "mode", "denoise", "custom")
TOKEN_LOSSES = ("ctc", "rnnt")  # losses of the final token predictions


def compute_losses(
    outputs: Outputs,
    tokens: Tensor,
    n_tokens: Tensor,
    settings: LossSettings,
    modes: Tensor | None = None,  # (B, 2) target weight of each mode; zeros if unknown
    token_lengths: Sequence[int] | None = None,  # `n_tokens` on the host
    mean_frames: float | None = None,  # mean frame count of the batch over all processes; None: of these trials
) -> dict[str, Tensor]:
    """Losses by name, each (B,); those of weight 0 are left out, because 0 times infinity is not a number.

    The kernels need the lengths on the host: with `token_lengths` and `outputs.lengths` nothing is read back from the
    device.
    """
    lengths = Lengths(
        outputs.n_frames.cpu() if outputs.lengths is None else torch.tensor(outputs.lengths),
        n_tokens.cpu() if token_lengths is None else torch.tensor(token_lengths),
    )

    def ctc(log_probs: Tensor) -> Tensor:
        return ctc_loss(log_probs.float(), lengths.n_frames, tokens, n_tokens, settings.ctc, lengths.n_tokens)

    losses = {}
    if settings.ctc.weight > 0:
        losses["ctc"] = ctc(outputs.log_probs["ctc"])
    if settings.rnnt.weight > 0 and outputs.joint is not None:
        if mean_frames is None:
            mean_frames = float(lengths.n_frames.float().mean())
        reduction = settings.rnnt.reduction
        losses["rnnt"] = _transducer_loss(outputs, outputs.joint, tokens, n_tokens, reduction, lengths, mean_frames)
    if outputs.intermediate:
        losses["intermediate"] = torch.stack([ctc(inner) for inner in outputs.intermediate.values()]).mean(0)
    if settings.mode.weight > 0 and outputs.mode is not None and modes is not None:
        losses["mode"] = mode_loss(outputs.mode, modes)
    if settings.denoise.weight > 0 and outputs.flow is not None:
        losses["denoise"] = flow_loss(outputs.flow, outputs.n_frames)
    if settings.has_custom and settings.custom is not None:
        losses["custom"] = _custom_loss(outputs, tokens, n_tokens, settings.custom)
    return losses


def _custom_loss(outputs: Outputs, tokens: Tensor, n_tokens: Tensor, settings: CustomLossSettings) -> Tensor:
    """A user-defined loss. (B,)"""
    values = component_class("losses", settings.kind)(settings)(outputs, tokens, n_tokens)
    if not isinstance(values, Tensor) or values.shape != outputs.n_frames.shape:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise UserError(f"the loss {settings.kind!r} returned {shape}; expected one value for each trial of the batch")
    return values


def weighted_loss(losses: dict[str, Tensor], settings: LossSettings) -> Tensor:
    """The training objective of each trial. (B,)"""
    return torch.stack([getattr(settings, name).weight * values for name, values in losses.items()]).sum(0)


def _transducer_loss(
    outputs: Outputs,
    joint: Joint,
    tokens: Tensor,
    n_tokens: Tensor,
    reduction: str,
    lengths: Lengths,
    mean_frames: float,
) -> Tensor:
    parts = (joint.logits, joint.frames, joint.predicted, tokens, outputs.n_frames, n_tokens)
    losses = chunked_rnnt_loss(*parts, blank=BLANK, on_host=lengths)
    match reduction:
        case "mean_per_token":
            return losses / n_tokens.clamp(min=1)
        case "half_mean_frames":
            return losses / max(mean_frames / 2, 1.0)
        case _:  # sum_per_trial
            return losses


def mode_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against target weights, which need not sum to 1. (B, 2), (B, 2) -> (B,)"""
    return -(target * logits.float().log_softmax(-1)).sum(-1)


def flow_loss(flow: Flow, n_frames: Tensor) -> Tensor:
    """Squared velocity error relative to predicting no flow: 1 for a denoiser that is the identity. (B,)"""
    valid = torch.arange(flow.target.shape[1], device=n_frames.device) < n_frames[:, None]
    squares = [part.float().square().mean(-1) for part in (flow.predicted - flow.target, flow.target)]
    error, scale = ((square * valid).sum(-1) for square in squares)
    return error / scale.clamp(min=1e-12)


def ctc_loss(
    log_probs: Tensor,  # (B, F, V)
    n_frames: Tensor,  # (B,)
    tokens: Tensor,  # (B, U) padded
    n_tokens: Tensor,  # (B,)
    settings: CTCSettings,
    n_tokens_on_host: Tensor | None = None,
) -> Tensor:
    """CTC loss (Graves et al. 2006) of each trial, divided by its number of tokens for mean_per_token. (B,)

    torch needs both lengths on the host: pass `n_frames` on the CPU, and `n_tokens_on_host`, to avoid a read.
    """
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        tokens.long(),
        n_frames.long(),
        (n_tokens if n_tokens_on_host is None else n_tokens_on_host).long(),
        blank=BLANK,
        reduction="none",
        zero_infinity=settings.zero_infinity,
    )
    return losses / n_tokens.clamp(min=1) if settings.reduction == "mean_per_token" else losses
