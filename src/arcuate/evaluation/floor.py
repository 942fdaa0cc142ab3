"""The floor of a run, as `experiments/floor.py` measured it: its error rates on input without neural information."""

from dataclasses import dataclass

from arcuate.errors import UserError
from arcuate.files import finite_number, read_json
from arcuate.run import Run


@dataclass(frozen=True)
class FloorRates:
    """The lowest error rates that were reached without neural information."""

    per: float | None
    wer: float | None  # None: words were not decoded


def read_floor(run: Run, split: str) -> FloorRates | None:
    """The floor of a run on a split; None if it was not measured."""
    file = run.measurement_file("floor", split)
    if not file.is_file():
        return None
    found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged; measure the floor of {run.path} again")
    by_input = found.get("wer_floor")
    rates = by_input.values() if isinstance(by_input, dict) else ()
    return FloorRates(
        finite_number(found.get("lowest")), min((r for v in rates if (r := finite_number(v)) is not None), default=None)
    )
