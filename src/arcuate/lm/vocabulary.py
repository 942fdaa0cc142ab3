"""The words of a model: one blob of bytes, and a hash table over it that lives in the file as well."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

SEED = np.uint64(14695981039346656037)
PRIME = np.uint64(1099511628211)


@dataclass(frozen=True, eq=False)
class Vocabulary(Sequence[str]):
    """Word ids to words and back, without a Python object per word."""

    blob: np.ndarray  # (n_bytes,) uint8, all words one after another
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
        """The id of a word, or -1."""
        text = np.frombuffer(word.encode("utf-8", "surrogatepass"), np.uint8)
        return int(find_word(text, 0, len(text), self.blob, self.offsets, self.slots))

    def find_all(self, words: Iterable[str]) -> np.ndarray:
        """Ids of many words at once, -1 where there is none."""
        coded = [word.encode("utf-8", "surrogatepass") for word in words]
        blob, offsets = join(coded)
        spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
        return find_spans(blob, spans, self.blob, self.offsets, self.slots)

    def first_ids(self) -> np.ndarray:
        """For each word the id under which it is found: its own, unless it was there before."""
        spans = np.stack([self.offsets[:-1], self.offsets[1:]], axis=1)
        return find_spans(self.blob, spans, self.blob, self.offsets, self.slots)


def vocabulary_of(words: Iterable[str]) -> Vocabulary:
    """A vocabulary with ids in the order given; a word that comes twice keeps its first id in the table."""
    return index_words(*join([word.encode("utf-8", "surrogatepass") for word in words]))


def join(coded: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Byte strings as one blob and the offsets of each."""
    offsets = np.zeros(len(coded) + 1, np.int64)
    np.cumsum([len(word) for word in coded], out=offsets[1:])
    return np.frombuffer(b"".join(coded), np.uint8), offsets


def index_words(blob: np.ndarray, offsets: np.ndarray) -> Vocabulary:
    n_words = len(offsets) - 1
    slots = np.full(1 << max(2 * n_words, 1).bit_length(), -1, np.int32)
    fill_slots(blob, offsets, slots)
    return Vocabulary(blob, offsets, slots)


@njit(cache=True)
def hash_bytes(text: np.ndarray, start: int, end: int) -> np.uint64:
    """FNV-1a, its upper half folded in."""
    value = SEED
    for i in range(start, end):
        value = (value ^ np.uint64(text[i])) * PRIME
    return value ^ (value >> np.uint64(32))


@njit(cache=True)
def fill_slots(blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray) -> None:
    for word in range(offsets.shape[0] - 1):
        start, end = offsets[word], offsets[word + 1]
        if find_word(blob, start, end, blob, offsets, slots) >= 0:
            continue
        at = np.int64(hash_bytes(blob, start, end) & np.uint64(slots.shape[0] - 1))
        while slots[at] >= 0:
            at = (at + 1) & (slots.shape[0] - 1)
        slots[at] = word


@njit(cache=True)
def find_word(
    text: np.ndarray, start: int, end: int, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray
) -> int:
    """The id of text[start:end], or -1."""
    size = slots.shape[0]
    at = np.int64(hash_bytes(text, start, end) & np.uint64(size - 1))
    for _ in range(size):
        word = slots[at]
        if word < 0 or word >= offsets.shape[0] - 1:
            return -1
        if same_bytes(text, start, end, blob, offsets[word], offsets[word + 1]):
            return int(word)
        at = (at + 1) & (size - 1)
    return -1


@njit(cache=True)
def same_bytes(a: np.ndarray, start: int, end: int, b: np.ndarray, b_start: int, b_end: int) -> bool:
    if end - start != b_end - b_start or b_start < 0 or b_end > b.shape[0]:
        return False
    for i in range(end - start):  # noqa: SIM110 (compiled)
        if a[start + i] != b[b_start + i]:
            return False
    return True


@njit(cache=True)
def find_spans(
    text: np.ndarray, spans: np.ndarray, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray
) -> np.ndarray:
    """Ids of the words text[start:end] for each span (n, 2); -1 where there is none."""
    found = np.empty(spans.shape[0], np.int32)
    for i in range(spans.shape[0]):
        found[i] = find_word(text, spans[i, 0], spans[i, 1], blob, offsets, slots)
    return found
