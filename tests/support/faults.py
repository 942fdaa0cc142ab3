"""Commands under faults: killed or out of disk space at the n-th file operation, or under a limit of the system.

Every command runs in a process of its own, forked from one that has imported everything. File operations are counted
by an audit hook, so that every way in which Python code can create, rename or remove a file in the work folder counts.

`python faults.py` reads jobs line by line and prints [exit code, number of file operations] for each process of a job.
"""

import atexit
import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

Kind = Literal["none", "kill", "full", "size", "readonly"]
_TIMEOUT_S = 300
_CREATING = ("open", "os.mkdir", "os.symlink")
_CHANGING = ("os.rename", "os.remove", "os.rmdir", "os.truncate")


@dataclass(frozen=True)
class Fault:
    """One fault.

    kill: SIGKILL at file operation `at`. full: no space from operation `at` on. size: files of at most `at` bytes.
    readonly: no permission to write.
    """

    kind: Kind = "none"
    at: int = 0


@dataclass(frozen=True)
class Done:
    """What a command left: exit code (negative: a signal), output, and number of file operations."""

    code: int
    stdout: str
    stderr: str
    n_operations: int


@lru_cache(maxsize=1)
def _server() -> "subprocess.Popen[str]":
    started = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(started.kill)
    return started


def run(arguments: Sequence[object], cwd: Path, fault: Fault = Fault()) -> Done:
    """Run `arcuate ARGUMENTS` in the folder `cwd` under a fault."""
    return run_together([arguments], cwd, fault)[0]


def run_together(commands: Sequence[Sequence[object]], cwd: Path, fault: Fault = Fault()) -> list[Done]:
    """Run several commands at the same time."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    named = [[str(a) for a in arguments] for arguments in commands]
    job = {"commands": named, "cwd": str(cwd), "fault": [fault.kind, fault.at]}
    server.stdin.write(json.dumps(job) + "\n")
    return [Done(*ended) for ended in json.loads(server.stdout.readline())]


# --- in the process that forks -------------------------------------------------------------------------------------


class _Fuse:
    """Counts file operations in a folder and fails or kills the process at one of them."""

    def __init__(self, folder: str, kind: Kind, at: int) -> None:
        self.folder, self.kind, self.at, self.n_operations = folder, kind, at, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        creates = event in _CREATING
        if not (creates or event in _CHANGING) or not self._counts(event, arguments):
            return
        self.n_operations += 1
        if self.kind == "kill" and self.n_operations == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "full" and self.n_operations >= self.at and creates:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    def _counts(self, event: str, arguments: tuple[Any, ...]) -> bool:
        path = arguments[0]
        if event == "open" and (not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return False
        if isinstance(path, int):
            return False
        if isinstance(path, (bytes, str, os.PathLike)):
            return os.path.abspath(os.fsdecode(path)).startswith(self.folder)
        return False


def _limit(kind: Kind, at: int) -> None:
    if kind == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))
    elif kind == "readonly" and os.geteuid() == 0:
        _drop_privileges()


def _drop_privileges() -> None:
    """Give up the right of the administrator to ignore permissions (the capabilities CAP_DAC_* and CAP_FOWNER)."""
    kept = 0xFFFFFFFF & ~0b1110
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data) or not data[0]:
        raise OSError(ctypes.get_errno(), "capget")
    data[0] &= kept
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def _child(arguments: list[str], job: dict[str, Any], stdout: int, stderr: int, report: int) -> None:
    kind, at = job["fault"]
    os.chdir(job["cwd"])
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the inherited ones belong to other files
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from arcuate.cli import main

    fuse = _Fuse(os.path.abspath(job["cwd"]), kind, at)
    sys.addaudithook(fuse)
    sys.argv = ["arcuate", *arguments]
    code = 1
    try:
        _limit(kind, at)
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what the interpreter itself does at the top
        with contextlib.suppress(OSError):
            traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(report, str(fuse.n_operations).encode())
    os._exit(code)


def _serve(job: dict[str, Any]) -> list[tuple[int, str, str, int]]:
    started = []
    for arguments in job["commands"]:
        pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, number of operations
        pid = os.fork()
        if pid == 0:
            signal.alarm(_TIMEOUT_S)
            try:
                _child(arguments, job, *(writing for _, writing in pipes))
            finally:
                os._exit(1)
        for _, writing in pipes:
            os.close(writing)
        started.append((pid, [reading for reading, _ in pipes]))
    ended = []
    for pid, readings in started:
        stdout, stderr, n_operations = _read_all(readings)
        ended.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stdout, stderr, int(n_operations or 0)))
    return ended


def _read_all(pipes: Sequence[int]) -> list[str]:
    """Everything that is written to some pipes until they are closed."""
    found: dict[int, bytes] = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                piece = os.read(key.fd, 1 << 16)
                found[key.fd] += piece
                if not piece:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
    return [content.decode(errors="replace") for content in found.values()]


_IMPORTED_ONCE = (
    "arcuate.cli",
    "arcuate.evaluation.adapted",
    "arcuate.evaluation.combine",
    "arcuate.evaluation.decode",
    "arcuate.evaluation.evaluate",
    "arcuate.evaluation.tune",
    "arcuate.experiments.calibrate",
    "arcuate.experiments.seeds",
    "arcuate.experiments.sweep",
    "arcuate.insight.ablation",
    "arcuate.insight.compare",
    "arcuate.insight.ledger",
    "arcuate.insight.report",
    "arcuate.language.ngram.estimate",
    "arcuate.language.ngram.mix",
    "arcuate.live.serve",
)

if __name__ == "__main__":
    for module in _IMPORTED_ONCE:
        import_module(module)
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)
