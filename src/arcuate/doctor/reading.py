"""Which reader for which file: judged by what is inside, never by its ending."""

from dataclasses import dataclass
from pathlib import Path

from arcuate.doctor.curve import Log
from arcuate.doctor.read_run import read_run
from arcuate.errors import UserError
from arcuate.run import open_run


@dataclass(frozen=True)
class Reading:
    """The runs that a path holds, and how they were read."""

    name: str
    source: str
    logs: tuple[Log, ...]
    notes: tuple[str, ...] = ()


def read(path: Path, allow_pickle: bool = False) -> Reading:
    if (path / "recipe.yaml").is_file():
        run = open_run(path)
        return Reading(run.name, "a run folder of arcuate", tuple(read_run(run)))
    raise UserError(f"{path} holds no training log")
