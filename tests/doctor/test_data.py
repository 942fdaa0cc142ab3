"""Faults in the data of a run are found and named; a sound store has none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.data.alphabet import SILENCE, token_names
from arcuate.data.store import Store
from arcuate.data.trial import Trial
from arcuate.doctor import check_data, diagnose
from arcuate.errors import UserError
from arcuate.files import write_jsonl
from arcuate.run import Run
from support.cli import NO_TORCH
from support.fabricate_runs import make_run
from support.stores import rewrite

Edit = Callable[[Trial], Trial]


def faulty_run(folder: Path, store: Path, chosen: Callable[[Trial], bool], edit: Edit) -> Run:
    """A healthy-looking run on a copy of the store in which some training trials were edited."""
    copy = rewrite(store, folder / "store", lambda t: edit(t) if t.split == "train" and chosen(t) else t)
    return make_run(folder / "run", data={"path": str(copy.path), "sessions": list(copy.sessions)})


def put_nan(trial: Trial) -> Trial:
    trial.bins[3, 2] = np.nan
    return trial


def silence(trial: Trial) -> Trial:
    return replace(trial, bins=np.zeros_like(trial.bins))


def pad(trial: Trial) -> Trial:
    return replace(trial, tokens=np.append(trial.tokens, [SILENCE] * 5))


def relabel(trial: Trial) -> Trial:
    return replace(trial, tokens=np.array([7, 9, 3, 12, 30, 22, SILENCE]))


def one_in_five(trial: Trial) -> bool:
    return trial.number % 5 == 0


def first_session(trial: Trial) -> bool:
    return trial.session == "sim.2023.08.11"


@pytest.mark.parametrize(
    ("edit", "chosen", "kind"),
    [
        (put_nan, one_in_five, "non-finite bins"),
        (silence, first_session, "dead session"),
        (silence, one_in_five, "dead trials"),
        (pad, one_in_five, "padded labels"),
        (relabel, one_in_five, "labels"),
    ],
)
def test_faults_are_named(
    tmp_path: Path, cohort_store: Path, edit: Edit, chosen: Callable[[Trial], bool], kind: str
) -> None:
    run = faulty_run(tmp_path, cohort_store, chosen, edit)
    diagnosis = diagnose(run.path, check_store=True)
    assert [fault.kind for fault in diagnosis.data_faults] == [kind]
    fault = diagnosis.data_faults[0]
    assert fault.severe and fault.trials
    assert diagnosis.causes[0].factor == f"data: {kind}"
    remedy = diagnosis.fix()
    assert not remedy
    assert "in the data" in remedy.message and fault.trials[0] in remedy.message


def test_sound_store_has_no_fault(tmp_path: Path, cohort_store: Path) -> None:
    run = faulty_run(tmp_path, cohort_store, lambda trial: False, put_nan)
    checked = check_data(run)
    assert checked.faults == ()
    assert checked.n_train == sum(t.split == "train" for t in Store.open(cohort_store).trials)


def test_missing_store_is_noted(tmp_path: Path) -> None:
    diagnosis = diagnose(make_run(tmp_path / "run").path, check_store=True)
    assert any("not checked" in note for note in diagnosis.notes)


def write_train_results(run: Run, store: Store, swapped: tuple[int, int] | None) -> tuple[str, ...]:
    """Results of the training split: every output equals its label, except for two trials that are exchanged."""
    trials = [t for t in store.trials if t.split == "train" and t.tokens]
    outputs = [list(t.tokens or ()) for t in trials]
    if swapped:
        a, b = swapped
        outputs[a], outputs[b] = outputs[b], outputs[a]
    rows = [
        {"trial": t.id, "session": t.session, "reference": token_names(t.tokens or ()), "hypothesis": token_names(o)}
        for t, o in zip(trials, outputs, strict=True)
    ]
    write_jsonl(run.results_file("train"), rows)
    return tuple(trials[i].id for i in swapped) if swapped else ()


def test_exchanged_labels_are_found_in_the_results_of_the_training_split(tmp_path: Path, cohort_store: Path) -> None:
    run = faulty_run(tmp_path, cohort_store, lambda trial: False, put_nan)
    store = Store.open(cohort_store)
    write_train_results(run, store, None)
    checked = check_data(run)
    assert checked.faults == () and "no label contradicts the output" in checked.notes[-1]
    ids = write_train_results(run, store, (1, 8))
    fault = check_data(run).faults[0]
    assert (fault.kind, set(fault.trials), fault.severe) == ("suspected labels", set(ids), False)
    assert f"{ids[0]} that of {ids[1]}" in fault.sentence


@pytest.mark.parametrize("options", [{"check_labels": True}, {"data": "store"}])
def test_data_of_a_log_without_a_run_folder_cannot_be_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    log = make_run(tmp_path / "run").metrics_file
    with pytest.raises(UserError, match="not an arcuate run folder"):
        diagnose(log, check_store=True, **options)


def test_store_is_checked_without_torch(tmp_path: Path, cohort_store: Path) -> None:
    import subprocess
    import sys

    run = faulty_run(tmp_path, cohort_store, one_in_five, put_nan)
    code = NO_TORCH.format(arguments=["doctor", str(run.path)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NaN or infinite bins" in " ".join(done.stdout.split())
