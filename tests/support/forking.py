"""The command line in processes of its own, forked from one that has imported everything: what costs seconds of each
fresh `python -m arcuate` is paid once per test worker. `test_cli.py` still starts fresh ones where imports matter.

`python forking.py` reads {"arguments", "cwd", "environment", "out", "err"} line by line and prints exit codes.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path

TIMEOUT = 300


@lru_cache(maxsize=1)
def server() -> "subprocess.Popen[str]":
    started = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(started.kill)
    return started


def arcuate(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """`arcuate ARGUMENTS…` as a process of its own: exit code, stdout, stderr."""
    told, command = server(), [str(a) for a in arguments]
    assert told.stdin is not None and told.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        job = {"arguments": command, "cwd": str(cwd or Path.cwd()), "environment": dict(environment or os.environ)}
        told.stdin.write(json.dumps(job | {"out": str(out), "err": str(err)}) + "\n")
        code = int(told.stdout.readline())
        return subprocess.CompletedProcess(command, code, text(out), text(err))


def text(file: Path) -> str:
    """As a pipe read in text mode gives it, carriage returns made newlines."""
    return file.read_text() if file.exists() else ""


def child(job: dict) -> None:
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    for name, handle in (("out", 1), ("err", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT, 0o600), handle)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from arcuate.cli import main

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


def ended(pid: int) -> int:
    limit = time.monotonic() + TIMEOUT
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


IMPORTED_ONCE = (
    "torch._dynamo",  # which the first optimizer of a process imports
    "arcuate.cli",
    "arcuate.evaluation.combine",
    "arcuate.evaluation.decode",
    "arcuate.evaluation.evaluate",
    "arcuate.experiments.multi_seed",
    "arcuate.insight.ablation",
    "arcuate.insight.comparison",
)

if __name__ == "__main__":
    for module in IMPORTED_ONCE:
        import_module(module)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            child(json.loads(line))
        print(ended(pid), flush=True)
