"""The one place that says what a number of metrics.jsonl is called in a tracker."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol

from arcuate.errors import UserError
from arcuate.run import Run
from arcuate.training.config import TrainingConfig
from arcuate.training.environment import installed
from arcuate.training.tracking.config import Track

TRAIN = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "grad_norm_max": "train/grad_norm_max",
    "blank_share": "train/blank_share",
    "n_distinct": "train/distinct_phonemes",
    "length_ratio": "train/length_ratio",
    "stage_index": "train/stage",
    "lr": "learning_rate",
    "lr_bias": "learning_rate_bias",
    "lr_session": "learning_rate_session",
    "losses": "train/loss",
    "skipped": "train/skipped",
    "cost.seconds_per_step": "train/batch_time",
    "cost.waiting_for_data_s": "train/waiting_for_data_time",
    "cost.memory_mb": "train/memory_mb",
}
VALIDATION = {
    "loss": "val/loss",
    "losses": "val/loss",
    "per": "val/per",
    "wer": "val/wer",
    "mode_accuracy": "val/mode_accuracy",
    "per_moving_average_200_steps": "val/per_moving_average_200_steps",
    "cost.seconds": "val/time",
}
NON_FINITE = "non_finite_values"


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row under their names; those that are not finite are counted under another."""
    training = row["split"] == "train"
    named = dict(_named(row, TRAIN if training else VALIDATION))
    if not training and "val/per" in named:
        named["val/phoneme_accuracy"] = 1.0 - named["val/per"]
    finite = {name: value for name, value in named.items() if math.isfinite(value)}
    if n_broken := len(named) - len(finite):
        finite[f"{'train' if training else 'val'}/{NON_FINITE}"] = float(n_broken)
    return finite


def _named(row: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for path, name in names.items():
        group, _, key = path.rpartition(".")
        place = row.get(group, {}) if group else row
        value = place.get(key)
        if isinstance(value, Mapping):  # by head, or by reason
            yield from ((f"{name}_{part}", float(v)) for part, v in value.items() if v is not None)
        elif value is not None:
            yield name, float(value)


# Watchers side by side, and the one that hands what it sees to a tracker without ever stopping training.

Say = Callable[[str], None]


class Watcher(AbstractContextManager["Watcher"], Protocol):
    """What the training loop tells, and a decoded validation trial shortly before the row it belongs to."""

    def step(self, step: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def incident(self, row: dict[str, Any]) -> None: ...

    def stage(self, row: dict[str, Any]) -> None: ...

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None: ...


class Watchers:
    """Several watchers as one; they close in the opposite order of opening, whatever happens."""

    def __init__(self, *watchers: Any) -> None:
        self.watchers: tuple[Watcher, ...] = watchers
        self.open = ExitStack()

    def __enter__(self) -> "Watchers":
        with ExitStack() as opening:
            for watcher in self.watchers:
                opening.enter_context(watcher)
            self.open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.__exit__(kind, error, trace)

    def step(self, step: int) -> None:
        for watcher in self.watchers:
            watcher.step(step)

    def row(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.row(row)

    def incident(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.incident(row)

    def stage(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.stage(row)

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        for watcher in self.watchers:
            watcher.sample(reference, hypothesis)


class Backend(Protocol):
    """An open tracker."""

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        """One row of metrics.jsonl, and the sample that goes with it."""

    def rewound(self, step: int) -> None:
        """What was sent for later steps is undone."""

    def close(self, failed: bool) -> None: ...


class Tracker:
    """A watcher that feeds a tracker.

    A tracker that fails later than at its opening is closed and named once, and training goes on: its disk, its
    network and its own process are no part of the run, and metrics.jsonl has every number. Only errors from outside
    are taken this way: OSError, or an exception type of the tracker's own package. Any other one is a mistake in this
    code and is raised.
    """

    def __init__(
        self, name: str, package: str, start: Callable[[], Backend], samples: bool, say: Say
    ) -> None:
        self.name, self.package, self.start, self.samples, self.say = name, package, start, samples, say
        self.backend: Backend | None = None
        self.text: str | None = None

    def __enter__(self) -> "Tracker":
        self.backend = self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell(lambda backend: backend.close(failed=kind is not None))
        self.backend = None

    def step(self, step: int) -> None:
        pass

    def row(self, row: dict[str, Any]) -> None:
        text = None
        if row["split"] != "train":
            text, self.text = self.text, None
        self.tell(lambda backend: backend.send(row["step"], scalars(row), text))

    def incident(self, row: dict[str, Any]) -> None:
        if (target := row.get("rewound_to")) is not None:
            self.tell(lambda backend: backend.rewound(target))

    def stage(self, row: dict[str, Any]) -> None:
        pass  # every row names its stage

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        if self.samples:
            self.text = f"said {' '.join(reference)}\nread {' '.join(hypothesis)}"

    def tell(self, message: Callable[[Backend], None]) -> None:
        if self.backend is None:
            return
        try:
            message(self.backend)
        except Exception as error:
            if not self.is_outside(error):
                raise
            self.backend = None
            self.say(
                f"{self.name} is given up: {type(error).__name__}: {error}; training goes on, and metrics.jsonl has"
                " every number"
            )

    def is_outside(self, error: Exception) -> bool:
        return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == self.package


# Which trackers a recipe asks for, and whether they can be had.


def wanted(track: Track) -> dict[str, str]:
    """The packages to track with, and the setting that asks for each."""
    found = {}
    if track.tensorboard.enabled:
        found["tensorboard"] = "track.tensorboard.enabled"
    if track.wandb.enabled and track.wandb.mode != "disabled":
        found["wandb"] = "track.wandb.enabled"
    return found


def check_trackers(track: Track) -> None:
    """Refuse a tracker that is not installed, before anything is written."""
    for package, setting in wanted(track).items():
        if installed(package) is None:
            raise UserError(
                f"{setting}=true needs the package {package}: pip install -e '.[track]' -c constraints.txt,"
                " or set it to false"
            )


def trackers(recipe: TrainingConfig, run: Run, step: int, say: Say) -> list[Tracker]:
    """A watcher for each tracker of the recipe; it starts when it is entered, at the step training starts from."""

    def tensorboard() -> Backend:
        from arcuate.training.tracking.tensorboard import EventFiles

        return EventFiles(run, recipe, step)

    def wandb() -> Backend:
        from arcuate.training.tracking.wandb import TrackedRun

        return TrackedRun(run, recipe, say)

    known = {"tensorboard": ("TensorBoard", tensorboard), "wandb": ("Weights & Biases", wandb)}
    return [
        Tracker(known[package][0], package, known[package][1], recipe.track.samples, say)
        for package in wanted(recipe.track)
    ]
