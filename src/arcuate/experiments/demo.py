"""`run_demo`: the complete workflow on simulated data, from simulation to report."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.config import Overrides, override_list
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.decode import Transcription, decode
from arcuate.evaluation.evaluate import Evaluation, evaluate
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import TrainResult, train
from arcuate.models.runtime import choose_device
from arcuate.progress import Progress, logger
from arcuate.run import Run
from arcuate.training.callbacks import Callback
from arcuate.training.tracking import check_trackers

_MARKER = ".made-by-demo"
_RECIPE = "tiny-best"
_SESSIONS, _TRIALS, _ELECTRODES, _SEED = 6, 250, 64, 0


@dataclass(frozen=True)
class DemoResult:
    """Result of every step of the demo."""

    prepared: Store
    trained: TrainResult
    evaluation: Evaluation
    words: Transcription
    page: Path  # the report
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        outcome = {"wer": self.words.wer, "report": str(self.page), "seconds": self.seconds}
        return {**self.evaluation.to_dict(), **outcome}


def run_demo(
    run: str | Path = "runs/demo",
    data: str | Path = "data/demo",
    *,
    write_report: Callable[[Run], Path],
    overrides: Overrides = (),
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> DemoResult:
    """Simulate, prepare, train, evaluate, decode and report; every step logs the command that does the same.

    Args:
        run: Run folder; an earlier demo there is replaced.
        data: Data folder; an earlier demo there is replaced.
        write_report: Writes the report of a run.
        overrides: Settings `key=value` of the training.
    """
    started = time.perf_counter()
    run, data = Path(run), Path(data)
    source, store, listed = data / "source", data / "store", override_list(overrides)
    recipe = load_recipe(_RECIPE, listed)  # errors come before anything is removed
    check_trackers(recipe.track)
    choose_device(recipe.runtime.device)
    _check_folders(run, data)
    _clear(run, data)

    size = f"--sessions {_SESSIONS} --trials {_TRIALS} --electrodes {_ELECTRODES}"
    _log_step(1, f"arcuate simulate {source} {size}")
    simulate(
        source,
        n_sessions=_SESSIONS,
        n_trials=_TRIALS,
        n_electrodes=_ELECTRODES,
        seed=_SEED,
        progress=progress,
    )
    _log_step(2, f"arcuate prepare {source} {store}")
    prepared = prepare(source, store, progress=progress)
    _log_step(3, f"arcuate train {_RECIPE} --data {store} --run {run} {' '.join(listed)}")
    trained = train(_RECIPE, store, run, overrides=listed, callbacks=callbacks, progress=progress)
    _log_step(4, f"arcuate evaluate {run} --split val")
    evaluation = evaluate(run, progress=progress)
    _log_step(5, f"arcuate decode {run} --n-best 5")
    words = decode(run, n_best=5, progress=progress)
    _log_step(6, f"arcuate report {run}")
    page = write_report(trained.run)
    return DemoResult(prepared, trained, evaluation, words, page, time.perf_counter() - started)


def _log_step(number: int, command: str) -> None:
    logger.info(f"\n[{number}/6] {command.strip()}")


def _check_folders(run: Path, data: Path) -> None:
    """Check that both are folders of an earlier demo or new, and that neither is inside the other."""
    for path, option in ((run, "--run"), (data, "--data")):
        if os.path.lexists(path) and not path.is_dir():
            raise UserError(f"{path} is not a folder; give another one with {option}")
    resolved_run, resolved_data = run.resolve(), data.resolve()
    if resolved_run in (resolved_data, *resolved_data.parents) or resolved_data in resolved_run.parents:
        raise UserError(f"--run {run} and --data {data} overlap; give two separate folders")
    if data.exists() and any(data.iterdir()) and not (data / _MARKER).exists():
        raise UserError(f"{data} was not made by the demo; move it away, or give another folder with --data")
    if run.exists() and any(run.iterdir()):
        trained_on = Run(run).data() if Run(run).environment_file.is_file() else {}
        if Path(str(trained_on.get("path", ""))) != (data / "store").resolve():
            raise UserError(f"{run} was not made by the demo; move it away, or give another folder with --run")


def _clear(run: Path, data: Path) -> None:
    for folder in (run, data):
        if folder.exists():
            shutil.rmtree(folder)
    data.mkdir(parents=True)
    (data / _MARKER).touch()
