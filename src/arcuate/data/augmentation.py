"""The augmentations of both baselines in their official order (gain, noise, offset, random walk, cut), then masks.

Every draw is a function of (seed, position in the training sequence, trial): neither padding nor the number of
workers nor the company a trial keeps in its batch changes what happens to it.
"""

from collections.abc import Sequence

import torch

from arcuate.data.config import Augment
from arcuate.seeds import derive


def augment(
    bins: torch.Tensor,
    n_bins: torch.Tensor,
    trial_ids: Sequence[str],
    settings: Augment,
    seed: int,
    position: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised bins (B, T, C) to augmented bins and lengths; the input is left as it was."""
    out = bins.clone()
    copies: dict[str, int] = {}
    for i, (trial, length) in enumerate(zip(trial_ids, n_bins.tolist(), strict=True)):
        copies[trial] = copies.get(trial, -1) + 1  # drawn with replacement, a trial may come twice
        generator = torch.Generator(device=bins.device)
        generator.manual_seed(derive(seed, position, trial, copies[trial]))
        changed = augment_trial(bins[i, :length], settings, generator)
        out[i, :length] = mask_trial(changed, settings, generator)
    cut = draw_cut(settings, seed, position)
    return out[:, cut:], (n_bins - cut).clamp(min=1) if cut else n_bins


def augment_trial(bins: torch.Tensor, settings: Augment, generator: torch.Generator) -> torch.Tensor:
    """One trial (T, C) without its padding."""
    n_bins, n_channels = bins.shape

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=bins.device, dtype=bins.dtype)

    if settings.gain_sd > 0:
        mixing = torch.eye(n_channels, device=bins.device, dtype=bins.dtype)
        bins = bins @ (mixing + settings.gain_sd * draw(n_channels, n_channels))
    if settings.white_noise_sd > 0:
        bins = bins + settings.white_noise_sd * draw(n_bins, n_channels)
    if settings.offset_sd > 0:
        bins = bins + settings.offset_sd * draw(1, n_channels)
    if settings.random_walk_sd > 0:
        axis = 1 if settings.random_walk_axis == "channel" else 0
        bins = bins + torch.cumsum(settings.random_walk_sd * draw(n_bins, n_channels), dim=axis)
    return bins


def mask_trial(bins: torch.Tensor, settings: Augment, generator: torch.Generator) -> torch.Tensor:
    """One trial (T, C) with stretches of time, groups of channels or single values set to 0, their mean."""
    n_bins, n_channels = bins.shape
    hidden = torch.zeros(bins.shape, dtype=torch.bool, device=bins.device)
    time, features = settings.time_masks, settings.feature_masks
    if time.n_masks and uniform(generator) < time.probability:
        widest = time.max_bins if time.max_bins is not None else int((time.max_share or 0.0) * n_bins)
        n_masks = time.n_masks if time.exactly else below(time.n_masks, generator) + 1
        for start, width in draw_masks(n_masks, min(widest, n_bins), n_bins, generator):
            hidden[start : start + width] = True
    if features.n_masks and uniform(generator) < features.probability:
        n_masks = below(features.n_masks, generator) + 1
        for start, width in draw_masks(
            n_masks, min(features.max_channels, n_channels), n_channels, generator
        ):
            hidden[:, start : start + width] = True
    if settings.speckle > 0:
        draws = torch.rand(bins.shape, generator=generator, device=bins.device)
        hidden |= draws < settings.speckle
    return bins.masked_fill(hidden, 0.0) if bool(hidden.any()) else bins


def draw_masks(n_masks: int, widest: int, length: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Start and width of each mask: width uniform on 0 … widest, start uniform where it fits."""
    masks = []
    for _ in range(n_masks):
        width = below(widest + 1, generator)
        masks.append((below(length - width + 1, generator), width))
    return masks


def uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, device=generator.device))


def below(n: int, generator: torch.Generator) -> int:
    """A whole number from 0 to n - 1."""
    return min(int(uniform(generator) * n), n - 1)


def draw_cut(settings: Augment, seed: int, position: int) -> int:
    """How many bins to drop from the start: one value for the whole batch, as in the '25 release."""
    return derive(seed, position, "cut") % settings.random_cut if settings.random_cut > 1 else 0
