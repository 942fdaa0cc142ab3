"""Preparation of unusual sources: invalid UTF-8, renamed files, folders without permission, dangling links."""

import csv
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from arcuate.cli.show_data import prepare as print_report
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


@pytest.mark.parametrize("kind", ["attribute", "fixed", "codes"])
def test_invalid_utf8_in_a_sentence_is_replaced_and_reported(source: Path, tmp_path: Path, kind: str) -> None:
    with h5py.File(source / SESSION / "data_train.hdf5", "a") as file:
        file.create_group(b"not\xffes")
        group = file["trial_0000"]
        del group.attrs["sentence_label"]
        match kind:
            case "attribute":  # declared as UTF-8
                group.attrs.create("sentence_label", b"caf\xe9 now", dtype=h5py.string_dtype("utf-8"))
            case "fixed":
                group.attrs["sentence_label"] = np.bytes_(b"caf\xe9 now")
            case "codes":
                group["transcription"] = np.array([99, 97, 102, 0xD800, 32, 110, 111, 119, 0, 0], dtype=np.int32)
    report = prepare(source, tmp_path / "store").report
    assert [(row.reason, row.action) for row in report.quality[:2]] == [
        ("unexpected entry", "kept"),
        ("text encoding", "kept"),
    ]
    trial = Store.open(tmp_path / "store").trials[0]
    assert (trial.text, trial.tokens) == ("caf� now", LABEL)
    assert table(tmp_path / "store")[0]["detail"] == report.quality[0].detail


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
    print_report(dry_run, {"store": tmp_path / "dry"})
    assert dry_run.unreadable and capsys.readouterr().out.encode("utf-8")


# --- renamed files ---------------------------------------------------------------------------------------


def test_renamed_data_files_are_reported_and_ignored(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data_val.h5", "data_dev.hdf5", "DATA_TEST.HDF5"):
        write_hdf5(source / SESSION / name, [FakeTrial(noise())])
    write_hdf5(source / "t15.2023.09.01" / "data_train.h5", [FakeTrial(noise())])
    (source / SESSION / "notes.txt").touch()
    report = prepare(source, tmp_path / "store").report
    print_report(report, {"store": tmp_path / "store"})
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


# --- missing permissions and dangling links --------------------------------------------------------------


def deny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a folder without permission; tests may run as root, for whom permissions do not apply."""
    listdir = os.listdir

    def denied(path: str | Path = ".") -> list[str]:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", denied)


def test_folders_without_permission(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is unreadable, a folder beside the recordings is noted, and without recordings it is named."""
    with monkeypatch.context() as denied:
        deny(source / LATER, denied)
        report = prepare(source, tmp_path / "store").report
    assert report.trials == 1
    assert [(row.trial, "Permission denied" in row.detail) for row in report.unreadable] == [(LATER, True)]
    (tmp_path / "empty" / "private").mkdir(parents=True)
    deny(tmp_path / "empty" / "private", monkeypatch)
    found = find_release(tmp_path)
    assert found.root == source and any("private" in note for note in found.notes)
    with pytest.raises(UserError, match="private cannot be listed"):
        find_release(tmp_path / "empty")


def test_dangling_and_circular_links_and_side_files_are_unreadable(source: Path, tmp_path: Path) -> None:
    (source / "t15.2023.09.01").symlink_to(tmp_path / "unmounted")
    (source / "t15.2023.09.02").symlink_to(source / "t15.2023.09.02")
    (source / "t15.2023.09.03" / "data_train.hdf5").mkdir(parents=True)
    (source / TRUTH_FILE).symlink_to(source / TRUTH_FILE)
    (source / DESCRIPTION_FILE).write_text("date,block number,corpus\n" + "x" * 200_000 + "\n")
    report = prepare(source, tmp_path / "store").report
    names = "t15.2023.09.01", "t15.2023.09.02", "t15.2023.09.03/train", TRUTH_FILE, DESCRIPTION_FILE
    assert actions(report) == dict.fromkeys(names, "missing") and report.trials == 2
