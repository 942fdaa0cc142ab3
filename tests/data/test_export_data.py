"""Export of stores, and round trips through NWB."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from arcuate.config import parse_yaml
from arcuate.data.describe import describe_file
from arcuate.data.export import export_data
from arcuate.data.prepare import prepare
from arcuate.data.readers.nwb import EXPORTED
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.cli import assert_refused
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
    return [
        (t.id, t.block, t.n_bins, t.tokens, t.text, t.corpus, t.mode, t.sha256, store.read_stored(t).tobytes())
        for t in store.trials
    ]


def test_nwb_round_trip_is_exact(small: Store, tmp_path: Path) -> None:
    export_data(small, tmp_path / "nwb", to="nwb")
    again = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert content(again) == content(small)
    assert again.classes == small.classes and again.layout == small.layout and again.n_channels == small.n_channels
    assert again.hashes == small.hashes


def test_nwb_round_trip_of_characters(cohort_store: Path, tmp_path: Path) -> None:
    spelled = prepare(cohort_store.parent / "source", tmp_path / "spelled", targets="characters")
    export_data(spelled, tmp_path / "nwb")
    again = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert content(again) == content(spelled) and again.classes == spelled.classes


def test_exported_files_satisfy_the_schema(small: Store, tmp_path: Path) -> None:
    from pynwb import NWBHDF5IO, validate

    (file, _) = export_data(small, tmp_path / "nwb").files
    assert not validate(path=str(file))
    with NWBHDF5IO(file, "r") as io:
        read = io.read()
        trials = read.trials.to_dataframe()
        assert list(trials["text"])[:2] == ["Bring, number 0.", "Bring, number 1."]
        assert read.acquisition["bins"].data.shape == (sum(t.n_bins for t in small.trials) // 2, 6)


def test_nwbinspector_finds_nothing_critical(small: Store, tmp_path: Path) -> None:
    inspector = pytest.importorskip("nwbinspector", reason="nwbinspector is not installed")
    files = export_data(small, tmp_path / "nwb").files
    found = [m for file in files for m in inspector.inspect_nwbfile(nwbfile_path=str(file))]
    severe = [m for m in found if m.importance.name in ("ERROR", "PYNWB_VALIDATION", "CRITICAL")]
    assert not severe, severe


@pytest.mark.parametrize("layout", ["nwb", "falcon-h2"])
def test_simulated_files_satisfy_the_schema(layout: str, tmp_path: Path) -> None:
    from pynwb import validate

    simulate(tmp_path / "sim", layout=layout, n_sessions=1, n_trials=4, n_electrodes=4)
    files = sorted((tmp_path / "sim").rglob("*.nwb"))[:2]
    assert files and not any(validate(path=str(file)) for file in files)
    inspector = pytest.importorskip("nwbinspector", reason="nwbinspector is not installed")
    found = [m for file in files for m in inspector.inspect_nwbfile(nwbfile_path=str(file))]
    assert not [m for m in found if m.importance.name in ("ERROR", "PYNWB_VALIDATION", "CRITICAL")]


def test_an_export_is_described(small: Store, tmp_path: Path) -> None:
    file = export_data(small, tmp_path / "nwb").files[0]
    found = describe_file(file)
    assert found.mapping == EXPORTED and "acquisition/bins/data" in {e.path for e in found.entries}
    assert "text: text" in found.mapping_text()


def read_mapping(text: str) -> dict:
    found = parse_yaml(text)
    assert isinstance(found, dict)
    return found


def test_features_with_the_same_bins_are_joined(tmp_path: Path) -> None:
    simulate(tmp_path / "sim", layout="nwb", n_sessions=1, n_trials=4, n_electrodes=4)
    file = next((tmp_path / "sim" / "nwb").glob("*.nwb"))
    found = describe_file(file)
    assert found.mapping is not None
    assert found.mapping.bins == ("acquisition/threshold_crossings", "acquisition/spike_band_power")
    assert not any(entry.path.startswith("specifications/") for entry in found.entries) and found.notes == ()
    written = parse_yaml((file.parent / "mapping.yaml").read_text("utf-8"))
    assert isinstance(written, dict) and tuple(written["bins"]) == found.mapping.bins


def write_units(path: Path) -> list[list[float]]:
    """A file as other labs write it: spike times, a trials table with other names, no splits."""
    from datetime import UTC, datetime

    from pynwb import NWBHDF5IO, NWBFile

    file = NWBFile("test", "id", datetime(2024, 5, 1, tzinfo=UTC))
    spikes = [[0.001, 0.015, 0.021, 1.0], [0.5, 0.505, 1.0199]]
    for times in spikes:
        file.add_unit(spike_times=times)
    file.add_trial_column("sentence", "cued sentence")
    file.add_trial_column("block_number", "block")
    for i in range(10):
        file.add_trial(start_time=0.0, stop_time=1.04, sentence=f"the cat {i}", block_number=1 + i // 5)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NWBHDF5IO(path, "w") as io:
        io.write(file)
    return spikes


def test_units_are_binned_by_a_mapping(tmp_path: Path) -> None:
    write_units(tmp_path / "lab" / "sub-01_ses-20240501.nwb")
    mapping = describe_file(tmp_path / "lab" / "sub-01_ses-20240501.nwb").mapping
    assert mapping is not None and mapping.units == "units" and mapping.text == "sentence"
    store = prepare(tmp_path / "lab", tmp_path / "store", layout="nwb", mapping=mapping.model_dump())
    assert [t.split for t in store.trials] == ["train"] * 8 + ["val", "test"]
    bins = store.read_bins(store.trials[0])
    assert bins.shape == (52, 2) and bins[:, 0].nonzero()[0].tolist() == [0, 1, 50] and bins[0, 0] == 2
    assert bins[:, 1].nonzero()[0].tolist() == [25, 50] and bins[25, 1] == 2
    assert store.trials[0].text == "the cat 0" and store.trials[5].block == 2 and store.trials[0].tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bins": ["acquisition/nothing"]}, "acquisition/nothing is missing"),
        ({"bins": []}, "bins or units"),
        ({"text": "sentense"}, "sentense"),
        ({"txt": "cue"}, "txt"),
        ({"trials": "intervals/epochs"}, "intervals/epochs is missing"),
    ],
)
def test_wrong_mappings_are_explained(small: Store, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    export_data(small, tmp_path / "nwb")
    mapping = EXPORTED.model_dump(mode="json") | change
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb", mapping=mapping)


@pytest.mark.parametrize(("place", "is_external"), [("acquisition/bins", True), ("intervals/trials/text", False)])
def test_links_are_refused(small: Store, tmp_path: Path, place: str, is_external: bool) -> None:
    files = export_data(small, tmp_path / "nwb").files
    with h5py.File(files[0], "r+") as data:
        data.move(place, "elsewhere")
        data[place] = h5py.ExternalLink(str(files[1]), f"/{place}") if is_external else h5py.SoftLink("/elsewhere")
    store = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert store.sessions == ("t15.2023.09.01",) and store.report.unreadable
    assert all("link" in row.detail for row in store.report.unreadable), store.report.unreadable


@pytest.mark.parametrize("field", ["text", "tokens", "block", "split", "number", "corpus", "mode"])
def test_a_column_that_is_named_and_absent_is_refused(small: Store, tmp_path: Path, field: str) -> None:
    file = export_data(small, tmp_path / "nwb").files[0]
    mapping = EXPORTED.model_dump(mode="json")
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb", mapping=mapping | {field: "absent"})
    message = str(caught.value)
    assert f"{field}: absent" in message and str(file) in message and "start_time" in message
    assert f"set {field}: null" in message and not (tmp_path / "store").exists()
    prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb", mapping=mapping | {field: None})


def test_an_export_without_optional_columns_is_read(small: Store, tmp_path: Path) -> None:
    """The default mapping names columns that the user did not."""
    for file in export_data(small, tmp_path / "nwb").files:
        with h5py.File(file, "r+") as data:
            del data["intervals/trials/corpus"], data["intervals/trials/mode"]
    store = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb")
    assert [t.sha256 for t in store.trials] == [t.sha256 for t in small.trials]


def test_times_that_do_not_increase_are_reported(small: Store, tmp_path: Path) -> None:
    file = export_data(small, tmp_path / "nwb").files[0]
    with h5py.File(file, "r+") as data:
        data["acquisition/bins/timestamps"][5] = 0.0
    report = prepare(tmp_path / "nwb", tmp_path / "store", layout="nwb").report
    assert report is not None and "do not increase" in report.unreadable[0].detail


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


def two_trials(folder: Path, **label: Any) -> Store:
    trials = [FakeTrial(noise(30, 6, seed=i), **label) for i in range(2)]
    write_hdf5(folder / "source" / "t15.2023.08.11" / "data_train.hdf5", trials)
    return prepare(folder / "source", folder / "store")


def test_nwb_round_trip_without_labels(tmp_path: Path) -> None:
    store = two_trials(tmp_path, tokens=None, text=None)
    export_data(store, tmp_path / "nwb", to="nwb")
    assert content(prepare(tmp_path / "nwb", tmp_path / "again", layout="nwb")) == content(store)


def test_brainsets_files_hold_text_as_utf_8(tmp_path: Path) -> None:
    temporaldata = pytest.importorskip("temporaldata", reason="temporaldata is not installed")
    file = export_data(two_trials(tmp_path, text="naïve"), tmp_path / "out", to="brainsets").files[0]
    with h5py.File(file, "r") as stored:
        texts = temporaldata.Data.from_hdf5(stored, lazy=False).trials.text
    assert [t.decode() if isinstance(t, bytes) else str(t) for t in texts] == ["naïve", "naïve"]


def test_brainsets_files_load_with_temporaldata(small: Store, tmp_path: Path) -> None:
    temporaldata = pytest.importorskip("temporaldata", reason="temporaldata is not installed")
    file = export_data(small, tmp_path / "out", to="brainsets").files[0]
    with h5py.File(file, "r") as stored:
        data = temporaldata.Data.from_hdf5(stored, lazy=False)
    trials = [t for t in small.trials if t.session == "t15.2023.08.11"]
    np.testing.assert_array_equal(data.bins.values, np.concatenate([small.read_stored(t) for t in trials]))
    assert data.session.id == "t15.2023.08.11" and len(data.trials) == len(trials)
    first = data.slice(float(data.trials.start[0]), float(data.trials.end[0]))
    assert len(first.bins) == trials[0].n_bins


def test_parquet_has_one_row_per_trial(small: Store, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    result = export_data(small, tmp_path / "out", to="parquet")
    table = parquet.read_table(tmp_path / "out" / "trials.parquet")
    assert table.column("trial").to_pylist() == [t.id for t in small.trials]
    assert table.column("text").to_pylist() == [t.text for t in small.trials]
    assert json.loads(table.schema.metadata[b"arcuate"])["classes"] == list(small.classes)
    arrays = np.load(result.files[0])
    assert arrays["bins"][: arrays["ends"][0]].tobytes() == small.read_stored(small.trials[0]).tobytes()


def test_exports_do_not_overwrite(small: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for force in (False, True):
        with pytest.raises(UserError, match="exists"):
            export_data(small, tmp_path / "mine", force=force)
    with pytest.raises(UserError, match="nwb, brainsets, parquet"):
        export_data(small, tmp_path / "new", to="csv")
    export_data(small, tmp_path / "new", to="parquet")
    export_data(small, tmp_path / "new", to="parquet", force=True)


def test_describe_on_the_command_line(small: Store, tmp_path: Path) -> None:
    file = export_data(small, tmp_path / "nwb").files[0]
    with h5py.File(file, "r+") as data:
        data["acquisition"].create_dataset("x\ntext: other", data=[1])  # stays in its comment
    done = arcuate("prepare", file, "--describe")
    assert "acquisition/bins/data" in done.stdout and "text: text" in done.stdout
    assert read_mapping(done.stdout) == EXPORTED.model_dump(mode="json")  # the output is a mapping file
    shown = json.loads(arcuate("prepare", file, "--describe", "--json").stdout)
    assert shown["mapping"]["text"] == "text"
    assert_refused(arcuate("prepare", file, tmp_path / "other.nwb", "--describe"), "--describe takes one file")
