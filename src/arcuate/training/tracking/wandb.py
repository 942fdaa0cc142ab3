"""Weights & Biases: one tracked run per run folder, however often that is stopped and resumed.

Rows are numbered as they are written to metrics.jsonl, rewound ones included, and the number is W&B's own step; the
optimizer step is the axis of the charts. So a row that was delivered before a crash is not sent again, and one that
was lost is sent from metrics.jsonl.
"""

import shutil
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl, write_json
from arcuate.run import Run
from arcuate.training.config import TrainingConfig
from arcuate.training.tracking.callbacks import Say, scalars
from arcuate.training.tracking.config import Wandb

FINISH_S = 300.0  # how long the end of a run waits for an upload; what is left can be sent with `wandb sync`
NUMBERS_ONLY = {  # nothing is sent but what this module sends, and use of the machine: no output, code or names
    "console": "off",
    "host": "",
    "disable_code": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
}


class TrackedRun:
    def __init__(self, run: Run, recipe: TrainingConfig, say: Say) -> None:
        settings = recipe.track.wandb
        self.offline = settings.mode == "offline"
        self.folder = run.path.resolve() / "wandb"
        self.file = self.folder / "arcuate.json"
        known: dict[str, Any] = read_json(self.file) if self.file.exists() else {}
        self.id = str(known.get("id") or uuid.uuid4().hex[:12])
        self.finished: list[str] = known.get("finished", [])
        n_delivered = int(known.get("n_delivered", 0))
        self.folder.mkdir(exist_ok=True)
        if self.offline:
            self.drop_unfinished()
        self.remember(n_delivered)
        self.wandb_run = start(settings, run, recipe, self.id, self.offline)
        self.n_delivered = n_delivered if self.offline else self.wandb_run.starting_step
        self.n_rows = 0
        for number, row in numbered_rows(run):
            self.n_rows = number
            self.send(row["step"], scalars(row), None)
        self.n_rows = count_rows(run)
        if self.offline:
            say(f"W&B is offline; upload the run with: wandb sync {self.folder}")

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        number, self.n_rows = self.n_rows, self.n_rows + 1
        if number >= self.n_delivered:
            sample = {} if text is None else {"val/sample": text}
            self.wandb_run.log({"step": step, **values, **sample}, step=number, commit=True)

    def rewound(self, step: int) -> None:
        """W&B keeps the rewound rows; in the charts the line goes back and starts again from there."""

    def close(self, failed: bool) -> None:
        self.wandb_run.finish(exit_code=int(failed))
        if self.offline:
            self.finished.append(self.part_name())
            self.remember(max(self.n_rows, self.n_delivered))

    def part_name(self) -> str:
        """The folder of this part of the run, offline-run-DATE-ID, which holds `files`."""
        return str(self.wandb_run.dir).rstrip("/").split("/")[-2]

    def remember(self, n_delivered: int) -> None:
        write_json(self.file, {"id": self.id, "n_delivered": n_delivered, "finished": self.finished})

    def drop_unfinished(self) -> None:
        """What a killed process left is cut off anywhere; its rows are in metrics.jsonl, and are written again."""
        for part in self.folder.glob(f"offline-run-*-{self.id}"):
            if part.name not in self.finished:
                shutil.rmtree(part)


def start(settings: Wandb, run: Run, recipe: TrainingConfig, run_id: str, offline: bool) -> wandb.Run:
    try:
        started = wandb.init(
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
            settings=wandb.Settings(**NUMBERS_ONLY, quiet=True, silent=offline, finish_timeout=FINISH_S),
        )
    except (wandb.Error, OSError) as error:
        raise UserError(
            f"Weights & Biases could not be started ({error}); mend it, or set track.wandb.mode=offline or"
            f" track.wandb.enabled=false, and go on with --resume"
        ) from None
    started.define_metric("step")
    started.define_metric("*", step_metric="step")
    return started


def numbered_rows(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """The rows of metrics.jsonl, each with its number among all that were ever written, rewound ones included."""
    rewinds = [i for i in read_jsonl(run.incidents_file) if "rewound_to" in i]
    return [
        (place + sum(len(i["rows"]) for i in rewinds if i["rewound_to"] < row["step"]), row)
        for place, row in enumerate(run.metrics())
    ]


def count_rows(run: Run) -> int:
    rewound = sum(len(i["rows"]) for i in read_jsonl(run.incidents_file) if "rewound_to" in i)
    return len(run.metrics()) + rewound
