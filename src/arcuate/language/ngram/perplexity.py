"""How well a model foretells a text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import score_sentences
from arcuate.language.ngram.vocabulary import EOS
from arcuate.progress import Progress

_SHOWN = 20
_PIECE = 20_000  # sentences at a time


@dataclass
class _Sums:
    """Running totals over pieces of a text."""

    n: int = 0
    log_prob: float = 0.0

    def add(self, log_probs: np.ndarray) -> None:
        self.n += len(log_probs)
        self.log_prob += float(log_probs.sum())

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(-self.log_prob / self.n, 700)) if self.n else None


@dataclass(frozen=True, eq=False)
class TextScores:
    """Every word of a text, and the end of every sentence, under a model."""

    log_probs: np.ndarray  # (n_tokens,) float64, nat
    known: np.ndarray  # (n_tokens,) bool, whether the model has the word, or an end of sentence
    sentence: np.ndarray  # (n_tokens,) int64, number of the sentence
    unknown: Counter[str]

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability of known words and sentence ends; None if there are none."""
        sums = _Sums()
        sums.add(self.log_probs[self.known])
        return sums.perplexity


def score_text(model: LanguageModel, sentences: Iterable[str], first_line: int = 1) -> TextScores:
    """Score sentences, each from its start to its end; words are what stands between spaces."""
    words, lengths = _words(sentences, first_line)
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    ids = model.words.find_all(words)
    ids[ends] = model.eos
    known = (ids >= 0) & (ids != model.unk)
    unknown = Counter(words[i] for i in np.flatnonzero(~known))
    known[ends] = EOS not in model.about.get("added", ())
    ids[ids < 0] = model.unk
    log_probs = np.empty(len(ids), np.float64)
    score_sentences(model.arrays, model.start, model.eos, ids, log_probs)
    return TextScores(log_probs, known, np.repeat(np.arange(len(lengths)), lengths), unknown)


def _words(sentences: Iterable[str], first_line: int) -> tuple[list[str], list[int]]:
    words: list[str] = []
    lengths: list[int] = []
    for number, sentence in enumerate(sentences, start=first_line):
        found = sentence.split()
        if "<s>" in found or "</s>" in found:
            raise UserError(
                f"sentence {number} contains <s> or </s>; leave them out, every line is a sentence"
            )
        words += found
        words.append("")  # the end, whatever the model calls it
        lengths.append(len(found) + 1)
    return words, lengths


def summary(
    model: LanguageModel, sentences: Sequence[str], report: Progress | None = None
) -> dict[str, object]:
    """What `lm score` prints: perplexity of the known words and of all, unknown words, leakage."""
    known, every, unseen = _Sums(), _Sums(), _Sums()
    unknown: Counter[str] = Counter()
    n_seen = 0
    for start in range(0, len(sentences), _PIECE):
        piece = sentences[start : start + _PIECE]
        scores = score_text(model, piece, start + 1)
        known.add(scores.log_probs[scores.known])
        every.add(scores.log_probs)
        unknown += scores.unknown
        if (seen := seen_sentences(model, piece)) is not None:
            n_seen += sum(seen)
            unseen.add(scores.log_probs[scores.known & ~np.array(seen)[scores.sentence]])
        if report:
            report(start + len(piece), len(sentences), "scoring")
    n_words, n_oov = every.n - len(sentences), unknown.total()
    return {
        "n_sentences": len(sentences),
        "n_words": n_words,
        "n_oov": n_oov,
        "oov_rate": n_oov / n_words if n_words else None,
        "perplexity": known.perplexity,
        "perplexity_with_oov": every.perplexity,
        "log10_prob": known.log_prob / math.log(10),
        "oov_words": [word for word, _ in unknown.most_common(_SHOWN)],
        "n_in_training_text": None if model.sentences is None else n_seen,
        "perplexity_unseen": unseen.perplexity if n_seen else None,
    }


def seen_sentences(model: LanguageModel, sentences: Sequence[str]) -> list[bool] | None:
    """Which sentences stand in the model's training text; None where the model does not know."""
    if model.sentences is None:
        return None
    return [model.contains(sentence) is True for sentence in sentences]
