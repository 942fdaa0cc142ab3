"""Every notebook runs from the first cell to the last, with fewer trials and training steps."""

import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))
SMALLER = {
    r"\bSTEPS = 400\b": "STEPS = 12",
    r"\bSTEPS, SENTENCES = 400, 20\b": "STEPS, SENTENCES = 12, 4",
    r"\bSTEPS = 150\b": "STEPS = 60",
    r"\bn_trials=1[0-9]0\b": "n_trials=30",
    r"\bn_electrodes=(32|64)\b": "n_electrodes=16",
    r'out="notebook/calibrated"': 'out="notebook/calibrated", settings={"steps": 10}',
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks need the extra notebooks")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need the extra notebooks")
    pytest.importorskip("ipykernel", reason="notebooks need the extra notebooks")
    source = path.read_text("utf-8")
    for pattern, smaller in SMALLER.items():
        source = re.sub(pattern, smaller, source)
    notebook = jupytext.reads(source, fmt="py:percent")
    assert sum(cell.cell_type == "code" for cell in notebook.cells) >= 3
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
