"""Results as they appear in an interactive session: short descriptions, and errors that say what was expected."""

from pathlib import Path

import pytest

import arcuate
from support.fabricate_runs import make_run


def test_a_run_is_made_from_text(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    run = arcuate.Run(str(tmp_path / "a"))
    assert run == arcuate.Run(tmp_path / "a")
    assert run.metrics()


def test_something_that_is_not_a_path_is_named() -> None:
    with pytest.raises(arcuate.UserError, match=r"expected a path, a run or a result of training, got list"):
        arcuate.compare(["runs/a", "runs/b"])  # type: ignore[arg-type]


def test_descriptions_are_short(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert repr(arcuate.list_runs(tmp_path)) == f"RunTable('{tmp_path}': 2 runs: a, b)"


def test_the_doctor_names_what_it_takes_for_the_end() -> None:
    """The last evaluation, 88.4 %, is shown beside the evidence, which uses a robust value."""
    found = arcuate.diagnose(Path(__file__).parents[1] / "examples" / "exploding-run.log")
    assert found.last_per == pytest.approx(0.884, abs=5e-4)
    assert any("83.8 % (median of the last three evaluations)" in sentence for sentence in found.evidence)


def test_the_verdict_of_a_list_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.metrics_file.write_text("\n".join(run.metrics_file.read_text("utf-8").splitlines()[:3]) + "\n", "utf-8")
    found = arcuate.list_runs(tmp_path, diagnose=arcuate.diagnose)
    assert (found.runs[0].verdict, found.cells()[0]["verdict"]) == ("too_short", "too short")
