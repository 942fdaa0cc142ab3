"""Atomic writes (links stay, pipes are written directly, folders are rejected) and the exclusive lock."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from arcuate.errors import UserError
from arcuate.files import (
    DECODINGS,
    FRAME_SCORES,
    PAGE,
    LockHeld,
    atomic_folder,
    atomic_group,
    check_writable,
    exclusive_lock,
    explain_write_error,
    fields_to_dict,
    save_npz,
    write_text,
)
from arcuate.losses.config import CTCSettings


def write_page(path: Path) -> None:
    write_text(path, "complete\n")


def test_an_npz_holds_the_given_arrays_and_never_a_pickle(tmp_path: Path) -> None:
    save_npz(tmp_path / "a.npz", {"x": np.arange(5)})
    with np.load(tmp_path / "a.npz") as file:
        assert file.files == ["x"]
    with pytest.raises(ValueError, match="x: an array of objects"):
        save_npz(tmp_path / "b.npz", {"x": np.array([{}])})
    assert not (tmp_path / "b.npz").exists()


def test_a_limit_on_the_size_of_files_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    message = str(explain_write_error(OSError(errno.EFBIG, "File too large"), tmp_path / "a"))
    assert "a file is too large; raise the limit on the size of files" in message and "disk" not in message


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "below" / "target"
    link.symlink_to(target)
    for _ in range(2):  # a target that is not there yet, then one that is
        write_page(link)
        assert link.is_symlink() and target.read_text() == "complete\n"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    """Even by a writer of archives, for which a pipe cannot go back."""
    os.mkfifo(tmp_path / "pipe")
    arrays = {"x": np.arange(5)}
    writing = threading.Thread(target=save_npz, args=(tmp_path / "pipe", arrays), daemon=True)
    writing.start()
    (tmp_path / "received").write_bytes((tmp_path / "pipe").read_bytes())
    writing.join()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with np.load(tmp_path / "received") as file:
        assert file["x"].tolist() == [0, 1, 2, 3, 4]


def test_inputs_and_impossible_places_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x")
    check_writable(tmp_path / "new" / "out", tmp_path / "in", "default", None)
    check_writable(None, tmp_path / "in")
    with pytest.raises(UserError, match="is an input of this command"):
        check_writable(tmp_path / "in", tmp_path / "in")
    with pytest.raises(UserError, match="is not a folder"):
        check_writable(tmp_path / "in" / "out")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=f"{tmp_path.name} is a folder"):
        write_page(tmp_path)
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="broken link"):
        write_page(tmp_path / "link")


def test_a_folder_is_replaced_when_complete_and_kept_on_failure(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for text in ("old", "new"):
        with atomic_folder(folder) as temporary:
            (temporary / "a").write_text(text)
    with pytest.raises(RuntimeError), atomic_folder(folder):
        raise RuntimeError
    assert (folder / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    for planted in (f".a.{os.getpid()}.part", ".a.part"):
        (tmp_path / planted).symlink_to(victim)
    write_page(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "complete\n" and not (tmp_path / "a").is_symlink()
    assert victim.read_text() == "keep"


def test_a_folder_is_never_lost_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any rename or removal leaves the old or the new folder in place, or the old one beside it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()

    def check(function: Callable) -> Callable:
        def checked(*arguments: object, **options: object) -> object:
            assert any((tmp_path / name).exists() for name in ("a/old", "a/new", ".a.old/old"))
            return function(*arguments, **options)

        return checked

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, check(getattr(os, name)))
    with atomic_folder(tmp_path / "a") as temporary:
        (temporary / "new").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "new"]


def test_a_group_never_has_the_summary_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "rows", tmp_path / "examples", tmp_path / "summary"]
    for file in files:
        file.write_text("old")
    states = []

    def watch(function: Callable) -> Callable:
        def watched(*arguments: object, **options: object) -> object:
            states.append([file.read_text() if file.exists() else None for file in files])
            return function(*arguments, **options)

        return watched

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, watch(getattr(os, name)))
    with atomic_group(*files) as temporary:
        for file in temporary:
            file.write_text("new")
    assert [file.read_text() for file in files] == ["new"] * 3
    assert all(summary is None or {rows, examples} == {summary} for rows, examples, summary in states)
    with pytest.raises(FileNotFoundError), atomic_group(*files) as temporary:
        temporary[0].joinpath("..").write_text("fails before the last file is written")
    assert [file.read_text() for file in files] == ["new"] * 3 and len(list(tmp_path.iterdir())) == 3


def test_only_earlier_outputs_of_the_same_kind_are_replaced(tmp_path: Path) -> None:
    weights, scores, words = (tmp_path / name for name in ("model.safetensors", "scores.npz", "words.jsonl"))
    weights.write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{}")
    save_npz(scores, {"logp": np.zeros((2, 3)), "lengths": np.array([2])})
    words.write_text('{"id": "s/val/0000", "text": "yes", "nbest": []}\n')
    check_writable(scores, kind=FRAME_SCORES)
    check_writable(words, kind=DECODINGS)
    check_writable(tmp_path / "new", kind=DECODINGS)
    for path, kind in ((weights, PAGE), (weights, DECODINGS), (words, FRAME_SCORES), (scores, DECODINGS)):
        with pytest.raises(UserError, match=f"exists and is not an earlier {kind.example}"):
            check_writable(path, kind=kind)


def test_a_lock_is_exclusive_and_is_released_by_its_holder_alone(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "lock"
    with exclusive_lock(path, "busy"):
        with pytest.raises(LockHeld, match="busy"), exclusive_lock(path, "busy", remove=True):
            pass
        assert path.exists()  # the attempt that failed did not remove the holder's file
    with exclusive_lock(path, "busy", remove=True):
        assert path.exists()
    assert not path.exists()


HOLDER = """
import os, sys, time
from pathlib import Path
from arcuate.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1]), "busy"):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # by the child, so that it has given up the lock when the test continues
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_process_is_released_though_its_child_lives(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as printed:
        child = int(printed.readline())
    try:
        with pytest.raises(LockHeld), exclusive_lock(path, "busy"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with exclusive_lock(path, "busy"):
            os.kill(child, 0)  # alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_waiting_for_a_lock(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with exclusive_lock(tmp_path / "lock", "", wait=True):
            order.append("second")

    with exclusive_lock(tmp_path / "lock", ""):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_fields_to_dict_converts_nested_results_paths_settings_and_numbers():
    @dataclass(frozen=True)
    class Inner:
        values: tuple[float, ...]

    @dataclass(frozen=True)
    class Result:
        path: Path
        inner: Inner
        settings: CTCSettings
        n: np.int64
        hidden: str = ""

    result = Result(Path("a/b"), Inner((1.0, float("nan"))), CTCSettings(), np.int64(3))
    expected = {"path": "a/b", "inner": {"values": [1.0, None]}, "settings": CTCSettings().model_dump(), "n": 3}
    assert fields_to_dict(result, "hidden") == expected
