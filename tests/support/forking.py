"""The command line in processes of its own, forked from one that has imported everything: what costs seconds of each
fresh `python -m arcuate` is paid once per test worker. `test_cli.py` still starts fresh ones where imports matter.

A command is started as `PROGRAM ARGUMENTS…`, an ordinary process: `forked.py` sends its arguments, environment, working
directory, limits and open files to the server below, forwards signals to the process forked there and ends as that
one ends. A killed one takes the forked process with it.
"""

import atexit
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.forked import SOCKET, read_message

TIMEOUT = 300
PROGRAM = (sys.executable, "-E", "-S", str(Path(__file__).with_name("forked.py")))


@lru_cache(maxsize=1)
def server() -> Path:
    """The socket of this test worker's server, which ends with the worker."""
    folder = tempfile.mkdtemp(prefix="forking-")
    path = Path(folder) / "socket"
    started = subprocess.Popen(
        [sys.executable, "-m", "support.forking", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    atexit.register(started.communicate)  # ends it by closing its stdin
    return path


def forking_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**(os.environ if environment is None else environment), SOCKET: str(server())}


def arcuate(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """`arcuate ARGUMENTS…` as a process of its own: exit code, stdout, stderr."""
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=forking_environment(environment),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT,
        check=False,
        **options,
    )


def start(*arguments: object, **options: Any) -> "subprocess.Popen[Any]":
    """`arcuate ARGUMENTS…`, running beside the test."""
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, **{**options, "env": forking_environment(options.get("env"))})


def child(job: dict[str, Any], handles: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    # The server's own streams remember what kind of file they were.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    from arcuate.cli import main
    from arcuate.experiments import train_many

    train_many.PROGRAM = PROGRAM
    sys.argv = ["arcuate", *job["arguments"]]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (what the interpreter itself does at the top)
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ended, ending = os.pipe()
    os.set_blocking(ending, False)
    signal.set_wakeup_fd(ending)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ready = selectors.DefaultSelector()
    for handle in (0, ended, listener):
        ready.register(handle, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fileobj == 0:  # the test worker has ended
                return
            if key.fileobj == ended:
                os.read(ended, 1024)
                report_ends(running, ready)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                job, handles = read_message(connection)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    ready.close()
                    for other in (listener, connection, *running.values()):
                        other.close()
                    child(job, handles)
                for handle in handles:
                    os.close(handle)
                running[pid] = connection
                ready.register(connection, selectors.EVENT_READ)
                connection.sendall(f"{pid}\n".encode())
            else:  # the process that stood for it was killed
                for pid, connection in running.items():
                    if connection is key.fileobj:
                        os.kill(pid, signal.SIGKILL)
                ready.unregister(key.fileobj)


def report_ends(running: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            connection = running.pop(pid)
            if connection.fileno() in ready.get_map():
                ready.unregister(connection)
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


IMPORTED_ONCE = (
    "torch._dynamo",  # which the first optimizer of a process imports
    "arcuate.cli",
    "arcuate.evaluation.combine",
    "arcuate.evaluation.decode",
    "arcuate.evaluation.evaluate",
    "arcuate.experiments.seeds",
    "arcuate.insight.ablation",
    "arcuate.insight.compare",
)
OF_EXTRAS = ("altair", "optuna")  # imported by the commands that need them, if they are installed

if __name__ == "__main__":
    from numba.core.registry import cpu_target

    for module in IMPORTED_ONCE:
        import_module(module)
    for module in filter(find_spec, OF_EXTRAS):
        import_module(module)
    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # which the first compiled function of a process does
    gc.collect()
    gc.freeze()  # forked processes share the pages of imported modules, unless a collection writes to them
    serve(sys.argv[1])
