"""Metadata of a log apart from its numbers: data set, planned length, end of training."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_DEPTH = 3  # of nested configurations
_B2T25 = re.compile(r"t15[._]?20\d\d|t15[._ ]copytask|hdf5_data_final|b2t[_-]?25|brain-to-text-25|\bt15\b", re.I)
_B2T24 = re.compile(r"t12[._]20\d\d|ptdecoder_ctc|competitiondata|b2t[_-]?24|brain-to-text-24|\bt12\b|willett", re.I)
_PLANNED = re.compile(
    r"(?:total[ _](?:batches|steps|iterations)|num[ _]training[ _](?:batches|steps)|n_?batch(?:es)?|max[ _]steps"
    r"|num[ _]train[ _]steps|training[ _]steps|planned[ _]steps)\W{1,4}(\d[\d,_]{1,11})\b",
    re.I,
)
_FINISHED = re.compile(
    r"training (?:is )?(?:complete|finished|done)|finished training|best avg val per achieved|total training time"
    r"|training completed|={3,} *(?:fin|end|done) *={3,}",
    re.I,
)
_RUN_NAME = re.compile(r"={2,} *(?:RUN|EXPERIMENT) +([^=\s][^=]{0,80}?) *={2,}", re.I)
_KEYWORDS = re.compile(r"train|best avg|=== *|finished|total|max.steps|num.train|n_?batch", re.I)
_PLANNED_KEYS = frozenset(
    "nbatch nbatches n_batches num_training_batches max_steps total_batches total_steps num_train_steps"
    " planned_steps steps max_iters n_steps".split()
)
_MAX_TEXT = 10_000


@dataclass
class Metadata:
    """Facts found so far, with their evidence."""

    dataset: tuple[str, str] | None = None  # name, evidence
    planned: tuple[int, str] | None = None  # steps, evidence
    n_finished: int = 0  # messages that training is complete
    run_names: list[str] = field(default_factory=list)
    implausible: list[str] = field(default_factory=list)  # columns that cannot be what their names state


def scan_line(line: str, metadata: Metadata, early: bool) -> bool:
    """Extract metadata from a line without metrics; return whether a new run or the end of one was found."""
    if not _KEYWORDS.search(line) and not early:
        return False
    finished, named = _FINISHED.search(line), _RUN_NAME.search(line)
    if finished:
        metadata.n_finished += 1
    if named:
        metadata.run_names.append(named[1].strip())
    if metadata.planned is None and (planned := _PLANNED.search(line)):
        _set_planned(metadata, planned[1].replace(",", "").replace("_", ""), "stated in the log")
    if early and metadata.dataset is None:
        detect_dataset(line, metadata, "file names in the log")
    return bool(finished or named)


def detect_dataset(text: str, metadata: Metadata, because: str) -> None:
    newer, older = _B2T25.search(text), _B2T24.search(text)
    match = newer or older
    if match and not (newer and older) and metadata.dataset is None:
        metadata.dataset = "b2t25" if newer else "b2t24", f"{because} ({match[0]})"


def scan_config(config: Any, metadata: Metadata, because: str) -> None:
    """Extract planned length and data set from a configuration stored with a log."""
    if not isinstance(config, dict):
        return
    flat = flatten(config)
    for name, value in flat.items():
        if name.rsplit("/", 1)[-1].lower() in _PLANNED_KEYS and metadata.planned is None:
            _set_planned(metadata, value, because)
    strings = " ".join(v for v in flat.values() if isinstance(v, str))
    detect_dataset(strings[:_MAX_TEXT], metadata, because)


def _set_planned(metadata: Metadata, value: Any, because: str) -> None:
    try:
        steps = int(value)
    except (TypeError, ValueError, OverflowError):
        return
    if 10 <= steps <= 100_000_000:
        metadata.planned = steps, because


def flatten(row: Mapping[Any, Any], depth: int = _MAX_DEPTH, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by slashes, to a limited depth; lists are omitted."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if depth > 0:
                flat |= flatten(value, depth - 1, f"{prefix}{name}/")
        elif not isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = value
    return flat
