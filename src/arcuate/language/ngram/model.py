"""`LanguageModel`: words, n-gram states and the arrays that compiled searches query; and its file (.alm).

A model file is a safetensors file. Its arrays are memory-mapped and shared between processes; only the words are read.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError, check_resources
from arcuate.files import OutputKind, atomic_write, check_writable, explain_write_error
from arcuate.language.ngram.query import NGramArrays, advance, links_are_valid, score_words, state_after
from arcuate.language.ngram.text import BOS, EOS, UNK
from arcuate.progress import Progress

VERSION = 2
MAX_ORDER = 100
_FORMAT = "arcuate-lm"  # key of the metadata
_LANGUAGE_MODEL = OutputKind(re.compile(rb".{8}\{.{0,20}arcuate-lm|\s*\\data\\|\x1f\x8b", re.DOTALL), "words.alm")
_MAX_HEADER = 2**22
_LAYOUT = {
    "words": ("I32", np.int32),
    "log_probs": ("F32", np.float32),
    "backoffs": ("F32", np.float32),
    "firsts": ("I32", np.int32),
    "suffixes": ("I32", np.int32),
    "nexts": ("I32", np.int32),
    "vocabulary": ("U8", np.uint8),  # UTF-8, one word per line
    "sentences": ("U64", np.uint64),  # optional
}


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A back-off n-gram model of any order."""

    arrays: NGramArrays
    words: tuple[str, ...]
    order: int
    name: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    sentences: np.ndarray | None = None  # (n,) uint64, sorted hashes of the training sentences, if stored
    ids: dict[str, int] = field(init=False, repr=False)
    unk: int = field(init=False)
    bos: int = field(init=False)
    eos: int = field(init=False)
    start: int = field(init=False)  # state after <s>
    empty: int = field(init=False, default=0)  # state without context

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", {word: i for i, word in enumerate(self.words)})
        if len(self.ids) != len(self.words):
            raise damaged(Path(self.name), "a word is repeated")
        for name, word in (("unk", UNK), ("bos", BOS), ("eos", EOS)):
            object.__setattr__(self, name, special_id(self.ids, word))
        if min(self.unk, self.bos, self.eos) < 0:
            raise UserError(f"{self.name or 'the model'} lacks one of {UNK}, {BOS}, {EOS}; import it again")
        object.__setattr__(self, "start", int(state_after(self.arrays, 1 + self.bos)))

    @staticmethod
    def open(path: str | Path, offset: int = 0, size: int | None = None) -> "LanguageModel":
        """Map a model file, or the part of a file that holds one."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no language model {path}; make one with `arcuate lm import` or `lm build`")
        parts, metadata = _map_arrays(path, offset, path.stat().st_size - offset if size is None else size)
        text = parts.pop("vocabulary")
        _check_crc("vocabulary", text, metadata, path)
        try:
            words = tuple(text.tobytes().decode().split("\n"))
        except UnicodeDecodeError:
            raise damaged(path, "its words are not UTF-8") from None
        sentences = parts.pop("sentences", None)
        arrays = NGramArrays(**parts)
        _check_shapes(path, arrays, len(words), metadata)
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
        return self.ids.get(word, self.unk)

    def find_all(self, words: Iterable[str]) -> np.ndarray:
        """Ids of many words (n,) int32; -1 for words that are not in the vocabulary."""
        return np.array([self.ids.get(word, -1) for word in words], np.int32)

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


def special_id(ids: Mapping[str, int], word: str) -> int:
    """Id of <unk>, <s> or </s> in lower or upper case, or -1."""
    return ids.get(word, ids.get(word.upper(), -1))


def hash_sentence(sentence: str) -> int:
    """64-bit hash of a sentence, normalised as for the word error rate. Used to detect leakage."""
    return int.from_bytes(hashlib.blake2b(normalise_text(sentence).encode(), digest_size=8).digest(), "little")


# --- checks -----------------------------------------------------------------------------------------------


def damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not a language model: {problem}; import or build it again")


def _check_shapes(path: Path, arrays: NGramArrays, n_words: int, metadata: dict[str, Any]) -> None:
    n_inner, n_nodes = len(arrays.backoffs), len(arrays.words)
    order = metadata.get("order")
    consistent = (
        type(order) is int
        and 1 <= order <= MAX_ORDER
        and isinstance(metadata.get("added", []), list)
        and n_nodes > n_words
        and len(arrays.log_probs) == n_nodes
        and len(arrays.firsts) == n_inner + 1
        and len(arrays.suffixes) == n_inner
        and len(arrays.nexts) == n_nodes - n_inner
        and 1 <= n_inner < n_nodes
    )
    if not consistent:
        raise damaged(path, "the sizes of its arrays are inconsistent")
    unigrams = arrays.words[1 : 1 + n_words]
    ends = (int(arrays.firsts[0]), int(arrays.firsts[1]), int(arrays.firsts[-1]))
    if ends != (1, n_words + 1, n_nodes) or not np.array_equal(unigrams, np.arange(n_words)):
        raise damaged(path, "its unigrams are not in order")


def check_model_file(path: Path) -> LanguageModel:
    """Open a model file and verify every checksum, link and number, which opening alone omits for speed."""
    model = LanguageModel.open(path)
    for name in NGramArrays._fields:
        _check_crc(name, getattr(model.arrays, name), model.metadata, path)
    if model.sentences is not None:
        _check_crc("sentences", model.sentences, model.metadata, path)
    check_values(model)
    return model


def check_values(model: LanguageModel) -> None:
    """Raise UserError if a link or a number of a model is impossible."""
    check_links(model)
    log_probs, backoffs = model.arrays.log_probs, model.arrays.backoffs
    if not (np.isfinite(log_probs).all() and np.isfinite(backoffs).all() and log_probs.max() <= 0):
        raise damaged(Path(model.name), "it contains values that are not log-probabilities")


def check_links(model: LanguageModel) -> None:
    """Raise UserError if the trie of a model is inconsistent."""
    if not links_are_valid(model.arrays, len(model.words)):
        raise damaged(Path(model.name), "the links between its n-grams are inconsistent")


def _check_crc(name: str, array: np.ndarray, metadata: dict[str, Any], path: Path) -> None:
    known = metadata.get("crc32")
    if not isinstance(known, dict) or known.get(name) != zlib.crc32(array.data):
        raise damaged(path, f"the checksum of {name} does not match")


# --- the model file ----------------------------------------------------------------------------------------


def write_model(model: LanguageModel, path: Path, progress: Progress | None = None) -> None:
    """Write a model file, which processes can map and share."""
    arrays = {**model.arrays._asdict(), "vocabulary": np.frombuffer("\n".join(model.words).encode(), np.uint8)}
    if model.sentences is not None:
        arrays["sentences"] = model.sentences
    crc = {name: zlib.crc32(array.data) for name, array in arrays.items()}
    about = json.dumps({"version": VERSION} | model.metadata | {"crc32": crc})
    head: dict[str, Any] = {"__metadata__": {_FORMAT: about}}
    ordered, at = sorted(arrays.items(), key=lambda item: -item[1].itemsize), 0  # keeps every array aligned
    for name, array in ordered:
        head[name] = {"dtype": _LAYOUT[name][0], "shape": [len(array)], "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open_output(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for i, (name, array) in enumerate(ordered):
            if progress:
                progress(i, len(ordered), f"writing {name}")
            stream.write(np.ascontiguousarray(array).data)


@contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds."""
    check_can_write(path)
    try:
        with atomic_write(path) as stream:
            yield stream
    except OSError as error:
        raise explain_write_error(error, path) from error


def check_can_write(path: Path, *inputs: Path | str | None) -> None:
    """Check before the work that `path` can be written, and is neither an input nor a file of another kind."""
    check_writable(path, *inputs, kind=_LANGUAGE_MODEL)


def is_model_file(path: Path) -> bool:
    """Whether a file has the header of a model file. Its contents are not checked."""
    with path.open("rb") as stream:
        return _FORMAT.encode() in stream.read(256)


def _map_arrays(path: Path, offset: int, size: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Map the arrays of a model file read-only; return them and the metadata. All sizes are checked."""
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            length = int.from_bytes(stream.read(8), "little")
            head = json.loads(stream.read(min(length, _MAX_HEADER)))
        metadata = json.loads(head.pop("__metadata__")[_FORMAT])
        version = metadata["version"]
        spans = {name: _check_entry(name, entry) for name, entry in head.items()}
        n_bytes = sum(last - first for first, last in spans.values())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise damaged(path, "its header is not that of a language model") from None
    if version != VERSION:
        raise UserError(f"{path} has format version {version}; this version of arcuate reads {VERSION}; build it again")
    if spans.keys() | {"sentences"} != _LAYOUT.keys() or 8 + length + n_bytes != size:
        raise damaged(path, "its size does not match its header")
    try:
        data = np.memmap(path, np.uint8, "r", offset + 8 + length, n_bytes)
    except (OSError, ValueError) as error:
        check_resources(error, path)
        raise UserError(f"cannot read {path}: {error}") from error
    return {name: np.asarray(data[i:j]).view(_LAYOUT[name][1]) for name, (i, j) in spans.items()}, metadata


def _check_entry(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    """First and last byte of an array; ValueError if it is not part of the format."""
    dtype, scalar = _LAYOUT[name]
    (n,), (first, last) = entry["shape"], entry["data_offsets"]
    whole = all(type(value) is int and value >= 0 for value in (n, first, last))
    if not whole or entry["dtype"] != dtype or last - first != n * np.dtype(scalar).itemsize:
        raise ValueError(name)
    return first, last
