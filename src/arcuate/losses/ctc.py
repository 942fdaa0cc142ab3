"""CTC loss (Graves et al. 2006), one value per trial; the caller sums over trials and divides once."""

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
    """Negative log-likelihood of each trial's tokens, divided by their number for mean_per_token. (B,)"""
    losses = F.ctc_loss(
        log_probs.transpose(0, 1),
        tokens.long(),
        n_frames.long(),
        n_tokens.long(),
        blank=BLANK,
        reduction="none",
        zero_infinity=settings.zero_infinity,
    )
    return losses / n_tokens.clamp(min=1) if settings.reduction == "mean_per_token" else losses
