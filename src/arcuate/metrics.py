"""Edit counts of a hypothesis against its reference, added up and divided once at the end."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein

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
