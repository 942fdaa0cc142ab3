"""Command line. Every command imports what it needs when it runs, so that `arcuate --help` is fast."""

import errno
import io
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

if find_spec("typer") is None:  # the runtime of exported models, installed alone
    sys.stderr.write(
        "error: commands need the complete installation, and this one lacks typer; install it with: pip install arcuate"
        " (the runtime alone decodes in Python: arcuate.runtime.Decoder)\n"
    )
    sys.exit(2)

from arcuate.cli.app import COMMANDS, app
from arcuate.cli.console import exit_broken_pipe, show_log_messages
from arcuate.errors import TOO_LARGE, TOO_MANY_FILES, UserError, escape_controls

__all__ = ["app", "main"]

_MODULES = {"import": "import_"}  # modules that are not named after their command

for _command in COMMANDS:  # each module registers its commands with `app`
    import_module(f"arcuate.cli.{_MODULES.get(_command, _command.replace('-', '_'))}")


def main() -> NoReturn:
    """Run the command line. A user error prints one sentence and exits with code 2, without a traceback."""
    _replace_closed_streams()
    _end_on_signals()
    show_log_messages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without Unicode
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        exit_broken_pipe()
    except MemoryError as error:
        _fail_out_of_memory(error)
    except (RuntimeError, ImportError) as error:
        for sign, remedy in _UNUSABLE_GPU.items():
            if sign in str(error):
                _fail(f"the GPU cannot be used ({sign}); {remedy}, or {_ON_CPU}")
        if not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        _fail_out_of_memory(error)
    except ValueError as error:
        if not any(sign in str(error) for sign in _NO_PATH):
            raise
        _fail("a file or an option names a path with a NUL or a lone surrogate, which no path can contain; correct it")
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno == errno.ENOMEM:
            _fail_out_of_memory(error)
        path = f" ({error.filename})" if error.filename else ""
        remedies = {errno.ENOSPC: "free some disk space", errno.EDQUOT: "free some disk space"}
        remedies[errno.EFBIG] = TOO_LARGE
        remedies |= dict.fromkeys((errno.EMFILE, errno.ENFILE), TOO_MANY_FILES)
        remedy = remedies.get(error.errno, "check the path and its permissions")
        if str(error.strerror).startswith("No usable temporary directory"):  # `tempfile` tries to write in each of them
            remedy = f"free some disk space, {TOO_LARGE} or set TMPDIR to a folder that can be written"
        _fail(escape_controls(f"{error.strerror}{path}; {remedy}"))
    sys.exit(0)


def _end_on_signals() -> None:
    """Let SIGTERM and SIGHUP (a closed terminal) end the program by an exception, so that temporary files are removed.

    A signal that is ignored (nohup) stays ignored; commands that save their state handle these signals themselves.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit_by_signal)


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one does not interrupt the removal of temporary files
    sys.exit(128 + number)


def _replace_closed_streams() -> None:
    """Open /dev/null for a closed stdout or stderr, so that no other file gets its descriptor."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        if "--json" in sys.argv:
            _fail("stdout is closed, so --json cannot print; open stdout or leave --json out")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


# how torch, libraries of CUDA, the threads of Python and the dynamic linker report that memory ran out
_OUT_OF_MEMORY = (
    *("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED", "can't start new thread"),
    "failed to map segment",
)


_NO_PATH = ("embedded null", "surrogates not allowed")  # of every function of Python that takes a path
_ON_CPU = "compute on the CPU: set CUDA_VISIBLE_DEVICES to nothing"
_UNUSABLE_GPU = {  # how CUDA reports a GPU that torch was not built for, and one in exclusive mode that is in use
    "no kernel image is available": "install a build of torch for this GPU",
    "busy or unavailable": "end the program that uses it",
}


def _fail_out_of_memory(error: Exception) -> NoReturn:
    size = " ".join(str(error).split())[:120] or "no size known"
    remedy = "raise the limit on memory (ulimit -v, ulimit -d), close other programs or give a smaller input"
    if "CUDA" in size or "CUDNN" in size:
        remedy = f"end other programs that use the GPU, or {_ON_CPU}"
    _fail(escape_controls(f"not enough memory ({size}); {remedy}"))


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
