"""Open, import and export language models: model files, ARPA files, and trie files of Sphinx."""

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.files import Result
from arcuate.language.ngram.arpa import read_arpa, write_arpa
from arcuate.language.ngram.model import (
    VERSION,
    LanguageModel,
    check_can_write,
    check_model_file,
    is_model_file,
    write_model,
)
from arcuate.language.ngram.sphinx import embedded_path, is_sphinx_file, read_sphinx
from arcuate.language.ngram.trie import model_from_tables
from arcuate.progress import Progress, logger

_EMBEDDED = ("default", "pocketsphinx")
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
    return read_third_party(path, progress)


def read_third_party(path: Path, progress: Progress | None = None) -> LanguageModel:
    """Read a model file of another tool: ARPA, plain or gzipped, or a Sphinx trie."""
    if not path.is_file():
        problem = "is a folder; give the ARPA file in it" if path.is_dir() else "does not exist; give an ARPA file"
        raise UserError(f"{path} {problem}")
    tables = read_sphinx(path) if is_sphinx_file(path) else read_arpa(path, progress)
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
            with suppress(OSError):  # damaged: converted again below
                cached.unlink()
    model = read_third_party(source, progress)
    try:
        write_model(model, cached)
    except UserError:
        return model  # the cache cannot be written: use the model in memory
    return LanguageModel.open(cached)


def _cache_folder() -> Path:
    """ARCUATE_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ARCUATE_CACHE") or Path(base) / "arcuate")


@dataclass(frozen=True)
class ModelInfo(Result):
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
            metadata={k: v for k, v in model.metadata.items() if k not in ("crc32", "order", "version")},
        )


def import_model(source: str | Path, path: str | Path, *, progress: Progress | None = None) -> ModelInfo:
    """Convert an ARPA file, a Sphinx trie or `default` to a model file.

    Args:
        source: ARPA file, plain or gzipped, or `default`.
        path: Model file to write.
    """
    source, path = embedded_path() if str(source) in _EMBEDDED else Path(source), Path(path)
    check_can_write(path, source)
    model = read_third_party(source, progress)
    write_model(model, path, progress)
    for word in model.metadata["added"]:
        logger.info(f"{source.name} has no {word}; it was added with probability zero")
    if n := model.metadata["n_repeated"]:
        logger.info(f"{n:,} n-grams are repeated with the same values; each was counted once")
    if n := model.metadata["n_implied"]:
        logger.info(f"{n:,} contexts of longer n-grams are missing; they were computed by backing off")
    return ModelInfo.of(model, path)


def model_info(name: str | Path, *, progress: Progress | None = None) -> ModelInfo:
    """Describe a model. The complete file is read and verified.

    Args:
        name: Model file, ARPA file, or `default` (English, embedded).
    """
    path = None if str(name) in _EMBEDDED else Path(name)
    return ModelInfo.of(open_model(name, progress, verify=True), path)


def export_model(name: str | Path, path: str | Path, *, progress: Progress | None = None) -> ModelInfo:
    """Write a model as an ARPA file.

    Args:
        name: Model file, or `default` (English, embedded).
        path: ARPA file to write, .arpa or .arpa.gz.
    """
    path = Path(path)
    check_can_write(path, name)
    model = open_model(name, progress, verify=True)
    write_arpa(model, path, progress)
    return ModelInfo.of(model, path)
