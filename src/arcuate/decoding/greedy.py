"""The greedy rule: best class per frame, merge repeats, then drop blanks. Nobody else decides this."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from arcuate.data.alphabet import BLANK


@dataclass(frozen=True)
class TokenSpan:
    """A token and the frames it was read from."""

    token: int
    first: int
    n_frames: int


def token_spans(log_probs: Any) -> list[TokenSpan]:
    """Stretches of frames with the same best class, blanks left out: (F, V), an array or a tensor.

    Repeats are merged before blanks go, so that a blank between two equal tokens keeps both.
    """
    found, first = [], 0
    for token, group in groupby(log_probs.argmax(-1).tolist()):
        n_frames = len(list(group))
        if token != BLANK:
            found.append(TokenSpan(token, first, n_frames))
        first += n_frames
    return found


def greedy(log_probs: Any) -> list[int]:
    """Tokens of one trial from its frames, padding cut off."""
    return [span.token for span in token_spans(log_probs)]
