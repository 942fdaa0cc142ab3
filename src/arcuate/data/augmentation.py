"""Augmentation of training trials: noise, offset and cut in the official order, then masks.

Every draw is a function of (seed, position in the training sequence, trial). Padding, the number of workers and the
other trials of the batch do not affect it.

The positions of masks and cuts are drawn on the CPU, noise on the device of the bins, each from a generator per trial;
everything else is one call per batch, so nothing is read back from the device. On a CPU one generator draws both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from arcuate.config import component_class
from arcuate.data.batching import to_device
from arcuate.data.config import AugmentationConfig
from arcuate.data.seeds import derive_seed
from arcuate.errors import UserError


def augment(
    bins: Tensor,
    n_bins: Tensor,
    trial_ids: Sequence[str],
    settings: AugmentationConfig,
    seed: int,
    position: int,
) -> tuple[Tensor, Tensor]:
    """Augmented copies of normalised bins (B, T, C), and their lengths; pass `n_bins` (B,) on the CPU."""
    lengths = n_bins.tolist()
    draws = _Draws(bins, settings)
    for i, (length, trial_seed) in enumerate(zip(lengths, _trial_seeds(trial_ids, seed, position), strict=True)):
        draws.draw(i, length, trial_seed)
    valid = torch.arange(bins.shape[1], device=bins.device) < to_device(n_bins, bins.device)[:, None]  # (B, T)
    out = draws.apply(bins, valid[..., None])
    if settings.custom:
        _apply_custom(out, lengths, trial_ids, settings, seed, position)
    cut = draw_cut(settings, seed, position)
    return out[:, cut:], (n_bins - cut).clamp(min=1) if cut else n_bins


def _trial_seeds(trial_ids: Sequence[str], seed: int, position: int, *purpose: str) -> list[int]:
    """One seed per trial of a batch, in which a trial may occur more than once (sampling with replacement)."""
    copies: dict[str, int] = {}
    seeds = []
    for trial in trial_ids:
        copies[trial] = copies.get(trial, -1) + 1
        seeds.append(derive_seed(seed, position, trial, copies[trial], *purpose))
    return seeds


def _apply_custom(
    bins: Tensor,
    lengths: Sequence[int],
    trial_ids: Sequence[str],
    settings: AugmentationConfig,
    seed: int,
    position: int,
) -> None:
    """Apply user-defined augmentations in place; each gets one trial (T, C) and a seeded generator."""
    for k, component in enumerate(settings.custom):
        apply = component_class("augmentations", component.kind)(component)
        seeds = _trial_seeds(trial_ids, seed, position, f"custom {k}")
        for i, (length, trial_seed) in enumerate(zip(lengths, seeds, strict=True)):
            generator = torch.Generator(device=bins.device).manual_seed(trial_seed)
            changed = apply(bins[i, :length].clone(), generator)
            if changed.shape != bins[i, :length].shape:
                raise UserError(
                    f"the augmentation {component.kind!r} changed the shape of a trial from"
                    f" {tuple(bins[i, :length].shape)} to {tuple(changed.shape)}; return bins of the same shape"
                )
            bins[i, :length] = changed


class _Draws:
    """All random numbers of a batch; tensors that the settings do not need are None."""

    def __init__(self, bins: Tensor, settings: AugmentationConfig) -> None:
        n_trials, n_bins, n_channels = bins.shape
        self.settings, self.device = settings, bins.device
        self.white = bins.new_zeros(n_trials, n_bins, n_channels) if settings.white_noise_sd > 0 else None
        self.offset = bins.new_zeros(n_trials, 1, n_channels) if settings.offset_sd > 0 else None
        self.masked_bins = torch.zeros(n_trials, n_bins, dtype=torch.bool)  # on the CPU
        self.masked_channels = torch.zeros(n_trials, n_channels, dtype=torch.bool)

    def draw(self, i: int, length: int, seed: int) -> None:
        """Draw the numbers of trial `i`, always in the same order."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        on_cpu = generator if self.device.type == "cpu" else torch.Generator().manual_seed(seed)
        if self.white is not None:
            self.white[i, :length].normal_(generator=generator)
        if self.offset is not None:
            self.offset[i].normal_(generator=generator)
        draw_masks(self.masked_bins[i, :length], self.masked_channels[i], self.settings, on_cpu)

    def apply(self, bins: Tensor, valid: Tensor) -> Tensor:
        """The augmented bins; padding (not `valid`) stays as it is."""
        out = bins.clone()
        if self.white is not None:
            out = out + self.settings.white_noise_sd * self.white
        if self.offset is not None:
            out = out + self.settings.offset_sd * self.offset
        out = torch.where(valid, out, bins)
        if bool(self.masked_bins.any()):
            out = out.masked_fill_(to_device(self.masked_bins, bins.device)[..., None], 0.0)
        if bool(self.masked_channels.any()):
            out = out.masked_fill_(to_device(self.masked_channels, bins.device)[:, None] & valid, 0.0)
        return out


def draw_masks(
    masked_bins: Tensor, masked_channels: Tensor, settings: AugmentationConfig, generator: torch.Generator
) -> None:
    """Mark runs of bins (T,) and groups of channels (C,) of one trial that are set to 0 (their mean)."""
    n_bins, n_channels = len(masked_bins), len(masked_channels)
    time, features = settings.time_masks, settings.feature_masks
    if time.n_masks and _uniform(generator) < time.probability:
        max_width = time.max_bins if time.max_bins is not None else int((time.max_fraction or 0.0) * n_bins)
        n_masks = time.n_masks if time.fixed_count else _randint(time.n_masks, generator) + 1
        for start, width in _draw_masks(n_masks, min(max_width, n_bins), n_bins, generator):
            masked_bins[start : start + width] = True
    if features.n_masks and _uniform(generator) < features.probability:
        n_masks = _randint(features.n_masks, generator) + 1
        max_width = min(features.max_channels, n_channels)
        for start, width in _draw_masks(n_masks, max_width, n_channels, generator):
            masked_channels[start : start + width] = True


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
    return float(torch.rand((), generator=generator))


def _randint(n: int, generator: torch.Generator) -> int:
    """An integer from 0 to n - 1."""
    return min(int(_uniform(generator) * n), n - 1)
