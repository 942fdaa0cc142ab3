"""Every notebook runs from the first cell to the last, with fewer trials and training steps."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))
SMALLER = {
    r"\bSTEPS = 400\b": "STEPS = 12",
    r"\bSTEPS, SENTENCES = 400, 20\b": "STEPS, SENTENCES = 12, 4",
    r"\bSTEPS = 150\b": "STEPS = 60",
    r"\bn_trials=1[0-9]0\b": "n_trials=30",
    r"\bn_electrodes=(32|64)\b": "n_electrodes=16",
}
PRINTED = {"03_rescue_a_run": ("collapsed", "eps")}  # what a notebook promises
EMPTY = "import os\nos.chdir({folder!r})\n%reset -f"  # the names of the notebook before are gone


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all notebooks, which would otherwise each import torch."""
    pytest.importorskip("nbclient", reason="notebooks need the extra notebooks")
    pytest.importorskip("ipykernel", reason="notebooks need the extra notebooks")
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    paths = os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    running = AsyncKernelManager(kernel_name="python3")
    yield running, environment
    if running.has_kernel:
        run_sync(running.shutdown_kernel)(now=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, kernel: Any) -> None:
    jupytext = pytest.importorskip("jupytext", reason="notebooks need the extra notebooks")
    import nbclient
    import nbformat

    running, environment = kernel
    source = path.read_text("utf-8")
    for pattern, smaller in SMALLER.items():
        source = re.sub(pattern, smaller, source)
    notebook = jupytext.reads(source, fmt="py:percent")
    assert sum(cell.cell_type == "code" for cell in notebook.cells) >= 3
    notebook.cells.insert(0, nbformat.v4.new_code_cell(EMPTY.format(folder=str(tmp_path))))
    client = nbclient.NotebookClient(notebook, km=running, timeout=300)
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [o.text for o in outputs if o.output_type == "stream" and "Warning" in o.text]
    text = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert [word for word in PRINTED.get(path.stem, ()) if word not in text] == []
