"""Error rates: PER, WER and CER from edit counts, the alignments behind them, and summaries of word errors.

Scores add up over trials. An error rate is summed edits over summed reference lengths, never a mean of rates. A WER
depends on the language model, so every summary names it and reports how many of the scored sentences occur in its
training text.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import CLASSES, error_rate_name, recorded_classes
from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import Result
from arcuate.run import Run

DELETED, INSERTED = "<del>", "<ins>"


def run_rate_name(*runs: Run) -> str:
    """Abbreviation of the error rate of runs, such as PER; "PER / CER" if their alphabets differ."""

    def name(run: Run) -> str:
        try:
            return error_rate_name(recorded_classes(run.environment()))
        except UserError:  # no environment.json, or a damaged one
            return error_rate_name(CLASSES)

    return " / ".join(dict.fromkeys(map(name, runs))) or error_rate_name(CLASSES)


@dataclass(frozen=True)
class Score:
    """Edit counts of one hypothesis, or the sum over several."""

    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0
    length: int = 0  # of the reference

    @property
    def errors(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float | None:
        """Errors per reference token; None for an empty reference."""
        return self.errors / self.length if self.length else None

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
            self.length + other.length,
        )


@dataclass(frozen=True)
class TextScore:
    """Edit counts of one decoded text, by word and by letter."""

    words: Score
    letters: Score  # spaces count as letters


def score(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> Score:
    """Count the edits of a minimum-edit-distance (Levenshtein 1966) alignment."""
    counts = Counter(tag for tag, _, _ in Levenshtein.editops(reference, hypothesis))
    return Score(counts["replace"], counts["insert"], counts["delete"], len(reference))


def score_text(reference: str, hypothesis: str) -> TextScore:
    """Count word and letter edits after normalising both texts with `arcuate.data.text`."""
    reference, hypothesis = normalise_text(reference), normalise_text(hypothesis)
    return TextScore(score(reference.split(), hypothesis.split()), score(reference, hypothesis))


def words_per_minute(n_words: int, seconds: float) -> float | None:
    """Words per minute of recording, silence included; None without words in references or without recordings."""
    return 60 * n_words / seconds if n_words and seconds > 0 else None


def total(scores: Iterable[Score]) -> Score:
    """Sum of scores."""
    return sum(scores, Score())


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def rates_by_group(scores: Iterable[tuple[str | None, Score]]) -> dict[str, float | None]:
    """Error rate of each named group, in the order of the names; scores without a name belong to no group."""
    groups: dict[str, Score] = {}
    for name, counts in scores:
        if name is not None:
            groups[name] = groups.get(name, Score()) + counts
    return {name: groups[name].rate for name in sorted(groups)}


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (reference, hypothesis) along one optimal alignment, with `<ins>` and `<del>` for the missing side."""
    pairs: list[tuple[str, str]] = []
    for op in Levenshtein.opcodes(reference, hypothesis):
        expected, decoded = reference[op.src_start : op.src_end], hypothesis[op.dest_start : op.dest_end]
        if op.tag == "insert":
            pairs += [(INSERTED, token) for token in decoded]
        elif op.tag == "delete":
            pairs += [(token, DELETED) for token in expected]
        else:
            pairs += list(zip(expected, decoded, strict=True))
    return pairs


def align_words(reference: str | None, words: Sequence[str]) -> list[dict[str, str]] | None:
    """Mark decoded words as correct, substitution (with its reference) or insertion, and add deletions."""
    if reference is None:
        return None
    aligned, decoded = [], iter(words)
    for expected, normalised in align(normalise_text(reference).split(), [normalise_text(word) for word in words]):
        if normalised == DELETED:
            aligned.append({"word": expected, "op": "deletion"})
        elif expected == INSERTED:
            aligned.append({"word": next(decoded), "op": "insertion"})
        elif expected == normalised:
            aligned.append({"word": next(decoded), "op": "correct"})
        else:
            aligned.append({"word": next(decoded), "op": "substitution", "reference": expected})
    return aligned


def confusions(pairs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> Counter[tuple[str, str]]:
    """Counts of aligned (reference token, hypothesis token) over many (reference, hypothesis) pairs."""
    return Counter(pair for reference, hypothesis in pairs for pair in align(reference, hypothesis))


@dataclass(frozen=True)
class ScoredTrial:
    """Edit counts of one decoded text with the attributes that results are grouped by."""

    id: str
    score: TextScore
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None


@dataclass(frozen=True)
class WordMetrics(Result):
    """Word and character error rates with 95 % bootstrap intervals, in total, by session and by corpus."""

    wer: float | None
    wer_low: float | None
    wer_high: float | None
    cer: float | None
    cer_low: float | None
    cer_high: float | None
    lm: str | None
    n_trials: int  # including those without a reference
    n_scored: int
    n_words: int
    substitutions: int
    insertions: int
    deletions: int
    n_sentences_correct: int
    n_in_lm_text: int | None  # None: unknown
    wer_without_lm_text: float | None
    wer_by_session: dict[str, float | None]
    wer_by_corpus: dict[str, float | None]

    @property
    def leakage_warning(self) -> str | None:
        """One sentence if scored sentences occur in the language model's training text."""
        if not self.n_in_lm_text:
            return None
        rate = self.wer_without_lm_text
        without = "no others were scored" if rate is None else f"without them the WER is {100 * rate:.2f} %"
        return (
            f"leakage: the training text of the language model ({self.lm or 'unnamed'}) contains"
            f" {self.n_in_lm_text} of {self.n_scored} sentences scored here; {without}"
        )


def summarise_words(
    trials: Sequence[ScoredTrial], *, lm: str | None, n_trials: int | None = None, n_resamples: int = 2000
) -> WordMetrics:
    """Error rates of scored trials; `n_trials` also counts the trials without a reference."""
    words = [trial.score.words for trial in trials]
    letters = [trial.score.letters for trial in trials]
    known = [t for t in trials if t.in_lm_text is not None]
    unseen = [t.score.words for t in known if not t.in_lm_text]
    counts = total(words)
    return WordMetrics(
        counts.rate,
        *bootstrap_interval(words, n_resamples=n_resamples),
        total(letters).rate,
        *bootstrap_interval(letters, n_resamples=n_resamples),
        lm,
        len(trials) if n_trials is None else n_trials,
        len(trials),
        counts.length,
        counts.substitutions,
        counts.insertions,
        counts.deletions,
        sum(not s.errors for s in words),
        sum(bool(t.in_lm_text) for t in known) if known else None,
        total(unseen).rate if known else None,
        rates_by_group((t.session, t.score.words) for t in trials),
        rates_by_group((t.corpus, t.score.words) for t in trials),
    )
