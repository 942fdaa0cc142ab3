"""Perplexity of a text under a model, and leakage: evaluation sentences in the model's training text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.files import fields_to_dict
from arcuate.language.ngram.io import open_model
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import score_sentences
from arcuate.language.ngram.text import EOS, read_sentences
from arcuate.progress import Progress, logger

_MAX_LISTED = 20  # unknown words in a result
_BATCH = 20_000  # sentences at a time


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Log-probability of every word and sentence end of a text."""

    log_probs: np.ndarray  # (n_tokens,) float64, nats
    known: np.ndarray  # (n_tokens,) bool, false for words that are not in the vocabulary
    sentence: np.ndarray  # (n_tokens,) int64, index of the sentence
    unknown: Counter[str]

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability of known words and sentence ends; None if there are none."""
        sums = _Sums()
        sums.add(self.log_probs[self.known])
        return sums.perplexity


@dataclass
class _Sums:
    """Running sum of log-probabilities."""

    n: int = 0
    log_prob: float = 0.0

    def add(self, log_probs: np.ndarray) -> None:
        self.n += len(log_probs)
        self.log_prob += float(log_probs.sum())

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(-self.log_prob / self.n, 700)) if self.n else None


def score_tokens(model: LanguageModel, sentences: Iterable[str], first_line: int = 1) -> TokenScores:
    """Score every word and sentence end. Words are separated by white space."""
    words, lengths = _split_words(sentences, first_line)
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    ids = model.words.find_all(words)
    ids[ends] = model.eos
    known = (ids >= 0) & (ids != model.unk)
    unknown = Counter(words[i] for i in np.flatnonzero(~known))
    known[ends] = EOS not in model.metadata.get("added", ())
    ids[ids < 0] = model.unk
    log_probs = np.empty(len(ids), np.float64)
    score_sentences(model.arrays, model.start, model.eos, ids, log_probs)
    return TokenScores(log_probs, known, np.repeat(np.arange(len(lengths)), lengths), unknown)


def _split_words(sentences: Iterable[str], first_line: int) -> tuple[list[str], list[int]]:
    words: list[str] = []
    lengths: list[int] = []
    for number, sentence in enumerate(sentences, start=first_line):
        found = sentence.split()
        if "<s>" in found or "</s>" in found:
            raise UserError(f"sentence {number} contains <s> or </s>; remove them: every line is one sentence")
        words += found
        words.append("")  # placeholder of the sentence end
        lengths.append(len(found) + 1)
    return words, lengths


@dataclass(frozen=True)
class Leakage:
    """Evaluation sentences that occur in the training text of a model."""

    n_sentences: int
    n_in_training_text: int
    share: float  # fraction of the evaluation sentences


def measure_leakage(model: LanguageModel, sentences: Sequence[str]) -> Leakage | None:
    """Count the evaluation sentences in the training text and warn about them; None if that is not stored."""
    seen = _seen_sentences(model, sentences)
    if seen is None:
        logger.info("the model does not store its training sentences, so leakage cannot be measured")
        return None
    n = sum(seen)
    if n:
        logger.warning(
            f"{n} of {len(seen)} evaluation sentences are in the training text, which lowers error rates on them;"
            " build the model with --leave-out"
        )
    return Leakage(len(seen), n, n / len(seen))


def _seen_sentences(model: LanguageModel, sentences: Sequence[str]) -> list[bool] | None:
    if model.sentences is None:
        return None
    return [model.contains(sentence) is True for sentence in sentences]


@dataclass(frozen=True)
class TextScore:
    """Result of `score_text`: perplexity, unknown (OOV) words and sentences of the training text."""

    model: str
    n_sentences: int
    n_words: int
    n_oov: int
    oov_rate: float | None
    perplexity: float | None  # over known words and sentence ends
    perplexity_with_oov: float | None  # unknown words at the probability of <unk>
    log10_prob: float  # log10 probability of known words and sentence ends
    oov_words: tuple[str, ...]  # the most frequent ones
    n_in_training_text: int | None  # sentences; None if the model does not store them
    perplexity_unseen: float | None  # perplexity of the other sentences
    leakage: Leakage | None = None
    leakage_requested: bool = False

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self, "leakage_requested", *(() if self.leakage_requested else ("leakage",)))


def score_text(
    model: str | Path | LanguageModel,
    text: str | Path | Sequence[str],
    *,
    normalise: bool = False,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Score a text: a file with one sentence per line (`-`: standard input), or a list of sentences.

    `normalise` applies the text normalisation of the word error rate first. `against` names evaluation sentences whose
    leakage into the training text is measured.
    """
    opened = model if isinstance(model, LanguageModel) else open_model(model, progress)
    sentences = read_sentences(text, progress) if isinstance(text, (str, Path)) else text
    if normalise:
        sentences = [normalise_text(sentence) for sentence in sentences]
    known, total, unseen = _Sums(), _Sums(), _Sums()
    unknown: Counter[str] = Counter()
    n_seen = 0
    for start in range(0, len(sentences), _BATCH):
        batch = sentences[start : start + _BATCH]
        scores = score_tokens(opened, batch, start + 1)
        known.add(scores.log_probs[scores.known])
        total.add(scores.log_probs)
        unknown += scores.unknown
        if (seen := _seen_sentences(opened, batch)) is not None:
            n_seen += sum(seen)
            unseen.add(scores.log_probs[scores.known & ~np.array(seen)[scores.sentence]])
        if progress:
            progress(start + len(batch), len(sentences), "scoring")
    n_words = total.n - len(sentences)
    return TextScore(
        model=opened.name if isinstance(model, LanguageModel) else str(model),
        n_sentences=len(sentences),
        n_words=n_words,
        n_oov=unknown.total(),
        oov_rate=unknown.total() / n_words if n_words else None,
        perplexity=known.perplexity,
        perplexity_with_oov=total.perplexity,
        log10_prob=known.log_prob / math.log(10),
        oov_words=tuple(word for word, _ in unknown.most_common(_MAX_LISTED)),
        n_in_training_text=None if opened.sentences is None else n_seen,
        perplexity_unseen=unseen.perplexity if n_seen else None,
        leakage=measure_leakage(opened, read_sentences(against)) if against is not None else None,
        leakage_requested=against is not None,
    )
