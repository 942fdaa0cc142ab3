"""Trie files of Sphinx (`*.lm.bin`), such as the English 3-gram in the package `pocketsphinx`.

Little-endian: magic bytes, order, counts, quantisation tables, unigrams, a bit-packed block per longer order, words.
The trie is reversed: it runs from the last word of an n-gram to its first. Logarithms have base 1.0001.
"""

import math
from pathlib import Path

import numpy as np

from arcuate.errors import UserError
from arcuate.files import find_package_file
from arcuate.language.ngram.trie import NGramTable, NGramTables, add_special_words

_MAGIC = b"Trie Language Model"
_LOG_BASE = math.log(1.0001)
_N_LEVELS = 65_536
_MAX_ORDER = 16


def embedded_path() -> Path:
    """Path of the English 3-gram in the installed package."""
    if path := find_package_file("pocketsphinx", "model/en-us/en-us.lm.bin"):
        return path
    raise UserError("the English language model is missing; run `pip install pocketsphinx`, which contains it")


def is_sphinx_file(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def read_sphinx(path: Path) -> NGramTables:
    """Read all n-grams of a Sphinx trie file."""
    reader = _SphinxReader(path)
    if reader.take(len(_MAGIC), np.uint8).tobytes() != _MAGIC:
        raise reader.damaged("its magic bytes are wrong")
    order = int(reader.take(1, np.uint8)[0])
    if not 2 <= order <= _MAX_ORDER:
        raise reader.damaged(f"its order is {order}")
    counts = [int(n) for n in reader.take(order, np.uint32)]
    reader.take(1, np.int32)
    levels = [reader.take(_N_LEVELS, np.float32) for _ in range(2 * (order - 2) + 1)]
    unigrams = reader.take(counts[0] + 1, np.dtype([("prob", "<f4"), ("backoff", "<f4"), ("first", "<u4")]))
    tables = [
        NGramTable(
            np.arange(counts[0], dtype=np.int32)[:, None],
            _to_natural_log(unigrams["prob"][:-1]),
            _to_natural_log(unigrams["backoff"][:-1]),
        )
    ]
    firsts, paths = unigrams["first"].astype(np.int64), tables[0].ids
    for k in range(2, order + 1):
        longest = k == order
        words, probs, backoffs, children = _unpack(reader, counts, k, int(firsts[-1]), longest)
        paths = _extend_paths(reader, paths, firsts, words, counts[0])
        log_probs = levels[2 * (k - 2)][probs]
        weights = np.zeros(len(words), np.float32) if longest else levels[2 * (k - 2) + 1][backoffs]
        tables.append(
            NGramTable(np.ascontiguousarray(paths[:, ::-1]), _to_natural_log(log_probs), _to_natural_log(weights))
        )
        firsts = children
    return add_special_words(NGramTables(_read_words(reader, counts[0]), tuple(tables), source=str(path)))


def _to_natural_log(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float64) * _LOG_BASE).astype(np.float32)


class _SphinxReader:
    """Sequential reader that never reads beyond the end of the file."""

    def __init__(self, path: Path) -> None:
        try:
            self.data = np.fromfile(path, np.uint8)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        self.path, self.at = path, 0

    def take(self, n: int, dtype: np.dtype | type) -> np.ndarray:
        n_bytes = n * np.dtype(dtype).itemsize
        if self.at + n_bytes > len(self.data):
            raise self.damaged("it is truncated")
        self.at += n_bytes
        return np.frombuffer(self.data[self.at - n_bytes : self.at].tobytes(), dtype)

    def damaged(self, problem: str) -> UserError:
        return UserError(f"{self.path} is not a complete Sphinx language model: {problem}; download it again")


def _unpack(
    reader: _SphinxReader, counts: list[int], k: int, n: int, longest: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(words, probability levels, back-off levels, first children (n + 1,)) of the n-grams of order k."""
    word_bits = counts[0].bit_length()
    pointer_bits = 0 if longest else counts[k].bit_length()
    size = word_bits + (16 if longest else 32) + pointer_bits
    block = reader.take(((1 + counts[k - 1]) * size + 7) // 8 + 8, np.uint8)
    if n > counts[k - 1]:
        raise reader.damaged("its pointers point outside the file")
    at = np.arange(n + 1, dtype=np.int64) * size
    words = _bit_fields(block, at[:-1], word_bits)
    if longest:
        none = np.zeros(0, np.int64)
        return words, _bit_fields(block, at[:-1] + word_bits, 16), none, none
    values = _bit_fields(block, at[:-1] + word_bits, 32)
    return words, values >> 16, values & 0xFFFF, _bit_fields(block, at + word_bits + 32, pointer_bits)


def _bit_fields(block: np.ndarray, at: np.ndarray, n_bits: int) -> np.ndarray:
    """Bit fields of up to 32 bits at arbitrary bit offsets, least significant bit first."""
    wide = np.ndarray((len(block) - 7,), "<u8", block.tobytes(), strides=(1,))
    return ((wide[at >> 3] >> (at & 7).astype(np.uint64)) & np.uint64((1 << n_bits) - 1)).astype(np.int64)


def _extend_paths(
    reader: _SphinxReader, paths: np.ndarray, firsts: np.ndarray, words: np.ndarray, n_words: int
) -> np.ndarray:
    """Extend paths by one word (n, k): the children of each node are between two pointers."""
    sizes = np.diff(firsts)
    if firsts[0] != 0 or (sizes < 0).any() or (len(words) and words.max() >= n_words):
        raise reader.damaged("its pointers are not in order")
    parents = np.repeat(np.arange(len(paths)), sizes)
    return np.concatenate([paths[parents], words[:, None].astype(np.int32)], axis=1)


def _read_words(reader: _SphinxReader, n_words: int) -> list[str]:
    n_bytes = int(reader.take(1, np.uint32)[0])
    try:
        *words, rest = reader.take(n_bytes, np.uint8).tobytes().decode("utf-8").split("\0")
    except UnicodeDecodeError:
        raise reader.damaged("its words are not UTF-8") from None
    if rest or len(words) != n_words or any("\n" in word for word in words):
        raise reader.damaged("its words do not match its counts")
    return words
