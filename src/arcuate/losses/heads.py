"""The losses of all heads that count, on one scale, and their weighted sum."""

import torch
from torch import Tensor

from arcuate.losses.ctc import ctc_loss
from arcuate.losses.rnnt import rnnt_loss_joined
from arcuate.losses.settings import RNNT, Loss
from arcuate.models.outputs import Joint, Outputs
from arcuate.tokens import BLANK

HEADS = ("ctc", "rnnt", "intermediate")


def head_losses(outputs: Outputs, tokens: Tensor, n_tokens: Tensor, settings: Loss) -> dict[str, Tensor]:
    """By head, one number per trial; a head of weight 0 is left out, for it may be infinite."""
    losses = {}
    if settings.ctc.weight > 0:
        log_probs = outputs.log_probs["ctc"].float()
        losses["ctc"] = ctc_loss(log_probs, outputs.n_frames, tokens, n_tokens, settings.ctc)
    if settings.rnnt.weight > 0 and outputs.joint is not None:
        losses["rnnt"] = transducer_loss(outputs.joint, outputs.n_frames, tokens, n_tokens, settings.rnnt)
    if settings.intermediate.weight > 0 and outputs.intermediate:
        losses["intermediate"] = intermediate_loss(outputs, tokens, n_tokens, settings)
    return losses


def intermediate_loss(outputs: Outputs, tokens: Tensor, n_tokens: Tensor, settings: Loss) -> Tensor:
    """The mean CTC loss of the inner layers that were listened to. (B,)"""
    losses = [
        ctc_loss(log_probs.float(), outputs.n_frames, tokens, n_tokens, settings.ctc)
        for log_probs in outputs.intermediate.values()
    ]
    return torch.stack(losses).mean(0)


def weigh(losses: dict[str, Tensor], settings: Loss) -> Tensor:
    """What is minimised, one number per trial. (B,)"""
    return torch.stack([getattr(settings, head).weight * loss for head, loss in losses.items()]).sum(0)


def transducer_loss(
    joint: Joint, n_frames: Tensor, tokens: Tensor, n_tokens: Tensor, settings: RNNT
) -> Tensor:
    losses = rnnt_loss_joined(
        joint.logits, joint.frames, joint.predicted, tokens, n_frames, n_tokens, blank=BLANK
    )
    match settings.reduction:
        case "mean_per_token":
            return losses / n_tokens.clamp(min=1)
        case "document_mean_t_half":
            return losses / (n_frames.float().mean() / 2).clamp(min=1)
        case "sum_per_trial":
            return losses
