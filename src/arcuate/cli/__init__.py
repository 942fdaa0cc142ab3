"""The command line. Commands stand in the order a person walks the path, and import what they need when they run."""

import errno
import io
import os
import sys
from typing import NoReturn

from arcuate.cli import (
    ablate,
    average,
    bench,
    calibrate,
    combine,
    compare,
    decode,
    demo,
    doctor,
    drift,
    evaluate,
    import_,
    ledger,
    live,
    lm,
    prepare,
    recipes,
    report,
    rescore,
    runs,
    simulate,
    submit,
    sweep,
    train,
    tune,
)
from arcuate.cli.app import app
from arcuate.cli.console import show_log_messages
from arcuate.errors import UserError

__all__ = [
    "app",
    "main",
    "ablate",
    "average",
    "bench",
    "calibrate",
    "combine",
    "compare",
    "decode",
    "demo",
    "doctor",
    "drift",
    "evaluate",
    "import_",
    "ledger",
    "live",
    "lm",
    "prepare",
    "recipes",
    "report",
    "rescore",
    "runs",
    "simulate",
    "submit",
    "sweep",
    "train",
    "tune",
]


def main() -> NoReturn:
    """Run the command line; a user's mistake is one sentence and exit code 2, never a traceback."""
    fill_closed_streams()
    show_log_messages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a sign still gets the rest
    try:
        app(standalone_mode=True)
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno is None:
            raise
        place = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fail(
            f"{error.strerror}{place}; {'free some space' if full else 'check the path and your rights to it'}"
        )
    sys.exit(0)


def fill_closed_streams() -> None:
    """A closed stdout or stderr must not be taken by the next file that is opened, nor end in a traceback."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        if "--json" in sys.argv:
            fail("stdout is closed, so there is nowhere to print the JSON to; open it or leave --json out")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
