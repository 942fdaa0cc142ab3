"""Reading untrusted files in a child process with limits on CPU time, wall time and memory.

A damaged HDF5 file can make its library loop forever, a damaged MATLAB file can crash scipy's compiled reader, and a
few compressed bytes can fill the memory. In a child, each of these is one file that cannot be read. The child reads
ahead while its parent checks and writes, so that the overhead is small.
"""

import multiprocessing
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

from arcuate.data.readers.source import UnreadableFile
from arcuate.errors import UserError

CPU_SECONDS = 15.0  # for one item; a real one takes milliseconds
_BYTES_PER_SECOND = 2**23  # more time for large files, because '24 files are loaded as a whole
_WALL_SECONDS = 900.0  # for one file, in case the file system does not respond
_MAX_BYTES = 2**31
_MEMORY_FACTOR = 20  # bytes of memory per byte of the file: compressed integers become float64

# Other start methods import the caller's script again, which calls `prepare` again where it has no main guard.
START_METHOD: Literal["fork", "spawn"] = "fork" if sys.platform.startswith("linux") else "spawn"

T = TypeVar("T")


def watched(
    path: Path, function: Callable[..., Iterable[T]], *arguments: object, cpu_seconds: float | None = None
) -> Iterator[T]:
    """The items of `function(*arguments)`, which reads the file `path` in a child process.

    Raises `UnreadableFile` if the child raises it, crashes or exceeds a limit.
    """
    cpu_seconds = CPU_SECONDS if cpu_seconds is None else cpu_seconds
    context = multiprocessing.get_context(START_METHOD)
    connection, of_child = context.Pipe(duplex=False)
    of_parent = connection if START_METHOD == "fork" else None
    call = (of_child, of_parent, path, cpu_seconds, function, arguments)
    child = context.Process(target=_serve, args=call, daemon=True)  # type: ignore[attr-defined]
    child.start()
    of_child.close()
    timer = threading.Timer(_WALL_SECONDS + _extra_seconds(path), child.kill)
    timer.daemon = True
    timer.start()
    try:
        while (answer := connection.recv()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer[0]
    except (EOFError, ConnectionResetError) as error:
        child.join()
        raise UnreadableFile(_describe_exit(child.exitcode, cpu_seconds)) from error
    finally:
        timer.cancel()
        child.kill()
        child.join()
        connection.close()


def call_watched(path: Path, function: Callable[..., T], *arguments: object) -> T:
    """The result of `function(*arguments)`, called like `watched`."""
    return next(watched(path, _once, function, *arguments))


def _once(function: Callable[..., T], *arguments: object) -> Iterator[T]:
    yield function(*arguments)


def _describe_exit(exit_code: int | None, cpu_seconds: float) -> str:
    """Why a child ended before its answer was complete; a negative exit code is the number of a signal."""
    if exit_code is None or exit_code >= 0:
        raise RuntimeError(f"the process that reads ended with exit code {exit_code}")
    name = signal.Signals(-exit_code).name
    if name == "SIGPROF":
        return f"reading took more than {cpu_seconds:g} s of CPU time, so the file is damaged; copy it again"
    if name in ("SIGKILL", "SIGTERM"):
        return "reading did not finish, or memory ran out; copy the file again"
    return f"reading it crashed ({name}), so the file is damaged; copy it again"


def _extra_seconds(path: Path) -> float:
    try:
        return path.stat().st_size / _BYTES_PER_SECOND
    except OSError:
        return 0.0  # reported when the file is opened


# --- the child ----------------------------------------------------------------------------------------------------


def _serve(
    connection: Connection,
    of_parent: Connection | None,
    path: Path,
    cpu_seconds: float,
    function: Callable[..., Iterable[Any]],
    arguments: tuple[object, ...],
) -> None:
    """Send every item as a tuple; at the end None, or an exception for the parent to raise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's handler, which a stuck read would never run
    if of_parent is not None:
        of_parent.close()  # inherited by the fork; while it is open here, an exit of the parent is not detected
    _limit_memory(path)
    _limit_time(cpu_seconds + _extra_seconds(path))
    answer: Exception | None = None
    try:
        for item in function(*arguments):
            _limit_time(None)
            connection.send((item,))
            _limit_time(cpu_seconds)
    except (BrokenPipeError, ConnectionResetError):
        return
    except (UserError, UnreadableFile) as error:
        answer = error
    except MemoryError as error:
        answer = UnreadableFile(f"it does not fit into memory {error}".strip())
    except Exception:  # noqa: BLE001 - the code of a user's reader
        traceback.print_exc()
        answer = UserError(
            f"the code that reads {path} raised the exception shown above; a reader raises UnreadableFile for damaged"
            " files"
        )
    _limit_time(None)
    connection.send(answer)


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
