"""The journal of a sweep: the operations of an Optuna study, one JSON line each, shared by its workers.

Optuna's own file backend raises at every later start if a line is incomplete. Here an incomplete line, left by a full
disk or a killed worker, is skipped: its writer never saw the operation succeed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import OptunaError
from optuna.storages.journal import BaseJournalBackend

from arcuate.errors import UserError
from arcuate.files import describe_error, exclusive_lock
from arcuate.progress import logger

# what Optuna raises while it applies operations that it did not write itself
_INVALID = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError, RecursionError, OptunaError)


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn the errors of a journal whose lines are JSON but not operations of a study into one sentence."""
    try:
        yield
    except _INVALID as error:
        reason = f"{type(error).__name__}: {describe_error(error)}"
        raise UserError(f"{path} is damaged: it is not the journal of a sweep ({reason}); restore the file") from error


class Journal(BaseJournalBackend):
    """Journal file of a study; one worker appends at a time."""

    def __init__(self, path: Path, lock: Path, create: bool = True) -> None:
        self._path, self._lock = path, lock
        self._offsets = {0: 0}  # number of operations -> position in the file after them
        self._skipped: set[int] = set()  # positions of incomplete lines
        if create:
            path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the operations from this number on; a last line without its end is still being written."""
        number = log_number_from if log_number_from in self._offsets else 0
        offset = self._offsets[number]
        with self._path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, offset = offset, offset + len(line)
                operation = _parse(line)
                if operation is None:
                    self._report_skipped(start, line)
                    continue
                number += 1
                self._offsets[number] = offset
                if number > log_number_from:
                    yield operation

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with exclusive_lock(self._lock, "the journal is in use", wait=True), self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    lines = b"\n" + lines  # ends the incomplete line of a killed worker
            try:
                file.seek(size)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, size)
                raise

    def _report_skipped(self, start: int, line: bytes) -> None:
        if start not in self._skipped and line.strip():
            self._skipped.add(start)
            logger.warning(f"{self._path}: an incomplete line at byte {start} is skipped (full disk or killed worker)")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        operation = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return operation if isinstance(operation, dict) else None
