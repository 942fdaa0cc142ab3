"""Models by name or path: the embedded English 3-gram, model files, ARPA files."""

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

from arcuate.errors import UserError
from arcuate.language.ngram.arpa import read_arpa
from arcuate.language.ngram.file import VERSION, is_model_file
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.pocketsphinx import embedded_path, is_sphinx_file, read_sphinx
from arcuate.language.ngram.trie import to_model, write_model
from arcuate.progress import Progress

EMBEDDED = ("default", "pocketsphinx")
EMBEDDED_NAME = "pocketsphinx English 3-gram"  # its training text is unknown


def open_model(name: str | Path, report: Progress | None = None) -> LanguageModel:
    """A language model by name (`default`) or path; foreign files are read into memory."""
    if str(name) in EMBEDDED:
        return replace(_embedded(report), name=EMBEDDED_NAME)
    path = Path(name)
    if not path.is_file():
        known = " or ".join(EMBEDDED)
        raise UserError(f"there is no language model {name}; give a model file, an ARPA file, or {known}")
    if is_model_file(path):
        return LanguageModel.open(path)
    return read_foreign(path, report=report)


def read_foreign(path: Path, *, recount: bool = False, report: Progress | None = None) -> LanguageModel:
    """A model from another tool's file: ARPA, plain or gzipped, or a Sphinx trie."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the ARPA file in it")
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    tables = read_sphinx(path) if is_sphinx_file(path) else read_arpa(path, recount=recount, report=report)
    return to_model(tables, report=report)


def _embedded(report: Progress | None) -> LanguageModel:
    """The English 3-gram of `pocketsphinx`, converted on first use and mapped from the cache from then on."""
    source = embedded_path()
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "blake2b").hexdigest()[:16]
    cached = cache_folder() / f"{re.sub(r'[^a-z]+', '-', source.name)}-{digest}-v{VERSION}.alm"
    if cached.is_file():
        try:
            return LanguageModel.open(cached)
        except UserError:
            pass  # damaged: made again below
    model = read_foreign(source, report=report)
    try:
        write_model(model, cached, force=True)
    except UserError:
        return model  # nowhere to keep it: this process has it in memory
    return LanguageModel.open(cached)


def cache_folder() -> Path:
    """Where converted models are kept: ARCUATE_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ARCUATE_CACHE") or Path(base) / "arcuate")
