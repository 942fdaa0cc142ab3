"""Augmentation of training trials: gain, noise, offset, random walk and cut in the official order, then masks.

Every draw is a function of (seed, position in the training sequence, trial). Padding, the number of workers and the
other trials of the batch do not affect it.
"""

from collections.abc import Sequence

import torch

from arcuate.data.config import AugmentationConfig
from arcuate.seeds import derive_seed


def augment(
    bins: torch.Tensor,
    n_bins: torch.Tensor,
    trial_ids: Sequence[str],
    settings: AugmentationConfig,
    seed: int,
    position: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Augmented copies of normalised bins (B, T, C), and their lengths."""
    out = bins.clone()
    copies: dict[str, int] = {}
    for i, (trial, length) in enumerate(zip(trial_ids, n_bins.tolist(), strict=True)):
        copies[trial] = copies.get(trial, -1) + 1  # drawn with replacement, a trial may occur twice
        generator = torch.Generator(device=bins.device)
        generator.manual_seed(derive_seed(seed, position, trial, copies[trial]))
        noisy = _add_noise(bins[i, :length], settings, generator)
        out[i, :length] = mask_trial(noisy, settings, generator)
    cut = draw_cut(settings, seed, position)
    return out[:, cut:], (n_bins - cut).clamp(min=1) if cut else n_bins


def _add_noise(bins: torch.Tensor, settings: AugmentationConfig, generator: torch.Generator) -> torch.Tensor:
    """Gain, white noise, offset and random walk on one trial (T, C) without its padding."""
    n_bins, n_channels = bins.shape

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=bins.device, dtype=bins.dtype)

    if settings.gain_sd > 0:
        identity = torch.eye(n_channels, device=bins.device, dtype=bins.dtype)
        bins = bins @ (identity + settings.gain_sd * draw(n_channels, n_channels))
    if settings.white_noise_sd > 0:
        bins = bins + settings.white_noise_sd * draw(n_bins, n_channels)
    if settings.offset_sd > 0:
        bins = bins + settings.offset_sd * draw(1, n_channels)
    if settings.random_walk_sd > 0:
        axis = 1 if settings.random_walk_axis == "channel" else 0
        bins = bins + torch.cumsum(settings.random_walk_sd * draw(n_bins, n_channels), dim=axis)
    return bins


def mask_trial(bins: torch.Tensor, settings: AugmentationConfig, generator: torch.Generator) -> torch.Tensor:
    """One trial (T, C) with runs of bins, groups of channels or single values set to 0, their mean."""
    n_bins, n_channels = bins.shape
    masked = torch.zeros(bins.shape, dtype=torch.bool, device=bins.device)
    time, features = settings.time_masks, settings.feature_masks
    if time.n_masks and _uniform(generator) < time.probability:
        max_width = time.max_bins if time.max_bins is not None else int((time.max_fraction or 0.0) * n_bins)
        n_masks = time.n_masks if time.fixed_count else _randint(time.n_masks, generator) + 1
        for start, width in _draw_masks(n_masks, min(max_width, n_bins), n_bins, generator):
            masked[start : start + width] = True
    if features.n_masks and _uniform(generator) < features.probability:
        n_masks = _randint(features.n_masks, generator) + 1
        max_width = min(features.max_channels, n_channels)
        for start, width in _draw_masks(n_masks, max_width, n_channels, generator):
            masked[:, start : start + width] = True
    if settings.speckle > 0:
        draws = torch.rand(bins.shape, generator=generator, device=bins.device)
        masked |= draws < settings.speckle
    return bins.masked_fill(masked, 0.0) if bool(masked.any()) else bins


def draw_cut(settings: AugmentationConfig, seed: int, position: int) -> int:
    """Number of bins to drop from the start: one draw for the complete batch, as in the '25 release."""
    return derive_seed(seed, position, "cut") % settings.random_cut if settings.random_cut > 1 else 0


def _draw_masks(n_masks: int, max_width: int, length: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Start and width of each mask: width uniform on 0 … max_width, start uniform over all possible positions."""
    masks = []
    for _ in range(n_masks):
        width = _randint(max_width + 1, generator)
        masks.append((_randint(length - width + 1, generator), width))
    return masks


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, device=generator.device))


def _randint(n: int, generator: torch.Generator) -> int:
    """An integer from 0 to n - 1."""
    return min(int(_uniform(generator) * n), n - 1)
