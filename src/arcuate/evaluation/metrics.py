"""Edit counts of a hypothesis against its reference, and the alignments behind them.

Scores add up over trials. An error rate is summed edits over summed reference lengths, never a mean of rates.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from arcuate.data.text import normalise_text

DELETED, INSERTED = "<del>", "<ins>"


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


def total(scores: Iterable[Score]) -> Score:
    """Sum of scores."""
    return sum(scores, Score())


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float | None:
    """Summed word edits over summed reference words."""
    pairs = zip(references, hypotheses, strict=True)
    return total(score_text(reference, hypothesis).words for reference, hypothesis in pairs).rate


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
