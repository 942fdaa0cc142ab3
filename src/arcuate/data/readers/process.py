"""Reading of source files in a monitored child process.

A damaged HDF5 file can make its library loop forever, and a damaged MATLAB file can crash scipy's compiled reader.
Files are therefore read in a child process with limits on CPU time and memory; a file that hangs or crashes the
child is reported like any other unreadable file, and the next file is read by a new child. The child reads ahead while
its parent checks and writes, so that the overhead is small.
"""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from arcuate.data.readers.release import READERS, read_trials, summarise_file
from arcuate.data.readers.source import FileSummary, ReadResult, Source, SourceFile, UnreadableFile
from arcuate.errors import UserError

MAX_CPU_SECONDS = 15.0  # for one trial; a real one takes milliseconds
_BYTES_PER_SECOND = 2**23  # more time for large files, '24 files are loaded as a whole
_MAX_WALL_SECONDS = 900.0  # for one file, in case the file system does not respond
_MAX_BYTES = 2**31
_MEMORY_FACTOR = 20  # bytes of memory per byte of the file: compressed integers become float64

Command = Literal["summarise", "read"]
T = TypeVar("T")


START_METHOD: Literal["fork", "spawn"] = "fork" if sys.platform.startswith("linux") else "spawn"


@dataclass(frozen=True)
class _End:
    """Last message of a response: `reason` says why a file cannot be read, or is the text of a `UserError`."""

    reason: str | None = None
    ends_command: bool = False  # `reason` is a UserError


class ReaderProcess:
    """Reads the files of a source in a child process, which starts with the first request."""

    def __init__(self, source: Source, features: str) -> None:
        self._source, self._features = source, features
        self._child: tuple[BaseProcess, Connection] | None = None

    def summarise(self, file: SourceFile) -> FileSummary:
        """Number of trials in a file, without reading them; raises `UnreadableFile`."""
        (summary,) = self._ask("summarise", file)
        return cast(FileSummary, summary)

    def read(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one file, one at a time; raises `UnreadableFile`."""
        return self._ask("read", file)

    def close(self) -> None:
        """End the child; the next request starts a new one."""
        if self._child is not None:
            (process, connection), self._child = self._child, None
            process.kill()
            process.join()
            connection.close()

    def __enter__(self) -> "ReaderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: Command, file: SourceFile) -> Iterator[Any]:
        process, connection = self._child = self._child or self._start()
        end: _End | None = None
        timer = threading.Timer(_MAX_WALL_SECONDS + _extra_seconds(file.path), process.kill)
        timer.daemon = True
        timer.start()
        try:
            connection.send((command, file))
            while not isinstance(answer := connection.recv(), _End):
                yield answer
            end = answer
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            process.join()
            if process.exitcode == 1 and self._source.reader not in (None, *READERS):  # Python has printed a traceback
                raise UserError(
                    f"the code of the reader {self._source.reader!r} raised an exception at {file.path}, shown above;"
                    " raise UnreadableFile for damaged files"
                ) from error
            raise UnreadableFile(_describe_exit(process.exitcode)) from error
        finally:
            timer.cancel()
            if end is None:  # the child has ended, or its remaining answers are not needed
                self.close()
        if end.reason is not None:
            raise (UserError if end.ends_command else UnreadableFile)(end.reason)

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context(START_METHOD)
        connection, of_child = context.Pipe()
        arguments = (of_child, connection if START_METHOD == "fork" else None, self._source, self._features)
        process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        of_child.close()
        return process, connection


def call_watched(function: Callable[[Path], T], path: Path) -> T:
    """`function(path)`, called in a child process with the limits of a reader; raises `UnreadableFile`."""
    context = multiprocessing.get_context(START_METHOD)
    connection, of_child = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(of_child, function, path), daemon=True)  # type: ignore[attr-defined]
    process.start()
    of_child.close()
    timer = threading.Timer(_MAX_WALL_SECONDS + _extra_seconds(path), process.kill)
    timer.daemon = True
    timer.start()
    try:
        answer = connection.recv()
    except EOFError as error:
        process.join()
        raise UnreadableFile(_describe_exit(process.exitcode)) from error
    finally:
        timer.cancel()
        process.kill()
        process.join()
        connection.close()
    if isinstance(answer, UserError):
        raise answer
    return cast(T, answer)


def _describe_exit(exit_code: int | None) -> str:
    """Why a child ended before its answer was complete; a negative exit code is the number of a signal."""
    if exit_code is None or exit_code >= 0:
        raise RuntimeError(f"the reader process ended with exit code {exit_code}")
    name = signal.Signals(-exit_code).name
    if name == "SIGPROF":
        return f"reading took more than {MAX_CPU_SECONDS:g} s of CPU time, so the file is damaged; copy it again"
    if name in ("SIGKILL", "SIGTERM"):
        return "reading did not finish, or memory ran out; copy the file again"
    return f"reading it crashed ({name}), so the file is damaged; copy it again"


def _extra_seconds(path: Path) -> float:
    try:
        return path.stat().st_size / _BYTES_PER_SECOND
    except OSError:
        return 0.0  # reported when the file is opened


# --- the child ----------------------------------------------------------------------------------------------------


def _call(connection: Connection, function: Callable[[Path], Any], path: Path) -> None:
    _ignore_signals_of_the_parent()
    _limit_memory(path)
    _limit_time(MAX_CPU_SECONDS + _extra_seconds(path))
    answer: Any
    try:
        answer = function(path)
    except UserError as error:
        answer = error
    connection.send(answer)


def _ignore_signals_of_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler, which a stuck read would never run


def _serve(connection: Connection, of_parent: Connection | None, source: Source, features: str) -> None:
    """Answer requests until the parent closes its end of the connection."""
    _ignore_signals_of_the_parent()
    if of_parent is not None:
        of_parent.close()  # inherited by the fork; while it is open here, an exit of the parent is not detected
    try:
        while True:
            command, file = connection.recv()
            _limit_memory(file.path)
            for answer in _answer(command, file, source, features):
                _limit_time(None)
                connection.send(answer)
                _limit_time(MAX_CPU_SECONDS)
            _limit_time(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(command: Command, file: SourceFile, source: Source, features: str) -> Iterator[Any]:
    _limit_time(MAX_CPU_SECONDS + _extra_seconds(file.path))
    try:
        if command == "summarise":
            yield summarise_file(source, file)
        else:
            yield from read_trials(source, file, features)
        yield _End()
    except UnreadableFile as error:
        yield _End(str(error))
    except UserError as error:
        yield _End(str(error), ends_command=True)


def _limit_time(seconds: float | None) -> None:
    """End the process by SIGPROF after this much CPU time; a loop inside a library cannot be interrupted."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds or 0.0)


def _limit_memory(path: Path) -> None:
    """Limit the address space, so that excessive allocations raise an error; only on systems with /proc."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError, ValueError):
        return
    size = path.stat().st_size if path.is_file() else 0
    limit = pages * resource.getpagesize() + _MAX_BYTES + _MEMORY_FACTOR * size
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
