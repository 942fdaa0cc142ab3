"""Preparation: the report, the written store, and unreadable sources."""

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from arcuate.cli.show_data import prepare as print_report
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.recordings import FakeTrial, noise, write_hdf5, write_mat

SESSION = "t15.2023.08.11"
LATER = "t15.2023.08.13"


def bad_bins() -> np.ndarray:
    bins = noise(60)
    bins[0, 0] = np.nan
    return bins


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A good and a bad training trial, the bad one again in val, a test trial without label."""
    folder = tmp_path / "source"
    train = [FakeTrial(noise(60, seed=1)), FakeTrial(bad_bins(), text="Something else.")]
    write_hdf5(folder / SESSION / "data_train.hdf5", train)
    write_hdf5(folder / SESSION / "data_val.hdf5", [FakeTrial(bad_bins()), FakeTrial(noise(60, seed=2), text="No.")])
    write_hdf5(folder / SESSION / "data_test.hdf5", [FakeTrial(noise(60, seed=3), tokens=None)])
    write_hdf5(folder / LATER / "data_train.hdf5", [FakeTrial(noise(60, seed=4))])
    return folder


def test_the_report_has_the_keys_that_scripts_rely_on(source: Path, tmp_path: Path) -> None:
    found = json.loads(json.dumps(prepare(source, tmp_path / "store").report.to_dict()))
    assert (found["trials"], found["sessions"], found["n_channels"], found["layout"]) == (6, 2, 8, "b2t25")
    assert [(row["trial"], row["reason"], row["number"]) for row in found["rejected"]] == [
        (f"{SESSION}/train/0001", "non-finite", 1)
    ]
    assert [row["trial"] for row in found["flagged"]] == [f"{SESSION}/val/0000"]
    assert found["unreadable"] == []
    assert found["splits"]["train"] == {"trials": 3, "usable": 2, "n_bins": 180}


def test_every_case_is_in_quality_csv(source: Path, tmp_path: Path) -> None:
    report = prepare(source, tmp_path / "store").report
    with (tmp_path / "store" / "quality.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["trial"], row["action"]) for row in rows] == [
        (f"{SESSION}/train/0001", "rejected"),
        (f"{SESSION}/train/0001", "kept"),  # the label of another sentence
        (f"{SESSION}/val/0000", "flagged"),
        (f"{SESSION}/val/0001", "kept"),
    ]
    assert len(rows) == len(report.quality)


def test_the_same_source_twice_gives_the_same_store(source: Path, tmp_path: Path) -> None:
    reports = [prepare(source, tmp_path / name).report for name in ("a", "b")]
    assert reports[0].hashes == reports[1].hashes
    for name in ("manifest.json", "quality.csv", f"sessions/{SESSION}.npy", f"sessions/{SESSION}.npz"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_changed_value_changes_the_hash_of_its_split_alone(source: Path, tmp_path: Path) -> None:
    before = prepare(source, tmp_path / "a").report.hashes
    with h5py.File(source / SESSION / "data_val.hdf5", "a") as file:
        file["trial_0001/input_features"][0, 0] += 1
    after = prepare(source, tmp_path / "b").report.hashes
    assert {split for split in before if before[split] != after[split]} == {"val"}


def test_unreadable_files_are_reported_and_skipped(source: Path, tmp_path: Path) -> None:
    (source / LATER / "data_train.hdf5").write_bytes(b"broken")
    done = arcuate("prepare", source, tmp_path / "store", "--json")
    found = one_object(done.stdout)
    assert (done.returncode, found["trials"], found["sessions"]) == (1, 5, 1)
    assert [row["trial"] for row in found["unreadable"]] == [f"{LATER}/train"]
    assert f"{LATER}/train" in [row["trial"] for row in found["rejected"]]
    assert len(Store.open(tmp_path / "store").trials) == 5


def test_unreadable_trials_and_other_channel_counts_do_not_affect_the_others(source: Path, tmp_path: Path) -> None:
    write_hdf5(source / "t15.2023.09.01" / "data_train.hdf5", [FakeTrial(noise(60, 3))])
    with h5py.File(source / SESSION / "data_train.hdf5", "a") as file:
        del file["trial_0000/input_features"]
    report = prepare(source, tmp_path / "store").report
    assert [(row.trial, row.reason, row.detail) for row in report.unreadable] == [
        (f"{SESSION}/train/0000", "unreadable", "input_features is missing"),
        ("t15.2023.09.01/train/0000", "channel count", "3 channels, but the other trials have 8"),
    ]
    assert (report.n_channels, report.trials) == (8, 5)


@pytest.mark.parametrize("content", [b"broken", None])
def test_nothing_readable_writes_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", [])
    if content is not None:
        path.write_bytes(content)
    words = "the files contain no trials" if content is None else "data_train.hdf5"
    assert_refused(arcuate("prepare", tmp_path / "source", tmp_path / "store", "--json"), "no trial in", words)
    assert not (tmp_path / "store").exists()


def test_labels_of_other_sentences_are_reported(tmp_path: Path, messages: list[str]) -> None:
    texts = ["Bring.", "Bring.", "She sells shells."]
    trials = [FakeTrial(noise(60, seed=i), text=text) for i, text in enumerate(texts)]
    write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", trials)
    report = prepare(tmp_path / "source", tmp_path / "store").report
    (row,) = report.quality
    assert (row.trial, row.action) == (f"{SESSION}/train/0002", "kept")
    assert row.detail == "'She sells shells.' is labelled B R IH NG SIL"
    (warning,) = messages
    assert "1 of 3 labels contradict their sentence" in warning and "(33.3 %)" in warning
    done = arcuate("prepare", tmp_path / "source", tmp_path / "other", "--strict")
    assert_refused(done, "1 of 3 labels contradict their sentence")
    assert not (tmp_path / "other").exists()


def test_a_partial_download_differs_from_the_published_numbers(source: Path) -> None:
    checks = {check.what: check for check in prepare(source, dry_run=True).report.release}
    assert checks["sessions"].differs and (checks["sessions"].found, checks["sessions"].expected) == ("2", "45")
    assert checks["val trials"].expected == "1,426" and not checks["first session"].differs
    assert json.loads(arcuate("prepare", source, "--dry-run", "--json").stdout)["release"][0]["status"] == "differs"


def test_a_dry_run_counts_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    report = prepare(source, dry_run=True).report
    assert (report.trials, report.n_channels, report.written) == (6, 8, False)
    assert {split: counts["trials"] for split, counts in report.splits.items()} == {"train": 3, "val": 2, "test": 1}
    assert report.files[f"{SESSION}/val"] == 2
    done = arcuate("prepare", source, "--dry-run")
    assert done.returncode == 0 and "nothing was written" in done.stdout


def test_the_24_layout_is_prepared(tmp_path: Path) -> None:
    root = tmp_path / "competitionData"
    for partition in ("train", "test", "competitionHoldOut"):
        bins = [noise(60, 4, seed=len(partition) + i) for i in range(2)]
        write_mat(root / partition / "t12.2022.04.28.mat", bins, ["Bring it.", "Xyzzyqua."], [3, 4])
    report = prepare(tmp_path, tmp_path / "store").report
    store = Store.open(tmp_path / "store")
    assert (report.layout, store.n_channels, report.unreadable) == ("b2t24", 8, [])
    assert {(info.split, info.text) for info in store.trials} == {
        ("train", "Bring it."),
        ("train", "Xyzzyqua."),
        ("val", "Bring it."),
        ("val", "Xyzzyqua."),
        ("test", None),
    }
    assert [row.reason for row in report.rows("kept")] == ["unknown words"] * 2
    assert all(info.usable for info in store.trials)
    assert store.features == "tx1+spikePow:6v"


def test_wrong_paths_raise_user_errors(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "store")
    with pytest.raises(UserError, match="already a prepared store"):
        prepare(tmp_path / "store", tmp_path / "again")
    with pytest.raises(UserError, match="exists and is not a store"):
        prepare(source, source)
    with pytest.raises(UserError, match="cannot write"):
        prepare(source, Path("/proc/nowhere/store"))


def test_the_printed_tables_name_every_part(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / LATER / "data_train.hdf5").write_bytes(b"broken")
    print_report(prepare(source, tmp_path / "store").report, {"store": tmp_path / "store"})
    printed = capsys.readouterr()
    for part in ("train", "val", "test", "leakage", "non-finite", "excluded from training", "5 trials"):
        assert part in printed.out, part
    assert f"could not read {LATER}/train" in printed.err
