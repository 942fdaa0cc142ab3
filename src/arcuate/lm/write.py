"""Tables to a model, in memory or as a file."""

from pathlib import Path
from typing import Any

import numpy as np

from arcuate.lm.file import Report, refuse_existing, write_arrays
from arcuate.lm.model import LanguageModel
from arcuate.lm.query import NGramArrays
from arcuate.lm.tables import Tables
from arcuate.lm.trie import build_trie
from arcuate.lm.vocabulary import Vocabulary


def to_model(
    tables: Tables,
    about: dict[str, Any] | None = None,
    sentences: np.ndarray | None = None,
    report: Report | None = None,
) -> LanguageModel:
    """A model in memory."""
    arrays, remarks = build_trie(tables, report)
    about = (about or {}) | {
        "order": tables.order,
        "source": Path(tables.source).name,
        "added": list(tables.added),
        "n_repeated": remarks.n_repeated,
        "n_implied": remarks.n_implied,
    }
    vocabulary = tables.vocabulary
    words = Vocabulary(*(_read_only(a) for a in (vocabulary.blob, vocabulary.offsets, vocabulary.slots)))
    return LanguageModel(arrays, words, tables.order, Path(tables.source).name, about, sentences)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def write_model(
    model: LanguageModel, path: Path, *, force: bool = False, report: Report | None = None
) -> None:
    """A model as a file that processes can share."""
    refuse_existing(path, force)
    arrays: dict[str, np.ndarray] = {name: getattr(model.arrays, name) for name in NGramArrays._fields}
    arrays |= {"vocabulary": model.words.blob, "offsets": model.words.offsets, "slots": model.words.slots}
    if model.sentences is not None:
        arrays["sentences"] = model.sentences
    about = {key: value for key, value in model.about.items() if key != "crc32"}
    write_arrays(path, arrays, about, force=force, report=report)
