"""`arcuate demo`: the whole path on simulated data, in the same steps a user would take."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from arcuate.cli.console import emit_json, out, progress, say
from arcuate.cli.decode import print_transcription
from arcuate.cli.evaluate import print_evaluation
from arcuate.cli.prepare import leakage_line, print_summary
from arcuate.cli.watch import TrainingDisplay
from arcuate.data.prepare import prepare_store
from arcuate.data.simulation import simulate
from arcuate.errors import UserError
from arcuate.evaluation.decode import decode
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.transcribe import Transcript
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.insight.report import write_report
from arcuate.models.runtime import choose_device
from arcuate.run import Run
from arcuate.training.tracking.tracker import check_trackers

MARK = ".made-by-demo"
SESSIONS, TRIALS, ELECTRODES, DIFFICULTY, SEED = 6, 250, 64, "real", 0


def run_demo(run: Path, data: Path, overrides: Sequence[str], as_json: bool) -> None:
    started = time.perf_counter()
    source, store = data / "source", data / "store"
    recipe = load_recipe("tiny", overrides)  # mistakes are told before anything is removed
    check_trackers(recipe.track)
    choose_device(recipe.runtime.device)
    check_places(run, data)
    refuse_foreign(run, data)
    clear(run, data)

    step(1, f"arcuate simulate {source} --sessions {SESSIONS} --trials {TRIALS} --electrodes {ELECTRODES}")
    with progress("simulating trials") as report:
        simulate(
            source,
            n_sessions=SESSIONS,
            n_trials=TRIALS,
            n_electrodes=ELECTRODES,
            difficulty=DIFFICULTY,
            seed=SEED,
            progress=report,
        )
    step(2, f"arcuate prepare {source} {store}")
    with progress("preparing") as report:
        prepared = prepare_store(source, store, progress=report)
    print_summary(prepared, store)
    if prepared.leakage is not None:
        say(leakage_line(prepared.leakage))
    step(3, f"arcuate train tiny --data {store} --run {run} {' '.join(overrides)}")
    display = TrainingDisplay()
    train("tiny", store, run, overrides=overrides, callbacks=[display], progress=display.report)
    step(4, f"arcuate evaluate {run} --split val")
    with progress("scoring trials") as report:
        evaluation = evaluate(run, progress=report)
    words_file = Run(run).results_file("val", "words")
    step(5, f"arcuate decode {run} --out {words_file}")
    with progress("loading") as report:
        words = decode(run, out=words_file, n_best=5, progress=report)
    step(6, f"arcuate report {run}")
    page = write_report(Run(run))

    seconds = time.perf_counter() - started
    if as_json:
        emit_json({**evaluation.to_dict(), "wer": words.wer, "report": str(page), "seconds": seconds})
        return
    print_evaluation(evaluation)
    show_candidates(words)
    print_transcription(words)
    out.print(f"Open {page} in a browser. All of it took {seconds:.0f} s.", soft_wrap=True)


def step(number: int, command: str) -> None:
    say(f"\n[{number}/6] {command.strip()}")


def show_candidates(transcripts: Sequence[Transcript]) -> None:
    """One sentence that was not easy: what was meant, and the readings in order with their scores."""
    open_ones = [t for t in transcripts if t.word_errors and t.word_errors.errors and len(t.n_best) > 1]
    example = (open_ones or list(transcripts))[0]
    out.print(f"\nmeant  {example.reference.text}", soft_wrap=True, markup=False)
    for rank, hypothesis in enumerate(example.n_best, 1):
        out.print(
            f"{rank:>5}  {hypothesis.text or '–'}  ({hypothesis.total:.1f})", soft_wrap=True, markup=False
        )
    out.print()


def check_places(run: Path, data: Path) -> None:
    """Both are folders, and neither is inside the other: each is replaced on its own."""
    for path, option in ((run, "--run"), (data, "--data")):
        if os.path.lexists(path) and not path.is_dir():
            raise UserError(f"{path} is not a folder; name another one with {option}")
    places = run.resolve(), data.resolve()
    if places[0] in (places[1], *places[1].parents) or places[1] in places[0].parents:
        raise UserError(f"--run {run} and --data {data} lie within one another; name two separate folders")


def refuse_foreign(run: Path, data: Path) -> None:
    """Only what an earlier demo made is replaced: its data bear a mark, its run was trained on them."""
    if data.exists() and any(data.iterdir()) and not (data / MARK).exists():
        raise UserError(f"{data} was not made by the demo; move it away, or name another folder with --data")
    if run.exists() and any(run.iterdir()):
        trained_on = Run(run).data() if Run(run).environment_file.is_file() else {}
        if Path(str(trained_on.get("path", ""))) != (data / "store").resolve():
            raise UserError(
                f"{run} was not made by the demo; move it away, or name another folder with --run"
            )


def clear(run: Path, data: Path) -> None:
    for folder in (run, data):
        if folder.exists():
            shutil.rmtree(folder)
    data.mkdir(parents=True)
    (data / MARK).touch()
