"""The CTC loss, one number per trial; whoever adds trials up knows how many there were."""

from torch import Tensor
from torch.nn import functional as F

from arcuate.data.alphabet import BLANK
from arcuate.losses.config import CTCSettings


def ctc_loss(
    log_probs: Tensor,  # (B, F, V)
    n_frames: Tensor,  # (B,)
    tokens: Tensor,  # (B, U) padded
    n_tokens: Tensor,  # (B,)
    settings: CTCSettings,
) -> Tensor:
    """Negative log-likelihood of each trial's tokens. (B,)"""
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        tokens.long(),
        n_frames.long(),
        n_tokens.long(),
        blank=BLANK,
        reduction="none",
        zero_infinity=settings.zero_infinity,
    )
    if settings.reduction == "mean_per_token":
        losses = losses / n_tokens.clamp(min=1)
    return losses
