"""The mean of several checkpoints of one run, as a model of its own beside them.

Weights of one run lie in one valley, and their mean is often a little better than any of them; of two runs it is
nothing. Training can keep averages itself (`ema`, `average`); this one needs no plan, only checkpoints that were kept.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from arcuate.errors import UserError
from arcuate.models.files import load_model, save_model
from arcuate.run import Run, write_json

NAME = "average"  # beside `best` and `last`
Report = Callable[[int, int, str], None]


def average_checkpoints(run: Run, n_last: int | None, report: Report) -> list[str]:
    """Write checkpoints/average, the mean of the last ones (None: of all that were kept); returns their names."""
    folders = choose(run, n_last)
    model = load_model(folders[0])
    total = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for n, folder in enumerate(folders[1:], start=1):
        report(n, len(folders), "averaging")
        other = load_model(folder)
        if other.card != model.card:
            raise UserError(f"{folder} holds another model than {folders[0]}; they have no mean")
        for name, tensor in other.state_dict().items():
            total[name] += tensor.double()
    with torch.no_grad():
        model.load_state_dict({name: (tensor / len(folders)).float() for name, tensor in total.items()})
    aside = run.checkpoints / f".{NAME}.part"
    shutil.rmtree(aside, ignore_errors=True)
    save_model(aside, model)
    write_json(aside / "average.json", {"checkpoints": [f.name for f in folders]})
    shutil.rmtree(run.checkpoints / NAME, ignore_errors=True)
    aside.rename(run.checkpoints / NAME)
    return [folder.name for folder in folders]


def choose(run: Run, n_last: int | None) -> list[Path]:
    """The checkpoints of this run in the order of their steps, the last `n_last` of them."""
    found = sorted(p for p in run.checkpoints.glob("step-*") if p.name != "step-00000000")
    wanted = len(found) if n_last is None else n_last
    if len(found) < max(wanted, 2):
        raise UserError(
            f"{run.path} kept {len(found)} checkpoints and {max(wanted, 2)} are wanted; train with"
            f" train.keep_checkpoints={max(wanted, 5)}, or ask for fewer with --last"
        )
    return found[len(found) - wanted :]
