"""Files are read in a child process: one that hangs, crashes or floods the memory is an unreadable file."""

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from arcuate.data import watched as module
from arcuate.data.prepare import prepare
from arcuate.data.readers.b2t25 import B2T25
from arcuate.data.readers.release import find_release
from arcuate.data.readers.source import UnreadableFile
from arcuate.data.store import Store
from arcuate.data.watched import call_watched, watched
from arcuate.errors import UserError
from support.recordings import FakeTrial, noise, write_hdf5

SESSIONS = ("t15.2023.08.11", "t15.2023.08.13", "t15.2023.08.18")


def count(n: int) -> Iterator[int]:
    yield from range(n)


def loop() -> None:
    while True:
        pass


def crash() -> None:
    faulthandler.disable()  # which pytest enables
    os.kill(os.getpid(), signal.SIGSEGV)


def flood() -> None:
    np.ones(2**33, np.uint8)


def refuse() -> None:
    raise UnreadableFile("no")


def after_two(fault: Callable[[], None]) -> Iterator[int]:
    yield from (0, 1)
    fault()


FAULTS = [
    (loop, "more than 0.5 s of CPU time"),
    (crash, r"crashed \(SIGSEGV\)"),
    (flood, "does not fit into memory"),
    (refuse, "no"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_items_before_a_fault_are_kept(tmp_path: Path, fault: Callable[[], None], words: str) -> None:
    items = watched(tmp_path, after_two, fault, cpu_seconds=0.5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(UnreadableFile, match=words):
        next(items)
    assert not multiprocessing.active_children()


def test_an_exception_of_the_function_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="raised the exception shown above"):
        call_watched(tmp_path, [].pop)
    assert "pop from empty list" in capfd.readouterr().err


def test_the_child_ends_with_its_reader(tmp_path: Path) -> None:
    items = watched(tmp_path, count, 10**9)
    assert next(items) == 0
    (child,) = multiprocessing.active_children()
    items.close()
    assert not child.is_alive()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for session in SESSIONS:
        write_hdf5(tmp_path / "source" / session / "data_train.hdf5", [FakeTrial(noise(seed=i)) for i in range(3)])
    return tmp_path / "source"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_both_ways_to_start_the_child_give_the_same_store(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(module, "START_METHOD", method)
    store = prepare(source, tmp_path / "store")
    direct = [result.trial for file in find_release(source).files for result in B2T25().read_trials(file)]
    assert len(store.trials) == len(direct) == 9
    for info, trial in zip(store.trials, direct, strict=True):
        assert trial is not None and info.id == trial.id
        np.testing.assert_array_equal(store.read_bins(info), trial.bins)


BROKEN = """
from arcuate.data.readers.source import ReadResult, Source, SourceFile
from arcuate.data.readers.b2t25 import B2T25
from tests_of_watched import SESSIONS, crash


class Broken(B2T25):
    def read_trials(self, file):
        for i, result in enumerate(super().read_trials(file)):
            if file.session == SESSIONS[1] and i == 1:
                crash()
            yield result
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is planted in a forked child")
def test_a_crash_is_one_unreadable_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reader.py").write_text(BROKEN, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tests_of_watched", sys.modules[__name__])
    report = prepare(source, tmp_path / "store", layout="broken_reader:Broken").report
    (row,) = report.unreadable
    assert row.trial == f"{SESSIONS[1]}/train" and "crashed (SIGSEGV)" in row.detail and "data_train.hdf5" in row.detail
    assert report.trials == 7  # one trial was read before the fault, and the other files are complete
    assert Store.open(tmp_path / "store").find_changed() == []


def test_a_file_that_makes_hdf5_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single flipped bit that HDF5 2.0 reads for ever, found by flipping bits at random."""
    path = tmp_path / "source" / SESSIONS[1] / "data_train.hdf5"
    content = bytearray(write_hdf5(path, [FakeTrial(noise(20, seed=i)) for i in range(4)]).read_bytes())
    content[6424] = 14
    path.write_bytes(content)
    monkeypatch.setattr(module, "CPU_SECONDS", 1.0)
    write_hdf5(tmp_path / "source" / SESSIONS[0] / "data_train.hdf5", [FakeTrial(noise(20))])
    report = prepare(tmp_path / "source", tmp_path / "store").report
    assert report.unreadable or report.trials == 5  # another version of the library may read the file
