"""Statistics of what a stream has heard before: normalisation from the past only."""

from dataclasses import replace

import numpy as np
from torch import nn

from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.models.model import Model, build_on_meta


def rolling_model(model: Model) -> Model:
    """The same weights under a front end that normalises causally, for models that were given whole blocks."""
    settings = model.config.settings
    front_end = settings.front_end.model_copy(update={"normalise": "rolling"})
    config = model.config.model_copy(
        update={"settings": settings.model_copy(update={"front_end": front_end})}
    )
    rolling = build_on_meta(config)
    rolling.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return rolling.eval()


def hold_still(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def remember(past: RunningStatistics, bins: np.ndarray, log: bool, max_bins: int) -> RunningStatistics:
    """The past with more bins (t, C) in it; what is longer ago than `max_bins` fades."""
    return fade(past, max_bins).merge(RunningStatistics.from_bins(signed_log(bins) if log else bins))


def fade(past: RunningStatistics, max_bins: int) -> RunningStatistics:
    share = min(1.0, max_bins / max(past.n_bins, 1))
    return replace(past, n=past.n * share, m2=past.m2 * share, n_bins=min(past.n_bins, max_bins))


def as_past(statistics: Statistics | None, n_channels: int) -> RunningStatistics:
    """Statistics known beforehand, such as those of an earlier session, as a past to go on from."""
    if statistics is None or statistics.n_bins <= 0:
        return RunningStatistics.empty(n_channels)
    n = np.full(n_channels, float(statistics.n_bins))
    sd = statistics.sd.astype(np.float64)
    return RunningStatistics(n, statistics.mean.astype(np.float64), n * sd**2, statistics.n_bins)
