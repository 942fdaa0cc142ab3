"""Augmentation of training trials: gain, noise, offset, random walk and cut in the official order, then masks.

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
    view: int = 0,
) -> tuple[Tensor, Tensor]:
    """Augmented copies of normalised bins (B, T, C), and their lengths; pass `n_bins` (B,) on the CPU.

    Views of the same trials differ in all draws except the cut, so their frames correspond. `change_speed` is applied
    beforehand, once for all views.
    """
    lengths = n_bins.tolist()
    draws = _Draws(bins, settings)
    purpose = (f"view {view}",) if view else ()
    seeds = _trial_seeds(trial_ids, seed, position, *purpose)
    for i, (length, trial_seed) in enumerate(zip(lengths, seeds, strict=True)):
        draws.draw(i, length, trial_seed)
    valid = torch.arange(bins.shape[1], device=bins.device) < to_device(n_bins, bins.device)[:, None]  # (B, T)
    out = draws.apply(bins, valid[..., None], lengths)
    if settings.custom:
        _apply_custom(out, lengths, trial_ids, settings, seed, position, *purpose)
    cut = draw_cut(settings, seed, position)
    return out[:, cut:], (n_bins - cut).clamp(min=1) if cut else n_bins


def change_speed(
    bins: Tensor,
    n_bins: Tensor,
    trial_ids: Sequence[str],
    settings: AugmentationConfig,
    seed: int,
    position: int,
    min_bins: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Resample normalised bins (B, T, C) in time (speed perturbation, Ko et al. 2015); return them and their lengths.

    Bins are interpolated linearly. A trial is not shortened below `min_bins`, so that its labels still fit into its
    frames. Lengths are on the CPU.
    """
    if settings.speed_change == 0:
        return bins, n_bins
    lengths: list[int] = n_bins.tolist()
    changed, sources = [], []
    for length, min_length, trial_seed in zip(
        lengths, min_bins, _trial_seeds(trial_ids, seed, position, "speed"), strict=True
    ):
        draw = 2 * _uniform(torch.Generator().manual_seed(trial_seed)) - 1
        n = max(round(length / (1 + settings.speed_change * draw)), min(length, min_length), 1)
        changed.append(n)
        # Sample j of n lies at the centre of the j-th of n equal parts of the trial.
        sources.append(((torch.arange(n, dtype=torch.float64) + 0.5) * (length / n) - 0.5).clamp(0, length - 1))
    source = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True)  # (B, T')
    before = source.floor()
    after = torch.minimum(before + 1, n_bins[:, None] - 1.0)
    valid = torch.arange(source.shape[1]) < torch.tensor(changed)[:, None]
    row = torch.arange(len(lengths), device=bins.device)[:, None]
    weight = to_device((source - before).to(bins.dtype), bins.device)[..., None]
    low, high = (bins[row, to_device(index.long(), bins.device)] for index in (before, after))
    out = torch.where(to_device(valid, bins.device)[..., None], low + weight * (high - low), 0.0)
    return out, torch.tensor(changed)


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
    *view: str,
) -> None:
    """Apply user-defined augmentations in place; each gets one trial (T, C) and a seeded generator."""
    for k, component in enumerate(settings.custom):
        apply = component_class("augmentations", component.kind)(component)
        seeds = _trial_seeds(trial_ids, seed, position, *view, f"custom {k}")
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

        def zeros(sd: float, *shape: int) -> Tensor | None:
            return bins.new_zeros(n_trials, *shape) if sd > 0 else None

        self.gain = zeros(settings.gain_sd, n_channels, n_channels)
        self.white = zeros(settings.white_noise_sd, n_bins, n_channels)
        self.offset = zeros(settings.offset_sd, 1, n_channels)
        self.walk = zeros(settings.random_walk_sd, n_bins, n_channels)
        self.speckle = None
        if settings.speckle > 0:
            self.speckle = torch.ones(bins.shape, device=bins.device)  # 1: never masked
        self.masked_bins = torch.zeros(n_trials, n_bins, dtype=torch.bool)  # on the CPU
        self.masked_channels = torch.zeros(n_trials, n_channels, dtype=torch.bool)

    def draw(self, i: int, length: int, seed: int) -> None:
        """Draw the numbers of trial `i`, always in the same order."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        on_cpu = generator if self.device.type == "cpu" else torch.Generator().manual_seed(seed)
        for whole_trial, values in ((True, self.gain), (False, self.white), (True, self.offset), (False, self.walk)):
            if values is not None:
                (values[i] if whole_trial else values[i, :length]).normal_(generator=generator)
        draw_masks(self.masked_bins[i, :length], self.masked_channels[i], self.settings, on_cpu)
        if self.speckle is not None:
            self.speckle[i, :length].uniform_(generator=generator)
        if self.settings.channel_dropout > 0:
            draws = torch.rand(self.masked_channels.shape[1], generator=on_cpu)
            self.masked_channels[i] |= draws < self.settings.channel_dropout

    def apply(self, bins: Tensor, valid: Tensor, lengths: Sequence[int]) -> Tensor:
        """The augmented bins; padding (not `valid`) stays as it is."""
        settings, out = self.settings, bins.clone()
        if self.gain is not None:
            identity = torch.eye(bins.shape[2], device=bins.device, dtype=bins.dtype)
            for i, length in enumerate(lengths):
                out[i, :length] = bins[i, :length] @ (identity + settings.gain_sd * self.gain[i])
        if self.white is not None:
            out = out + settings.white_noise_sd * self.white
        if self.offset is not None:
            out = out + settings.offset_sd * self.offset
        if self.walk is not None:
            axis = 2 if settings.random_walk_axis == "channel" else 1
            out = out + torch.cumsum(settings.random_walk_sd * self.walk, dim=axis)
        out = torch.where(valid, out, bins)
        if bool(self.masked_bins.any()):
            out = out.masked_fill_(to_device(self.masked_bins, bins.device)[..., None], 0.0)
        if bool(self.masked_channels.any()):
            out = out.masked_fill_(to_device(self.masked_channels, bins.device)[:, None] & valid, 0.0)
        if self.speckle is not None:
            out = out.masked_fill_(self.speckle < settings.speckle, 0.0)
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
