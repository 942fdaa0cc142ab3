"""Open, import, write, check and export language models: model files, ARPA files, the embedded English 3-gram."""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.files import fields_to_dict
from arcuate.language.ngram.arpa import read_arpa, write_arpa
from arcuate.language.ngram.file import VERSION, check_can_write, check_crc, damaged, is_model_file, write_arrays
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.pocketsphinx import embedded_path, is_sphinx_file, read_sphinx
from arcuate.language.ngram.query import NGramArrays
from arcuate.language.ngram.trie import check_links, model_from_tables
from arcuate.progress import Progress, logger

_EMBEDDED = ("default", "pocketsphinx")
_EMBEDDED_NAME = "pocketsphinx English 3-gram"  # its training text is unknown


def open_model(name: str | Path, progress: Progress | None = None) -> LanguageModel:
    """Open a model by name (`default`) or path. Files of other tools are converted in memory."""
    if str(name) in _EMBEDDED:
        return replace(_open_embedded(progress), name=_EMBEDDED_NAME)
    path = Path(name)
    if not path.is_file():
        known = " or ".join(_EMBEDDED)
        raise UserError(f"no language model {name}; give a model file, an ARPA file, or {known}")
    if is_model_file(path):
        return LanguageModel.open(path)
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
    check_links(model)
    if not (np.isfinite(model.arrays.log_probs).all() and np.isfinite(model.arrays.backoffs).all()):
        raise damaged(path, "it contains values that are not finite")
    if model.arrays.log_probs.max() > 0:
        raise damaged(path, "it contains probabilities above one")
    return model


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
    model = open_model(name, progress)
    write_arpa(model, path, force=force, progress=progress)
    return ExportResult(str(name), str(path), model.counts)
