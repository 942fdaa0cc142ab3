"""The augmentations of both baselines, in their official order: gain, noise, offset, random walk, cut.

Every draw is a function of (seed, position in the training sequence, trial): neither padding nor the number of
workers nor the company a trial keeps in its batch changes what happens to it.
"""

from collections.abc import Sequence

import torch

from arcuate.augment.settings import Augment
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
        out[i, :length] = augment_trial(bins[i, :length], settings, generator)
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


def draw_cut(settings: Augment, seed: int, position: int) -> int:
    """How many bins to drop from the start: one value for the whole batch, as in the '25 release."""
    return derive(seed, position, "cut") % settings.random_cut if settings.random_cut > 1 else 0
