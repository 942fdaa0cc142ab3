"""`LanguageModel`: vocabulary, n-gram states and the arrays that compiled searches query."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.language.ngram.file import check_crc, damaged, map_arrays
from arcuate.language.ngram.query import NGramArrays, advance, score_words, state_after
from arcuate.language.ngram.vocabulary import BOS, EOS, UNK, Vocabulary, special_id

MAX_ORDER = 100
_LAYOUT = {
    "words": "I32",
    "log_probs": "F32",
    "backoffs": "F32",
    "firsts": "I32",
    "suffixes": "I32",
    "nexts": "I32",
    "vocabulary": "U8",
    "offsets": "I64",
    "slots": "I32",
    "sentences": "U64",
}
_OPTIONAL = frozenset({"sentences"})
_VOCABULARY_ARRAYS = ("vocabulary", "offsets", "slots")


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A back-off n-gram model of any order."""

    arrays: NGramArrays
    words: Vocabulary
    order: int
    name: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    sentences: np.ndarray | None = None  # (n,) uint64, sorted hashes of the training sentences, if stored
    unk: int = field(init=False)
    bos: int = field(init=False)
    eos: int = field(init=False)
    start: int = field(init=False)  # state after <s>
    empty: int = field(init=False, default=0)  # state without context

    def __post_init__(self) -> None:
        for name, word in (("unk", UNK), ("bos", BOS), ("eos", EOS)):
            object.__setattr__(self, name, special_id(self.words, word))
        if min(self.unk, self.bos, self.eos) < 0:
            raise UserError(f"{self.name or 'the model'} lacks one of {UNK}, {BOS}, {EOS}; import it again")
        object.__setattr__(self, "start", int(state_after(self.arrays, 1 + self.bos)))

    @staticmethod
    def open(path: str | Path) -> "LanguageModel":
        """Map a model file. Takes milliseconds at any size, and processes share its memory."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no language model {path}; make one with `arcuate lm import` or `lm build`")
        parts, metadata = map_arrays(path, _LAYOUT, _OPTIONAL)
        for name in _VOCABULARY_ARRAYS:
            check_crc(name, parts[name], metadata, path)
        words = Vocabulary(*(parts.pop(name) for name in _VOCABULARY_ARRAYS))
        sentences = parts.pop("sentences", None)
        arrays = NGramArrays(**{name: parts[name] for name in NGramArrays._fields})
        _check_shapes(path, arrays, words, metadata)
        return LanguageModel(arrays, words, metadata["order"], path.name, metadata, sentences)

    @property
    def unigrams(self) -> np.ndarray:
        """Unigram log-probability of every word (V,)."""
        return self.arrays.log_probs[1 : 1 + len(self.words)]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of n-grams of each order."""
        firsts, bounds = self.arrays.firsts, [1]
        for _ in range(self.order):
            last = bounds[-1]
            bounds.append(int(firsts[last]) if 0 <= last < len(firsts) else len(self.arrays.words))
        counts = tuple(b - a for a, b in pairwise(bounds))
        if min(counts) < 0 or bounds[-1] != len(self.arrays.words):
            raise damaged(Path(self.name), "its orders do not match its n-grams")
        return counts

    def find(self, word: str) -> int:
        """Id of a word, or the id of the unknown word."""
        found = self.words.find(word)
        return self.unk if found < 0 else found

    def advance(self, state: int, word: int) -> tuple[float, int]:
        """Log-probability of a word id after a state, and the next state.

        Compiled code calls `arcuate.language.ngram.query.advance` with `.arrays`.
        """
        log_prob, after = advance(self.arrays, state, word)
        return float(log_prob), int(after)

    def score(self, words: np.ndarray, state: int | None = None) -> tuple[np.ndarray, int]:
        """Log-probability of each word id after a state (default: sentence start), and the last state."""
        out = np.empty(len(words), np.float64)
        ids = np.asarray(words, np.int32)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.words)):
            raise ValueError("word id out of range")
        after = score_words(self.arrays, self.start if state is None else state, ids, out)
        return out, int(after)

    def contains(self, sentence: str) -> bool | None:
        """Whether the training text contains a sentence; None if the model does not store that."""
        if self.sentences is None:
            return None
        value = np.uint64(hash_sentence(sentence))
        at = int(np.searchsorted(self.sentences, value))
        if at < len(self.sentences) and self.sentences[at] == value:
            return True
        return None if self.metadata.get("sentences_in_part") else False


def _check_shapes(path: Path, arrays: NGramArrays, words: Vocabulary, metadata: dict[str, Any]) -> None:
    n_inner, n_nodes, n_words = len(arrays.backoffs), len(arrays.words), len(words)
    order = metadata.get("order")
    slots = len(words.slots)
    consistent = (
        type(order) is int
        and 1 <= order <= MAX_ORDER
        and isinstance(metadata.get("added", []), list)
        and n_words > 0
        and n_nodes > n_words
        and len(arrays.log_probs) == n_nodes
        and len(arrays.firsts) == n_inner + 1
        and len(arrays.suffixes) == n_inner
        and len(arrays.nexts) == n_nodes - n_inner
        and 1 <= n_inner < n_nodes
        and slots > 0
        and slots & (slots - 1) == 0
    )
    if not consistent:
        raise damaged(path, "the sizes of its arrays are inconsistent")
    unigrams = arrays.words[1 : 1 + n_words]
    ends = (int(arrays.firsts[0]), int(arrays.firsts[1]), int(arrays.firsts[-1]))
    if ends[:2] != (1, n_words + 1) or ends[2] != n_nodes or not np.array_equal(unigrams, np.arange(n_words)):
        raise damaged(path, "its unigrams are not in order")
    if not (words.offsets[0] == 0 and words.offsets[-1] == len(words.blob) and (np.diff(words.offsets) >= 0).all()):
        raise damaged(path, "its words are not in order")


def hash_sentence(sentence: str) -> int:
    """64-bit hash of a sentence, normalised as for the word error rate. Used to detect leakage."""
    return _hash(normalise_text(sentence))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_sentences(sentences: Iterable[str]) -> np.ndarray:
    """Sorted distinct hashes; sentences without words are ignored."""
    hashes = {_hash(text) for text in map(normalise_text, sentences) if text}
    return np.sort(np.fromiter(hashes, np.uint64, len(hashes)))
