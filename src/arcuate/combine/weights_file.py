"""Fitted weights as a YAML file: a number per criterion, and where they come from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from arcuate.combine.lists import finite_number
from arcuate.errors import UserError
from arcuate.run import write_aside


def write_weights(path: Path, names: Sequence[str], weights: np.ndarray, about: Mapping[str, Any]) -> None:
    tree = {
        "weights": {name: round(float(w), 6) for name, w in zip(names, weights, strict=True)},
        "about": dict(about),
    }
    write_aside(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def read_weights(path: Path, names: Sequence[str]) -> np.ndarray:
    """One weight for each of the criteria at hand, no more and no fewer: (k,)"""
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as weights: {str(error).splitlines()[0]}") from None
    given = tree.get("weights") if isinstance(tree, dict) else None
    if not isinstance(given, dict):
        raise UserError(f"{path} has no table `weights`; write one with --save-weights")
    if set(given) != set(names):
        raise UserError(
            f"{path} weighs {', '.join(map(str, given))}, but here there are {', '.join(names)};"
            " use the same language models as when the weights were fitted"
        )
    return np.array([finite_number(given[name], f"{path}: {name}") for name in names])
