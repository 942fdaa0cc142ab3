"""`arcuate average`."""

from pathlib import Path

from arcuate.cli.console import emit_json, progress, say
from arcuate.errors import UserError
from arcuate.run import open_run
from arcuate.training.averaging import AVERAGE, average_checkpoints


def average_command(path: Path, n_last: int | None, as_json: bool) -> None:
    run = open_run(path)
    if not run.checkpoints.is_dir():
        raise UserError(
            f"{path} has no checkpoints, so there is nothing to average; name a run of arcuate train"
        )
    with progress("averaging") as report:
        names = average_checkpoints(run, n_last, report)
    if as_json:
        emit_json({"run": str(path), "checkpoint": AVERAGE, "averaged": names})
        return
    say(f"the mean of {', '.join(names)} is {run.checkpoints / AVERAGE}")
    say(f"next: arcuate evaluate {path} --checkpoint {AVERAGE} --label {AVERAGE}")
