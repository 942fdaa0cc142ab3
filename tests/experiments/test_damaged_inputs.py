"""Training and evaluation with damaged, modified or exchanged stores and runs."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import arcuate as package
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.train import train
from arcuate.insight.report import write_report
from arcuate.models.io import load_model
from arcuate.run import Run, open_run
from arcuate.training.start import check_same_data
from support.official_checkpoints import write_nejm
from support.stores import edit_manifest

FEW = ("train.steps=2", "train.validate_every=2", "train.log_every=1", "train.checkpoint_every=1")


@pytest.fixture(scope="module")
def trained(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "run"
    train("tiny", cohort_store, path, overrides=FEW)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may modify."""
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


@pytest.fixture
def store(cohort_store: Path, tmp_path: Path) -> Path:
    """A copy that a test may modify."""
    return Path(shutil.copytree(cohort_store, tmp_path / "store"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- files whose content has another shape ---------------------------------------------------------------


@pytest.mark.parametrize("data", [[], "here", 5, None])
def test_malformed_environment_is_rejected(run: Path, data: object) -> None:
    edit(run / "environment.json", data=data)
    with pytest.raises(UserError, match=r"environment\.json"):
        evaluate(run)
    with pytest.raises(UserError, match=r"environment\.json"):
        check_same_data(Run(run), {"data": {"hashes": {}}})


# --- content that changed --------------------------------------------------------------------------------


def spoil_session(store: Path) -> str:
    """Change every value of the first session behind the manifest's back."""
    session = Store.open(store).sessions[0]
    bins = np.load(store / "sessions" / f"{session}.npy", mmap_mode="r+")
    bins += 1
    bins.flush()
    return session


def test_modified_store_is_neither_scored_nor_trained_on(run: Path, store: Path) -> None:
    session = spoil_session(store)
    with pytest.raises(UserError, match=f"{session}/val/.*prepare"):
        evaluate(run, data=store)
    for resume, path in ((True, run), (False, run.with_name("new"))):
        with pytest.raises(UserError, match=f"{session}/train/.*prepare"):
            train("tiny", store, path, overrides=FEW, resume=resume)


def test_different_store_is_not_resumed_and_reported_at_scoring(run: Path, store: Path, messages: list[str]) -> None:
    edit_manifest(store, '"split": "train", "number": 0, "block": ', '"split": "train", "number": 0, "block": 9')
    with pytest.raises(UserError, match="different data"):
        train("tiny", store, run, overrides=FEW, resume=True)
    same = evaluate(run).to_dict()
    messages.clear()
    other = evaluate(run, data=store).to_dict()
    assert (same["data_differ_in"], other["data_differ_in"]) == ([], ["train"])
    (message,) = [m for m in messages if "the train trials of" in m]
    assert "differ" in message


# --- another store ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sessions of which the first three bear the names of the cohort's."""
    folder = tmp_path_factory.mktemp("other")
    options = {"n_trials": 10, "n_electrodes": 16, "difficulty": "easy", "seed": 6}
    simulate(folder / "source", layout="b2t25", n_sessions=6, **options)  # type: ignore[arg-type]
    prepare(folder / "source", folder / "store")
    return folder / "store"


def test_additional_trials_of_another_store_are_counted(run: Path, other_store: Path, messages: list[str]) -> None:
    store, known = Store.open(other_store), set(Store.open(Run(run).data()["path"]).sessions)
    unknown = [t for t in store.trials if t.split == "val" and t.session not in known]
    sessions = list(dict.fromkeys(t.session for t in unknown))
    assert unknown and len(sessions) < len(store.sessions)
    summary = evaluate(run, data=other_store).to_dict()
    assert summary["left_out"] == {"trials": len(unknown), "sessions": sessions}
    assert any(f"{len(unknown)} val trials" in message and sessions[0] in message for message in messages)
    assert summary["n_trials"] == sum(t.split == "val" for t in store.trials) - len(unknown)


# --- a model that was imported ---------------------------------------------------------------------------


@pytest.fixture
def imported(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of `arcuate import` and a store of the same sessions and channels."""
    from arcuate.models.import_checkpoint import import_checkpoint

    write_nejm(tmp_path / "official")
    config = load_model(import_checkpoint(tmp_path / "official", tmp_path / "model", "nejm").model).config
    sessions, n_channels = config.sessions, config.n_channels
    from support.recordings import FakeTrial, noise, write_hdf5

    for i, session in enumerate((*sessions, "t15.2030.01.01")):
        for split in ("train", "val"):
            made = [FakeTrial(noise(80, n_channels, seed=10 * i + n)) for n in range(3)]
            write_hdf5(tmp_path / "source" / session / f"data_{split}.hdf5", made)
    prepare(tmp_path / "source", tmp_path / "store")
    return tmp_path / "model", tmp_path / "store"


def test_imported_model_is_scored(imported: tuple[Path, Path]) -> None:
    folder, store = imported
    with pytest.raises(UserError, match="--data STORE"):
        evaluate(folder)
    summary = evaluate(folder, data=store).to_dict()
    n_sessions = len(package.load(folder).sessions)
    assert summary["n_trials"] == 3 * n_sessions and summary["per"] is not None
    assert summary["left_out"] == {"trials": 3, "sessions": ["t15.2030.01.01"]}
    assert (summary["selected_on"], summary["data_differ_in"]) == (None, None)
    assert len((folder / "results" / "val.jsonl").read_text().splitlines()) == summary["n_trials"]
    assert write_report(open_run(folder)).is_file()


# --- devices and YAML ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "toaster", ""])
def test_unknown_device_is_rejected(run: Path, device: str) -> None:
    with pytest.raises(UserError, match="device"):
        package.load(run, device=device)


def test_invalid_date_does_not_prevent_a_report(run: Path) -> None:
    with (run / "recipe.yaml").open("a") as file:
        file.write("noted: 2024-13-45\n")
    assert write_report(Run(run)).is_file()


# --- the log -----------------------------------------------------------------------------------------------


def test_documented_log_fields_are_complete(trained: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    section = page[page.index("## Rows of metrics.jsonl") : page.index("## Run folder")]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    written = {"step", "split"}
    for row in Run(trained).metrics():
        for name, value in row.items():
            deep = isinstance(value, dict) and name in ("losses", "cost")
            written |= {f"{name}.{inner}" for inner in value} if deep else {name}
    assert set(re.findall(r"`([\w.]+)`", cells)) | {"step", "split"} == written


def test_modified_weights_are_rejected(run: Path) -> None:
    weights = (run / "checkpoints" / "best").resolve() / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[5000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        evaluate(run)
    with pytest.raises(UserError, match="damaged"):
        package.load(run)


def test_model_with_invalid_state_is_rejected(run: Path) -> None:
    ((run / "checkpoints" / "best").resolve() / "state.json").write_text('{"files": []}')
    with pytest.raises(UserError, match="damaged"):
        package.load(run)
