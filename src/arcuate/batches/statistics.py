"""Statistics of the trials of a batch, for the normalisation that the model does."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class BatchStatistics:
    """What normalisation knows beforehand: of the trial's block, or (rolling) of the bins before the trial.

    Where the model takes logarithms, these are statistics of the logarithms.
    """

    mean: Tensor  # (B, C)
    sd: Tensor  # (B, C)
    n_bins: Tensor  # (B,)
