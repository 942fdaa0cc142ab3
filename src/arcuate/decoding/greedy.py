"""Greedy CTC decoding: best class per frame, merge repeats, then remove blanks."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from arcuate.data.alphabet import BLANK


@dataclass(frozen=True)
class TokenSpan:
    """A token and the frames it covers."""

    token: int
    first: int
    n_frames: int


def token_spans(log_probs: Any) -> list[TokenSpan]:
    """Runs of frames with the same best class, without blanks; `log_probs` is an array or tensor (F, V).

    Repeats are merged before blanks are removed, so a blank between two equal tokens keeps both.
    """
    found, first = [], 0
    for token, group in groupby(log_probs.argmax(-1).tolist()):
        n_frames = len(list(group))
        if token != BLANK:
            found.append(TokenSpan(token, first, n_frames))
        first += n_frames
    return found


def greedy(log_probs: Any) -> list[int]:
    """Tokens of one trial from its frames (F, V) without padding."""
    return [span.token for span in token_spans(log_probs)]
