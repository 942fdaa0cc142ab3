"""An append-only log that several states may share: what makes a search state a value without copying its past."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Log:
    """The first `n` rows of a buffer. Rows are written once, so older states keep what they know.

    `written` counts the rows in use by anyone. Whoever stands at the end may append in place; a state that was
    left behind (two continuations of one beginning) goes on in a copy of its own.
    """

    rows: np.ndarray  # (room,), structured
    written: list[int]
    n: int

    def with_room(self, n_more: int) -> "Log":
        """A log with the same rows that may be appended to, up to `n_more` rows."""
        if self.written[0] == self.n and self.n + n_more <= len(self.rows):
            return self
        rows = np.empty(max(2 * self.n, self.n + 2 * n_more), self.rows.dtype)
        rows[: self.n] = self.rows[: self.n]
        return Log(rows, [self.n], self.n)

    def appended(self, n: int) -> "Log":
        """The log after rows were written behind it, `n` rows in all."""
        self.written[0] = n
        return Log(self.rows, self.written, n)


def empty_log(dtype: np.dtype, room: int) -> Log:
    return Log(np.empty(room, dtype), [0], 0)
