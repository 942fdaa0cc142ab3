"""Weights & Biases: one tracked run per run folder, even if the run is stopped and resumed several times.

Rows are numbered as they are written to metrics.jsonl, rewound ones included. The number is the step of W&B; the
optimizer step is the x axis of its charts. A row delivered before a crash is therefore not sent again, and a lost one
is sent from metrics.jsonl.
"""

import shutil
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl, write_json
from arcuate.progress import logger
from arcuate.run import Run
from arcuate.training.config import TrainingConfig, Wandb
from arcuate.training.tracking.tracker import to_scalars

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


class WandbBackend:
    """A W&B run, resumed if the run folder has one already."""

    def __init__(self, run: Run, recipe: TrainingConfig) -> None:
        settings = recipe.track.wandb
        self._offline = settings.mode == "offline"
        self._folder = run.path.resolve() / "wandb"
        self._file = self._folder / "arcuate.json"
        known: dict[str, Any] = read_json(self._file) if self._file.exists() else {}
        self._id = str(known.get("id") or uuid.uuid4().hex[:12])
        self._finished: list[str] = known.get("finished", [])  # names of completed offline parts
        n_delivered = int(known.get("n_delivered", 0))
        self._folder.mkdir(exist_ok=True)
        if self._offline:
            self._remove_unfinished()
        self._save(n_delivered)
        self._run = _init(settings, run, recipe, self._id, self._offline)
        self._n_delivered = n_delivered if self._offline else self._run.starting_step
        self._n_rows = 0
        for number, row in _numbered_rows(run):
            self._n_rows = number
            self.send(row["step"], to_scalars(row), None)
        self._n_rows = _count_rows(run)
        if self._offline:
            logger.info(f"W&B is offline; upload the run with: wandb sync {self._folder}")

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        number, self._n_rows = self._n_rows, self._n_rows + 1
        if number >= self._n_delivered:
            sample = {} if text is None else {"val/sample": text}
            self._run.log({"step": step, **values, **sample}, step=number, commit=True)

    def rewind(self, step: int) -> None:
        """Keep the rewound rows; in the charts the line goes back to `step` and continues from there."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        if self._offline:
            self._finished.append(self._part_name())
            self._save(max(self._n_rows, self._n_delivered))

    def _part_name(self) -> str:
        """Return the folder of this part of the run, offline-run-DATE-ID, which contains `files`."""
        return str(self._run.dir).rstrip("/").split("/")[-2]

    def _save(self, n_delivered: int) -> None:
        write_json(self._file, {"id": self._id, "n_delivered": n_delivered, "finished": self._finished})

    def _remove_unfinished(self) -> None:
        """Remove parts of killed processes, which may be truncated; their rows are sent again from metrics.jsonl."""
        for part in self._folder.glob(f"offline-run-*-{self._id}"):
            if part.name not in self._finished:
                shutil.rmtree(part)


def _init(settings: Wandb, run: Run, recipe: TrainingConfig, run_id: str, offline: bool) -> wandb.Run:
    try:
        wandb_run = wandb.init(
            dir=str(run.path.resolve()),
            id=run_id,
            resume="allow",
            reinit="create_new",
            mode="offline" if offline else "online",
            project=settings.project,
            entity=settings.entity,
            name=settings.run_name or run.name,
            tags=list(settings.tags),
            notes=settings.notes or None,
            config=to_tree(recipe),
            allow_val_change=True,
            settings=wandb.Settings(**_METRICS_ONLY, quiet=True, silent=offline, finish_timeout=_FINISH_TIMEOUT_S),
        )
    except (wandb.Error, OSError) as error:
        raise UserError(
            f"Weights & Biases could not be started ({error}); fix the cause, or set track.wandb.mode=offline or"
            f" track.wandb.enabled=false, and continue with --resume"
        ) from None
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run


def _numbered_rows(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of metrics.jsonl with their numbers among all that were ever written, rewound ones included."""
    rewinds = [i for i in read_jsonl(run.incidents_file) if "rewound_to" in i]
    return [
        (index + sum(len(i["rows"]) for i in rewinds if i["rewound_to"] < row["step"]), row)
        for index, row in enumerate(run.metrics())
    ]


def _count_rows(run: Run) -> int:
    rewound = sum(len(i["rows"]) for i in read_jsonl(run.incidents_file) if "rewound_to" in i)
    return len(run.metrics()) + rewound
