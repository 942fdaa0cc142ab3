import torch

from arcuate.data.augmentation import augment, draw_cut
from arcuate.data.config import AugmentationConfig, FeatureMasks, TimeMasks

SETTINGS = AugmentationConfig(
    white_noise_sd=0.5,
    offset_sd=0.2,
    time_masks=TimeMasks(n_masks=2, max_bins=3),
    feature_masks=FeatureMasks(n_masks=1, max_channels=2),
)


def bins(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_augmentation_of_a_trial_does_not_depend_on_its_batch() -> None:
    """Padding, order and the other trials have no effect."""
    x = bins(0, 2, 20, 4)
    n_bins = torch.tensor([20, 11])
    both, _ = augment(x, n_bins, ["a", "b"], SETTINGS, seed=1, position=3)
    swapped, _ = augment(x.flip(0), n_bins.flip(0), ["b", "a"], SETTINGS, seed=1, position=3)
    alone, _ = augment(x[1:, :11], n_bins[1:], ["b"], SETTINGS, seed=1, position=3)
    torch.testing.assert_close(both[1, :11], swapped[0, :11], rtol=0, atol=0)
    torch.testing.assert_close(both[1, :11], alone[0], rtol=0, atol=0)


def test_draws_differ_between_positions_seeds_trials_and_copies() -> None:
    x, n_bins = torch.zeros(2, 9, 3), torch.tensor([9, 9])
    draws = [
        augment(x, n_bins, ids, SETTINGS, seed, position)[0]
        for ids, seed, position in ((["a", "a"], 0, 0), (["a", "b"], 0, 1), (["a", "b"], 1, 0))
    ]
    rows = [row for draw in draws for row in draw]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_strengths_are_standard_deviations() -> None:
    x, n_bins = torch.zeros(1, 4000, 50), torch.tensor([4000])
    noise = augment(x, n_bins, ["a"], AugmentationConfig(white_noise_sd=0.8), 0, 0)[0]
    offset = augment(x, n_bins, ["a"], AugmentationConfig(offset_sd=0.2), 0, 0)[0][0]
    assert abs(noise.std() - 0.8) < 0.01
    assert torch.equal(offset, offset[:1].expand_as(offset))
    assert 0.1 < offset[0].std() < 0.3


def test_cut_is_one_official_value_per_batch() -> None:
    settings = AugmentationConfig(random_cut=3)
    cuts = [draw_cut(settings, 0, p) for p in range(300)]
    assert set(cuts) == {0, 1, 2}
    assert min(cuts.count(c) for c in (0, 1, 2)) > 70
    position = cuts.index(2)
    x, n_bins = bins(1, 1, 9, 3), torch.tensor([9])
    out, lengths = augment(x, n_bins, ["a"], settings, 0, position)
    assert torch.equal(out, x[:, 2:]) and lengths.tolist() == [7]


def test_heavy_time_masking_covers_about_half_of_the_bins() -> None:
    """Twenty masks of up to 7.5 %: 1 - (1 - 0.0375)^20 = 53 % for evenly distributed masks."""
    settings = AugmentationConfig(time_masks=TimeMasks(n_masks=20, fixed_count=True, max_fraction=0.075))
    x, n_bins = torch.ones(60, 300, 2), torch.full((60,), 300)
    out, _ = augment(x, n_bins, [str(i) for i in range(60)], settings, 0, 0)
    assert abs(float((out == 0).float().mean()) - 0.53) < 0.04
    assert torch.equal(out[..., 0], out[..., 1])


def test_masks_respect_width_number_and_probability() -> None:
    x, n_bins = torch.ones(400, 50, 8), torch.full((400,), 50)
    ids = [str(i) for i in range(400)]
    few = AugmentationConfig(time_masks=TimeMasks(n_masks=1, probability=0.1, max_bins=15))
    masked = (augment(x, n_bins, ids, few, 0, 0)[0] == 0).all(-1).sum(1)
    assert masked.max() <= 15
    assert 0.04 < float((masked > 0).float().mean()) < 0.16
    channels = AugmentationConfig(feature_masks=FeatureMasks(n_masks=1, max_channels=3))
    hidden = (augment(x, n_bins, ids, channels, 0, 0)[0] == 0).all(1).sum(1)
    assert set(hidden.tolist()) == {0, 1, 2, 3}
