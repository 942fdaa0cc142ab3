"""Average of several checkpoints of one run, written beside them as another checkpoint.

Checkpoints of one run usually lie in one basin of the loss, and their mean is often slightly better than each of them
(Izmailov et al. 2018). Averages kept during training (`ema`, `swa`) are in `arcuate.training.optim`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arcuate.errors import UserError
from arcuate.files import locked_folder, write_json
from arcuate.models.io import load_model, save_model
from arcuate.progress import Progress
from arcuate.run import Run, RunLike, open_run

NAME = "average"  # beside `best` and `last`


@dataclass(frozen=True)
class AveragedCheckpoint:
    """The checkpoint `average` of a run."""

    run: Run
    checkpoints: tuple[str, ...]  # names of the averaged checkpoints

    @property
    def path(self) -> Path:
        return self.run.checkpoints / NAME

    def to_dict(self) -> dict[str, Any]:
        return {"run": str(self.run.path), "checkpoint": NAME, "averaged": list(self.checkpoints)}


def average(run: RunLike, *, last: int | None = None, progress: Progress | None = None) -> AveragedCheckpoint:
    """Average the weights of the checkpoints of a run, or of the `last` ones, into checkpoints/average.

    The number of checkpoints that training keeps is `train.keep_checkpoints`.
    """
    opened = open_run(run)
    if not opened.checkpoints.is_dir():
        raise UserError(f"{opened.path} has no checkpoints to average; give a run of arcuate train")
    folders = _choose_checkpoints(opened, last)
    model = load_model(folders[0])
    total = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for n, folder in enumerate(folders[1:], start=1):
        if progress is not None:
            progress(n, len(folders), "averaging")
        other = load_model(folder)
        if other.config != model.config:
            raise UserError(f"{folder} and {folders[0]} are different models; average checkpoints of one model")
        for name, tensor in other.state_dict().items():
            total[name] += tensor.double()
    with torch.no_grad():
        model.load_state_dict({name: (tensor / len(folders)).float() for name, tensor in total.items()})
    names = tuple(folder.name for folder in folders)
    with locked_folder(opened.checkpoints / NAME) as temporary:
        save_model(temporary, model)
        write_json(temporary / "average.json", {"checkpoints": list(names)})
    return AveragedCheckpoint(opened, names)


def _choose_checkpoints(run: Run, last: int | None) -> list[Path]:
    """Checkpoints in the order of their steps, without the untrained one of step 0."""
    found = sorted(p for p in run.checkpoints.glob("step-*") if p.name != "step-00000000")
    n = len(found) if last is None else last
    if len(found) < max(n, 2):
        raise UserError(
            f"{run.path} kept {len(found)} checkpoints, but {max(n, 2)} are needed; train with"
            f" train.keep_checkpoints={max(n, 5)}, or average fewer with --last"
        )
    return found[len(found) - n :]
