"""Where results go: links stay, pipes are written into, folders are refused, nothing is left half done."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arcuate.errors import UserError
from arcuate.files import check_target
from arcuate.language.ngram.file import map_arrays, write_arrays
from arcuate.run import save_npz, write_aside


def write_text(path: Path) -> None:
    write_aside(path, "whole\n")


def write_npz(path: Path) -> None:
    save_npz(path, {"x": np.arange(5)})


def write_model_file(path: Path) -> None:
    write_arrays(path, {"x": np.arange(5, dtype=np.int32)}, {}, force=True)


WRITERS = [write_text, write_npz, write_model_file]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_stays_and_its_target_is_written(write: Callable[[Path], None], tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "below" / "target"
    link.symlink_to(target)
    for _ in range(2):  # a target that is not there yet, then one that is
        write(link)
        assert link.is_symlink() and target.is_file() and target.stat().st_size
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_is_written_into(write: Callable[[Path], None], tmp_path: Path) -> None:
    pipe, plain = tmp_path / "pipe", tmp_path / "plain"
    os.mkfifo(pipe)
    writing = threading.Thread(target=write, args=(pipe,), daemon=True)
    writing.start()
    with pipe.open("rb") as stream:
        received = stream.read()
    writing.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write(plain)
    if write is write_npz:  # a stream that cannot go back is packed a little differently
        (tmp_path / "received").write_bytes(received)
        with np.load(tmp_path / "received") as file:
            assert file["x"].tolist() == [0, 1, 2, 3, 4]
    else:
        assert received == plain.read_bytes()


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_is_refused_by_name(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path.name} is a folder"):
        write(tmp_path)


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="leads nowhere"):
        write_text(tmp_path / "link")


def test_model_files_keep_their_contents(tmp_path: Path) -> None:
    write_model_file(tmp_path / "m")
    parts, _ = map_arrays(tmp_path / "m", {"x": "I32"}, frozenset())
    assert parts["x"].tolist() == [0, 1, 2, 3, 4]


def test_inputs_and_impossible_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x")
    check_target(tmp_path / "new" / "out", tmp_path / "in", "default", None)
    check_target(None, tmp_path / "in")
    with pytest.raises(UserError, match="read by this command"):
        check_target(tmp_path / "in", tmp_path / "in")
    with pytest.raises(UserError, match="is not a folder"):
        check_target(tmp_path / "in" / "out")
    assert not (tmp_path / "new").exists()
