"""References of a run."""

import json
import shutil
from pathlib import Path

from arcuate.evaluation.cite import cite

GOLDEN = Path(__file__).parents[1] / "golden"


def test_references_of_a_run(tmp_path: Path) -> None:
    run = shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)
    result = cite(run)
    assert [r.reason for r in result.references][:3] == ["software", "data", "ctc"]
    assert "dryad.dncjsxm85" in result.references[1].reference
    assert json.dumps(result.to_dict())


def test_simulated_data_need_no_reference(tmp_path: Path) -> None:
    run = shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True)
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    environment["data"] |= {"simulated": True}
    (run / "environment.json").write_text(json.dumps(environment), "utf-8")
    result = cite(run)
    assert "simulated" in result.note and "data" not in {r.reason for r in result.references}
