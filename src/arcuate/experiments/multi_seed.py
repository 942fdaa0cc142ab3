"""One recipe with several seeds: which settings change with the seed, and what the runs say together."""

import statistics
from collections.abc import Sequence
from typing import Any

from arcuate.experiments.recipe import Recipe


def seed_settings(recipe: Recipe, i: int) -> list[str]:
    """The settings of repetition i. The order of the data changes with it too, unless that seed carves out `dev`."""
    settings = [f"train.seed={recipe.train.seed + i}"]
    if recipe.data.dev_fraction == 0:
        settings.append(f"data.seed={recipe.data.seed + i}")
    return settings


def spread(rates: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and range of error rates over seeds; null where there are too few."""
    return {
        "mean_per": statistics.fmean(rates) if rates else None,
        "sd_per": statistics.stdev(rates) if len(rates) > 1 else None,
        "low_per": min(rates, default=None),
        "high_per": max(rates, default=None),
    }
