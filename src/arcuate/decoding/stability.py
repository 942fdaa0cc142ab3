"""How steady the text is while it is being read: what a person who watches partial results goes through."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Partial:
    """The words shown after so many frames."""

    n_frames: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Stability:
    """Sums over one or many trials, divided once at the end; stabilities add up."""

    n_words: int = 0  # in the final texts
    n_revisions: int = 0  # words shown that were taken back or changed later
    n_updates: int = 0  # times the text changed
    n_flickers: int = 0  # of those, times a shown word went or changed
    frames_to_final: int = 0  # from the end of each final word to the frame from which it stood for good

    def __add__(self, other: "Stability") -> "Stability":
        return Stability(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    @property
    def revisions_per_word(self) -> float | None:
        return self.n_revisions / self.n_words if self.n_words else None

    @property
    def flicker(self) -> float | None:
        """Share of updates that took something back instead of only adding to it."""
        return self.n_flickers / self.n_updates if self.n_updates else None

    @property
    def mean_frames_to_final(self) -> float | None:
        return self.frames_to_final / self.n_words if self.n_words else None


def stability(partials: Sequence[Partial], final: Partial, word_ends: Sequence[int]) -> Stability:
    """How steady the partial texts of one trial were; `word_ends` are the last frames of the final words."""
    shown = [Partial(0, ()), *partials, final]
    updates = [(a.words, b.words) for a, b in pairwise(shown) if a.words != b.words]
    taken_back = [len(a) - common(a, b) for a, b in updates]
    return Stability(
        n_words=len(final.words),
        n_revisions=sum(taken_back),
        n_updates=len(updates),
        n_flickers=sum(n > 0 for n in taken_back),
        frames_to_final=sum(
            max(0, stands_from(shown, final.words, k) - 1 - end) for k, end in enumerate(word_ends)
        ),
    )


def stands_from(shown: Sequence[Partial], final: Sequence[str], k: int) -> int:
    """Number of frames after which word k and all before it were as in the final text, and stayed so."""
    since = shown[-1].n_frames
    for partial in reversed(shown):
        if common(partial.words, final) <= k:
            break
        since = partial.n_frames
    return since


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many words two texts have in common from the beginning."""
    n = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        n += 1
    return n
