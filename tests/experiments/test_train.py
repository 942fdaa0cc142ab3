"""`train` as a library function: arguments, result, callbacks and interruption."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import arcuate
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.run import find_checkpoint, open_run
from arcuate.training.callbacks import Callback, Stop

SMALL: dict[str, Any] = {
    "encoder.width": 16,
    "train.steps": 4,
    "train.log_every": 2,
    "train.validate_every": 2,
    "data.batching.batch_size": 4,
}


class StopAt(Callback):
    """Callback that requests a stop at one step."""

    def __init__(self, stop: Stop, at: int) -> None:
        self.stop, self.at = stop, at

    def on_step(self, step: int) -> None:
        if step == self.at:
            self.stop.request()


def test_the_result_is_accepted_as_a_run(cohort_store: Path, tmp_path: Path) -> None:
    result = arcuate.train("tiny", Store.open(cohort_store), tmp_path / "run", overrides=SMALL)
    assert open_run(result) == result.run == open_run(str(tmp_path / "run"))
    assert find_checkpoint(result, "last").name == "step-00000004"
    assert arcuate.evaluate(result, split="val").metrics.per == pytest.approx(result.best_per)
    assert (result.steps, result.interrupted, result.signal) == (4, False, None)
    assert set(result.to_dict()) == {
        *("run", "recipe", "n_parameters", "steps", "best_per", "best_wer", "best_step", "selected_on", "rewinds"),
        *("seconds", "target"),
    }


def test_recipe_objects_and_both_forms_of_overrides_train_alike(cohort_store: Path, tmp_path: Path) -> None:
    listed = [f"{key}={value}" for key, value in SMALL.items()]
    results = [
        train("tiny", cohort_store, tmp_path / "a", overrides=SMALL),
        train("tiny", cohort_store, tmp_path / "b", overrides=listed),
        train(load_recipe("tiny", SMALL), str(cohort_store), str(tmp_path / "c")),
    ]
    assert len({result.best_per for result in results}) == 1
    assert results[0].recipe == results[1].recipe == results[2].recipe


def test_overrides_as_one_text_are_rejected(cohort_store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\['train.steps=4'\]"):
        train("tiny", cohort_store, tmp_path / "run", overrides="train.steps=4")


def test_a_callback_stops_training_with_a_checkpoint(cohort_store: Path, tmp_path: Path) -> None:
    stop, run = Stop(), tmp_path / "run"
    first = train("tiny", cohort_store, run, overrides=SMALL, callbacks=[StopAt(stop, 2)], stop=stop)
    assert (first.steps, first.interrupted, first.signal) == (3, True, None)
    assert find_checkpoint(first, "last").name == "step-00000003"
    resumed = train("tiny", cohort_store, run, overrides=SMALL, resume=True)
    assert (resumed.steps, resumed.interrupted) == (4, False)
    straight = train("tiny", cohort_store, tmp_path / "straight", overrides=SMALL)
    assert resumed.best_per == straight.best_per


def test_signals_interrupt_and_their_handlers_are_restored(cohort_store: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    class Interrupt(StopAt):
        def on_step(self, step: int) -> None:
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    callbacks = [Interrupt(Stop(), 2)]
    result = train("tiny", cohort_store, tmp_path / "run", overrides=SMALL, callbacks=callbacks)
    assert (result.interrupted, result.signal) == (True, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_training_runs_in_any_thread_and_reports_progress(
    cohort_store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int, str]] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            train(
                *("tiny", cohort_store, tmp_path / "run"),
                overrides=SMALL,
                progress=lambda done, total, what: seen.append((done, total, what)),
            )
        except BaseException as error:  # noqa: BLE001 (reported below)
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert seen == [(step, 4, "training") for step in (1, 2, 3, 4)]
    assert capfd.readouterr() == ("", "")
