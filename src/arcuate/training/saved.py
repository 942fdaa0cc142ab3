"""What `state.json` of a checkpoint holds: everything about a run that changes and is no tensor, checked when read."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from arcuate.errors import UserError
from arcuate.run import finite
from arcuate.settings import Settings
from arcuate.training.schedule import PlateauState
from arcuate.training.stages import Progress
from arcuate.training.tally import Tally

Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass
class Best:
    """The best validation so far: by actual error rate, ties by loss; without validation the newest wins."""

    step: Count | None = None
    per: float | None = None
    loss: float | None = None
    position: Count | None = (
        None  # in the data; tells apart two passes over a step, before and after a rewind
    )

    def improve(self, step: int, per: float | None, loss: float | None, position: int | None = None) -> bool:
        inf = float("inf")
        new = (inf if per is None else per, inf if loss is None else loss)
        old = (inf if self.per is None else self.per, inf if self.loss is None else self.loss)
        if self.step is not None and per is not None and new >= old:
            return False
        self.step, self.per, self.loss, self.position = step, per, loss, position
        return True


class Averaged(Settings):
    n_ema: Count
    n_mean: Count


class FilesAt(Settings):
    """How long the run's files of rows were, in bytes."""

    metrics: Count
    incidents: Count


class Saved(Settings):
    step: Count
    position: Count
    rate_scale: float = Field(ge=0.0)
    plateaus: tuple[PlateauState, PlateauState]
    best: Best
    validations: list[tuple[Count, float]]
    tally: Tally
    guard: dict[str, Any]
    good: list[Count] = Field(max_length=3)
    rewound_to: Count | None
    averages: Averaged
    mixed_on: bool
    progress: Progress = Progress()
    bests: dict[str, Best] = Field(default_factory=dict)  # of stages that are over, by name
    scaler: dict[str, int | float]
    files_at: FilesAt
    files: dict[str, str]


def seal(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its own checksum in it."""
    plain = finite(state)
    return {**plain, "checksum": digest(plain)}


def unseal(state: dict[str, Any], where: str) -> Saved:
    """Nothing in the file is trusted before its checksum and every type and range in it are right."""
    content = {k: v for k, v in state.items() if k != "checksum"}
    try:
        if digest(content) != state.get("checksum"):
            raise UserError(f"{where} is damaged: its checksum is not the one it was saved with")
        return Saved.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UserError(f"{where} is not the state of a checkpoint ({path}: {first['msg']})") from None
    except RecursionError:
        raise UserError(f"{where} is not the state of a checkpoint") from None


def digest(content: dict[str, Any]) -> str:
    """Of the values, not of the layout: JSON gives numbers back as they were."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def check_like(known: dict[str, Any], given: dict[str, Any], what: str) -> None:
    """Refuse values of other names or kinds than those that stand there now."""
    if known.keys() != given.keys():
        raise ValueError(f"{what} holds other values")
    for name, value in given.items():
        if not is_like(known[name], value):
            raise ValueError(f"{what}.{name} is no value of its kind")


def is_like(known: Any, given: Any) -> bool:
    if isinstance(known, bool):
        return isinstance(given, bool)
    if isinstance(known, list):
        return isinstance(given, list) and all(is_number(v) for v in given)
    if known is None:
        return given is None or is_number(given)
    return is_number(given)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
