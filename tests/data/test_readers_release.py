"""Finding recordings: from any parent folder; ambiguous folders are errors."""

from pathlib import Path

import pytest

from arcuate.data.readers.release import find_release
from arcuate.errors import UserError
from support.recordings import FakeTrial, noise, write_hdf5, write_mat


def release25(root: Path, *sessions: str) -> Path:
    for session in sessions or ("t15.2023.08.11",):
        write_hdf5(root / session / "data_train.hdf5", [FakeTrial(noise())])
    return root


def release24(root: Path) -> Path:
    write_mat(root / "train" / "t12.2022.04.28.mat", [noise()], ["Yes."])
    return root


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_recordings_are_found_from_any_parent(tmp_path: Path, depth: int) -> None:
    root = release25(tmp_path / "a" / "b" / "hdf5_data_final")
    given = [root, *root.parents][depth]
    found = find_release(given)
    assert (found.layout, found.root, found.sessions) == ("b2t25", root, ("t15.2023.08.11",))


def test_a_single_session_can_be_given(tmp_path: Path) -> None:
    release25(tmp_path, "t15.2023.08.11", "t15.2023.08.13")
    assert find_release(tmp_path / "t15.2023.08.13").sessions == ("t15.2023.08.13",)


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = release25(tmp_path / "hdf5_data_final", "t15.2023.08.11", "t15.2023.08.13")
    monkeypatch.chdir(root)
    assert find_release(Path(".")).root == root
    monkeypatch.chdir(root / "t15.2023.08.13")
    assert find_release(Path(".")).sessions == ("t15.2023.08.13",)
    assert len(find_release(Path("..")).sessions) == 2


def test_files_are_ordered_by_date_and_split(tmp_path: Path) -> None:
    for session in ("t15.2024.01.05", "t15.2023.12.30", "t15.2023.12.4"):
        for split in ("test", "train", "val"):
            write_hdf5(tmp_path / session / f"data_{split}.hdf5", [FakeTrial(noise())])
    found = find_release(tmp_path)
    assert found.sessions == ("t15.2023.12.4", "t15.2023.12.30", "t15.2024.01.05")
    assert [file.split for file in found.files[:3]] == ["train", "val", "test"]


def test_two_layouts_are_an_error_that_names_both(tmp_path: Path) -> None:
    release25(tmp_path / "new")
    release24(tmp_path / "old")
    with pytest.raises(UserError, match=r"new \(b2t25\) and .*old \(b2t24\)"):
        find_release(tmp_path)


def test_two_layouts_in_one_folder_are_an_error(tmp_path: Path) -> None:
    release24(release25(tmp_path))
    with pytest.raises(UserError, match="both layouts"):
        find_release(tmp_path)


def test_a_folder_without_recordings_names_the_expected_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data_\{train,val,test\}\.hdf5.*it is empty"):
        find_release(tmp_path)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(UserError, match=r"it holds holiday\.jpg"):
        find_release(tmp_path)
    (tmp_path / "t15_copyTask_neuralData.zip").touch()
    with pytest.raises(UserError, match="unpack it first"):
        find_release(tmp_path)


def test_errors_for_wrong_paths_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        find_release(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file"):
        find_release(release25(tmp_path / "r") / "t15.2023.08.11" / "data_train.hdf5")
    with pytest.raises(UserError, match="folder above it"):
        find_release(release24(tmp_path / "c") / "train")


def test_a_folder_that_links_to_itself_is_visited_once(tmp_path: Path) -> None:
    root = release25(tmp_path / "data")
    (tmp_path / "again").symlink_to(tmp_path)
    assert find_release(tmp_path).root == root
