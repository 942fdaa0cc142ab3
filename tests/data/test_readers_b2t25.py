"""The '25 reader: trials, labels and texts, and damaged or hostile files."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from arcuate.data.alphabet import token_names
from arcuate.data.readers.b2t25 import B2T25
from arcuate.data.readers.release import find_release
from arcuate.data.readers.source import ReadResult, SourceFile, UnreadableFile
from support.recordings import LABEL, FakeTrial, noise, write_hdf5

SESSION = "t15.2023.08.11"


def results(path: Path, split: str = "train") -> list[ReadResult]:
    (file,) = [file for file in find_release(path.parent.parent).files if file.split == split]
    return list(B2T25().read_trials(file))


def reasons(result: ReadResult) -> list[str]:
    return [problem.reason for problem in result.problems]


def write_file(folder: Path, *trials: FakeTrial, split: str = "train") -> Path:
    return write_hdf5(folder / SESSION / f"data_{split}.hdf5", trials)


@pytest.mark.shared
def test_the_real_trial_is_read_completely(shared: Path) -> None:
    source = find_release(shared / "real" / "t15_trial")
    (result,) = B2T25().read_trials(source.files[0])
    trial = result.trial
    assert trial is not None
    assert result.problems == ()
    assert (trial.id, trial.block, trial.text) == ("t15.2023.08.11/train/0000", 2, "Bring it closer.")
    assert trial.bins.shape == (321, 512)
    assert trial.bins.dtype == np.float32
    assert " ".join(token_names(trial.tokens)) == "B R IH NG SIL IH T SIL K L OW S ER SIL"
    with h5py.File(source.files[0].path) as file:
        np.testing.assert_array_equal(trial.bins, file["trial_0000/input_features"][:])


@pytest.mark.parametrize("kind", [str, str.encode, lambda text: np.array([text.encode()])])
def test_text_attributes_may_be_bytes_or_str(tmp_path: Path, kind: type) -> None:
    fake = FakeTrial(noise(), attributes={"sentence_label": kind("Bring it."), "session": kind(SESSION)})
    (result,) = results(write_file(tmp_path, fake))
    assert result.trial is not None and result.trial.text == "Bring it." and result.problems == ()


@pytest.mark.parametrize(("split", "expected"), [("test", []), ("train", ["no label"])])
def test_only_test_trials_need_no_label(tmp_path: Path, split: str, expected: list[str]) -> None:
    (result,) = results(write_file(tmp_path, FakeTrial(noise(), tokens=None), split=split), split)
    assert result.trial is not None and (result.trial.tokens, reasons(result)) == (None, expected)


@pytest.mark.parametrize(
    ("fake", "reason", "kept"),
    [
        (FakeTrial(noise(), attributes={"seq_len": 3}), "label length", LABEL[:3]),
        (FakeTrial(noise(), attributes={"seq_len": 900}), "label length", LABEL),
        (FakeTrial(noise(), attributes={"seq_len": None}), "label length", LABEL),
        (FakeTrial(noise(), attributes={"seq_len": 7}), "blank in label", None),
        (FakeTrial(noise(), tokens=(7, 0, 7)), "blank in label", None),
        (FakeTrial(noise(), tokens=(7, 41, 7)), "label out of range", None),
        (FakeTrial(noise(), tokens=(7, -1, 7)), "label out of range", None),
        (FakeTrial(noise(), tokens=()), "empty label", ()),
        (FakeTrial(noise(), attributes={"n_time_steps": 99}), "time steps", LABEL),
    ],
)
def test_an_inconsistent_label_or_length_is_reported(
    tmp_path: Path, fake: FakeTrial, reason: str, kept: tuple[int, ...] | None
) -> None:
    (result,) = results(write_file(tmp_path, fake))
    assert result.trial is not None
    assert reason in reasons(result)
    assert any(problem.severity == "bad" for problem in result.problems)
    assert (None if result.trial.tokens is None else tuple(result.trial.tokens)) == kept


def test_attributes_may_be_data_sets(tmp_path: Path) -> None:
    """As a lab writes them that does not use attributes."""
    path = write_file(tmp_path, FakeTrial(noise(60)))
    with h5py.File(path, "a") as file:
        group = file["trial_0000"]
        for name in ("seq_len", "block_num", "sentence_label", "session"):
            group[name] = group.attrs[name]
            del group.attrs[name]
        group["n_time_steps"] = np.array([40])
        del group.attrs["n_time_steps"]
    (result,) = results(path)
    assert result.trial is not None and (len(result.trial.bins), result.trial.block) == (40, 1)
    assert (tuple(result.trial.tokens), result.trial.text, reasons(result)) == (LABEL, "Bring.", ["time steps"])


def test_the_text_may_come_from_character_codes(tmp_path: Path) -> None:
    path = write_file(tmp_path, FakeTrial(noise(), attributes={"sentence_label": None}))
    with h5py.File(path, "a") as file:
        file["trial_0000/transcription"] = np.array([*b"Bring.", 0, 0], dtype=np.int32)
    (result,) = results(path)
    assert result.trial is not None
    assert result.trial.text == "Bring."


def test_missing_block_and_other_session_name_are_notes(tmp_path: Path) -> None:
    fake = FakeTrial(noise(), block=None, attributes={"session": "t15.1999.01.01"})
    (result,) = results(write_file(tmp_path, fake))
    assert reasons(result) == ["no block number", "session name"]
    assert {problem.severity for problem in result.problems} == {"note"}


# --- hostile files -----------------------------------------------------------------------------------------

BINS = "trial_0000/input_features"


def virtual(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout(shape=(60, 8), dtype="f4")
    layout[:] = h5py.VirtualSource(str(other), "trial_0000/input_features", shape=(60, 8))
    file.create_virtual_dataset(BINS, layout)


def link(name: str) -> Callable[[h5py.File, Path], None]:
    def write(file: h5py.File, other: Path) -> None:
        if name in file:
            del file[name]
        file[name] = h5py.ExternalLink(str(other), f"/{name}")

    return write


def value(content: object) -> Callable[[h5py.File, Path], None]:
    return lambda file, other: file.__setitem__(BINS, content)


HOSTILE: dict[str, tuple[Callable[[h5py.File, Path], object], str]] = {
    "link to values": (link(BINS), "link"),
    "link to a trial": (link("trial_0000"), "link"),
    "values in another file": (
        lambda file, other: file.create_dataset(BINS, (60, 8), "f4", external=[(str(other), 0, 60 * 8 * 4)]),
        "another file",
    ),
    "virtual values": (virtual, "another file"),
    "impossible size": (
        lambda file, other: file.create_dataset(BINS, (10**12, 512), "f4", chunks=(64, 512)),
        "1000000000000 bins",
    ),
    "text": (value(np.array(["a", "b"], dtype=h5py.string_dtype())), "expected numbers"),
    "complex": (value(np.zeros((4, 4), dtype=np.complex64)), "expected numbers"),
    "three axes": (value(np.zeros((4, 4, 4))), "expected numbers"),
    "scalar": (value(np.float32(1.0)), "expected numbers"),
    "empty": (value(h5py.Empty("f4")), "not an array"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_values_that_are_not_plain_arrays_of_the_file_are_refused(tmp_path: Path, name: str) -> None:
    """Also where the values exist elsewhere; the other trial of the file is read."""
    other = write_hdf5(tmp_path / "elsewhere" / "secret.h5", [FakeTrial(noise(seed=9))])
    path = write_file(tmp_path / "data", FakeTrial(noise()), FakeTrial(noise(seed=1)))
    spoil, words = HOSTILE[name]
    with h5py.File(path, "a") as file:
        del file[BINS]
        spoil(file, other)
    first, second = results(path)
    assert first.trial is None and reasons(first) == ["unreadable"] and words in first.problems[0].detail
    assert second.trial is not None


def test_other_number_types_become_float32(tmp_path: Path) -> None:
    bins = np.arange(80, dtype=np.uint8).reshape(10, 8)
    wide = np.full((10, 8), 1e300)  # beyond float32
    first, second = results(write_file(tmp_path, FakeTrial(bins), FakeTrial(wide)))
    assert first.trial is not None
    assert second.trial is not None
    np.testing.assert_array_equal(first.trial.bins, bins.astype(np.float32))
    assert np.isinf(second.trial.bins).all()


def test_other_entries_are_ignored_and_duplicates_rejected(tmp_path: Path) -> None:
    path = write_file(tmp_path, FakeTrial(noise()))
    with h5py.File(path, "a") as file:
        file["notes"] = 1
        file.copy("trial_0000", "trial_0")
    remark, first, second = results(path)
    assert reasons(remark) == ["unexpected entry"]
    assert [first.trial is None, second.trial is None] == [False, True]


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all", b"\x89HDF\r\n\x1a\n" + bytes(200), None])
def test_a_file_that_is_not_complete_hdf5_is_unreadable(tmp_path: Path, content: bytes | None) -> None:
    path = write_file(tmp_path, *(FakeTrial(noise(seed=i)) for i in range(4)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(UnreadableFile):
        results(path)


def test_a_session_name_that_is_not_a_file_name_is_unreadable(tmp_path: Path) -> None:
    path = write_file(tmp_path, FakeTrial(noise()))
    with pytest.raises(UnreadableFile, match="rename"):
        list(B2T25().read_trials(SourceFile("../../evil", "train", path)))


# --- the corpus table --------------------------------------------------------------------------------------


def test_the_corpus_comes_from_date_and_block(tmp_path: Path) -> None:
    root = tmp_path / "release" / "hdf5_data_final"
    path = write_file(
        root, FakeTrial(noise(), block=1), FakeTrial(noise(seed=1), block=2), FakeTrial(noise(seed=2), block=9)
    )
    (tmp_path / "release" / "t15_copyTaskData_description.csv").write_text(
        "\ufeffDate, Post-implant day,Block number ,Number of sentences,Corpus,Split\n"
        "2023-08-11,25,1,40, Switchboard ,Train\n"
        " 8/11/2023,25, 2,40,50-Word,Train\n"
        "someday,1,2,3,4,5\n",
        encoding="utf-8",
    )
    source = find_release(tmp_path)
    found = [source.annotate(r.trial).corpus for r in B2T25().read_trials(source.files[0]) if r.trial]
    assert found == ["Switchboard", "50-Word", None]
    assert source.files[0].path == path
    assert "1 rows" in source.notes[0]
