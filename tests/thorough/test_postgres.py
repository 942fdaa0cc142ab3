"""A sweep in PostgreSQL: workers on machines without a common folder share it, and its password is nowhere."""

from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.experiments.sweep import sweep
from support.postgres import PASSWORD, find_programs, server

pytest.importorskip("optuna", reason="Optuna is not installed")
pytest.importorskip("psycopg", reason="psycopg is not installed")
pytestmark = pytest.mark.thorough

FEW = ["train.steps=4", "train.validate_every=2", "train.log_every=2", "encoder.width=16", "encoder.depth=1"]
SPACE = {"schedule.peak_lr": {"low": 1e-4, "high": 1e-2, "log": True}}


@pytest.mark.usefixtures("forked_training")
def test_workers_without_a_common_folder_share_a_study(cohort_store: Path, tmp_path: Path) -> None:
    if (programs := find_programs()) is None:
        pytest.skip("PostgreSQL is not installed (no initdb): apt-get install postgresql")
    first, second = tmp_path / "one" / "sweep", tmp_path / "two" / "sweep"
    with server(programs) as url:
        with pytest.raises(UserError, match="password authentication failed") as refusal:
            sweep("tiny", SPACE, cohort_store, first, FEW, 1, storage=url.replace(PASSWORD, "wr0ng-w0rd"))
        assert "wr0ng" not in str(refusal.value)
        assert len(sweep("tiny", SPACE, cohort_store, first, FEW, 1, storage=url).trials) == 1
        both = sweep("tiny", SPACE, cohort_store, second, FEW, 2, storage=url)
        other = sweep(
            "tiny", SPACE, cohort_store, tmp_path / "three" / "sweep", [*FEW, "ema.decay=0.5"], 1, storage=url
        )
    assert [t.state for t in both.trials] == ["complete", "complete"]
    assert [t.state for t in other.trials] == ["complete"]  # of the same folder name, but another sweep
    assert (first / "trial-0000").is_dir() and (second / "trial-0001").is_dir()
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file
