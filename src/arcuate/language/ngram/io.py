"""Open, import and export language models: model files, ARPA files, and trie files of Sphinx."""

import hashlib
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.files import fields_to_dict, find_package_file
from arcuate.language.ngram.arpa import read_arpa, write_arpa
from arcuate.language.ngram.model import (
    VERSION,
    LanguageModel,
    check_can_write,
    check_model_file,
    is_model_file,
    write_model,
)
from arcuate.language.ngram.text import Vocabulary, index_words
from arcuate.language.ngram.trie import NGramTable, NGramTables, add_special_words, model_from_tables
from arcuate.progress import Progress, logger

_EMBEDDED = ("default", "pocketsphinx")
_SPHINX_MAGIC = b"Trie Language Model"
_LOG_BASE = math.log(1.0001)
_N_LEVELS = 65_536
_MAX_SPHINX_ORDER = 16
_EMBEDDED_NAME = "pocketsphinx English 3-gram"  # its training text is unknown


def open_model(name: str | Path, progress: Progress | None = None, *, verify: bool = False) -> LanguageModel:
    """Open a model by name (`default`) or path. Files of other tools are converted in memory.

    `verify` checks every checksum, which commands that write a new model from this one need.
    """
    if str(name) in _EMBEDDED:
        return replace(_open_embedded(progress), name=_EMBEDDED_NAME)
    path = Path(name)
    if not path.is_file():
        known = " or ".join(_EMBEDDED)
        raise UserError(f"no language model {name}; give a model file, an ARPA file, or {known}")
    if is_model_file(path):
        return check_model_file(path) if verify else LanguageModel.open(path)
    return read_third_party(path, progress=progress)


def read_third_party(path: Path, *, recount: bool = False, progress: Progress | None = None) -> LanguageModel:
    """Read a model file of another tool: ARPA, plain or gzipped, or a Sphinx trie."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the ARPA file in it")
    if not path.is_file():
        raise UserError(f"no file {path}; give an ARPA file")
    if is_sphinx_file(path):
        tables = read_sphinx(path)
    else:
        tables = read_arpa(path, recount=recount, progress=progress)
    return model_from_tables(tables, progress=progress)


def _open_embedded(progress: Progress | None) -> LanguageModel:
    """Open the English 3-gram of `pocketsphinx`: converted on first use, mapped from the cache afterwards."""
    source = embedded_path()
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "blake2b").hexdigest()[:16]
    cached = _cache_folder() / f"{re.sub(r'[^a-z]+', '-', source.name)}-{digest}-v{VERSION}.alm"
    if cached.is_file():
        try:
            return LanguageModel.open(cached)
        except UserError:
            pass  # damaged: converted again below
    model = read_third_party(source, progress=progress)
    try:
        write_model(model, cached, force=True)
    except UserError:
        return model  # the cache cannot be written: use the model in memory
    return LanguageModel.open(cached)


def _cache_folder() -> Path:
    """ARCUATE_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ARCUATE_CACHE") or Path(base) / "arcuate")


@dataclass(frozen=True)
class ModelInfo:
    """Sizes and origin of a model."""

    path: str | None
    order: int
    n_ngrams: tuple[int, ...]  # by order
    n_words: int
    n_bytes: int | None
    bytes_per_ngram: float | None
    n_sentence_hashes: int | None
    metadata: dict[str, Any]

    @staticmethod
    def of(model: LanguageModel, path: Path | None) -> "ModelInfo":
        n_bytes = path.stat().st_size if path else None
        return ModelInfo(
            path=str(path) if path else None,
            order=model.order,
            n_ngrams=model.counts,
            n_words=len(model.words),
            n_bytes=n_bytes,
            bytes_per_ngram=n_bytes / sum(model.counts) if n_bytes else None,
            n_sentence_hashes=None if model.sentences is None else len(model.sentences),
            metadata={k: v for k, v in model.metadata.items() if k not in ("crc32", "order")},
        )

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class ImportResult:
    """Result of `import_model`."""

    source: str
    info: ModelInfo

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, **self.info.to_dict()}


def import_model(
    source: str | Path,
    path: str | Path,
    *,
    recount: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportResult:
    """Convert an ARPA file, a Sphinx trie or `default` to a model file."""
    source_path, path = embedded_path() if str(source) in _EMBEDDED else Path(source), Path(path)
    check_can_write(path, force, source_path)
    model = read_third_party(source_path, recount=recount, progress=progress)
    write_model(model, path, force=force, progress=progress)
    for word in model.metadata["added"]:
        logger.info(f"{source_path.name} has no {word}; it was added with probability zero")
    if n := model.metadata["n_repeated"]:
        logger.info(f"{n:,} n-grams are repeated with the same values; each was counted once")
    if n := model.metadata["n_implied"]:
        logger.info(f"{n:,} contexts of longer n-grams are missing; they were computed by backing off")
    return ImportResult(str(source), ModelInfo.of(model, path))


@dataclass(frozen=True)
class InfoResult:
    """Result of `model_info`."""

    model: str
    info: ModelInfo
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, **self.info.to_dict(), "checked": self.checked}


def model_info(name: str | Path, *, check: bool = False, progress: Progress | None = None) -> InfoResult:
    """Describe a model; with `check`, read the complete file and verify it."""
    path = None if str(name) in _EMBEDDED else Path(name)
    if check and path is not None:
        if path.is_file() and not is_model_file(path):
            raise UserError(f"--check verifies model files, and {name} is not one; import it first: arcuate lm import")
        check_model_file(path)
    return InfoResult(str(name), ModelInfo.of(open_model(name, progress), path), check)


@dataclass(frozen=True)
class ExportResult:
    """Result of `export_model`."""

    model: str
    arpa: str
    n_ngrams: tuple[int, ...]  # by order

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def export_model(
    name: str | Path, path: str | Path, *, force: bool = False, progress: Progress | None = None
) -> ExportResult:
    """Write a model as an ARPA file, gzipped if its name ends in .gz."""
    path = Path(path)
    check_can_write(path, force, name)
    model = open_model(name, progress, verify=True)
    write_arpa(model, path, force=force, progress=progress)
    return ExportResult(str(name), str(path), model.counts)


# --- trie files of Sphinx (`*.lm.bin`), such as the English 3-gram in the package `pocketsphinx` --------------
#
# Little-endian: magic bytes, order, counts, quantisation tables, unigrams, a bit-packed block per longer order, words.
# The trie is reversed: it runs from the last word of an n-gram to its first. Logarithms have base 1.0001.


def embedded_path() -> Path:
    """Path of the English 3-gram in the installed package."""
    if path := find_package_file("pocketsphinx", "model/en-us/en-us.lm.bin"):
        return path
    raise UserError("the English language model is missing; run `pip install pocketsphinx`, which contains it")


def is_sphinx_file(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_SPHINX_MAGIC)) == _SPHINX_MAGIC


def read_sphinx(path: Path) -> NGramTables:
    """Read all n-grams of a Sphinx trie file."""
    reader = _SphinxReader(path)
    if reader.take(len(_SPHINX_MAGIC), np.uint8).tobytes() != _SPHINX_MAGIC:
        raise reader.damaged("its magic bytes are wrong")
    order = int(reader.take(1, np.uint8)[0])
    if not 2 <= order <= _MAX_SPHINX_ORDER:
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


def _read_words(reader: _SphinxReader, n_words: int) -> Vocabulary:
    n_bytes = int(reader.take(1, np.uint32)[0])
    blob = reader.take(n_bytes, np.uint8)
    ends = np.flatnonzero(blob == 0)
    if len(ends) != n_words or (n_words and ends[-1] != n_bytes - 1):
        raise reader.damaged("its words do not match its counts")
    offsets = np.concatenate([[0], np.cumsum(np.diff(ends, prepend=-1) - 1)])
    try:
        blob.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        raise reader.damaged("its words are not UTF-8") from None
    return index_words(blob[blob != 0], offsets.astype(np.int64))
