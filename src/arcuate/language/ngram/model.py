"""`LanguageModel`: vocabulary, n-gram states and the arrays that compiled searches query; and its file (.alm).

A model file holds named arrays in the safetensors layout, memory-mapped and never loaded completely. Any safetensors
reader opens it.
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
from arcuate.language.ngram.text import BOS, EOS, UNK, Vocabulary, special_id
from arcuate.progress import Progress

VERSION = 1
_FORMAT = "arcuate-lm"
_LANGUAGE_MODEL = OutputKind(re.compile(rb".{8}\{.{0,200}arcuate-lm|\s*\\data\\|\x1f\x8b", re.DOTALL), "words.alm")
_DTYPES = {"U64": np.uint64, "I64": np.int64, "I32": np.int32, "F32": np.float32, "U8": np.uint8}
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 2**22
_CHUNK = 2**24
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
    def open(path: str | Path, offset: int = 0, size: int | None = None) -> "LanguageModel":
        """Map a model file, or the part of a file that holds one. Takes milliseconds; processes share its memory."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"no language model {path}; make one with `arcuate lm import` or `lm build`")
        parts, metadata = map_arrays(path, _LAYOUT, _OPTIONAL, offset, size)
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


# --- the model file ----------------------------------------------------------------------------------------


def write_model(model: LanguageModel, path: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write a model file, which processes can map and share."""
    arrays: dict[str, np.ndarray] = {name: getattr(model.arrays, name) for name in NGramArrays._fields}
    arrays |= {"vocabulary": model.words.blob, "offsets": model.words.offsets, "slots": model.words.slots}
    if model.sentences is not None:
        arrays["sentences"] = model.sentences
    metadata = {key: value for key, value in model.metadata.items() if key != "crc32"}
    write_arrays(path, arrays, metadata, force=force, progress=progress)


def check_model_file(path: Path) -> LanguageModel:
    """Open a model file and verify every checksum, link and number, which opening alone omits for speed."""
    model = LanguageModel.open(path)
    for name in NGramArrays._fields:
        check_crc(name, getattr(model.arrays, name), model.metadata, path)
    if model.sentences is not None:
        check_crc("sentences", model.sentences, model.metadata, path)
        if (model.sentences[1:] <= model.sentences[:-1]).any():
            raise damaged(path, "its sentence hashes are not in order")
    check_values(model)
    return model


def check_values(model: LanguageModel) -> None:
    """Raise UserError if a link or a number of a model is impossible."""
    path = Path(model.name)
    check_links(model)
    if not (np.isfinite(model.arrays.log_probs).all() and np.isfinite(model.arrays.backoffs).all()):
        raise damaged(path, "it contains values that are not finite")
    if model.arrays.log_probs.max() > 0:
        raise damaged(path, "it contains probabilities above one")


def check_links(model: LanguageModel) -> None:
    """Raise UserError if the trie of a model is inconsistent."""
    if not links_are_valid(model.arrays, len(model.words)):
        raise damaged(Path(model.name), "the links between its n-grams are inconsistent")


def write_arrays(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    metadata: dict[str, Any],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a model file. After a failure the previous file is unchanged."""
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # keeps every array aligned
    metadata = metadata | {"crc32": {name: _crc(array) for name, array in ordered.items()}}
    head = _header(ordered, metadata)
    total = sum(array.nbytes for array in ordered.values())
    with open_output(path, force) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        done = 0
        for name, array in ordered.items():
            for block in _blocks(array):
                stream.write(block)
                done += block.nbytes
                if progress:
                    progress(done, total, f"writing {name}")


@contextmanager
def open_output(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds."""
    check_can_write(path, force)
    try:
        with atomic_write(path) as stream:
            yield stream
            check_can_write(path, force)  # another process may have written it meanwhile
    except OSError as error:
        raise explain_write_error(error, path) from error


def check_can_write(path: Path, force: bool, *inputs: Path | str) -> None:
    """Check before the work that `path` can be written and is neither an input nor, without `force`, a file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file for the model")
    check_writable(path, *inputs)
    if (path.is_file() or (path.is_symlink() and not path.exists())) and not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another name")
    if path.is_file() and not _LANGUAGE_MODEL.matches(path):
        raise UserError(f"{path} is not a language model, and --force replaces only those; choose another name")


def _header(arrays: Mapping[str, np.ndarray], metadata: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {"format": _FORMAT, "version": str(VERSION), "about": json.dumps(metadata)}
    }
    at = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(entries, ensure_ascii=True).encode()
    return text + b" " * (-len(text) % 64 + 56)  # the data starts at a multiple of 64


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK].data


def _crc(array: np.ndarray) -> int:
    value = 0
    for block in _blocks(array):
        value = zlib.crc32(block, value)
    return value


def is_model_file(path: Path) -> bool:
    """Whether a file has the header of a model file. Its contents are not checked."""
    with path.open("rb") as stream:
        return _FORMAT.encode() in stream.read(256)


def map_arrays(
    path: Path, layout: Mapping[str, str], optional: frozenset[str], offset: int = 0, size: int | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Map the arrays of a model file read-only; return them and the metadata. All sizes are checked."""
    try:
        head, start = _read_header(path, offset)
        size = path.stat().st_size - offset if size is None else size
        data = np.memmap(path, np.uint8, "r", offset, size)
    except (OSError, ValueError) as error:
        check_resources(error, path)
        raise UserError(f"cannot read {path}: {error}") from error
    metadata = _read_metadata(head.pop("__metadata__", None), path)
    arrays, end = {}, 0
    for name, entry in head.items():
        dtype, shape, (first, last) = _parse_entry(name, entry, layout, path)
        if first != end or last - first != int(np.prod(shape, dtype=object)) * dtype.itemsize:
            raise damaged(path, f"array {name} has a wrong offset or size")
        if start + last > size:
            raise damaged(path, "it is truncated")
        end = last
        arrays[name] = np.asarray(data[start + first : start + last]).view(dtype)
    if start + end != size:
        raise damaged(path, "its size does not match its header")
    if missing := set(layout) - set(arrays) - optional:
        raise damaged(path, f"it lacks {', '.join(sorted(missing))}")
    return arrays, metadata


def damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not a language model: {problem}; import or build it again")


def _read_header(path: Path, offset: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as stream:
        stream.seek(offset)
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise damaged(path, "it has no header")
        try:
            head = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise damaged(path, "its header cannot be read") from None
    if not isinstance(head, dict):
        raise damaged(path, "its header cannot be read")
    return head, 8 + length


def _read_metadata(meta: Any, path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise damaged(path, "its header names a different format")
    if meta.get("version") != str(VERSION):
        raise UserError(f"{path} has format version {meta.get('version')}; this version of arcuate reads {VERSION}")
    try:
        metadata = json.loads(meta["about"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise damaged(path, "its metadata cannot be read") from None
    if not isinstance(metadata, dict):
        raise damaged(path, "its metadata cannot be read")
    return metadata


def _parse_entry(
    name: str, entry: Any, layout: Mapping[str, str], path: Path
) -> tuple[np.dtype, list[int], tuple[int, int]]:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = layout.get(name) == dtype and all(type(n) is int and n >= 0 for n in (*shape, first, last))
        if not valid or len(shape) != 1 or first > last:
            raise ValueError(name)
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"array {name[:40]!r} is not part of the format") from None
    return np.dtype(_DTYPES[dtype]), shape, (first, last)


def check_crc(name: str, array: np.ndarray, metadata: dict[str, Any], path: Path) -> None:
    """Raise UserError if the checksum of an array does not match the header."""
    known = metadata.get("crc32")
    if not isinstance(known, dict) or known.get(name) != _crc(array):
        raise damaged(path, f"the checksum of {name} does not match")
