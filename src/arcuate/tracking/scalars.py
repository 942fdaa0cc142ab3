"""The one place that says what a number of metrics.jsonl is called in a tracker."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

TRAIN = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "grad_norm_max": "train/grad_norm_max",
    "blank_share": "train/blank_share",
    "n_distinct": "train/distinct_phonemes",
    "length_ratio": "train/length_ratio",
    "stage_index": "train/stage",
    "lr": "learning_rate",
    "lr_bias": "learning_rate_bias",
    "lr_session": "learning_rate_session",
    "losses": "train/loss",
    "skipped": "train/skipped",
    "cost.seconds_per_step": "train/batch_time",
    "cost.waiting_for_data_s": "train/waiting_for_data_time",
    "cost.memory_mb": "train/memory_mb",
}
VALIDATION = {
    "loss": "val/loss",
    "losses": "val/loss",
    "per": "val/per",
    "wer": "val/wer",
    "mode_accuracy": "val/mode_accuracy",
    "per_moving_average_200_steps": "val/per_moving_average_200_steps",
    "cost.seconds": "val/time",
}
NON_FINITE = "non_finite_values"


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row under their names; those that are not finite are counted under another."""
    training = row["split"] == "train"
    named = dict(_named(row, TRAIN if training else VALIDATION))
    if not training and "val/per" in named:
        named["val/phoneme_accuracy"] = 1.0 - named["val/per"]
    finite = {name: value for name, value in named.items() if math.isfinite(value)}
    if n_broken := len(named) - len(finite):
        finite[f"{'train' if training else 'val'}/{NON_FINITE}"] = float(n_broken)
    return finite


def _named(row: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for path, name in names.items():
        group, _, key = path.rpartition(".")
        place = row.get(group, {}) if group else row
        value = place.get(key)
        if isinstance(value, Mapping):  # by head, or by reason
            yield from ((f"{name}_{part}", float(v)) for part, v in value.items() if v is not None)
        elif value is not None:
            yield name, float(value)
