"""Recordings as NWB, and exports of stores: round trips, mappings, damaged files."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from arcuate.data.export import export_data
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.command import arcuate
from support.recordings import FakeTrial, noise, write_hdf5

pytest.importorskip("pynwb", reason="pynwb is not installed")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two sessions with unusual trials: NaN, empty, without label, without text."""
    folder = tmp_path_factory.mktemp("small")
    bins = [noise(30 + 7 * i, 6, seed=i) for i in range(5)]
    bins[1][3, 2] = np.nan
    bins[2] = bins[2][:0]
    for session in ("t15.2023.08.11", "t15.2023.09.01"):
        trials = [FakeTrial(values, block=3 + i // 2, text=f"Bring, number {i}.") for i, values in enumerate(bins)]
        trials[4].tokens = None
        write_hdf5(folder / "source" / session / "data_train.hdf5", trials)
        unlabelled = [FakeTrial(noise(25, 6, seed=9), tokens=None, text=None)]
        write_hdf5(folder / "source" / session / "data_test.hdf5", unlabelled)
    return prepare(folder / "source", folder / "store")


def content(store: Store) -> list[tuple[Any, ...]]:
    """Everything that a round trip has to keep; NaN compares by its bits."""
    return [(t, store.read_stored(t).tobytes()) for t in store.trials]


@pytest.fixture(scope="module")
def exported(small: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_data(small, tmp_path_factory.mktemp("exported") / "nwb", experimenter="Ada", institution="A lab").path


def test_round_trip_is_exact(small: Store, exported: Path, tmp_path: Path) -> None:
    again = prepare(exported, tmp_path / "store", layout="nwb")
    assert content(again) == content(small) and again.hashes == small.hashes
    assert (again.classes, again.layout, again.n_channels) == (small.classes, small.layout, small.n_channels)


def test_round_trip_of_characters(cohort_store: Path, tmp_path: Path) -> None:
    spelled = prepare(cohort_store.parent / "source", tmp_path / "spelled", targets="characters")
    export_data(spelled, tmp_path / "nwb")
    again = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert content(again) == content(spelled) and again.classes == spelled.classes


def test_exported_files_satisfy_the_schema(small: Store, exported: Path) -> None:
    from pynwb import NWBHDF5IO, validate

    files, identifiers = sorted(exported.glob("*.nwb")), set()
    for file in files:
        assert not validate(path=str(file))
        with NWBHDF5IO(file, "r") as io:
            read = io.read()
            identifiers.add(read.identifier)
            assert list(read.trials.to_dataframe()["text"])[:2] == ["Bring, number 0.", "Bring, number 1."]
            assert read.acquisition["bins"].data.shape == (sum(t.n_bins for t in small.trials) // 2, 6)
            assert read.acquisition["bins"].data.compression == "gzip"
            assert (list(read.experimenter), read.institution) == (["Ada"], "A lab")
    assert len(identifiers) == 2 and all(str(small.hashes["train"])[:8] in name for name in identifiers)
    inspector = pytest.importorskip("nwbinspector", reason="nwbinspector is not installed")
    found = [m for file in files for m in inspector.inspect_nwbfile(nwbfile_path=str(file))]
    assert not [m for m in found if m.importance.name in ("ERROR", "PYNWB_VALIDATION", "CRITICAL")]


# --- mappings -----------------------------------------------------------------------------------------------


def write_units(path: Path) -> None:
    """A file as other labs write it: spike times, a trials table with other names, no splits."""
    from pynwb import NWBHDF5IO, NWBFile

    file = NWBFile("test", "id", datetime(2024, 5, 1, tzinfo=UTC))
    for times in ([0.001, 0.015, 0.021, 1.0], [0.5, 0.505, 1.0199]):
        file.add_unit(spike_times=times)
    file.add_trial_column("sentence", "cued sentence")
    file.add_trial_column("block_number", "block")
    for i in range(10):
        file.add_trial(start_time=0.0, stop_time=1.04, sentence=f"the cat {i}", block_number=1 + i // 5)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NWBHDF5IO(path, "w") as io:
        io.write(file)


def test_units_are_binned_by_a_guessed_mapping(tmp_path: Path) -> None:
    write_units(tmp_path / "lab" / "sub-01_ses-20240501.nwb")
    store = prepare(tmp_path / "lab", tmp_path / "store", layout="nwb")
    assert store.report.mapping is not None
    assert (store.report.mapping["bins"], store.report.mapping["text"]) == ([], "sentence")
    assert [t.split for t in store.trials] == ["train"] * 8 + ["val", "test"]
    bins = store.read_bins(store.trials[0])
    assert bins.shape == (52, 2) and bins[:, 0].nonzero()[0].tolist() == [0, 1, 50] and bins[0, 0] == 2
    assert bins[:, 1].nonzero()[0].tolist() == [25, 50] and bins[25, 1] == 2
    assert store.trials[0].text == "the cat 0" and store.trials[5].block == 2 and store.trials[0].tokens


def test_a_dry_run_prints_the_mapping_to_edit(tmp_path: Path) -> None:
    write_units(tmp_path / "lab" / "sub-01_ses-20240501.nwb")
    printed = arcuate("prepare", tmp_path / "lab", "--layout", "nwb", "--dry-run")
    assert printed.returncode == 0 and "nothing was written" in printed.stdout
    lines = printed.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("bins:"))
    mapping = yaml.safe_load("\n".join(line for line in lines[start:] if ": " in line and not line.startswith("nwb:")))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**mapping, "text": None}), "utf-8")
    report = prepare(tmp_path / "lab", layout=str(tmp_path / "mine.yaml"), dry_run=True).report
    assert report.trials == 10 and {row.reason for row in report.quality} == {"no label"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bins": ["acquisition/nothing"]}, "acquisition/nothing is missing; its time series are acquisition/bins"),
        ({"bins": []}, "it has no units"),
        ({"text": "sentense"}, "no column sentense, only start_time"),
        ({"txt": "cue"}, "txt"),
    ],
)
def test_wrong_mappings_are_explained(exported: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    mapping = {"bins": ["acquisition/bins"], "text": "text", "tokens": "tokens", "block": "block", "split": "split"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**mapping, **change}), "utf-8")
    with pytest.raises(UserError, match=message):
        prepare(exported, tmp_path / "store", layout=str(tmp_path / "mine.yaml"))


def test_damaged_and_hostile_files_are_unreadable(exported: Path, tmp_path: Path) -> None:
    """A link to another file, times that do not increase, and something else; optional columns may be missing."""
    shutil.copytree(exported, tmp_path / "nwb")
    first, second = sorted((tmp_path / "nwb").glob("*.nwb"))
    shutil.copy(first, first.with_name("t15.2023.10.01.nwb"))
    (tmp_path / "nwb" / "t15.2023.11.01.nwb").write_bytes(b"text")
    with h5py.File(first, "r+") as data:
        data.move("acquisition/bins", "elsewhere")
        data["acquisition/bins"] = h5py.ExternalLink(str(second), "/acquisition/bins")
    with h5py.File(first.with_name("t15.2023.10.01.nwb"), "r+") as data:
        data["acquisition/bins/timestamps"][5] = 0.0
    with h5py.File(second, "r+") as data:
        table = data["intervals/trials"]
        del table["corpus"], table["mode"]
        table.attrs["colnames"] = [name for name in table.attrs["colnames"] if name not in ("corpus", "mode")]
    store = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert store.sessions == ("t15.2023.09.01",) and len(store.trials) == 6
    details = {row.trial: row.detail for row in store.report.unreadable}
    for session, words in (("08.11", "link"), ("10.01", "do not increase"), ("11.01", "")):
        assert words in details[f"t15.2023.{session}/train"]


def test_no_file_or_no_nwb_file(tmp_path: Path) -> None:
    (tmp_path / "bad.nwb").write_bytes(b"text")
    for path, message in ((tmp_path / "nowhere", "no file or folder"), (tmp_path, "no NWB file can be read: .*bad")):
        with pytest.raises(UserError, match=message):
            prepare(path, tmp_path / "store", layout="nwb")


# --- exports -------------------------------------------------------------------------------------------------


def test_brainsets_files_load_with_temporaldata(small: Store, tmp_path: Path) -> None:
    temporaldata = pytest.importorskip("temporaldata", reason="temporaldata is not installed")
    file = export_data(small, tmp_path / "out", to="brainsets").files[0]
    with h5py.File(file, "r") as stored:
        data = temporaldata.Data.from_hdf5(stored, lazy=False)
    trials = [t for t in small.trials if t.session == "t15.2023.08.11"]
    np.testing.assert_array_equal(data.bins.values, np.concatenate([small.read_stored(t) for t in trials]))
    assert data.session.id == "t15.2023.08.11" and len(data.trials) == len(trials)
    assert [text.decode() if isinstance(text, bytes) else text for text in data.trials.text][1] == "Bring, number 1."
    first = data.slice(float(data.trials.start[0]), float(data.trials.end[0]))
    assert len(first.bins) == trials[0].n_bins


def test_brainsets_files_are_a_dataset_of_torch_brain(small: Store, tmp_path: Path) -> None:
    """Seen with torch_brain 0.2.1, which requires ray and is therefore in no extra."""
    datasets = pytest.importorskip("torch_brain.datasets", reason="torch_brain is not installed")
    export_data(small, tmp_path / "speech", to="brainsets")
    dataset = datasets.Dataset(tmp_path / "speech")
    assert dataset.recording_ids == sorted(small.sessions)
    session = dataset.recording_ids[0]
    first = dataset.get_recording(session).trials
    sample = dataset[datasets.DatasetIndex(session, float(first.start[0]), float(first.end[0]))]
    trial = next(t for t in small.trials if t.session == session)
    assert len(sample.bins.timestamps) == trial.n_bins and len(sample.trials) == 1


def test_exports_do_not_overwrite(small: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="exists"):
        export_data(small, tmp_path / "mine")
    with pytest.raises(UserError, match="nwb or brainsets"):
        export_data(small, tmp_path / "new", to="csv")
    export_data(small, tmp_path / "new", to="nwb")
    export_data(small, tmp_path / "new", to="nwb")
