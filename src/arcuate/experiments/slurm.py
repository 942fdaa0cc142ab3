"""Slurm jobs: `submit` appends a command to the user's own `#SBATCH` header and submits the batch script.

Two minutes before the time limit, and when it is preempted, the processes of a job receive SIGTERM: training saves a
checkpoint and ends with exit code 143. The batch script then puts the job back into the queue, where it resumes
exactly, unless it was cancelled.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arcuate.errors import UserError, without_password
from arcuate.files import Result

# The lines of the user follow these, so they have precedence.
_DEFAULTS = "#SBATCH --job-name=arcuate --requeue --open-mode=append --signal=TERM@120"
# Each task of srun is a rank of the training; --kill-on-bad-exit ends the others when one fails. srun of Slurm 22.05
# and 23.02 does not take --cpus-per-task over from sbatch.
_BODY = """
trap : TERM
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 40000))"
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} bash -c '
  if [ "$SLURM_NTASKS" -gt 1 ]; then
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
  fi
  exec "$@"' arcuate {command}
code=$?
if [ "$code" = 143 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 100 ] &&
    scontrol show job "$SLURM_JOB_ID" | grep -q "JobState=RUNNING"; then
  echo "stopped with a checkpoint: requeuing the job"
  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm ends this script
fi
exit "$code"
"""


@dataclass(frozen=True)
class Submission(Result):
    """A submitted job."""

    job: str  # identifier
    script: str


def submit(header: Path, words: Sequence[str]) -> Submission:
    """Submit `arcuate WORDS` to Slurm with the `#SBATCH` lines and shell lines of a header file.

    A `train` command gets `--resume`, so that a requeued job continues its run.

    Args:
        header: File with the `#SBATCH` lines of the job, and shell lines such as `module load cuda`.
        words: Command line without the name of the program: `["train", "tiny", "--data", …]`.
    """
    script = batch_script(header, words)
    if shutil.which("sbatch") is None:
        raise UserError("sbatch was not found; run this on a node of the Slurm cluster")
    # Variables of the job in which this process runs would become options of the new one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_")) or k == "SLURM_CONF"}
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise UserError(f"sbatch rejected the job: {reason.strip()}")
    return Submission(done.stdout.strip().partition(";")[0], script)


def batch_script(header: Path, words: Sequence[str]) -> str:
    """The batch script that `submit` submits."""
    if not header.is_file():
        raise UserError(f"--slurm {header}: no such file; expected a file of #SBATCH lines, such as #SBATCH --time=60")
    lines = [line for line in header.read_text("utf-8").splitlines() if not line.startswith("#!")]
    if shown := next((without_password(word) for word in words if without_password(word) != word), None):
        raise UserError(f"{shown} is given with its password, which Slurm would store; put it into ~/.pgpass")
    resume = ["--resume"] if words[:1] == ["train"] and "--resume" not in words else []
    command = shlex.join([sys.executable, "-u", "-m", "arcuate", *words, *resume])
    return "\n".join(["#!/bin/bash", _DEFAULTS, *lines, _BODY.format(command=command).lstrip()])
