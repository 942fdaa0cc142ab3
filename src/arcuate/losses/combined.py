"""The losses of all heads that count, on one scale, and their weighted sum."""

import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.losses.config import LossSettings, RNNTSettings
from arcuate.losses.ctc import ctc_loss
from arcuate.losses.rnnt import chunked_rnnt_loss
from arcuate.models.interfaces import Flow, Joint, Outputs

LOSS_NAMES = ("ctc", "rnnt", "intermediate", "mode", "denoise")
TOKEN_LOSSES = ("ctc", "rnnt")  # losses of what was said


def compute_losses(
    outputs: Outputs,
    tokens: Tensor,
    n_tokens: Tensor,
    settings: LossSettings,
    modes: Tensor | None = None,  # (B, 2) how much each mode is wanted; zeros where nothing is known
) -> dict[str, Tensor]:
    """By head, one number per trial; a head of weight 0 is left out, for it may be infinite."""
    losses = {}
    if settings.ctc.weight > 0:
        log_probs = outputs.log_probs["ctc"].float()
        losses["ctc"] = ctc_loss(log_probs, outputs.n_frames, tokens, n_tokens, settings.ctc)
    if settings.rnnt.weight > 0 and outputs.joint is not None:
        losses["rnnt"] = transducer_loss(outputs.joint, outputs.n_frames, tokens, n_tokens, settings.rnnt)
    if settings.intermediate.weight > 0 and outputs.intermediate:
        losses["intermediate"] = intermediate_loss(outputs, tokens, n_tokens, settings)
    if settings.mode.weight > 0 and outputs.mode is not None and modes is not None:
        losses["mode"] = mode_loss(outputs.mode, modes)
    if settings.denoise.weight > 0 and outputs.flow is not None:
        losses["denoise"] = flow_loss(outputs.flow, outputs.n_frames)
    return losses


def intermediate_loss(outputs: Outputs, tokens: Tensor, n_tokens: Tensor, settings: LossSettings) -> Tensor:
    """The mean CTC loss of the inner layers that were listened to. (B,)"""
    losses = [
        ctc_loss(log_probs.float(), outputs.n_frames, tokens, n_tokens, settings.ctc)
        for log_probs in outputs.intermediate.values()
    ]
    return torch.stack(losses).mean(0)


def weighted_loss(losses: dict[str, Tensor], settings: LossSettings) -> Tensor:
    """What is minimised, one number per trial. (B,)"""
    return torch.stack([getattr(settings, head).weight * values for head, values in losses.items()]).sum(0)


def mode_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy against wanted modes, which need not add up to 1. (B, 2), (B, 2) -> (B,)"""
    return -(wanted * logits.float().log_softmax(-1)).sum(-1)


def flow_loss(flow: Flow, n_frames: Tensor) -> Tensor:
    """Squared error of the flow over what it would be without any flow: 1 for a denoiser that does nothing. (B,)"""
    true = torch.arange(flow.wanted.shape[1], device=n_frames.device) < n_frames[:, None]
    error, size = (
        (part.float().square().mean(-1) * true).sum(-1) for part in (flow.said - flow.wanted, flow.wanted)
    )
    return error / size.clamp(min=1e-12)


def transducer_loss(
    joint: Joint, n_frames: Tensor, tokens: Tensor, n_tokens: Tensor, settings: RNNTSettings
) -> Tensor:
    losses = chunked_rnnt_loss(
        joint.logits, joint.frames, joint.predicted, tokens, n_frames, n_tokens, blank=BLANK
    )
    match settings.reduction:
        case "mean_per_token":
            return losses / n_tokens.clamp(min=1)
        case "half_mean_frames":
            return losses / (n_frames.float().mean() / 2).clamp(min=1)
        case "sum_per_trial":
            return losses
