"""Slurm jobs: the batch script anywhere, and the submission with a program in place of sbatch."""

import os
import subprocess
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.experiments.slurm import batch_script, submit
from support.command import arcuate

TRAIN = ["train", "tiny", "--data", "my store", "--run", "RUN"]


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.sh"
    path.write_text("#!/bin/sh\n#SBATCH --time=12:00:00 --signal=TERM@300\nmodule load cuda\n")
    return path


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that keeps its script and environment in the returned folder."""
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/script\nenv > {tmp_path}/environment\necho '7;cluster'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_lines_of_the_user_have_precedence(header: Path) -> None:
    lines = batch_script(header, TRAIN).splitlines()
    assert lines[0] == "#!/bin/bash" and "#!/bin/sh" not in lines
    assert "--requeue" in lines[1] and "--signal=TERM@120" in lines[1]
    assert lines[2:4] == ["#SBATCH --time=12:00:00 --signal=TERM@300", "module load cuda"]


def test_a_training_continues_when_its_job_starts_again(header: Path) -> None:
    script = batch_script(header, TRAIN)
    assert "-m arcuate train tiny --data 'my store' --run RUN --resume" in script
    assert batch_script(header, [*TRAIN, "--resume"]) == script
    assert "--resume" not in batch_script(header, ["sweep", "tiny", "space.yaml"])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0


def test_impossible_jobs_are_refused(header: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        submit(tmp_path / "missing", TRAIN)
    with pytest.raises(UserError, match="pgpass") as refusal:
        submit(header, ["sweep", "--storage", "postgresql://me:secret@host/db"])
    assert "secret" not in str(refusal.value)


def test_a_rejected_job_is_one_sentence(header: Path, sbatch: Path) -> None:
    (sbatch / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(UserError, match="sbatch rejected the job: sbatch: error: invalid partition"):
        submit(header, TRAIN)


def test_the_command_is_submitted_without_the_variables_of_an_outer_job(
    header: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun refuses the memory of two jobs, and GPUs of another node."""
    of_job = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_CPU": "4096"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab"}
    for name, value in (of_job | kept).items():
        monkeypatch.setenv(name, value)
    assert "submitted job 7" in arcuate("--slurm", header, *TRAIN).stdout
    assert (sbatch / "script").read_text() == batch_script(header, TRAIN)
    passed_on = dict(line.split("=", 1) for line in (sbatch / "environment").read_text().splitlines() if "=" in line)
    assert not of_job.keys() & passed_on.keys() and kept.items() <= passed_on.items()
