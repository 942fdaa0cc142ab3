"""The trie files of Sphinx (`*.lm.bin`), among them the English 3-gram that the package `pocketsphinx` carries.

Little-endian throughout: a magic text, the order, counts, quantiser tables, unigrams, one bit-packed block per longer
order, the words. The trie is keyed backwards, from the last word of an n-gram to its first. Logarithms are to base
1.0001.
"""

import importlib.util
import math
from pathlib import Path

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.vocabulary import Table, Tables, Vocabulary, index_words, with_specials

MAGIC = b"Trie Language Model"
_BASE = math.log(1.0001)
_LEVELS = 65_536
_MAX_ORDER = 16


def embedded_path() -> Path:
    """The English 3-gram of the installed package; its compiled module is not imported."""
    spec = importlib.util.find_spec("pocketsphinx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "model" / "en-us" / "en-us.lm.bin"
        if path.is_file():
            return path
    raise UserError("the English language model is missing: run `pip install pocketsphinx`, which carries it")


def is_sphinx_file(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_sphinx(path: Path) -> Tables:
    """All n-grams of a Sphinx trie file."""
    parts = _Parts(path)
    if parts.take(len(MAGIC), np.uint8).tobytes() != MAGIC:
        raise parts.damaged("it does not start like one")
    order = int(parts.take(1, np.uint8)[0])
    if not 2 <= order <= _MAX_ORDER:
        raise parts.damaged(f"its order is {order}")
    counts = [int(n) for n in parts.take(order, np.uint32)]
    parts.take(1, np.int32)
    levels = [parts.take(_LEVELS, np.float32) for _ in range(2 * (order - 2) + 1)]
    unigrams = parts.take(counts[0] + 1, np.dtype([("prob", "<f4"), ("backoff", "<f4"), ("first", "<u4")]))
    tables = [
        Table(
            np.arange(counts[0], dtype=np.int32)[:, None],
            _natural(unigrams["prob"][:-1]),
            _natural(unigrams["backoff"][:-1]),
        )
    ]
    firsts, paths = unigrams["first"].astype(np.int64), tables[0].ids
    for k in range(2, order + 1):
        longest = k == order
        words, probs, backoffs, children = _unpack(parts, counts, k, int(firsts[-1]), longest)
        paths = _extend(parts, paths, firsts, words, counts[0])
        log_probs = levels[2 * (k - 2)][probs]
        weights = np.zeros(len(words), np.float32) if longest else levels[2 * (k - 2) + 1][backoffs]
        tables.append(Table(np.ascontiguousarray(paths[:, ::-1]), _natural(log_probs), _natural(weights)))
        firsts = children
    return with_specials(Tables(_words(parts, counts[0]), tuple(tables), source=str(path)))


def _natural(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float64) * _BASE).astype(np.float32)


class _Parts:
    """A file taken apart from the front, never beyond its end."""

    def __init__(self, path: Path) -> None:
        try:
            self.data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        self.path, self.at = path, 0

    def take(self, n: int, dtype: np.dtype | type) -> np.ndarray:
        n_bytes = n * np.dtype(dtype).itemsize
        if self.at + n_bytes > len(self.data):
            raise self.damaged("it ends too early")
        self.at += n_bytes
        return np.frombuffer(self.data[self.at - n_bytes : self.at].tobytes(), dtype)

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is no whole Sphinx language model: {what}; fetch it again")


def _unpack(
    parts: _Parts, counts: list[int], k: int, n: int, longest: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(words, probability levels, back-off levels, first children (n + 1,)) of the n-grams of order k."""
    word_bits = counts[0].bit_length()
    pointer_bits = 0 if longest else counts[k].bit_length()
    size = word_bits + (16 if longest else 32) + pointer_bits
    block = parts.take(((1 + counts[k - 1]) * size + 7) // 8 + 8, np.uint8)
    if n > counts[k - 1]:
        raise parts.damaged("its pointers leave the file")
    at = np.arange(n + 1, dtype=np.int64) * size
    words = _bits(block, at[:-1], word_bits)
    if longest:
        none = np.zeros(0, np.int64)
        return words, _bits(block, at[:-1] + word_bits, 16), none, none
    values = _bits(block, at[:-1] + word_bits, 32)
    return words, values >> 16, values & 0xFFFF, _bits(block, at + word_bits + 32, pointer_bits)


def _bits(block: np.ndarray, at: np.ndarray, n_bits: int) -> np.ndarray:
    """Fields of up to 32 bits that begin anywhere, the least significant bit first."""
    wide = np.ndarray((len(block) - 7,), "<u8", block.tobytes(), strides=(1,))
    return ((wide[at >> 3] >> (at & 7).astype(np.uint64)) & np.uint64((1 << n_bits) - 1)).astype(np.int64)


def _extend(
    parts: _Parts, paths: np.ndarray, firsts: np.ndarray, words: np.ndarray, n_words: int
) -> np.ndarray:
    """Paths (n, k) from those one shorter: each node's children lie between two pointers."""
    sizes = np.diff(firsts)
    if firsts[0] != 0 or (sizes < 0).any() or (len(words) and words.max() >= n_words):
        raise parts.damaged("its pointers are not in order")
    parents = np.repeat(np.arange(len(paths)), sizes)
    return np.concatenate([paths[parents], words[:, None].astype(np.int32)], axis=1)


def _words(parts: _Parts, n_words: int) -> Vocabulary:
    n_bytes = int(parts.take(1, np.uint32)[0])
    blob = parts.take(n_bytes, np.uint8)
    ends = np.flatnonzero(blob == 0)
    if len(ends) != n_words or (n_words and ends[-1] != n_bytes - 1):
        raise parts.damaged("its words do not fit its counts")
    offsets = np.concatenate([[0], np.cumsum(np.diff(ends, prepend=-1) - 1)])
    try:
        blob.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        raise parts.damaged("its words are not UTF-8") from None
    return index_words(blob[blob != 0], offsets.astype(np.int64))
