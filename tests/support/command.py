"""`arcuate ARGUMENTS…` inside the test process: what a command prints and its exit code, and nothing of it stays."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def arcuate(*arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Done:
    """Run a command as `main` of the command line does, in `cwd`; `environment` replaces the variables of the process.

    Only the first command of a process imports. A command that must be killed, limited or left alone with its streams
    needs a process of its own: `start`.
    """
    from arcuate.cli import main

    code = 1
    with _restored(), tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        if cwd is not None:
            os.chdir(cwd)
        with _streams(stdout.fileno(), stderr.fileno()):
            try:
                main([*map(str, arguments)])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except Exception:  # noqa: BLE001 - what the interpreter does at the top
                traceback.print_exc()
        printed = []
        for stream in (stdout, stderr):
            stream.seek(0)
            printed.append(stream.read().decode(errors="replace"))
    return Done(code, *printed)


@contextlib.contextmanager
def _streams(stdout: int, stderr: int) -> Iterator[None]:
    """Descriptors 0 to 2, which processes that a command starts inherit, and the streams of Python on them."""
    named = sys.stdin, sys.stdout, sys.stderr
    kept = [os.dup(number) for number in range(3)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        for number, handle in enumerate((nothing, stdout, stderr)):
            os.dup2(handle, number)
        with (
            open(0, closefd=False, encoding="utf-8") as sys.stdin,
            open(1, "w", closefd=False, encoding="utf-8") as sys.stdout,
            open(2, "w", buffering=1, errors="backslashreplace", closefd=False, encoding="utf-8") as sys.stderr,
        ):
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = named
        for number, handle in enumerate(kept):
            os.dup2(handle, number)
            os.close(handle)
        os.close(nothing)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore afterwards what commands change in their process because it is theirs."""
    folder, variables, path, argv = os.getcwd(), dict(os.environ), list(sys.path), sys.argv
    modules = set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    logger = logging.getLogger("arcuate")
    logging_as_before = list(logger.handlers), logger.level, logger.propagate
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    try:
        yield
    finally:
        here = os.getcwd()  # that of the tests may contain the virtual environment
        for name in sys.modules.keys() - modules if here != folder else ():
            if str(getattr(sys.modules[name], "__file__", None)).startswith(here + os.sep):
                del sys.modules[name]  # a component of a user
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:], sys.argv = path, argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logger.handlers[:], logger.level, logger.propagate = logging_as_before
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)
