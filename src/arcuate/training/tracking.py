"""Trackers of metrics during training: TensorBoard and Weights & Biases."""

import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from arcuate.config import to_tree, to_yaml
from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl, write_json
from arcuate.progress import logger
from arcuate.run import Run
from arcuate.training.callbacks import Callback, ErrorType
from arcuate.training.config import Track, TrainingConfig, Wandb
from arcuate.training.environment import installed_version

if TYPE_CHECKING:  # the packages of the trackers are optional, and imported when one is opened
    import wandb
    from torch.utils.tensorboard import SummaryWriter

_TRAIN_NAMES = {
    "epoch": "epoch",
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
    "epoch": "epoch",
    "loss": "val/loss",
    "losses": "val/loss",
    "per": "val/per",
    "wer": "val/wer",
    "mode_accuracy": "val/mode_accuracy",
    "per_moving_average_200_steps": "val/per_moving_average_200_steps",
    "cost.seconds": "val/time",
}
_FINISH_TIMEOUT_S = 300.0  # for the upload at the end of a run; the rest can be sent with `wandb sync`
_METRICS_ONLY = {  # send only what this module sends, and system metrics: no console output, code or host names
    "console": "off",
    "host": "",
    "disable_code": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
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

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send one row of metrics."""

    def rewind(self, step: int) -> None:
        """Discard what was sent for later steps."""

    def close(self, failed: bool) -> None: ...


class Tracker(Callback):
    """Callback that sends metrics to a backend.

    A backend that fails after it was opened is closed with one warning, and training continues: disk and network are
    not part of the run, and metrics.jsonl is complete. This covers OSError and exceptions of the tracker's own package;
    any other exception is a bug in this code and is raised.
    """

    def __init__(self, name: str, package: str, open_backend: Callable[[], Backend]) -> None:
        self._name, self._package = name, package
        self._open_backend = open_backend
        self._backend: Backend | None = None

    def __enter__(self) -> Self:
        self._backend = self._open_backend()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call(lambda backend: backend.close(failed=kind is not None))
        self._backend = None

    def on_metrics(self, row: dict[str, Any]) -> None:
        self._call(lambda backend: backend.send(row["step"], to_scalars(row)))

    def on_incident(self, row: dict[str, Any]) -> None:
        if (target := row.get("rewound_to")) is not None:
            self._call(lambda backend: backend.rewind(target))

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
                f"{setting}=true needs the package {package}: pip install 'arcuate[track]', or set it to false"
            )


def make_trackers(recipe: TrainingConfig, run: Run, step: int) -> list[Tracker]:
    """Return a callback for each enabled tracker; it opens when entered, at the step training starts from."""

    known: dict[str, tuple[str, Callable[[], Backend]]] = {
        "tensorboard": ("TensorBoard", lambda: TensorBoardBackend(run, recipe, step)),
        "wandb": ("Weights & Biases", lambda: WandbBackend(run, recipe)),
    }
    enabled = {package: known[package] for package in _enabled_packages(recipe.track)}
    return [Tracker(name, package, opener) for package, (name, opener) in enabled.items()]


def _enabled_packages(track: Track) -> dict[str, str]:
    """Return the package of each enabled tracker, with the setting that enables it."""
    packages = {}
    if track.tensorboard.enabled:
        packages["tensorboard"] = "track.tensorboard.enabled"
    if track.wandb.enabled:
        packages["wandb"] = "track.wandb.enabled"
    return packages


class TensorBoardBackend:
    """Event files in RUN/tensorboard.

    Each start opens a new file, which makes TensorBoard discard later steps of older files.
    """

    def __init__(self, run: Run, recipe: TrainingConfig, step: int) -> None:
        self._folder = run.path / "tensorboard"
        self._writer = self._open(step)
        self._writer.add_text("recipe", _code_block(to_yaml(recipe)), step)

    def _open(self, step: int) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=step + 1)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # nothing is lost if the run is killed

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _code_block(text: str) -> str:
    """Indent the text, so that TensorBoard shows it verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class WandbBackend:
    """One Weights & Biases run per run folder, even if the run is stopped and resumed several times.

    Rows are numbered as they are written to metrics.jsonl, rewound ones included. The number is the step of W&B; the
    optimizer step is the x axis of its charts. After a crash the last rows may be missing there; metrics.jsonl is
    complete.
    """

    def __init__(self, run: Run, recipe: TrainingConfig) -> None:
        settings, folder = recipe.track.wandb, run.path.resolve() / "wandb"
        file = folder / "arcuate.json"
        folder.mkdir(exist_ok=True)
        known: dict[str, Any] = read_json(file) if file.exists() else {"id": uuid.uuid4().hex[:12]}
        write_json(file, known)
        self._run = _init(settings, run, recipe, str(known["id"]))
        rewound = sum(len(i["rows"]) for i in read_jsonl(run.incidents_file) if "rewound_to" in i)
        self._n_rows = max(len(run.metrics()) + rewound, self._run.starting_step)
        if os.environ.get("WANDB_MODE") == "offline":
            logger.info(f"W&B is offline; upload the run with: wandb sync {folder}")

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values}, step=self._n_rows, commit=True)
        self._n_rows += 1

    def rewind(self, step: int) -> None:
        """Keep the rewound rows; in the charts the line goes back to `step` and continues from there."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _init(settings: Wandb, run: Run, recipe: TrainingConfig, run_id: str) -> "wandb.Run":
    import wandb

    offline, config = os.environ.get("WANDB_MODE") == "offline", to_tree(recipe)
    try:
        wandb_run = wandb.init(
            dir=str(run.path.resolve()),
            id=run_id,
            resume="allow",
            reinit="create_new",
            project=settings.project,
            entity=settings.entity,
            name=settings.run_name or run.name,
            tags=list(settings.tags),
            notes=config.get("purpose") or None,
            config=config,
            allow_val_change=True,
            settings=wandb.Settings(**_METRICS_ONLY, quiet=True, silent=offline, finish_timeout=_FINISH_TIMEOUT_S),
        )
    except (wandb.Error, OSError) as error:
        raise UserError(
            f"Weights & Biases could not be started ({error}); fix the cause, or set WANDB_MODE=offline in the"
            " environment or track.wandb.enabled=false, and continue with --resume"
        ) from None
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run
