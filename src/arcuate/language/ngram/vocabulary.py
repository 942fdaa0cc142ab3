"""Vocabulary of a model, and n-gram tables: the form between readers or estimators and the trie.

A vocabulary is one blob of UTF-8 bytes with an open-addressing hash table over it. Both are stored in the model file,
so a vocabulary of any size is mapped and needs no Python object per word.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numba import njit

LN10 = 2.302585092994046
LOG_ZERO = -99 * LN10  # nats; ARPA files write probability zero as -99
UNK, BOS, EOS = "<unk>", "<s>", "</s>"

_FNV_OFFSET = np.uint64(14695981039346656037)
_FNV_PRIME = np.uint64(1099511628211)


@dataclass(frozen=True, eq=False)
class Vocabulary(Sequence[str]):
    """Maps word ids to words and back."""

    blob: np.ndarray  # (n_bytes,) uint8, all words concatenated
    offsets: np.ndarray  # (n_words + 1,) int64
    slots: np.ndarray  # (power of two,) int32, word id or -1, by hash

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes().decode("utf-8", "replace")

    def find(self, word: str) -> int:
        """Id of a word, or -1."""
        text = np.frombuffer(word.encode("utf-8", "surrogatepass"), np.uint8)
        return int(find_word(text, 0, len(text), self.blob, self.offsets, self.slots))

    def find_all(self, words: Iterable[str]) -> np.ndarray:
        """Ids of many words at once; -1 for words that are not in the vocabulary."""
        blob, offsets = join_bytes([word.encode("utf-8", "surrogatepass") for word in words])
        spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
        return _find_spans(blob, spans, self.blob, self.offsets, self.slots)

    def first_ids(self) -> np.ndarray:
        """First id of each word: its own, unless the word is a repetition."""
        spans = np.stack([self.offsets[:-1], self.offsets[1:]], axis=1)
        return _find_spans(self.blob, spans, self.blob, self.offsets, self.slots)


def make_vocabulary(words: Iterable[str]) -> Vocabulary:
    """Assign ids in the given order. A repeated word is found under its first id."""
    return index_words(*join_bytes([word.encode("utf-8", "surrogatepass") for word in words]))


def join_bytes(encoded: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate byte strings; return the blob and the offsets of each."""
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(word) for word in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def index_words(blob: np.ndarray, offsets: np.ndarray) -> Vocabulary:
    """Build the hash table of a blob of words; its load factor is at most one half."""
    n_words = len(offsets) - 1
    slots = np.full(1 << max(2 * n_words, 1).bit_length(), -1, np.int32)
    _fill_slots(blob, offsets, slots)
    return Vocabulary(blob, offsets, slots)


@njit(cache=True)
def _hash_bytes(text: np.ndarray, start: int, end: int) -> np.uint64:
    """FNV-1a with its upper half folded in."""
    value = _FNV_OFFSET
    for i in range(start, end):
        value = (value ^ np.uint64(text[i])) * _FNV_PRIME
    return value ^ (value >> np.uint64(32))


@njit(cache=True)
def _fill_slots(blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray) -> None:
    for word in range(offsets.shape[0] - 1):
        start, end = offsets[word], offsets[word + 1]
        if find_word(blob, start, end, blob, offsets, slots) >= 0:
            continue
        at = np.int64(_hash_bytes(blob, start, end) & np.uint64(slots.shape[0] - 1))
        while slots[at] >= 0:
            at = (at + 1) & (slots.shape[0] - 1)
        slots[at] = word


@njit(cache=True)
def find_word(text: np.ndarray, start: int, end: int, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray) -> int:
    """Id of the word text[start:end], or -1. Linear probing, bounded so that a damaged table cannot loop."""
    size = slots.shape[0]
    at = np.int64(_hash_bytes(text, start, end) & np.uint64(size - 1))
    for _ in range(size):
        word = slots[at]
        if word < 0 or word >= offsets.shape[0] - 1:
            return -1
        if _same_bytes(text, start, end, blob, offsets[word], offsets[word + 1]):
            return int(word)
        at = (at + 1) & (size - 1)
    return -1


@njit(cache=True)
def _same_bytes(a: np.ndarray, start: int, end: int, b: np.ndarray, b_start: int, b_end: int) -> bool:
    if end - start != b_end - b_start or b_start < 0 or b_end > b.shape[0]:
        return False
    for i in range(end - start):  # noqa: SIM110 (compiled)
        if a[start + i] != b[b_start + i]:
            return False
    return True


@njit(cache=True)
def _find_spans(
    text: np.ndarray, spans: np.ndarray, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray
) -> np.ndarray:
    """Ids of the words text[start:end] of spans (n, 2); -1 for unknown words."""
    found = np.empty(spans.shape[0], np.int32)
    for i in range(spans.shape[0]):
        found[i] = find_word(text, spans[i, 0], spans[i, 1], blob, offsets, slots)
    return found


@dataclass(frozen=True, eq=False)
class NGramTable:
    """n-grams of one order, in any sequence."""

    ids: np.ndarray  # (n, order) int32
    log_probs: np.ndarray  # (n,) float32, nats; NaN if only a longer n-gram implies this one
    backoffs: np.ndarray  # (n,) float32, nats; unused at the longest order
    lines: np.ndarray | None = None  # (n,) int64, line numbers in the source file

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: np.ndarray, log_prob: float) -> "NGramTable":
        """Append n-grams (n, order) with one log-probability and without back-off."""
        n = len(ids)
        return NGramTable(
            np.concatenate([self.ids, ids.astype(np.int32)]),
            np.concatenate([self.log_probs, np.full(n, log_prob, np.float32)]),
            np.concatenate([self.backoffs, np.zeros(n, np.float32)]),
            None if self.lines is None else np.concatenate([self.lines, np.zeros(n, np.int64)]),
        )


@dataclass(frozen=True, eq=False)
class NGramTables:
    """A back-off model as one table per order, starting with unigrams."""

    vocabulary: Vocabulary
    orders: tuple[NGramTable, ...]
    added: tuple[str, ...] = ()  # special words (<unk>, <s>, </s>) that the source lacks
    source: str = ""  # name used in messages
    n_repeated: int = 0  # words that the source repeats with the same values

    @property
    def order(self) -> int:
        return len(self.orders)


def special_id(words: Vocabulary, word: str) -> int:
    """Id of <unk>, <s> or </s> in lower or upper case, or -1."""
    found = words.find(word)
    return found if found >= 0 else words.find(word.upper())


def add_special_words(tables: NGramTables) -> NGramTables:
    """Add those of <unk>, <s> and </s> that are missing, with probability zero."""
    added = tuple(word for word in (UNK, BOS, EOS) if special_id(tables.vocabulary, word) < 0)
    if not added:
        return tables
    new_ids = len(tables.vocabulary) + np.arange(len(added))
    unigrams = tables.orders[0].extend(new_ids[:, None], LOG_ZERO)
    vocabulary = make_vocabulary([*tables.vocabulary, *added])
    return replace(tables, vocabulary=vocabulary, orders=(unigrams, *tables.orders[1:]), added=added)
