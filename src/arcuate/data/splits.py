"""Splits: content hashes that pin them down, what leaks between them, and the part of train to select on."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.data.trial import SPLITS


class Sentence(Protocol):
    """As much of a trial as splitting needs."""

    @property
    def id(self) -> str: ...
    @property
    def session(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def tokens(self) -> tuple[int, ...] | None: ...
    @property
    def text(self) -> str | None: ...


def hash_bins(bins: np.ndarray) -> bytes:
    """Hash of the recording alone: its shape and its little-endian float32 values."""
    digest = hashlib.sha256(repr(bins.shape).encode())
    digest.update(np.ascontiguousarray(bins, dtype="<f4").data)
    return digest.digest()


def hash_trial(bins_hash: bytes, tokens: Sequence[int] | None, text: str | None) -> str:
    """Hash of a trial's whole content: recording, label and sentence."""
    digest = hashlib.sha256(bins_hash)
    digest.update(repr((None if tokens is None else [int(token) for token in tokens], text)).encode())
    return digest.hexdigest()


def hash_split(hashes: Iterable[str]) -> str:
    """One hash for a set of trials, whatever their order."""
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def find_leakage(
    recordings: Mapping[str, Sequence[bytes]], texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What two splits share: recordings bit for bit, and sentences after normalisation.

    By split, `recordings` has the hash of every trial's bins, `texts` the sentence of every trial with one.
    """
    known = {split: frozenset(recordings.get(split, ())) for split in SPLITS}
    shared = {
        f"{a}-{b}": sum(r in known[a] for r in recordings.get(b, ())) for a, b in combinations(SPLITS, 2)
    }
    said: dict[str, list[str]] = {
        split: [normalise_text(text) for text in texts.get(split, ())] for split in SPLITS
    }
    return {
        "trials": shared,
        "texts": {
            f"{held} in {other}": _overlap(said[held], frozenset(said[other]))
            for held, other in (("val", "train"), ("test", "train"), ("test", "val"))
        },
    }


def _overlap(held: Sequence[str], other: frozenset[str]) -> dict[str, Any]:
    """Share None: there are no texts to compare, which is not the same as no overlap."""
    n = sum(text in other for text in held)
    return {"n": n, "of": len(held), "share": round(n / len(held), 4) if held and other else None}


def dev_split(infos: Iterable[Sentence], fraction: float, seed: int) -> set[str]:
    """Ids of the training trials set aside to select on.

    The hash of a sentence decides, so all its repetitions fall on the same side. Sessions are filled one
    after the other, each to its share, so adding later sessions moves no trial of the earlier ones.
    """
    by_session: dict[str, dict[bytes, list[str]]] = {}
    for info in infos:
        if info.split == "train":
            by_session.setdefault(info.session, {}).setdefault(_sentence_key(info, seed), []).append(info.id)
    taken: set[bytes] = set()
    passed: set[bytes] = set()
    dev: set[str] = set()
    n_seen = 0
    for sentences in by_session.values():
        n_seen += sum(len(ids) for ids in sentences.values())
        quota = int(fraction * n_seen + 0.5)
        dev.update(trial for key in taken & sentences.keys() for trial in sentences[key])
        for key in sorted(sentences.keys() - taken - passed):
            if len(dev) + len(sentences[key]) <= quota:
                taken.add(key)
                dev.update(sentences[key])
        passed |= sentences.keys() - taken
    return dev


def _sentence_key(info: Sentence, seed: int) -> bytes:
    """A pseudo-random number of the sentence; without a text the label, else the trial, stands in."""
    said = normalise_text(info.text) if info.text else repr(info.tokens) if info.tokens else info.id
    return hashlib.sha256(f"{seed}\n{said}".encode()).digest()
