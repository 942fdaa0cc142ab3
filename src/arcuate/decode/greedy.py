"""The greedy rule: best class per frame, merge repeats, then drop blanks. Nobody else decides this."""

from typing import Any

import numpy as np

from arcuate.tokens import BLANK


def greedy(log_probs: Any) -> list[int]:
    """Tokens of one trial from its frames, padding cut off: (F, V), an array or a tensor.

    Repeats are merged before blanks go, so that a blank between two equal tokens keeps both.
    """
    best = np.asarray(log_probs.argmax(-1).tolist(), dtype=np.int64)  # (F,)
    changed = np.diff(best, prepend=-1) != 0
    return [int(token) for token in best[changed] if token != BLANK]
