"""`--set key=value`: settings of one class from the command line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from arcuate.config import Settings, apply_override, known_paths, nearest
from arcuate.errors import UserError

if TYPE_CHECKING:
    from arcuate.adaptation.config import Adaptation

S = TypeVar("S", bound=Settings)


def read_set(kind: type[S], overrides: Sequence[str], example: str, fixed: Mapping[str, str] | None = None) -> S:
    """Parse the values of `--set`; `fixed` settings are given by --adapt."""
    fixed = fixed or {}
    tree: dict[str, Any] = {}
    for override in overrides:
        if not override.partition("=")[1] or override.startswith("="):
            raise UserError(f"--set {override!r} is not of the form key=value, such as {example}")
        apply_override(tree, override)
    if duplicates := [key for key in fixed if key in tree]:
        raise UserError(f"--set {duplicates[0]} is already given by --adapt; leave one of them out")
    try:
        return kind.model_validate({**tree, **fixed})
    except ValidationError as error:
        raise UserError(_explain(error, kind, fixed)) from None


def read_adaptation(method: str | None, overrides: Sequence[str] | None) -> "Adaptation | None":
    """Settings of online adaptation from --adapt and --set; None without --adapt."""
    from arcuate.adaptation.config import Adaptation, resolve_adaptation

    if method is None:
        if overrides:
            raise UserError("--set changes settings of adaptation; name a method with --adapt, such as one-step")
        return None
    resolve_adaptation(method)
    return read_set(Adaptation, overrides or (), "lr=5e-4", {"method": method})


def _explain(error: ValidationError, kind: type[Settings], fixed: Mapping[str, str]) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    paths = known_paths(kind) - set(fixed)
    leaves = [p for p in sorted(paths) if not any(other.startswith(f"{p}.") for other in paths)]
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        near = nearest(path, leaves)
        problem = "unknown setting" + (f" (did you mean {near}?)" if near else "")
    return f"--set {path + ': ' if path else ''}{problem}; known settings are {', '.join(leaves)}"
