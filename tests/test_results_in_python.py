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
    assert repr(arcuate.list_runs(tmp_path)) == f"RunList('{tmp_path}': 2 runs: a, b)"
