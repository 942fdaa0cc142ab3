"""Progress and notices without a terminal, as in the log file of a batch job."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from arcuate.progress import ProgressBar


def test_lines_at_intervals_with_the_time_left() -> None:
    now, text = 0.0, io.StringIO()
    report = ProgressBar(console=Console(file=text, width=80), clock=lambda: now)
    for done in range(0, 601):
        now = done / 2  # two items per second
        report(done, 600, f"training, loss {done}")
    lines = text.getvalue().splitlines()
    assert lines[0] == "training, loss 60 60/600, 30 s, 4 min left"
    assert lines[1] == "training, loss 120 120/600, 60 s, 4 min left"
    assert len(lines) == 10  # one every 30 s; the last is the complete one
    assert lines[-1].endswith("600/600, 5 min")


@pytest.mark.parametrize(("always", "expected"), [(False, ""), (True, "training, loss 1.5 10/10, 0 s\n")])
def test_a_short_activity_prints_at_most_its_end(always: bool, expected: str) -> None:
    text = io.StringIO()
    report = ProgressBar(always=always, console=Console(file=text, width=80), clock=lambda: 0.0)
    for done in range(11):
        report(done, 10, "training, loss 1.5")
    assert text.getvalue() == expected


def test_a_bar_in_a_terminal_has_the_time_left_and_ends_when_complete() -> None:
    text = io.StringIO()
    with ProgressBar(console=Console(file=text, width=80, force_terminal=True)) as report:
        report(5, 10, "training, loss 1.5")
        report(10, 10, "training, loss 1.4")
        assert "━" in text.getvalue() and "10/10" in text.getvalue()
    assert text.getvalue().endswith("\n\x1b[?25h")  # the cursor is visible again


UNWRITABLE = """
import logging, sys
from numba.core import caching
def refuse(self):
    raise PermissionError("read-only file system")
for locator in caching.CacheImpl._locator_classes:
    if "UserProvided" not in locator.__name__:
        locator.ensure_cache_path = refuse
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from arcuate.language.jit import power_of_two
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
