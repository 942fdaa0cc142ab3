"""`arcuate demo`: the whole path on simulated data, in the same steps a user would take."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from arcuate.cli.console import emit_json, out, say
from arcuate.cli.evaluate import evaluate_run, show
from arcuate.cli.prepare import prepare_store
from arcuate.cli.simulate import simulate_cohort
from arcuate.cli.train import Asked, train_run
from arcuate.errors import UserError
from arcuate.report import write_report
from arcuate.run import Run

MARK = ".made-by-demo"
SESSIONS, TRIALS, ELECTRODES, DIFFICULTY, SEED = 6, 250, 64, "real", 0


def run_demo(run: Path, data: Path, overrides: Sequence[str], as_json: bool) -> None:
    started = time.perf_counter()
    source, store = data / "source", data / "store"
    clear_run(run, store)
    clear_data(data)

    step(1, f"arcuate simulate {source} --sessions {SESSIONS} --trials {TRIALS} --electrodes {ELECTRODES}")
    simulate_cohort(source, "b2t25", SESSIONS, TRIALS, ELECTRODES, DIFFICULTY, SEED, force=False)
    step(2, f"arcuate prepare {source} {store}")
    prepare_store(source, store)
    step(3, f"arcuate train tiny --data {store} --run {run} {' '.join(overrides)}")
    train_run(Asked("tiny", overrides, store, run))
    step(4, f"arcuate evaluate {run} --split val")
    summary = evaluate_run(Run(run), "val", None, "best", None, None)
    step(5, f"arcuate report {run}")
    page = write_report(Run(run))

    seconds = time.perf_counter() - started
    if as_json:
        emit_json({**summary, "report": str(page), "seconds": seconds})
        return
    show(Run(run), summary)
    out.print(f"Open {page} in a browser. All of it took {seconds:.0f} s.", soft_wrap=True)


def step(number: int, command: str) -> None:
    say(f"\n[{number}/5] {command.strip()}")


def clear_data(data: Path) -> None:
    """Remove what an earlier demo left here; anything else is not ours to remove."""
    if data.exists() and any(data.iterdir()):
        if not (data / MARK).exists():
            raise UserError(
                f"{data} was not made by the demo; move it away, or name another folder with --data"
            )
        shutil.rmtree(data)
    data.mkdir(parents=True, exist_ok=True)
    (data / MARK).touch()


def clear_run(run: Path, store: Path) -> None:
    """Remove an earlier demo's run: one that was trained on the demo's own store."""
    if not run.exists() or not any(run.iterdir()):
        return
    trained_on = Run(run).data() if Run(run).environment_file.is_file() else {}
    if Path(str(trained_on.get("path", ""))) != store.resolve():
        raise UserError(f"{run} was not made by the demo; move it away, or name another folder with --run")
    shutil.rmtree(run)
