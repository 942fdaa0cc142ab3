"""Hypothesis: one reading of a trial."""

from dataclasses import dataclass, field

from arcuate.data.alphabet import token_names


@dataclass(frozen=True)
class WordTime:
    """When a word was read: the frames of its first and of its last token."""

    first: int
    last: int


@dataclass(frozen=True)
class Hypothesis:
    tokens: tuple[int, ...]
    scores: dict[str, float] = field(default_factory=dict)  # natural-log score by source, e.g. "acoustic"
    words: tuple[str, ...] = ()
    times: tuple[WordTime, ...] = ()  # one per word, where a search knows them
    total: float | None = None  # what readings of one trial are ranked by: the weighted sum of the scores

    @property
    def phonemes(self) -> list[str]:
        return token_names(self.tokens)

    @property
    def text(self) -> str | None:
        """The words as one string; None where only phonemes were decoded."""
        return " ".join(self.words) if self.words else None
