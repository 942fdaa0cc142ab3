"""Synthetic sessions with known drift, for a small model trained on the first of them.

Every phoneme of a small alphabet drives its own direction in channel space; in later sessions directions are rotated.
A GRU learns this in seconds, so adaptation and calibration can be tested on a model with a low error rate.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import token_names
from arcuate.data.prepare import prepare
from support.recordings import FakeTrial, write_hdf5

ALPHABET = (7, 12, 17, 24, 28, 40)
N_CHANNELS = 12
FIRST, SECOND = "t15.2030.01.01", "t15.2030.01.04"
SAME, DRIFTED, PERMUTED, DEAD, UNLABELLED = (
    "t15.2030.01.08",
    "t15.2030.01.12",
    "t15.2030.01.20",
    "t15.2030.01.24",
    "t15.2030.01.28",
)
NOISE = 1.2
TRAINING = (
    *("encoder.width=32", "encoder.depth=1", "encoder.dropout=0", "train.steps=220", "train.validate_every=110"),
    *("train.checkpoint_every=220", "train.log_every=20", "front_end.patch.bins=4", "front_end.patch.stride=2"),
    *("front_end.smoothing.sd=0", "front_end.normalise=none", "augment.white_noise_sd=0.2", "augment.offset_sd=0.05"),
    *("augment.random_cut=0", "data.batching.batch_size=16", "schedule.peak_lr=0.01", "runtime.threads=1"),
)


def directions() -> np.ndarray:
    """One unit vector per phoneme. (alphabet, C)"""
    rng = np.random.default_rng(11)
    return np.linalg.qr(rng.normal(size=(N_CHANNELS, N_CHANNELS)))[0][: len(ALPHABET)]


def turn(angle: float) -> np.ndarray:
    """A rotation that turns pairs of channels by this angle. (C, C)"""
    turned = np.eye(N_CHANNELS)
    for i in range(0, N_CHANNELS, 2):
        turned[i : i + 2, i : i + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return turned


def speak(rng: np.random.Generator, mixing: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """One sentence: bins (T, C) and its tokens, no two neighbours alike."""
    spoken: list[int] = []
    while len(spoken) < 8:
        spoken += [int(i) for i in rng.integers(len(ALPHABET), size=1) if not spoken or i != spoken[-1]]
    drive = [np.zeros(N_CHANNELS)] * 4
    for i in spoken:
        drive += [3.0 * directions()[i]] * int(rng.integers(4, 7)) + [np.zeros(N_CHANNELS)] * 2
    bins = np.stack([*drive, *[np.zeros(N_CHANNELS)] * 4]) @ mixing
    noisy = bins + NOISE * rng.standard_normal(bins.shape)
    return noisy.astype(np.float32), tuple(ALPHABET[i] for i in spoken)


def write_day(
    root: Path, session: str, seed: int, mixing: np.ndarray, n_train: int, n_val: int, labelled: bool = True
) -> None:
    rng = np.random.default_rng((99, seed))
    for split, n, block in (("train", n_train, 1), ("val", n_val, 2)):
        made = []
        for _ in range(n):
            bins, tokens = speak(rng, mixing)
            text = " ".join(token_names(tokens))
            made.append(FakeTrial(bins, tokens if labelled else None, text if labelled else None, block=block))
        write_hdf5(root / "hdf5_data_final" / session / f"data_{split}.hdf5", made)


def make_days(root: Path, angle: float = 0.65) -> Path:
    """A store with two training sessions, and sessions with the same, rotated, permuted and flat channels."""
    source = root / "source"
    still, shuffled = np.eye(N_CHANNELS), np.eye(N_CHANNELS)[::-1]
    plan: Sequence[tuple[str, np.ndarray, int, bool]] = (
        (FIRST, still, 60, True),
        (SECOND, still, 60, True),
        (SAME, still, 60, True),
        (DRIFTED, turn(angle), 60, True),
        (PERMUTED, shuffled, 20, True),
        (DEAD, np.zeros((N_CHANNELS, N_CHANNELS)), 10, True),
        (UNLABELLED, still, 10, False),
    )
    for seed, (session, mixing, n_train, labelled) in enumerate(plan):
        write_day(source, session, seed, mixing, n_train, 20, labelled)
    silence(source / "hdf5_data_final" / DEAD)
    prepare(source, root / "store")
    return root / "store"


def silence(folder: Path) -> None:
    """Set every bin of a day to 0, as a headstage that is not plugged in records it."""
    import h5py

    for file in folder.glob("*.hdf5"):
        with h5py.File(file, "r+") as day:
            for trial in day.values():
                trial["input_features"][...] = 0.0
