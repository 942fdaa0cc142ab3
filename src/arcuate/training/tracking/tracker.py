"""The callback that sends metrics to a tracker, and the names of the metrics there."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from arcuate.errors import UserError
from arcuate.progress import logger
from arcuate.run import Run
from arcuate.training.callbacks import Callback, ErrorType
from arcuate.training.config import Track, TrainingConfig
from arcuate.training.environment import installed_version

_TRAIN_NAMES = {
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
_VALIDATION_NAMES = {
    "loss": "val/loss",
    "losses": "val/loss",
    "per": "val/per",
    "wer": "val/wer",
    "mode_accuracy": "val/mode_accuracy",
    "per_moving_average_200_steps": "val/per_moving_average_200_steps",
    "cost.seconds": "val/time",
}


def to_scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row of metrics.jsonl by tracker name, and the number of non-finite ones."""
    is_train = row["split"] == "train"
    named = dict(_named_values(row, _TRAIN_NAMES if is_train else _VALIDATION_NAMES))
    if not is_train and "val/per" in named:
        named["val/phoneme_accuracy"] = 1.0 - named["val/per"]
    finite = {name: value for name, value in named.items() if math.isfinite(value)}
    if n_broken := len(named) - len(finite):
        finite[f"{'train' if is_train else 'val'}/non_finite_values"] = float(n_broken)
    return finite


def _named_values(row: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    for path, name in names.items():
        group, _, key = path.rpartition(".")
        value = (row.get(group, {}) if group else row).get(key)
        if isinstance(value, Mapping):  # by loss, or by reason
            yield from ((f"{name}_{part}", float(v)) for part, v in value.items() if v is not None)
        elif value is not None:
            yield name, float(value)


class Backend(Protocol):
    """An open tracker."""

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        """Send one row of metrics, and its sample."""

    def rewind(self, step: int) -> None:
        """Discard what was sent for later steps."""

    def close(self, failed: bool) -> None: ...


class Tracker(Callback):
    """Callback that sends metrics to a backend.

    A backend that fails after it was opened is closed with one warning, and training continues: disk and network are
    not part of the run, and metrics.jsonl is complete. This covers OSError and exceptions of the tracker's own package;
    any other exception is a bug in this code and is raised.
    """

    def __init__(self, name: str, package: str, open_backend: Callable[[], Backend], samples: bool) -> None:
        self._name, self._package = name, package
        self._open_backend, self._samples = open_backend, samples
        self._backend: Backend | None = None
        self._text: str | None = None  # sample of the next validation row

    def __enter__(self) -> Self:
        self._backend = self._open_backend()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call(lambda backend: backend.close(failed=kind is not None))
        self._backend = None

    def on_metrics(self, row: dict[str, Any]) -> None:
        text = None
        if row["split"] != "train":
            text, self._text = self._text, None
        self._call(lambda backend: backend.send(row["step"], to_scalars(row), text))

    def on_incident(self, row: dict[str, Any]) -> None:
        if (target := row.get("rewound_to")) is not None:
            self._call(lambda backend: backend.rewind(target))

    def on_sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        if self._samples:
            self._text = f"reference  {' '.join(reference)}\nhypothesis {' '.join(hypothesis)}"

    def _call(self, method: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            method(self._backend)
        except Exception as error:
            if not self._is_external(error):
                raise
            self._backend = None
            logger.warning(
                f"{self._name} was closed after {type(error).__name__}: {error}; training continues, and metrics.jsonl"
                " is complete"
            )

    def _is_external(self, error: Exception) -> bool:
        return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == self._package


def check_trackers(track: Track) -> None:
    """Require the packages of the enabled trackers, before anything is written."""
    for package, setting in _enabled_packages(track).items():
        if installed_version(package) is None:
            raise UserError(
                f"{setting}=true needs the package {package}: pip install -e '.[track]' -c constraints.txt,"
                " or set it to false"
            )


def make_trackers(recipe: TrainingConfig, run: Run, step: int) -> list[Tracker]:
    """Return a callback for each enabled tracker; it opens when entered, at the step training starts from."""

    def open_tensorboard() -> Backend:
        from arcuate.training.tracking.tensorboard import TensorBoardBackend

        return TensorBoardBackend(run, recipe, step)

    def open_wandb() -> Backend:
        from arcuate.training.tracking.wandb import WandbBackend

        return WandbBackend(run, recipe)

    known = {"tensorboard": ("TensorBoard", open_tensorboard), "wandb": ("Weights & Biases", open_wandb)}
    enabled = {package: known[package] for package in _enabled_packages(recipe.track)}
    return [Tracker(name, package, opener, recipe.track.samples) for package, (name, opener) in enabled.items()]


def _enabled_packages(track: Track) -> dict[str, str]:
    """Return the package of each enabled tracker, with the setting that enables it."""
    packages = {}
    if track.tensorboard.enabled:
        packages["tensorboard"] = "track.tensorboard.enabled"
    if track.wandb.enabled and track.wandb.mode != "disabled":
        packages["wandb"] = "track.wandb.enabled"
    return packages
