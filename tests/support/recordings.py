"""Small synthetic recordings in the layouts of both releases, valid or deliberately damaged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io

LABEL = (7, 28, 17, 24, 40)  # "bring"


@dataclass
class FakeTrial:
    """One trial to write; any part can be missing or wrong."""

    bins: np.ndarray
    tokens: Sequence[int] | None = LABEL
    text: str | bytes | None = "Bring."
    block: int | None = 1
    attributes: dict[str, Any] = field(default_factory=dict)  # override the default ones; None removes one


def noise(n_bins: int = 60, n_channels: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n_bins, n_channels)).astype(np.float32)


def write_hdf5(path: Path, trials: Sequence[FakeTrial], padded: int = 50) -> Path:
    """One '25 file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for number, fake in enumerate(trials):
            group = file.create_group(f"trial_{number:04d}")
            group["input_features"] = fake.bins
            attributes: dict[str, Any] = {
                "n_time_steps": len(fake.bins),
                "session": path.parent.name,
                "trial_num": number,
                "block_num": fake.block,
            }
            if fake.tokens is not None:
                group["seq_class_ids"] = np.pad(np.asarray(fake.tokens, dtype=np.int32), (0, padded - len(fake.tokens)))
                attributes |= {"seq_len": len(fake.tokens), "sentence_label": fake.text}
            for name, value in (attributes | fake.attributes).items():
                if value is not None:
                    group.attrs[name] = value
    return path


def write_mat(
    path: Path, bins: Sequence[np.ndarray], texts: Sequence[str], blocks: Sequence[int] | None = None
) -> Path:
    """One '24 file: tx1 is the bins rounded to counts, spikePow the bins, each over twice the columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    counts, power = np.empty((1, len(bins)), dtype=object), np.empty((1, len(bins)), dtype=object)
    for i, values in enumerate(bins):
        both_areas = np.concatenate([values, values + 100], axis=1)
        counts[0, i] = np.abs(both_areas).astype(np.uint8)
        power[0, i] = both_areas.astype(np.float32)
    data: Mapping[str, Any] = {
        "tx1": counts,
        "spikePow": power,
        "sentenceText": np.array([text.ljust(80) for text in texts]),
        "blockIdx": np.array(blocks or [1] * len(bins), dtype=np.float64)[:, None],
    }
    scipy.io.savemat(path, data, do_compression=True)
    return path
