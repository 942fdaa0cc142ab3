"""How well a model foretells a text."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.errors import UserError
from arcuate.lm.model import LanguageModel
from arcuate.lm.query import score_sentences

_SHOWN = 20


@dataclass(frozen=True, eq=False)
class TextScores:
    """Every word of a text, and the end of every sentence, under a model."""

    log_probs: np.ndarray  # (n_tokens,) float64, nat
    known: np.ndarray  # (n_tokens,) bool, whether the model has the word
    sentence: np.ndarray  # (n_tokens,) int64, number of the sentence
    unknown: Counter[str]

    @property
    def n_sentences(self) -> int:
        return int(self.sentence[-1]) + 1 if len(self.sentence) else 0

    def perplexity(self, among: np.ndarray | None = None) -> float | None:
        """exp of the mean negative log-probability of words and sentence ends, of those chosen; None for none."""
        chosen = self.known if among is None else among
        return math.exp(min(-float(self.log_probs[chosen].mean()), 700)) if chosen.any() else None


def score_text(model: LanguageModel, sentences: Iterable[str]) -> TextScores:
    """Score sentences, each from its start to its end; words are what stands between spaces."""
    words, lengths = _words(sentences)
    ids = model.words.find_all(words)
    known = ids >= 0
    unknown = Counter(words[i] for i in np.flatnonzero(~known))
    ids[~known] = model.unk
    log_probs = np.empty(len(ids), np.float64)
    score_sentences(model.arrays, model.start, model.eos, ids, log_probs)
    sentence = np.repeat(np.arange(len(lengths)), lengths)
    return TextScores(log_probs, known & (ids != model.unk), sentence, unknown)


def _words(sentences: Iterable[str]) -> tuple[list[str], list[int]]:
    words: list[str] = []
    lengths: list[int] = []
    for number, sentence in enumerate(sentences, start=1):
        found = sentence.split()
        if "<s>" in found or "</s>" in found:
            raise UserError(f"line {number} contains <s> or </s>; leave them out, every line is a sentence")
        words += found
        words.append("</s>")
        lengths.append(len(found) + 1)
    return words, lengths


def summary(model: LanguageModel, sentences: Sequence[str]) -> dict[str, object]:
    """What `lm score` prints: perplexity of the known words and of all, unknown words, leakage."""
    scores = score_text(model, sentences)
    n_words = len(scores.log_probs) - scores.n_sentences
    n_oov = int((~scores.known).sum())
    every = np.ones(len(scores.known), bool)
    seen = seen_sentences(model, sentences)
    unseen = None
    if seen is not None and any(seen):
        unseen = scores.perplexity(scores.known & ~np.array(seen)[scores.sentence])
    return {
        "n_sentences": scores.n_sentences,
        "n_words": n_words,
        "n_oov": n_oov,
        "oov_rate": n_oov / n_words if n_words else None,
        "perplexity": scores.perplexity(),
        "perplexity_with_oov": scores.perplexity(every),
        "log10_prob": float(scores.log_probs[scores.known].sum() / math.log(10)),
        "oov_words": [word for word, _ in scores.unknown.most_common(_SHOWN)],
        "n_in_training_text": None if seen is None else sum(seen),
        "perplexity_unseen": unseen,
    }


def seen_sentences(model: LanguageModel, sentences: Sequence[str]) -> list[bool] | None:
    """Which sentences stand in the model's training text; None where the model does not know."""
    if model.sentences is None:
        return None
    return [model.contains(sentence) is True for sentence in sentences]
