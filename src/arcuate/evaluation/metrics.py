"""Edit counts of a hypothesis against its reference, added up and divided once at the end."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.text import normalise_text

DELETED, INSERTED = "<del>", "<ins>"
CHUNK = 500  # resamples drawn at a time


@dataclass(frozen=True)
class Score:
    """One hypothesis against its reference; scores add up."""

    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    length: int = 0  # of the reference

    @property
    def errors(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float | None:
        """Errors per reference token; None where there is no reference to divide by."""
        return self.errors / self.length if self.length else None

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.length + other.length,
        )


def score(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> Score:
    """Fewest edits that turn the reference into the hypothesis."""
    counts = Counter(tag for tag, _, _ in Levenshtein.editops(reference, hypothesis))
    return Score(counts["replace"], counts["insert"], counts["delete"], len(reference))


def total(scores: Iterable[Score]) -> Score:
    return sum(scores, Score())


def aligned(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (reference, hypothesis) along one best alignment, with <ins> and <del> where a side is missing."""
    pairs: list[tuple[str, str]] = []
    for op in Levenshtein.opcodes(reference, hypothesis):
        said, read = reference[op.src_start : op.src_end], hypothesis[op.dest_start : op.dest_end]
        if op.tag == "insert":
            pairs += [(INSERTED, h) for h in read]
        elif op.tag == "delete":
            pairs += [(r, DELETED) for r in said]
        else:
            pairs += list(zip(said, read, strict=True))
    return pairs


def confusions(pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Counter[tuple[str, str]]:
    """How often each reference token was read as each hypothesis token, over many (reference, hypothesis)."""
    return Counter(pair for reference, hypothesis in pairs for pair in aligned(reference, hypothesis))


def bootstrap_interval(
    scores: Sequence[Score], *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> tuple[float | None, float | None]:
    """Percentile interval of the error rate when trials are drawn anew with replacement.

    None where there are fewer than two trials: one trial says nothing about the spread between trials, and
    drawing it again and again would give an interval of width 0.
    """
    scored = [s for s in scores if s.length]
    if len(scored) < 2 or not n_resamples:
        return None, None
    counts = np.array([(s.errors, s.length) for s in scored], dtype=np.float64)
    errors, lengths = resampled_sums(counts, n_resamples, seed).T
    low, high = np.quantile(errors / lengths, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def resampled_sums(values: np.ndarray, n_resamples: int, seed: int) -> np.ndarray:
    """Column sums (R, K) of rows (N, K) drawn anew with replacement; a few hundred draws at a time, to spare memory."""
    rng, n_rows = np.random.default_rng(seed), len(values)
    shares = np.full(n_rows, 1 / n_rows)
    sizes = [min(CHUNK, n_resamples - start) for start in range(0, n_resamples, CHUNK)]
    return np.concatenate([rng.multinomial(n_rows, shares, size=size) @ values for size in sizes])


# Word and letter errors of decoded texts, both sides normalised by the one rule in `arcuate.data.text`.


@dataclass(frozen=True)
class TextScore:
    """One decoded text against what was to be said."""

    words: Score
    letters: Score  # spaces count: where a word ends is part of the text


@dataclass(frozen=True)
class ScoredTrial:
    """A trial's text score with what tables are made by."""

    id: str
    score: TextScore
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None  # whether the language model was trained on the sentence; None: not known


def score_text(reference: str, hypothesis: str) -> TextScore:
    """Fewest edits by word and by letter."""
    said, read = normalise_text(reference), normalise_text(hypothesis)
    return TextScore(score(said.split(), read.split()), score(said, read))


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float | None:
    """Summed word edits over summed reference words."""
    pairs = zip(references, hypotheses, strict=True)
    return total(score_text(said, read).words for said, read in pairs).rate


def summarise_words(
    trials: Sequence[ScoredTrial], *, lm: str | None, n_trials: int | None = None, n_resamples: int = 2000
) -> dict[str, Any]:
    """Error rates with 95 % intervals, whole, by session and by corpus. A WER says nothing without its `lm`.

    `n_trials` counts the trials that had no reference too.
    """
    words = [trial.score.words for trial in trials]
    letters = [trial.score.letters for trial in trials]
    counted = total(words)
    wer_low, wer_high = bootstrap_interval(words, n_resamples=n_resamples)
    cer_low, cer_high = bootstrap_interval(letters, n_resamples=n_resamples)
    return {
        "wer": counted.rate,
        "wer_low": wer_low,
        "wer_high": wer_high,
        "cer": total(letters).rate,
        "cer_low": cer_low,
        "cer_high": cer_high,
        "lm": lm,
        "n_trials": len(trials) if n_trials is None else n_trials,
        "n_scored": len(trials),
        "n_words": counted.length,
        "substitutions": counted.substitutions,
        "insertions": counted.insertions,
        "deletions": counted.deletions,
        "n_sentences_right": sum(not s.errors for s in words),
        **leakage(trials),
        "wer_by_session": wer_by(trials, lambda t: t.session),
        "wer_by_corpus": wer_by(trials, lambda t: t.corpus),
    }


def leakage(trials: Sequence[ScoredTrial]) -> dict[str, Any]:
    """How many sentences the language model was trained on, and the error rate without them."""
    known = [t for t in trials if t.in_lm_text is not None]
    unseen = [t.score.words for t in known if not t.in_lm_text]
    return {
        "n_in_lm_text": sum(bool(t.in_lm_text) for t in known) if known else None,
        "wer_without_lm_text": total(unseen).rate if known else None,
    }


def leakage_warning(summary: dict[str, Any]) -> str | None:
    """One sentence where sentences of the evaluation stand in the language model's training text."""
    if not summary.get("n_in_lm_text"):
        return None
    rate = summary["wer_without_lm_text"]
    without = "there is no other" if rate is None else f"without them the WER is {100 * rate:.2f} %"
    return (
        f"leakage: the text of the language model ({summary['lm'] or 'not named'}) contains"
        f" {summary['n_in_lm_text']} of {summary['n_scored']} sentences scored here; {without}"
    )


def wer_by(
    trials: Iterable[ScoredTrial], key: Callable[[ScoredTrial], str | None]
) -> dict[str, float | None]:
    """Word error rate by whatever the key tells apart; trials without one are left to the whole."""
    known = sorted((t for t in trials if key(t) is not None), key=lambda t: str(key(t)))
    return {str(k): total(t.score.words for t in group).rate for k, group in groupby(known, key)}
