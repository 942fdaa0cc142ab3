"""n-grams as flat tables, one per order: what readers and estimators give, and what a trie is built from."""

from dataclasses import dataclass, replace

import numpy as np

from arcuate.lm.vocabulary import Vocabulary, vocabulary_of

LN10 = 2.302585092994046
ZERO = -99 * LN10  # what ARPA files write for probability nought, in nat
UNK, BOS, EOS = "<unk>", "<s>", "</s>"


@dataclass(frozen=True, eq=False)
class Table:
    """n-grams of one order, in any sequence; back-offs may be missing at the longest order."""

    ids: np.ndarray  # (n, order) int32
    log_probs: np.ndarray  # (n,) float32, nat; NaN where the n-gram is implied by a longer one
    backoffs: np.ndarray  # (n,) float32, nat
    lines: np.ndarray | None = None  # (n,) int64, where a file says so

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Tables:
    """A back-off model: words, and the n-grams of every order from 1."""

    vocabulary: Vocabulary
    orders: tuple[Table, ...]
    added: tuple[str, ...] = ()  # of <unk>, <s>, </s>, those the source did not have
    source: str = ""  # how messages name where it came from
    n_repeated: int = 0  # words that the source gave again with the same values

    @property
    def order(self) -> int:
        return len(self.orders)


def special_id(words: Vocabulary, word: str) -> int:
    """The id of <unk>, <s> or </s>, in either case; -1 if there is none."""
    found = words.find(word)
    return found if found >= 0 else words.find(word.upper())


def with_specials(tables: Tables) -> Tables:
    """The same model with <unk>, <s> and </s>, at probability nought where its source had none."""
    added = tuple(word for word in (UNK, BOS, EOS) if special_id(tables.vocabulary, word) < 0)
    if not added:
        return tables
    old = tables.orders[0]
    n = len(added)
    lines = None if old.lines is None else np.concatenate([old.lines, np.zeros(n, np.int64)])
    new_ids = np.arange(len(tables.vocabulary), len(tables.vocabulary) + n, dtype=np.int32)
    unigrams = Table(
        np.concatenate([old.ids, new_ids[:, None]]),
        np.concatenate([old.log_probs, np.full(n, ZERO, np.float32)]),
        np.concatenate([old.backoffs, np.zeros(n, np.float32)]),
        lines,
    )
    vocabulary = vocabulary_of([*tables.vocabulary, *added])
    return replace(tables, vocabulary=vocabulary, orders=(unigrams, *tables.orders[1:]), added=added)
