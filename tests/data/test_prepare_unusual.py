"""Preparation of unusual sources: invalid UTF-8, renamed files, folders without permission, dangling links."""

import csv
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from arcuate.cli.prepare import print_report
from arcuate.data.prepare import PrepareReport, prepare
from arcuate.data.readers.release import DESCRIPTION_FILE, TRUTH_FILE, find_release
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.recordings import LABEL, FakeTrial, noise, write_hdf5, write_mat

SESSION, LATER = "t15.2023.08.11", "t15.2023.08.13"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for seed, session in enumerate((SESSION, LATER)):
        write_hdf5(folder / session / "data_train.hdf5", [FakeTrial(noise(seed=seed))])
    return folder


def actions(report: PrepareReport) -> dict[str, str]:
    return {row.trial: row.action for row in report.quality}


def table(store: Path) -> list[dict[str, str]]:
    with (store / "quality.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


# --- invalid UTF-8 ---------------------------------------------------------------------------------------


def set_label(path: Path, value: bytes) -> None:
    """A variable-length attribute declared as UTF-8 that is not UTF-8."""
    with h5py.File(path, "a") as file:
        del file["trial_0000"].attrs["sentence_label"]
        attributes = file["trial_0000"].attrs
        attributes.create("sentence_label", value, dtype=h5py.string_dtype("utf-8"))


@pytest.mark.parametrize("fixed", [False, True])
def test_invalid_utf8_in_a_sentence_is_replaced_and_reported(source: Path, tmp_path: Path, fixed: bool) -> None:
    path = source / SESSION / "data_train.hdf5"
    if fixed:
        with h5py.File(path, "a") as file:
            file["trial_0000"].attrs["sentence_label"] = np.bytes_(b"caf\xe9 now")
    else:
        set_label(path, b"caf\xe9 now")
    report = prepare(source, tmp_path / "store").report
    row = report.quality[0]
    assert (row.trial, row.reason, row.action) == (f"{SESSION}/train/0000", "text encoding", "kept")
    assert Store.open(tmp_path / "store").trials[0].text == "caf� now"


def test_invalid_character_codes_are_replaced_and_reported(source: Path, tmp_path: Path) -> None:
    with h5py.File(source / SESSION / "data_train.hdf5", "a") as file:
        del file["trial_0000"].attrs["sentence_label"]
        file["trial_0000"]["transcription"] = np.array([72, 0xD800, 105, 0, 0], dtype=np.int32)
    report = prepare(source, tmp_path / "store").report
    assert [row.reason for row in report.quality] == ["text encoding", "label differs from text"]
    assert Store.open(tmp_path / "store").trials[0].text == "H�i"


def test_an_entry_with_an_invalid_name_is_reported(source: Path, tmp_path: Path) -> None:
    with h5py.File(source / SESSION / "data_train.hdf5", "a") as file:
        file.create_group(b"not\xffes")
    report = prepare(source, tmp_path / "store").report
    (row,) = report.quality
    assert row.reason == "unexpected entry" and "not" in row.detail
    assert table(tmp_path / "store")[0]["detail"] == row.detail


def odd_folder(parent: Path) -> Path:
    """A folder with a name that is not UTF-8, if the file system allows one."""
    folder = Path(os.fsdecode(os.fsencode(parent) + b"/t15.\xff"))
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    return folder


def test_a_session_folder_with_an_invalid_name_is_unreadable_and_skipped(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hdf5(odd_folder(source) / "data_train.hdf5", [FakeTrial(noise(), attributes={"session": None})])
    report = prepare(source, tmp_path / "store").report
    found = json.loads(json.dumps(report.to_dict(), ensure_ascii=False).encode("utf-8"))
    assert found["trials"] == 2
    assert [row["trial"] for row in found["unreadable"]] == ["t15.�/train"]
    dry_run = prepare(source, dry_run=True).report
    print_report(dry_run, tmp_path / "dry")
    assert dry_run.unreadable and capsys.readouterr().out.encode("utf-8")


def test_a_mat_file_with_an_invalid_name_is_unreadable(tmp_path: Path) -> None:
    train = tmp_path / "c" / "train"
    path = write_mat(train / "t12.2022.04.28.mat", [noise()], ["Yes."])
    (train / os.fsdecode(b"t12.\xff.mat")).write_bytes(path.read_bytes())
    report = prepare(tmp_path / "c", tmp_path / "store").report
    assert actions(report) == {"t12.�/train": "missing"}


def test_an_invalid_mode_does_not_stop_preparation(source: Path, tmp_path: Path) -> None:
    row = {"session": SESSION, "split": "train", "number": 0, "mode": "\ud800silent"}
    (source / TRUTH_FILE).write_text(json.dumps(row) + "\n")
    prepare(source, tmp_path / "store")
    assert Store.open(tmp_path / "store").trials[0].mode == "�silent"


# --- renamed files ---------------------------------------------------------------------------------------


def test_renamed_data_files_are_reported_and_ignored(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data_val.h5", "data_dev.hdf5", "DATA_TEST.HDF5"):
        write_hdf5(source / SESSION / name, [FakeTrial(noise())])
    write_hdf5(source / "t15.2023.09.01" / "data_train.h5", [FakeTrial(noise())])
    (source / SESSION / "notes.txt").touch()
    report = prepare(source, tmp_path / "store").report
    print_report(report, tmp_path / "store")
    printed = capsys.readouterr()
    assert not report.unreadable
    expected = [f"{SESSION}/{name}" for name in ("DATA_TEST.HDF5", "data_dev.hdf5", "data_val.h5")]
    expected.append("t15.2023.09.01/data_train.h5")
    rows = [row for row in table(tmp_path / "store") if row["reason"] == "unrecognised file"]
    assert [(row["trial"], row["action"]) for row in rows] == [(name, "ignored") for name in expected]
    assert f"{SESSION}/data_val.h5" in printed.err and "not <session>/data_{train,val,test}.hdf5" in printed.err


def test_renamed_files_of_the_24_layout_are_reported(tmp_path: Path) -> None:
    root = tmp_path / "c"
    path = write_mat(root / "train" / "t12.2022.04.28.mat", [noise()], ["Yes."])
    (root / "train" / "t12.2022.05.05.MAT").write_bytes(path.read_bytes())
    (root / "holdOut").mkdir()
    (root / "holdOut" / "t12.2022.05.05.mat").write_bytes(path.read_bytes())
    (root / "test" / "t12.2022.05.05.mat").mkdir(parents=True)
    report = prepare(root, tmp_path / "store").report
    assert actions(report) == {
        "train/t12.2022.05.05.MAT": "ignored",
        "holdOut/t12.2022.05.05.mat": "ignored",
        "t12.2022.05.05/val": "missing",
    }
    assert report.unreadable


def test_a_data_file_that_is_a_folder_is_unreadable(source: Path, tmp_path: Path) -> None:
    (source / SESSION / "data_val.hdf5").mkdir()
    (source / "t15.2023.09.01" / "data_train.hdf5").mkdir(parents=True)
    report = prepare(source, tmp_path / "store").report
    assert actions(report) == {f"{SESSION}/val": "missing", "t15.2023.09.01/train": "missing"}
    assert report.unreadable


# --- missing permissions and dangling links --------------------------------------------------------------


def deny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a folder without permission; tests may run as root, for whom permissions do not apply."""
    listdir, stat = os.listdir, os.stat

    def refuse(path: str | Path) -> None:
        if isinstance(path, str | Path) and (Path(path) == folder or folder in Path(path).parents):
            raise PermissionError(13, "Permission denied", str(path))

    def denied_listdir(path: str | Path = ".") -> list[str]:
        refuse(path)
        return listdir(path)

    def denied_stat(path: str | Path, **options: object) -> os.stat_result:
        if Path(path) != folder:
            refuse(path)
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "listdir", denied_listdir)
    monkeypatch.setattr(os, "stat", denied_stat)


def test_a_session_folder_without_permission_is_unreadable_and_skipped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny(source / LATER, monkeypatch)
    report = prepare(source, tmp_path / "store").report
    assert (len(report.unreadable), report.trials) == (1, 1)
    (row,) = report.rows("missing")
    assert row.trial == LATER and "Permission denied" in row.detail


def test_a_parent_folder_without_permission_is_noted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private").mkdir()
    deny(tmp_path / "private", monkeypatch)
    found = find_release(tmp_path)
    assert found.root == source
    assert any("private" in note for note in found.notes)


def test_the_error_names_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").mkdir()
    deny(tmp_path / "private", monkeypatch)
    with pytest.raises(UserError, match="private cannot be listed"):
        find_release(tmp_path)


def test_a_dangling_or_circular_link_is_unreadable(source: Path, tmp_path: Path) -> None:
    (source / "t15.2023.09.01").symlink_to(tmp_path / "unmounted")
    (source / "t15.2023.09.02").symlink_to(source / "t15.2023.09.02")
    report = prepare(source, tmp_path / "store").report
    assert report.unreadable and report.trials == 2
    assert actions(report) == {"t15.2023.09.01": "missing", "t15.2023.09.02": "missing"}


@pytest.mark.parametrize("name", [DESCRIPTION_FILE, TRUTH_FILE])
def test_an_unreadable_side_file_does_not_stop_preparation(source: Path, tmp_path: Path, name: str) -> None:
    (source / name).symlink_to(source / name)
    report = prepare(source, tmp_path / "store").report
    assert report.unreadable and report.trials == 2
    assert actions(report) == {name: "missing"}


def test_a_corpus_table_that_is_not_csv_does_not_stop_preparation(source: Path, tmp_path: Path) -> None:
    (source / DESCRIPTION_FILE).write_text("date,block number,corpus\n" + "x" * 200_000 + "\n")
    report = prepare(source, tmp_path / "store").report
    assert actions(report) == {DESCRIPTION_FILE: "missing"}


def test_labels_are_complete(source: Path, tmp_path: Path) -> None:
    set_label(source / SESSION / "data_train.hdf5", b"\xff")
    prepare(source, tmp_path / "store")
    assert Store.open(tmp_path / "store").trials[0].tokens == LABEL
