"""Signals remove temporary files, and modules that exist only on Unix are not required."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arcuate.training.callbacks import Stop, handle_signals

WRITING = """
import sys, time
from pathlib import Path
import arcuate.cli
from arcuate.files import atomic_folder, atomic_write

folder = Path(sys.argv[1])

def command(words):
    with atomic_folder(folder / "store") as part, atomic_write(folder / "page.html") as page:
        (part / "half").write_text("half")
        page.write(b"half")
        (folder / "ready").touch()
        time.sleep(100)

arcuate.cli.run = command
arcuate.cli.main()
"""


def test_hangup_requests_a_stop_unless_it_is_ignored() -> None:
    old = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with handle_signals(Stop()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested  # nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with handle_signals(Stop()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested and stop.exit_code == 128 + signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_removes_temporary_files(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None and not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number and not stderr, stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


ELSEWHERE = """
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None  # as on Windows
import arcuate.cli, arcuate.evaluation.decode, arcuate.experiments.train, arcuate.live.bench
from pathlib import Path
from arcuate.files import LockHeld, exclusive_lock
from arcuate.progress import peak_memory_bytes

file = Path(sys.argv[1]) / "lock"
with exclusive_lock(file, "busy"):
    try:
        with exclusive_lock(file, "busy"):
            raise SystemExit("locked twice")
    except LockHeld:
        pass
with exclusive_lock(file, "busy"):
    print(peak_memory_bytes())
"""


def test_modules_of_unix_are_not_required(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr
