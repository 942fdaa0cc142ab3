"""Source files are read in a child process: one that hangs, crashes or floods the memory is an unreadable file."""

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from arcuate.data import describe
from arcuate.data.describe import describe_file
from arcuate.data.prepare import prepare_store
from arcuate.data.readers import process
from arcuate.data.readers.release import find_source, read_trials
from arcuate.data.readers.source import ReadResult, Source, SourceFile
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.recordings import FakeTrial, noise, write_hdf5

BAD = "t15.2023.08.13"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for session in ("t15.2023.08.11", BAD, "t15.2023.08.18"):
        write_hdf5(tmp_path / "source" / session / "data_train.hdf5", [FakeTrial(noise(seed=i)) for i in range(3)])
    return tmp_path / "source"


def _loop() -> None:
    while True:
        pass


def _crash() -> None:
    faulthandler.disable()  # which pytest enables
    os.kill(os.getpid(), signal.SIGSEGV)


def _flood() -> None:
    np.ones(2**33, np.uint8)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is planted in a forked child")
@pytest.mark.parametrize(
    ("fault", "words"),
    [(_loop, "more than 0.5 s of CPU time"), (_crash, "crashed (SIGSEGV)"), (_flood, "Unable to allocate")],
)
def test_a_fault_in_a_library_is_one_unreadable_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault, words: str
) -> None:
    def read(source: Source, file: SourceFile, features: str) -> Iterator[ReadResult]:
        for i, result in enumerate(read_trials(source, file, features)):
            if file.session == BAD and i == 1:
                try:
                    fault()
                except MemoryError as error:
                    raise process.UnreadableFile(str(error)) from error
            yield result

    monkeypatch.setattr(process, "read_trials", read)
    monkeypatch.setattr(process, "MAX_CPU_SECONDS", 0.5)
    report = prepare_store(source, tmp_path / "store")
    (row,) = report.unreadable
    assert row.trial == f"{BAD}/train" and words in row.detail and "data_train.hdf5" in row.detail
    assert report.trials == 7  # one trial was read before the fault, and the other files are complete
    store = Store.open(tmp_path / "store")
    assert store.find_changed() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the fault is planted in a forked child")
@pytest.mark.parametrize(("fault", "words"), [(_loop, "more than 0.2 s of CPU time"), (_crash, "crashed")])
def test_a_file_that_hangs_or_crashes_its_description_is_one_sentence(
    source: Path, monkeypatch: pytest.MonkeyPatch, fault, words: str
) -> None:
    path = source / BAD / "data_train.hdf5"
    assert describe_file(path).entries
    monkeypatch.setattr(process, "MAX_CPU_SECONDS", 0.2)
    monkeypatch.setattr(describe, "whosmat", lambda path: fault())
    path.with_suffix(".mat").write_bytes(b"MATLAB 5.0")
    with pytest.raises(UserError, match=words):
        describe_file(path.with_suffix(".mat"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_both_ways_to_start_the_child_give_the_same_store(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(process, "START_METHOD", method)
    report = prepare_store(source, tmp_path / "store")
    found = find_source(source)
    direct = [result.trial for file in found.files for result in read_trials(found, file)]
    store = Store.open(tmp_path / "store")
    assert report.trials == len(direct) == 9
    for info, trial in zip(store.trials, direct, strict=True):
        assert trial is not None and info.id == trial.id
        np.testing.assert_array_equal(store.read_bins(info), trial.bins)


def test_the_child_ends_with_its_reader(source: Path) -> None:
    with process.ReaderProcess(find_source(source), "tx1:6v") as reader:
        results = reader.read(find_source(source).files[0])
        next(results)
        assert reader._child is not None
        child = reader._child[0]
    assert not child.is_alive()


@pytest.mark.parametrize(("at", "value"), [(6424, 14), (6392, 46), (6425, 8)])
def test_files_that_make_hdf5_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, value: int) -> None:
    """Single flipped bits that HDF5 2.0 reads for ever, found by flipping bits at random."""
    path = tmp_path / "source" / BAD / "data_train.hdf5"
    content = bytearray(write_hdf5(path, [FakeTrial(noise(20, seed=i)) for i in range(4)]).read_bytes())
    content[at] = value
    path.write_bytes(content)
    monkeypatch.setattr(process, "MAX_CPU_SECONDS", 1.0)
    write_hdf5(tmp_path / "source" / "t15.2023.08.18" / "data_train.hdf5", [FakeTrial(noise(20))])
    report = prepare_store(tmp_path / "source", tmp_path / "store")
    assert report.unreadable or report.trials == 5  # another version of the library may read the file
    assert all("data_train.hdf5" in row.detail for row in report.unreadable if row.trial == f"{BAD}/train")


def test_an_exception_in_the_code_of_a_reader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The traceback of a reader from outside is for its author; the command ends with one sentence."""
    code = f"""
from arcuate.data.readers.source import FileSummary, Source, SourceFile


class Broken:
    layout = "broken"

    def find_source(self, path):
        return Source(self.layout, path, (SourceFile("{BAD}", "train", path / "x.csv"),))

    def summarise_file(self, file):
        return FileSummary(1, {{}})

    def read_trials(self, file):
        yield [][1]
"""
    (tmp_path / "broken_reader.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"reader 'broken_reader:Broken' raised an exception at .*x\.csv"):
        prepare_store(tmp_path, tmp_path / "store", layout="broken_reader:Broken")
    assert "list index out of range" in capfd.readouterr().err
    assert not (tmp_path / "store").exists()
