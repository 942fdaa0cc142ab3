"""Splits: content hashes that identify them, and leakage between them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TypedDict

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.data.trial import SPLITS


class TextOverlap(TypedDict):
    """Sentences of one split that also occur in another."""

    n: int
    of: int
    share: float | None  # None: there are no texts to compare, which differs from no overlap


class Leakage(TypedDict):
    """What two splits have in common."""

    trials: dict[str, int]  # "train-val": identical recordings
    texts: dict[str, TextOverlap]  # "val in train": identical sentences after normalisation


def hash_bins(bins: np.ndarray) -> bytes:
    """Hash of a recording: its shape and its little-endian float32 values."""
    digest = hashlib.sha256(repr(bins.shape).encode())
    digest.update(np.ascontiguousarray(bins, dtype="<f4").data)
    return digest.digest()


def hash_trial(bins_hash: bytes, tokens: Sequence[int] | None, text: str | None) -> str:
    """Hash of a trial's content: recording, label and sentence."""
    digest = hashlib.sha256(bins_hash)
    digest.update(repr((None if tokens is None else [int(token) for token in tokens], text)).encode())
    return digest.hexdigest()


def hash_split(hashes: Iterable[str]) -> str:
    """Hash of a set of trials, independent of their order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def find_leakage(bins_hashes: Mapping[str, Sequence[bytes]], texts: Mapping[str, Sequence[str]]) -> Leakage:
    """Recordings and normalised sentences that occur in two splits; both arguments are by split."""
    known = {split: frozenset(bins_hashes.get(split, ())) for split in SPLITS}
    sentences: dict[str, list[str]] = {
        split: [normalise_text(text) for text in texts.get(split, ())] for split in SPLITS
    }
    return {
        "trials": {
            f"{a}-{b}": sum(found in known[a] for found in bins_hashes.get(b, ())) for a, b in combinations(SPLITS, 2)
        },
        "texts": {
            f"{held_out} in {other}": _overlap(sentences[held_out], frozenset(sentences[other]))
            for held_out, other in (("val", "train"), ("test", "train"), ("test", "val"))
        },
    }


def _overlap(texts: Sequence[str], other: frozenset[str]) -> TextOverlap:
    n = sum(text in other for text in texts)
    return {"n": n, "of": len(texts), "share": round(n / len(texts), 4) if texts and other else None}
