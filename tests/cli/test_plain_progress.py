"""Progress and notices without a terminal, as in the log file of a batch job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arcuate.cli import console
from arcuate.cli.console import PlainProgress


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(console, "say", said.append)
    return said


def test_lines_at_intervals_with_the_time_left(lines: list[str]) -> None:
    now = 0.0
    report = PlainProgress(every_s=30, clock=lambda: now)
    for done in range(0, 601):
        now = done / 2  # two items per second
        report(done, 600, f"training, loss {done}")
    assert lines[0] == "training, loss 60 60/600, 30 s, 4 min left"
    assert lines[1] == "training, loss 120 120/600, 60 s, 4 min left"
    assert len(lines) == 10  # one every 30 s; the last is the complete one
    assert lines[-1].endswith("600/600, 5 min")


def test_a_short_activity_prints_nothing(lines: list[str]) -> None:
    report = PlainProgress(clock=lambda: 0.0)
    for activity in ("reading", "decoding"):
        for done in range(11):
            report(done, 10, activity)
    assert lines == []
    report = PlainProgress(always=True, clock=lambda: 0.0)
    for done in range(1, 11):
        report(done, 10, "training, loss 1.5")
    assert lines == ["training, loss 1.5 10/10, 0 s"]


def test_progress_of_a_command_prints_plain_lines(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Every report is a line here; a bar would appear when it is closed, after the messages that follow it."""
    monkeypatch.setattr(console, "PlainProgress", lambda: PlainProgress(every_s=0.0, clock=lambda: 1.0))
    with console.progress("decoding") as report:
        report(1, 3, "")
        console.say("a message in between")
        report(2, 3, "searching words")
    assert [line.split()[0] for line in lines] == ["decoding", "a", "searching"]


UNWRITABLE = """
import logging, sys
from numba.core import caching
def refuse(self):
    raise PermissionError("read-only file system")
for locator in caching.CacheImpl._locator_classes:
    if "UserProvided" not in locator.__name__:
        locator.ensure_cache_path = refuse
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from arcuate.decoding.compiled import power_of_two
from numba import config
print(power_of_two(5), config.CACHE_DIR)
"""


def test_read_only_folders_do_not_stop_compiled_commands(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", UNWRITABLE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    notice, compiling, result = done.stdout.splitlines()
    assert notice.startswith("neither the program folder nor the user's cache folder can be written")
    assert compiling.startswith("compiling functions on first use")
    assert result.startswith(f"8 {tmp_path}")
    assert list(tmp_path.iterdir()) == []  # deleted at the end
