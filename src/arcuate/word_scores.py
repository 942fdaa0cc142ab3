"""Word and letter errors of decoded texts, both sides normalised by the one rule in `arcuate.text`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from arcuate.metrics import Score, bootstrap_interval, score, total
from arcuate.text import normalise_text


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
