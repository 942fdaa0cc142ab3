"""Where results go: looked at before the work begins, written beside their place and put there when they are whole."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from arcuate.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream into a file: whole or not at all. What is no ordinary file, such as a pipe, is written into."""
    target = settle(path)
    if not is_ordinary(target):
        with target.open("wb") as stream:
            yield stream
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def settle(path: Path) -> Path:
    """The file that a name means: a link stays and its target is written; a folder is refused."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write to")
    if not path.is_symlink() or not is_ordinary(path):
        return path
    try:
        return path.resolve()
    except (RuntimeError, OSError):
        raise UserError(f"{path} is a link that leads nowhere; name a file to write to") from None


def is_ordinary(path: Path) -> bool:
    """Whether a file that is written there replaces nothing but a file."""
    return path.is_file() or not path.exists()


def check_target(path: Path | None, *inputs: Path | str | None) -> None:
    """Refuse before the work what could not be written after it, and what the work reads from."""
    if path is None:
        return
    target = settle(path)
    for given in inputs:
        if given is not None and target.exists() and Path(given).exists() and target.samefile(given):
            raise UserError(f"{path} is read by this command; name another file to write to")
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: you have no right to write in {folder}")


def to_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame with one line per row."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise UserError("tables need pandas; install it with: pip install pandas") from None
    return pandas.DataFrame(list(rows))
