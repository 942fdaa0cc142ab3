"""Per-channel mean and standard deviation, accumulated in float64; non-finite values are ignored."""

from dataclasses import dataclass, field

import numpy as np

_CHUNK_BINS = 4096  # bins converted to float64 at a time


@dataclass(frozen=True)
class Statistics:
    """Per-channel mean and standard deviation of a stretch of recording, used for normalisation."""

    mean: np.ndarray = field(repr=False)  # (C,) float32
    sd: np.ndarray = field(repr=False)  # (C,) float32, population SD
    n_bins: int


@dataclass(frozen=True)
class RunningStatistics:
    """Per-channel count, mean and sum of squared deviations, merged pairwise (Chan et al. 1983)."""

    n: np.ndarray  # (C,) float64, number of finite values
    mean: np.ndarray  # (C,) float64
    m2: np.ndarray  # (C,) float64
    n_bins: int

    @staticmethod
    def empty(n_channels: int) -> "RunningStatistics":
        return RunningStatistics(np.zeros(n_channels), np.zeros(n_channels), np.zeros(n_channels), 0)

    @staticmethod
    def from_bins(bins: np.ndarray) -> "RunningStatistics":
        """Statistics of (T, C) bins."""
        total = RunningStatistics.empty(bins.shape[1])
        for start in range(0, len(bins), _CHUNK_BINS):
            total = total.merge(_from_chunk(bins[start : start + _CHUNK_BINS]))
        return total

    def merge(self, other: "RunningStatistics") -> "RunningStatistics":
        n = self.n + other.n
        weight = other.n / np.maximum(n, 1.0)
        delta = other.mean - self.mean
        return RunningStatistics(
            n, self.mean + delta * weight, self.m2 + other.m2 + delta**2 * self.n * weight, self.n_bins + other.n_bins
        )

    def statistics(self) -> Statistics:
        """Mean and SD; a channel without finite values gets 0 and 1, so normalisation leaves it unchanged."""
        seen = self.n > 0
        mean = np.where(seen, self.mean, 0.0)
        sd = np.where(seen, np.sqrt(self.m2 / np.maximum(self.n, 1.0)), 1.0)
        return Statistics(mean.astype(np.float32), sd.astype(np.float32), self.n_bins)


def signed_log(bins: np.ndarray) -> np.ndarray:
    """sign(x) · log(1 + |x|): the input of normalisation in a model with `front_end.log1p`."""
    return np.sign(bins) * np.log1p(np.abs(bins))


def _from_chunk(bins: np.ndarray) -> RunningStatistics:
    finite = np.isfinite(bins)
    values = bins.astype(np.float64)  # (T, C)
    if finite.all():
        n = np.full(values.shape[1], float(len(values)))
        mean = values.mean(axis=0)
        values -= mean
        m2 = np.einsum("tc,tc->c", values, values)
    else:
        n = finite.sum(axis=0).astype(np.float64)
        mean = np.where(finite, values, 0.0).sum(axis=0) / np.maximum(n, 1.0)
        m2 = np.square(np.where(finite, values - mean, 0.0)).sum(axis=0)
    return RunningStatistics(n, mean, m2, len(values))
