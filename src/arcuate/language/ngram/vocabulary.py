"""The words of a model: one blob of bytes, and a hash table over it that lives in the file as well."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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


# n-grams as flat tables, one per order: what readers and estimators give, and what a trie is built from.

LN10 = 2.302585092994046
ZERO = -99 * LN10  # what ARPA files write for probability nought, in nat
UNK, BOS, EOS = "<unk>", "<s>", "</s>"


@dataclass(frozen=True, eq=False)
class Table:
    """n-grams of one order, in any sequence; back-offs may be missing at the longest order."""

    ids: np.ndarray  # (n, order) int32
    log_probs: np.ndarray  # (n,) float32, nat; NaN where the n-gram is implied by a longer one
    backoffs: np.ndarray  # (n,) float32, nat
    lines: np.ndarray | None = None  # (n,) int64, where a file says so

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Tables:
    """A back-off model: words, and the n-grams of every order from 1."""

    vocabulary: Vocabulary
    orders: tuple[Table, ...]
    added: tuple[str, ...] = ()  # of <unk>, <s>, </s>, those the source did not have
    source: str = ""  # how messages name where it came from
    n_repeated: int = 0  # words that the source gave again with the same values

    @property
    def order(self) -> int:
        return len(self.orders)


def special_id(words: Vocabulary, word: str) -> int:
    """The id of <unk>, <s> or </s>, in either case; -1 if there is none."""
    found = words.find(word)
    return found if found >= 0 else words.find(word.upper())


def with_specials(tables: Tables) -> Tables:
    """The same model with <unk>, <s> and </s>, at probability nought where its source had none."""
    added = tuple(word for word in (UNK, BOS, EOS) if special_id(tables.vocabulary, word) < 0)
    if not added:
        return tables
    old = tables.orders[0]
    n = len(added)
    lines = None if old.lines is None else np.concatenate([old.lines, np.zeros(n, np.int64)])
    new_ids = np.arange(len(tables.vocabulary), len(tables.vocabulary) + n, dtype=np.int32)
    unigrams = Table(
        np.concatenate([old.ids, new_ids[:, None]]),
        np.concatenate([old.log_probs, np.full(n, ZERO, np.float32)]),
        np.concatenate([old.backoffs, np.zeros(n, np.float32)]),
        lines,
    )
    vocabulary = vocabulary_of([*tables.vocabulary, *added])
    return replace(tables, vocabulary=vocabulary, orders=(unigrams, *tables.orders[1:]), added=added)
