"""Mean and spread of bins, gathered piece by piece in float64; non-finite values do not count."""

from dataclasses import dataclass, field

import numpy as np

_ROWS = 4096  # bins turned into float64 at a time


@dataclass(frozen=True)
class Statistics:
    """What normalisation needs to know of a stretch of recording."""

    mean: np.ndarray = field(repr=False)  # (C,) float32
    sd: np.ndarray = field(repr=False)  # (C,) float32, of the population
    n_bins: int


@dataclass(frozen=True)
class Moments:
    """Per-channel count, mean and summed squared deviation; two of them merge into one (Chan's update)."""

    n: np.ndarray  # (C,) float64, finite values seen
    mean: np.ndarray  # (C,) float64
    m2: np.ndarray  # (C,) float64
    n_bins: int

    @staticmethod
    def empty(n_channels: int) -> "Moments":
        return Moments(np.zeros(n_channels), np.zeros(n_channels), np.zeros(n_channels), 0)

    @staticmethod
    def of(bins: np.ndarray) -> "Moments":
        """Moments of (T, C) bins."""
        total = Moments.empty(bins.shape[1])
        for start in range(0, len(bins), _ROWS):
            total = total.merge(_of_piece(bins[start : start + _ROWS]))
        return total

    def merge(self, other: "Moments") -> "Moments":
        n = self.n + other.n
        share = other.n / np.maximum(n, 1.0)
        step = other.mean - self.mean
        return Moments(
            n,
            self.mean + step * share,
            self.m2 + other.m2 + step**2 * self.n * share,
            self.n_bins + other.n_bins,
        )

    def statistics(self) -> Statistics:
        """A channel without a single finite value gets mean 0 and SD 1, so normalising leaves it alone."""
        seen = self.n > 0
        mean = np.where(seen, self.mean, 0.0)
        sd = np.where(seen, np.sqrt(self.m2 / np.maximum(self.n, 1.0)), 1.0)
        return Statistics(mean.astype(np.float32), sd.astype(np.float32), self.n_bins)


def _of_piece(bins: np.ndarray) -> Moments:
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
    return Moments(n, mean, m2, len(values))


def signed_log(bins: np.ndarray) -> np.ndarray:
    """log(1 + x), mirrored for negative values: what a model with `front_end.log1p` sees before it normalises."""
    return np.sign(bins) * np.log1p(np.abs(bins))


# Statistics of the trials of a batch, for the normalisation that the model does.
