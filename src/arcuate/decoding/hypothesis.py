"""Hypothesis: one decoding result of a trial."""

from dataclasses import dataclass, field

from arcuate.data.alphabet import token_names


@dataclass(frozen=True)
class WordTime:
    """Frames of a word's first and last token."""

    first: int
    last: int


@dataclass(frozen=True)
class Hypothesis:
    """Tokens, words or both, with natural-log scores by source."""

    tokens: tuple[int, ...]
    scores: dict[str, float] = field(default_factory=dict)  # by source, such as "acoustic" and "lm"
    words: tuple[str, ...] = ()
    times: tuple[WordTime, ...] = ()  # one per word, if the search provides them
    total: float | None = None  # weighted sum of the scores, by which an n-best list is ranked

    @property
    def phonemes(self) -> list[str]:
        return token_names(self.tokens)

    @property
    def text(self) -> str | None:
        """The words as one string; None if only phonemes were decoded."""
        return " ".join(self.words) if self.words else None
