"""Accuracy of the doctor on labelled real logs, with the command of docs/doctor.md; skipped without the logs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "benchmarks" / "doctor_accuracy.py"


@pytest.mark.shared
def test_accuracy_on_real_logs(shared: Path) -> None:
    logs = shared / "real" / "logs"
    if not (logs / "labels.csv").is_file():
        pytest.skip("the labelled logs (../shared/real/logs) are not available")
    done = subprocess.run(
        [sys.executable, COMMAND, "--logs", logs, "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    foreign = found.pop("strangers")
    assert foreign["right"] >= 0.96 * foreign["logs"] and foreign["cause"] >= 0.65 * foreign["with_cause"]
    assert foreign["contradicts"] == foreign["harmful"] == foreign["flagged"] == 0
    for figures in found.values():
        assert figures["accuracy"] >= 0.9
        assert figures["accuracy_by_group"] >= 0.85
        assert figures["false_alarms"] <= 0.03 * figures["healthy"]
