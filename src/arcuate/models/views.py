"""Averaged views: a pseudo-ensemble of one model over noisy copies of its input, for complete trials and for streams.

The log-probabilities of the views are averaged and normalised. The first view is the clean input; the others add white
noise to the normalised bins. The noise is a function of view, bin and channel, so results depend neither on the batch
nor on how a stream is cut into chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from arcuate.data.batching import BatchStatistics
from arcuate.data.seeds import derive_seed
from arcuate.models.interfaces import Outputs
from arcuate.models.model import Model, StreamState

_BLOCK = 64  # bins drawn by one generator


@dataclass(frozen=True)
class ViewStates:
    """State of a stream: one per view."""

    views: tuple[StreamState, ...]
    n_bins: int  # received so far


class AveragedViews:
    """A causal model that decodes `n_views` views of a stream; it has the streaming methods of `Model`."""

    def __init__(self, model: Model, n_views: int, noise: float) -> None:
        self.model, self.n_views, self.noise = model, n_views, noise

    def start(self, session: int, statistics: BatchStatistics | None = None) -> ViewStates:
        """State before the first bin of a trial."""
        return ViewStates((self.model.start(session, statistics),) * self.n_views, 0)

    def step(self, state: ViewStates, bins: Tensor) -> tuple[Outputs, ViewStates]:
        """Next stored bins (1, t, C) -> averaged outputs of the frames they complete, and the state after them."""
        noises = (self.noise * view_noise(view, state.n_bins, bins) if view else None for view in range(self.n_views))
        steps = [self.model.step(s, bins, noise) for s, noise in zip(state.views, noises, strict=True)]
        views = tuple(after for _, after in steps)
        return average_outputs([outputs for outputs, _ in steps]), ViewStates(views, state.n_bins + bins.shape[1])

    def precompute(self, state: ViewStates) -> ViewStates:
        """The same state with the parts of the next frames computed that need no further bins."""
        return replace(state, views=tuple(map(self.model.precompute, state.views)))

    def finish(self, state: ViewStates) -> Outputs:
        """Averaged outputs of the frames held back until the end of a trial."""
        return average_outputs([self.model.finish(view) for view in state.views])


def average_outputs(views: Sequence[Outputs]) -> Outputs:
    """Outputs of the first view with the mean of the CTC log-probabilities of all views, normalised."""
    summed = torch.stack([v.log_probs["ctc"].float() for v in views]).sum(0)
    averaged = torch.log_softmax(summed / len(views), dim=-1)
    return replace(views[0], log_probs={**views[0].log_probs, "ctc": averaged})


def view_noise(view: int, first: int, like: Tensor) -> Tensor:
    """Standard normal noise of a view for the bins from `first` on, as many as `like` (B, t, C) has. (1, t, C)"""
    n, n_channels = like.shape[1], like.shape[2]
    blocks = [_block(view, k, n_channels) for k in range(first // _BLOCK, -(-(first + n) // _BLOCK))]
    rows = np.concatenate(blocks)[first % _BLOCK :][:n] if blocks else np.zeros((0, n_channels), np.float32)
    return torch.from_numpy(rows)[None].to(like.device)


@lru_cache(maxsize=64)
def _block(view: int, number: int, n_channels: int) -> np.ndarray:
    rng = np.random.default_rng(derive_seed("views", view, number))
    return rng.standard_normal((_BLOCK, n_channels), dtype=np.float32)
