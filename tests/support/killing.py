"""Trains in real processes that kill themselves with SIGKILL at a chosen file operation; forked, for speed.

`python killing.py` reads lines {"arguments": [...], "jobs": [[RUN, n | null], ...]} and prints what became of the jobs:
exit code (-9 where it was killed) and how many file operations it had made.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

Job = tuple[Path, int | None]


@lru_cache(maxsize=1)
def server() -> "subprocess.Popen[str]":
    started = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    atexit.register(started.communicate)  # ends it by closing its stdin
    return started


def train_and_kill(arguments: Sequence[str], jobs: Sequence[Job]) -> list[tuple[int, int]]:
    asked = server()
    assert asked.stdin is not None and asked.stdout is not None
    with tempfile.NamedTemporaryFile("r") as errors:
        spec = {
            "arguments": list(arguments),
            "jobs": [[str(run), at] for run, at in jobs],
            "errors": errors.name,
            "cwd": os.getcwd(),
        }
        asked.stdin.write(json.dumps(spec) + "\n")
        told: list[tuple[int, int]] = json.loads(asked.stdout.readline())
        for (run, _), (code, _) in zip(jobs, told, strict=True):
            assert code in (0, -signal.SIGKILL), f"{run}: exit code {code}\n{errors.read()}"
    return told


class Fuse:
    """Counts file operations and kills this process at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.n_operations = at, 0

    def blow(self) -> bool:
        self.n_operations += 1
        return self.n_operations == self.at

    def wrap(self, owner: Any, name: str, torn: Callable[..., None] | None = None) -> None:
        plain = getattr(owner, name)

        def wrapped(*positional: Any, **named: Any) -> Any:
            if self.blow():
                if torn is not None:
                    torn(*positional)
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*positional, **named)

        setattr(owner, name, wrapped)


def half_a_line(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write('{"step": ')


def half_a_file(tensors: Any, path: Path) -> None:
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")


def child(arguments: Sequence[str], run: str, at: int | None, report: int, errors: str) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(2, 1)
    import arcuate.models.io
    import arcuate.training.checkpoint
    import arcuate.training.loop
    from arcuate.cli import main

    fuse = Fuse(at)
    for name in ("replace", "fsync", "truncate", "symlink", "mkdir"):
        fuse.wrap(os, name)
    for name in ("rename", "replace", "touch", "unlink", "write_text"):
        fuse.wrap(Path, name)
    fuse.wrap(shutil, "rmtree")
    fuse.wrap(arcuate.training.loop, "append_jsonl", half_a_line)
    for module in (arcuate.models.io, arcuate.training.checkpoint):
        fuse.wrap(module, "save_tensors", half_a_file)
    sys.argv = ["arcuate", "train", *arguments, "--run", run, "--resume"]
    try:
        main()
    except SystemExit as end:
        os.write(report, str(fuse.n_operations).encode())
        sys.stderr.flush()
        os._exit(int(end.code or 0))


def fork(arguments: Sequence[str], run: str, at: int | None, errors: str) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(arguments, run, at, writing, errors)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        n_operations = int(told.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), n_operations


if __name__ == "__main__":
    import arcuate.cli
    import arcuate.experiments.train  # noqa: F401 (imported once, for all children)

    for line in sys.stdin:
        spec = json.loads(line)
        os.chdir(spec["cwd"])
        ends = [fork(spec["arguments"], run, at, spec["errors"]) for run, at in spec["jobs"]]
        print(json.dumps(ends), flush=True)
