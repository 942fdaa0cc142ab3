"""Text to a language model file's content: reading, leaving out, estimating, remembering the sentences."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.language.ngram.arpa import open_raw, unpacked
from arcuate.language.ngram.estimate import (
    MAX_ORDER,
    Corpus,
    Discounts,
    estimate,
    prune_thresholds,
    read_corpus,
)
from arcuate.language.ngram.model import LanguageModel, hash_sentence, hash_sentences
from arcuate.language.ngram.trie import to_model
from arcuate.progress import Progress

_EVERY = 50_000


@dataclass(frozen=True)
class Built:
    """A model and what became of its text."""

    model: LanguageModel
    corpus: Corpus
    discounts: list[Discounts]
    n_left_out: int


def build_model(
    texts: Sequence[Path],
    order: int,
    *,
    prune: Sequence[int] = (),
    normalise: bool = False,
    leave_out: Iterable[str] = (),
    keep_hashes: bool = True,
    report: Progress | None = None,
) -> Built:
    """Estimate a model from text files with a sentence per line."""
    if not 1 <= order <= MAX_ORDER:
        raise UserError(f"the order must be between 1 and {MAX_ORDER}, not {order}")
    prune_thresholds(prune, order)  # a mistake is told before the text is read
    reading = _Reading(frozenset(hash_sentences(leave_out).tolist()), keep_hashes, normalise)
    name = " + ".join(path.name for path in texts)
    corpus = read_corpus(reading.lines(texts, report), name)
    tables, discounts = estimate(corpus, order, prune, name, report)
    about = {
        "made_by": "modified Kneser-Ney",
        "prune": list(prune),
        "n_sentences": corpus.n_sentences,
        "n_words": int(len(corpus.ids) - 2 * corpus.n_sentences),
        "discounts": [list(d.amounts) for d in discounts],
    }
    sentences = reading.hashes() if keep_hashes else None
    return Built(to_model(tables, about, sentences, report), corpus, discounts, reading.n_left_out)


class _Reading:
    """Lines on their way into the counts, with note of which sentences went by."""

    def __init__(self, unwanted: frozenset[int], keep_hashes: bool, normalise: bool) -> None:
        self._unwanted, self._keep, self._normalise = unwanted, keep_hashes, normalise
        self._seen: set[int] = set()
        self.n_left_out = 0

    def lines(self, paths: Sequence[Path], report: Progress | None) -> Iterator[bytes]:
        for path in paths:
            for number, line in enumerate(text_lines(path, report), start=1):
                yield from self._pass_on(line, decoded(line, path, number))

    def _pass_on(self, line: bytes, text: str) -> Iterator[bytes]:
        if self._keep or self._unwanted or self._normalise:
            sentence = normalise_text(text)
            value = hash_sentence(sentence)
            if value in self._unwanted:
                self.n_left_out += 1
                return
            if sentence and self._keep:
                self._seen.add(value)
            if self._normalise:
                line = sentence.encode()
        yield line

    def hashes(self) -> np.ndarray:
        return np.sort(np.fromiter(self._seen, np.uint64, len(self._seen)))


def text_lines(path: Path, report: Progress | None = None) -> Iterator[bytes]:
    """The lines of a text file, plain or gzipped."""
    with open_raw(path) as raw, unpacked(raw) as stream:
        size, number = path.stat().st_size, 0
        lines = iter(stream)
        while True:
            try:
                line = next(lines, None)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UserError(f"{path} cannot be unpacked ({error}); fetch it again") from error
            if line is None:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if report and number % _EVERY == 0:
                report(raw.tell(), size, f"reading {path.name}")
            yield line


def decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"{path}, line {number}: not UTF-8 text; convert it, for example with iconv"
        ) from None


def read_sentences(path: Path, report: Progress | None = None) -> list[str]:
    """A text file as sentences, a line each; empty lines are left out."""
    sentences = []
    for number, line in enumerate(text_lines(path, report), start=1):
        if text := decoded(line, path, number).strip():
            sentences.append(text)
    if not sentences:
        raise UserError(f"{path} contains no sentences")
    return sentences
