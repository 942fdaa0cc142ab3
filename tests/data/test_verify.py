"""Verification of downloads against what is known of the releases."""

from pathlib import Path

import pytest

from arcuate.data import verify as module
from arcuate.data.verify import RELEASES, verify
from arcuate.errors import UserError
from support.command import arcuate
from support.recordings import FakeTrial, noise, write_hdf5


def write_release(folder: Path) -> None:
    for day in ("2023.08.11", "2025.04.13"):
        for split, n in (("train", 3), ("val", 1), ("test", 1)):
            if (day, split) not in (("2023.08.11", "val"), ("2023.08.11", "test")):
                trials = [FakeTrial(noise(20, 4, seed=i)) for i in range(n)]
                write_hdf5(folder / f"t15.{day}" / f"data_{split}.hdf5", trials)


def test_a_complete_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_release(tmp_path / "data")
    small = module.Release(
        "small", "10.1/x", "b2t25", 4, 2, {"train": 6, "val": 1, "test": 1}, "2023-08-11", "2025-04-13", {},
        {"val": 1, "test": 1},
    )  # fmt: skip
    monkeypatch.setattr(module, "RELEASES", (small,))
    assert verify(tmp_path / "data").complete
    (tmp_path / "data" / "t15.2025.04.13" / "data_val.hdf5").unlink()
    result = verify(tmp_path / "data")
    assert not result.complete
    differing = {check.what for check in result.checks if check.status == "differs"}
    assert differing == {"val trials", "sessions without val trials"}


def test_half_a_download_of_the_real_release(tmp_path: Path) -> None:
    write_release(tmp_path / "data")
    result = verify(tmp_path / "data")
    found = {check.what: (check.found, check.expected) for check in result.checks}
    assert not result.complete and found["sessions"] == ("2", "45") and found["val trials"] == ("1", "1,426")
    assert arcuate("verify", tmp_path / "data").returncode == 1


def test_archives_by_size(tmp_path: Path) -> None:
    name, size = next(iter(RELEASES[0].archives.items()))
    with (tmp_path / name).open("wb") as file:
        file.truncate(size)
    assert verify(tmp_path / name).complete
    with (tmp_path / name).open("wb") as file:
        file.truncate(size // 2)
    assert not verify(tmp_path / name).complete
    (tmp_path / "other.zip").write_bytes(b"")
    with pytest.raises(UserError, match="not a known archive"):
        verify(tmp_path / "other.zip")
