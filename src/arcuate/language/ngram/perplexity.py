"""Perplexity of a text under a model, and leakage: evaluation sentences in the model's training text."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.files import Result
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.open import open_model
from arcuate.language.ngram.query import score_sentences
from arcuate.language.ngram.text import BOS, EOS, read_sentences
from arcuate.progress import Progress, logger

_MAX_LISTED = 20  # unknown words in a result


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Log-probability of every word and sentence end of a text."""

    log_probs: np.ndarray  # (n_tokens,) float64, nats
    known: np.ndarray  # (n_tokens,) bool, false for words that are not in the vocabulary
    sentence: np.ndarray  # (n_tokens,) int64, index of the sentence
    unknown: Counter[str]

    def perplexity(self, of: np.ndarray | None = None) -> float | None:
        """exp of the mean negative log-probability, by default of known words and sentence ends; None if empty."""
        log_probs = self.log_probs[self.known if of is None else of]
        return math.exp(min(-log_probs.mean(), 700)) if len(log_probs) else None


def score_tokens(model: LanguageModel, sentences: Iterable[str]) -> TokenScores:
    """Score every word and sentence end. Words are separated by white space."""
    find, tokens, lengths, unknown = model.ids.get, array("i"), array("q"), Counter[str]()
    for number, sentence in enumerate(sentences, start=1):
        words = sentence.split()
        if BOS in words or EOS in words:
            raise UserError(f"sentence {number} contains <s> or </s>; remove them: every line is one sentence")
        found = [find(word, model.unk) for word in words]
        unknown.update(word for word, i in zip(words, found, strict=True) if i == model.unk)
        tokens.extend(found)
        tokens.append(model.eos)
        lengths.append(len(found) + 1)
    ids, ends = np.array(tokens, np.int32), np.cumsum(lengths, dtype=np.int64) - 1
    known = ids != model.unk
    known[ends] = EOS not in model.metadata.get("added", ())
    log_probs = np.empty(len(ids), np.float64)
    score_sentences(model.arrays, model.start, model.eos, ids, log_probs)
    return TokenScores(log_probs, known, np.repeat(np.arange(len(lengths)), lengths), unknown)


@dataclass(frozen=True)
class Leakage:
    """Evaluation sentences that occur in the training text of a model."""

    n_sentences: int
    n_in_training_text: int
    share: float  # fraction of the evaluation sentences


def measure_leakage(model: LanguageModel, sentences: Sequence[str]) -> Leakage | None:
    """Count the evaluation sentences in the training text and warn about them; None if that is not stored."""
    if model.sentences is None:
        logger.info("the model does not store its training sentences, so leakage cannot be measured")
        return None
    n = sum(model.contains(sentence) is True for sentence in sentences)
    if n:
        logger.warning(
            f"{n} of {len(sentences)} evaluation sentences are in the training text, which lowers error rates on them;"
            " build the model with --leave-out"
        )
    return Leakage(len(sentences), n, n / len(sentences))


@dataclass(frozen=True)
class TextScore(Result):
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
    leakage: Leakage | None = None  # of the text given as `against`


def score_text(
    model: str | Path | LanguageModel,
    text: str | Path | Sequence[str] = "-",
    *,
    normalise: bool = False,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> TextScore:
    """Report the perplexity of a text.

    Args:
        model: Model file, ARPA file, or `default` (English, embedded).
        text: Text with one sentence per line, - for standard input; in Python also a list of sentences.
        normalise: Normalise sentences as for the word error rate.
        against: Evaluation text: report how many of its sentences are in the training text of the model.
    """
    opened = model if isinstance(model, LanguageModel) else open_model(model, progress)
    sentences = read_sentences(text, progress) if isinstance(text, (str, Path)) else text
    if normalise:
        sentences = [normalise_text(sentence) for sentence in sentences]
    scores = score_tokens(opened, sentences)
    seen = np.array([opened.contains(sentence) is True for sentence in sentences], bool)
    n_words, n_oov = len(scores.log_probs) - len(sentences), scores.unknown.total()
    return TextScore(
        model=opened.name if isinstance(model, LanguageModel) else str(model),
        n_sentences=len(sentences),
        n_words=n_words,
        n_oov=n_oov,
        oov_rate=n_oov / n_words if n_words else None,
        perplexity=scores.perplexity(),
        perplexity_with_oov=scores.perplexity(np.ones(len(scores.known), bool)),
        log10_prob=float(scores.log_probs[scores.known].sum()) / math.log(10),
        oov_words=tuple(word for word, _ in scores.unknown.most_common(_MAX_LISTED)),
        n_in_training_text=None if opened.sentences is None else int(seen.sum()),
        perplexity_unseen=scores.perplexity(scores.known & ~seen[scores.sentence]) if seen.any() else None,
        leakage=measure_leakage(opened, read_sentences(against)) if against is not None else None,
    )
