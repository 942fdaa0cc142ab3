"""Back-off models as plain dictionaries: the reference implementation for tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.text import LN10
from arcuate.language.ngram.trie import NGramTable, NGramTables, add_special_words, model_from_tables

Ngram = tuple[str, ...]
Backoff = dict[Ngram, tuple[float, float]]  # (log10 probability, log10 back-off)


def reference_log10(ngrams: Backoff, context: Sequence[str], word: str) -> float:
    """log10 p(word | context) by the definition of back-off; a missing context has back-off zero."""
    context = tuple(context)
    if (*context, word) in ngrams:
        return ngrams[(*context, word)][0]
    return ngrams.get(context, (0.0, 0.0))[1] + reference_log10(ngrams, context[1:], word)


def model_of(ngrams: Backoff) -> LanguageModel:
    words = [gram[0] for gram in ngrams if len(gram) == 1]
    ids = {word: i for i, word in enumerate(words)}
    orders = []
    for k in range(1, max(map(len, ngrams)) + 1):
        grams = [gram for gram in ngrams if len(gram) == k]
        values = np.array([ngrams[gram] for gram in grams], np.float64).reshape(-1, 2) * LN10
        rows = np.array([[ids[word] for word in gram] for gram in grams], np.int32).reshape(-1, k)
        orders.append(NGramTable(rows, *values.T.astype(np.float32)))
    return model_from_tables(add_special_words(NGramTables(words, tuple(orders), source="test")))


def walk(model: LanguageModel, words: Iterable[str], state: int | None = None) -> tuple[list[float], int]:
    """log10 probability of each word of a sequence, and the state after the last."""
    scores, state = [], model.empty if state is None else state
    for word in words:
        log_prob, state = model.advance(state, model.find(word))
        scores.append(log_prob / LN10)
    return scores, state


def write_arpa_text(path: Path, ngrams: Backoff, newline: str = "\n") -> Path:
    """Write an ARPA file."""
    order = max(map(len, ngrams))
    lines = ["\\data\\"]
    lines += [f"ngram {k}={sum(len(g) == k for g in ngrams)}" for k in range(1, order + 1)]
    for k in range(1, order + 1):
        lines += ["", f"\\{k}-grams:"]
        for gram, (prob, backoff) in ngrams.items():
            if len(gram) == k:
                lines.append(f"{prob}\t{' '.join(gram)}" + (f"\t{backoff}" if backoff else ""))
    path.write_bytes(newline.join([*lines, "", "\\end\\", ""]).encode())
    return path


SMALL: Backoff = {
    ("<unk>",): (-2.0, 0.0),
    ("<s>",): (-99.0, -0.3),
    ("</s>",): (-0.7, 0.0),
    ("a",): (-0.5, -0.2),
    ("b",): (-0.6, -0.4),
    ("c",): (-0.9, 0.0),
    ("<s>", "a"): (-0.2, -0.1),
    ("a", "b"): (-0.3, -0.5),
    ("b", "</s>"): (-0.4, 0.0),
    ("<s>", "a", "b"): (-0.1, 0.0),
    ("a", "b", "c"): (-0.15, 0.0),
}
