"""Reading and writing files: atomic writes, the exclusive lock, JSON, JSON lines and arrays.

An atomic write goes to a hidden temporary file or folder `.NAME.part` beside its destination, is synced and then
renamed, so that the destination is never incomplete, even if the process is killed.
"""

import difflib
import errno
import json
import math
import os
import re
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import TOO_LARGE, TOO_MANY_FILES, UserError, check_regular, check_resources
from arcuate.progress import logger

# --- Atomic writes ---------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Stream into a file that appears complete or not at all. A pipe or device is written directly."""
    target = _resolve_target(path)
    if not _is_regular(target):
        with target.open("wb") as stream:
            yield stream
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with _open_new(temporary) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _open_new(path: Path) -> BinaryIO:
    """Create a temporary file. One left by a killed process is removed; a link is never followed (O_EXCL)."""
    path.unlink(missing_ok=True)
    return path.open("xb")


@contextmanager
def atomic_group(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Temporary paths of files that belong together; they replace `paths` when all of them are written.

    The last file describes the others. It is removed before they are replaced and appears after them, so that a process
    killed in between never leaves it beside files that it does not describe. Processes that write the same group
    replace it one after the other.
    """
    paths[-1].parent.mkdir(parents=True, exist_ok=True)
    staged = tuple(path.with_name(f".{path.name}.{os.getpid()}.new") for path in paths)
    try:
        yield staged
        lock = paths[-1].with_name(f".{paths[-1].name}.lock")
        with exclusive_lock(lock, f"{paths[-1]} is being written", wait=True, remove=True):
            paths[-1].unlink(missing_ok=True)
            sync(paths[-1].parent)
            for temporary, path in zip(staged, paths, strict=True):
                os.replace(temporary, path)
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Temporary folder that is synced and renamed to `path` on success, and removed on failure.

    A folder that is already at `path` is replaced. Only one process may write a folder at a time: see `locked_folder`.
    """
    temporary = path.with_name(f".{path.name}.part")
    with temporary_folder(temporary):
        temporary.mkdir(parents=True)
        yield temporary
        for part in (*temporary.iterdir(), temporary):
            sync(part)
        replace_folder(temporary, path)


@contextmanager
def temporary_folder(path: Path) -> Iterator[None]:
    """Remove the folder `path` before and after the context."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked_folder(path: Path) -> Iterator[Path]:
    """`atomic_folder` for commands that hold no lock of their own; `LockHeld` if another process writes `path`."""
    path = path.resolve()  # a link stays, and the folder that it names is replaced
    busy = f"another process is writing {path}; wait for it to end"
    try:
        with exclusive_lock(path.with_name(f".{path.name}.lock"), busy, remove=True), atomic_folder(path) as temporary:
            yield temporary
    except OSError as error:
        raise explain_write_error(error, path) from error


def replace_folder(temporary: Path, path: Path) -> None:
    """Rename a folder to `path` and delete the folder that was there.

    The old folder is renamed to `.NAME.old` first, where a kill in between leaves it, and renamed back if the second
    rename fails.
    """
    old = old_folder(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def old_folder(path: Path) -> Path:
    """Path where `replace_folder` keeps the previous folder until the new one is in place."""
    return path.with_name(f".{path.name}.old")


def replace_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, replacing an older link in one rename."""
    temporary = link.with_name(f".{link.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    sync(link.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def explain_write_error(error: OSError, path: Path) -> UserError:
    """The message for a failed write to `path`, after the incomplete files were removed."""
    if error.errno in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
        return UserError(f"{path} cannot be written: too many files are open; {TOO_MANY_FILES}")
    if error.errno == errno.EFBIG:
        return UserError(f"{path} cannot be written: a file is too large; {TOO_LARGE} (incomplete files were removed)")
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return UserError(f"the disk is full; free some space and write {path} again (incomplete files were removed)")
    reason = error.strerror or " ".join(str(error).split())
    return UserError(f"cannot write {path}: {reason}; check the folder and its permissions")


@dataclass(frozen=True)
class OutputKind:
    """Kind of output file: how such a file begins, and its name in messages."""

    begins: re.Pattern[bytes]
    example: str

    def matches(self, path: Path) -> bool:
        """Whether the file is empty or an earlier output of this kind."""
        with path.open("rb") as file:
            start = file.read(_MAX_START)
        return not start or self.begins.match(start) is not None


_MAX_START = 2**20  # bytes; enough for the first line of a file of decodings
DECODINGS = OutputKind(re.compile(rb'\{"id": [^\n]*"nbest": \['), "decodings.jsonl")
FRAME_SCORES = OutputKind(re.compile(rb"PK\x03\x04.{26}logp\.npy", re.DOTALL), "scores.npz")
WEIGHTS = OutputKind(re.compile(rb"weights:\s|beam: \d"), "weights.yaml")
PAGE = OutputKind(re.compile(b"<!doctype html", re.IGNORECASE), "page.html")
DIARY = OutputKind(re.compile(b"# Run diary", re.IGNORECASE), "DIARY.md")


def check_writable(path: Path | str | None, *inputs: Path | str | None, kind: OutputKind | None = None) -> None:
    """Check before a long computation that `path` can be written after it, and is not one of its inputs.

    With `kind`, an existing file is replaced only if it is an earlier output of that kind: a mistake such as `--scores
    RUN/checkpoints/best/model.safetensors` must not destroy weights.
    """
    if path is None:
        return
    target = _resolve_target(Path(path))
    for given in inputs:
        if given is not None and target.exists() and Path(given).exists() and target.samefile(given):
            raise UserError(f"{path} is an input of this command; give another file to write to")
    if kind is not None and target.is_file() and not kind.matches(target):
        raise UserError(f"{path} exists and is not an earlier {kind.example}; choose another name")
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: no permission to write in {folder}")


def _resolve_target(path: Path) -> Path:
    """The file to write: a link stays and its target is written; a folder is rejected."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a file to write to")
    if not path.is_symlink() or not _is_regular(path):
        return path
    try:
        return path.resolve()
    except (RuntimeError, OSError):
        raise UserError(f"{path} is a broken link; give a file to write to") from None


def _is_regular(path: Path) -> bool:
    return path.is_file() or not path.exists()


# --- Exclusive lock --------------------------------------------------------------------------------------

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without locks


class LockHeld(UserError):
    """Raised when another process holds a lock."""


@contextmanager
def exclusive_lock(path: Path, busy: str, *, wait: bool = False, remove: bool = False) -> Iterator[None]:
    """Hold the lock file `path` for the duration of the context; `LockHeld(busy)` if another process holds it.

    The kernel releases the lock when its holder exits or is killed; forked children do not inherit it. The file stays,
    unless `remove`: then its holder deletes it before the release. `wait` blocks until the lock is free. On a file
    system without locks, a warning is logged and the context runs unlocked.
    """
    import filelock  # not installed with the runtime of exported models

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, timeout=-1 if wait else 0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise LockHeld(busy) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(f"the file system of {path.parent} has no locks; do not use it from two processes concurrently")
    try:
        yield
    finally:
        if remove:
            path.unlink(missing_ok=True)
        lock.release()


# --- JSON, text and arrays -------------------------------------------------------------------------------


def to_json_value(value: Any) -> Any:
    """The value as JSON can hold it: results become objects, paths text, numpy scalars numbers, NaN and inf None."""
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json_value(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "to_dict"):
        return to_json_value(value.to_dict())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "model_dump"):  # settings
        return value.model_dump(mode="json", by_alias=True)
    return fields_to_dict(value) if is_dataclass(value) else value


def finite_number(value: Any) -> float | None:
    """Return a value as a float if it is one that can be drawn, or None for anything else a file may contain."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e100 else None


def finite_int(value: Any) -> int | None:
    number = finite_number(value)
    return None if number is None else int(number)


def fields_to_dict(result: Any, *omit: str) -> dict[str, Any]:
    """The fields of a dataclass as JSON-ready values, except those in `omit`."""
    return {name: to_json_value(value) for name, value in vars(result).items() if name not in omit}


class Result:
    """Base class of results whose JSON object has their fields."""

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON text; a path that is not UTF-8 is written with escapes, which read back as the same path."""
    plain = to_json_value(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)
    is_valid = text.isascii() or not _SURROGATES.search(text)
    return text if is_valid else json.dumps(plain, allow_nan=False, indent=indent)


_SURROGATES = re.compile("[\ud800-\udfff]")


def to_json_line(value: Any) -> str:
    return _to_json(value)


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8", "backslashreplace"))  # parts of paths that are not UTF-8


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, _to_json(value, indent=1) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text(path, "".join(to_json_line(row) + "\n" for row in rows))


def append_jsonl(path: Path, *rows: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(to_json_line(row) + "\n" for row in rows))


def save_npz(path: Path, arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        if np.asarray(array).dtype.hasobject:  # NumPy would pickle it; before 2.1, `savez` has no option to prevent it
            raise ValueError(f"{name}: an array of objects cannot be written without pickle")
    with atomic_write(path) as stream:
        np.savez_compressed(stream, **arrays)


_FREE_BYTES = 2**26  # always accepted
_MAX_EXPANSION = 100  # bytes per stored byte; recordings and scores have up to 20


# how NumPy and zlib report damaged files; a header with an impossible shape is a MemoryError
_DAMAGE = (
    *(zlib.error, EOFError, NotImplementedError, RuntimeError, LookupError, ArithmeticError, struct.error, SyntaxError),
    *(tokenize.TokenError, TypeError, MemoryError),
)


def read_npz(path: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of an .npz file (`names`, or all); ValueError if it is damaged or contains anything but plain arrays.

    The sizes in the archive are compared before anything is inflated.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [e for e in archive.infolist() if names is None or e.filename.removesuffix(".npy") in names]
            wanted = [entry.filename.removesuffix(".npy") for entry in entries]
            if len(set(wanted)) < len(wanted):
                raise ValueError("an array occurs twice")
            check_expansion(sum(entry.file_size for entry in entries), path.stat().st_size)
        with np.load(path, allow_pickle=False) as file:
            return {name: _check_plain(file[name]) for name in wanted}
    except zipfile.BadZipFile as error:
        raise ValueError("it is not a zip archive of arrays" if not zipfile.is_zipfile(path) else str(error)) from None
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read_npy(path: Path) -> np.ndarray:
    """The array of an .npy file; ValueError if it is damaged or contains anything but numbers or text."""
    try:
        return _check_plain(np.load(path, allow_pickle=False))
    except (zipfile.BadZipFile, *_DAMAGE) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _check_plain(array: Any) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise ValueError("it holds something that is not an array")
    if array.dtype.kind not in "biufSU":
        raise ValueError(f"an array holds {array.dtype}, not numbers or text")
    return array


def check_expansion(n_bytes: int, n_packed: int) -> None:
    """Raise ValueError if `n_packed` bytes of a file expand to far more than those of real data do."""
    if n_bytes > _FREE_BYTES + _MAX_EXPANSION * n_packed:
        raise ValueError(f"{n_packed:,} bytes expand to {n_bytes:,}, which is not plausible")


_MAX_JSON_BYTES = 2**31  # of a text file that is read as a whole


def read_json(path: Path) -> dict[str, Any]:
    try:
        check_regular(path, _MAX_JSON_BYTES)
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        check_resources(error, path)
        raise UserError(f"{path} cannot be read: {describe_error(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain one JSON object")
    return value


def read_jsonl(path: Path, growing: bool = False) -> list[dict[str, Any]]:
    """The rows of a JSON lines file. With `growing`, an incomplete last line is ignored."""
    try:
        check_regular(path, _MAX_JSON_BYTES)
        lines = path.read_text("utf-8").removeprefix("\ufeff").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        check_resources(error, path)
        raise UserError(f"{path} cannot be read: {describe_error(error)}") from None
    unfinished = lines.pop()
    if unfinished and not growing:
        lines.append(unfinished)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path} line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object")
        rows.append(row)
    return rows


def to_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame with one line per row."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise UserError("tables need pandas; install it with: pip install pandas") from None
    return pandas.DataFrame(list(rows))


def describe_error(error: Exception) -> str:
    """One line on why a file cannot be read: the system's message or the parser's."""
    return (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())[:200]


def similar_folder(path: Path, file: str) -> Path | None:
    """The folder beside a missing one that has `file` and the most similar name, if any is similar."""
    try:
        names = [p.name for p in path.parent.iterdir() if (p / file).is_file() and not p.name.startswith(".")]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


def find_package_file(package: str, name: str) -> Path | None:
    """Path of a data file in an installed package, without importing the package; None if there is none."""
    spec = find_spec(package)
    paths = [Path(folder) / name for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((path for path in paths if path.is_file()), None)
