"""Command line. Every command imports what it needs when it runs, so that `arcuate --help` is fast."""

import difflib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

if find_spec("cyclopts") is None:  # the runtime of exported models, installed alone
    sys.stderr.write(
        "error: commands need the complete installation, and this one lacks cyclopts; install it with: pip install"
        " arcuate (the runtime alone decodes in Python: arcuate.runtime.Decoder)\n"
    )
    sys.exit(2)

from cyclopts import CycloptsError
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError

from arcuate.cli.adapter import Call, load
from arcuate.cli.commands import COMMANDS, SUCCESSORS, make_app
from arcuate.cli.console import TrainingDisplay, emit_json, err, exit_broken_pipe, out, show_log_messages
from arcuate.errors import TOO_LARGE, TOO_MANY_FILES, UserError, escape_controls
from arcuate.progress import ProgressBar

__all__ = ["main", "run"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. A user error prints one sentence and exits with code 2, without a traceback."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    _replace_closed_streams(words)
    _end_on_signals()
    show_log_messages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without Unicode
    try:
        code = run(words)
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
    sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run the command that `words` name and return its exit code."""
    words, as_json, header = _take_global_options(words)
    if header is not None:
        from arcuate.experiments.slurm import submit

        out.print(f"submitted job {submit(Path(header), words).job}")
        return 0
    app = make_app()
    if words and not words[0].startswith(("-", "__complete")) and words[0] not in app:
        known = [name for name in app if not name.startswith("-")]
        close = difflib.get_close_matches(words[0], known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(known)}"
        remedy = SUCCESSORS.get(words[0], remedy)
        raise UserError(f"no command is named {words[0]!r}; {remedy}")
    try:
        function, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise UserError(_explain(error)) from error
    call = function(*bound.args, **bound.kwargs)
    return _execute(call, as_json) if isinstance(call, Call) else 0  # otherwise help was printed


def _take_global_options(words: Sequence[str]) -> tuple[list[str], bool, str | None]:
    """The words without the options of every command, whether to print JSON, and the header of a Slurm job."""
    from arcuate.plugins import allow_code

    kept: list[str] = []
    as_json, header = False, None
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if word == "--":
            return [*kept, word, *left], as_json, header
        if word == "--json":
            as_json = True
        elif option == "--allow-code":
            allow_code(*(value if equals else next(left, "")).split(","))
        elif option == "--slurm":
            header = value if equals else next(left, "")
        else:
            kept.append(word)
    return kept + ["--json"] * (as_json and header is not None), as_json, header


def _explain(error: CycloptsError) -> str:
    text, command = str(error).rstrip("."), " ".join(error.command_chain or ())
    if isinstance(error, UnusedCliTokensError):
        text = f"unexpected argument {' '.join(error.unused_tokens or ())}"
    if isinstance(error, UnknownOptionError) and command in COMMANDS and "overrides…" in COMMANDS[command].positional:
        from arcuate.experiments.recipe import setting_for

        option = error.token.keyword or error.token.value
        if setting := setting_for(option):
            return f"unknown option {option}; settings are written without dashes: {setting}=VALUE"
    return f"{text[0].lower()}{text[1:]}; see arcuate {command} --help"


def _execute(call: Call, as_json: bool) -> int:
    """Run a command, print its result and return the exit code."""
    from arcuate.training.callbacks import Stop, stop_with_parent

    command, stop = call.command, Stop()
    stop_with_parent(stop)
    with TrainingDisplay() as display, ProgressBar(console=err) as bar:
        result = call(
            progress=display.report if call.trains else bar,
            callbacks=[display],
            stop=stop,
            diagnose=lambda path: load(".doctor:diagnose")(path),
            diagnosis_page=lambda path: load(".doctor.page:diagnosis_page")(load(".doctor:diagnose")(path)),
            write_report=lambda run: load(".insight.report:write_report")(run),
        )
        if command.then:
            result = load(command.then)(result, call.values)
    if getattr(result, "is_main", True):  # the first process of a training
        if as_json:
            emit_json(_plain(result))
        elif command.show:
            load(command.show)(result, call.values)
        elif hasattr(result, "summary"):
            out.print(result.summary(), soft_wrap=True, markup=False)
    return getattr(result, "exit_code", 0)


def _plain(result: Any) -> Any:
    for name in ("to_dict", "to_dicts"):
        if hasattr(result, name):
            return getattr(result, name)()
    raise UserError("this command prints no JSON; leave --json out")


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


def _replace_closed_streams(words: Sequence[str]) -> None:
    """Open /dev/null for a closed stdout or stderr, so that no other file gets its descriptor."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        if "--json" in words:
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
