"""The store: round trip, statistics, atomic writing, and validation when it is opened."""

import multiprocessing
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.prepare import prepare
from arcuate.data.statistics import RunningStatistics
from arcuate.data.store import Store, TrialInfo, hash_trials, session_path, statistics_path
from arcuate.errors import UserError
from support.recordings import FakeTrial, noise, write_hdf5, write_mat
from support.stores import edit_manifest

SESSION = "t15.2023.08.11"
LATER = "t15.2023.08.13"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two sessions; in the first, block 1 has three trials, block 2 two, and there is a val file."""
    folder = tmp_path / "source"
    blocks = (1, 1, 1, 2, 2)
    train = [FakeTrial(10 * b + noise(40 + i, seed=i), block=b) for i, b in enumerate(blocks)]
    write_hdf5(folder / SESSION / "data_train.hdf5", train)
    write_hdf5(folder / SESSION / "data_val.hdf5", [FakeTrial(noise(50, seed=7), block=1)])
    write_hdf5(folder / LATER / "data_train.hdf5", [FakeTrial(noise(45, seed=8))])
    return folder


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Store:
    prepare(source, tmp_path / "store")
    return Store.open(tmp_path / "store")


def raw_bins(source: Path, info: TrialInfo) -> np.ndarray:
    with h5py.File(source / info.session / f"data_{info.split}.hdf5") as file:
        return file[f"trial_{info.number:04d}/input_features"][:]


def test_trials_are_complete_and_in_order(store: Store, source: Path) -> None:
    assert [info.id for info in store.trials] == [
        *(f"{SESSION}/train/{i:04d}" for i in range(5)),
        f"{SESSION}/val/0000",
        f"{LATER}/train/0000",
    ]
    assert (store.sessions, store.n_channels, store.layout) == ((SESSION, LATER), 8, "b2t25")
    for info in store.trials:
        trial = store.read(info)
        np.testing.assert_array_equal(trial.bins, raw_bins(source, info))
        assert trial.bins.dtype == np.float32
        assert (trial.id, tuple(trial.tokens), trial.text) == (info.id, info.tokens, "Bring.")


def test_block_statistics_are_those_of_the_block_in_its_file(store: Store, source: Path) -> None:
    for info in store.trials:
        block = [t for t in store.trials if (t.session, t.split, t.block) == (info.session, info.split, info.block)]
        bins = np.concatenate([raw_bins(source, t) for t in block]).astype(np.float64)
        found = store.block_statistics(info)
        np.testing.assert_allclose(found.mean, bins.mean(axis=0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.sd, bins.std(axis=0), rtol=1e-6)
        assert found.n_bins == len(bins)


@pytest.mark.parametrize(("number", "past"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [3])], ids=str)
def test_past_statistics_exclude_the_current_trial(store: Store, source: Path, number: int, past: list[int]) -> None:
    found = store.past_statistics(store.trials[number])
    if not past:
        assert (found.n_bins, found.mean.tolist(), found.sd.tolist()) == (0, [0.0] * 8, [1.0] * 8)
        return
    bins = np.concatenate([raw_bins(source, store.trials[i]) for i in past]).astype(np.float64)
    np.testing.assert_allclose(found.mean, bins.mean(axis=0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.sd, bins.std(axis=0), rtol=1e-6)
    assert found.n_bins == len(bins)


def test_non_finite_values_are_stored_and_read_as_zero(tmp_path: Path) -> None:
    bins = noise(40)
    bins[3, 2], bins[4, 1] = np.nan, -np.inf
    write_hdf5(tmp_path / "source" / SESSION / "data_val.hdf5", [FakeTrial(bins)])
    prepare(tmp_path / "source", tmp_path / "store")
    store = Store.open(tmp_path / "store")
    (info,) = store.trials
    assert info.flags == ("non-finite",)
    np.testing.assert_array_equal(store.read_bins(info), np.where(np.isfinite(bins), bins, 0))
    np.testing.assert_array_equal(np.load(session_path(store.path, SESSION), mmap_mode="r"), bins)
    channel = bins[np.isfinite(bins[:, 2]), 2].astype(np.float64)
    assert store.block_statistics(info).mean[2] == pytest.approx(channel.mean(), rel=1e-5)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.floats(-1e4, 1e4), st.integers(0, 99))
def test_merged_statistics_equal_those_of_all_bins(lengths: list[int], offset: float, seed: int) -> None:
    pieces = [(offset + noise(n, 3, seed=seed + i)).astype(np.float32) for i, n in enumerate(lengths)]
    merged = RunningStatistics.empty(3)
    for piece in pieces:
        merged = merged.merge(RunningStatistics.from_bins(piece))
    whole = np.concatenate(pieces).astype(np.float64)
    assert merged.n_bins == len(whole)
    if len(whole):
        np.testing.assert_allclose(merged.mean, whole.mean(axis=0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(merged.m2, whole.var(axis=0) * len(whole), rtol=1e-6, atol=1e-6)


# --- processes ---------------------------------------------------------------------------------------------


def _sum_of_first(store: Store) -> float:
    return float(store.read_bins(store.trials[0]).sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_works_in_other_processes(store: Store, method: str) -> None:
    expected = _sum_of_first(store)  # reads the statistics
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_sum_of_first, (store,)) == expected
    assert _sum_of_first(store) == expected


# --- writing -----------------------------------------------------------------------------------------------


def test_only_a_store_is_replaced_and_only_with_force(source: Path, store: Store, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / ".empty.part" / "sessions").mkdir(parents=True)  # left by a killed process
    for out, force, message in ((store.path, False, "--force"), (tmp_path / "thesis", True, "not a store")):
        with pytest.raises(UserError, match=message):
            prepare(source, out, force=force)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()
    assert prepare(source, tmp_path / "empty").trials == store.trials and hidden(tmp_path) == []
    (source / LATER / "data_train.hdf5").unlink()
    prepare(source, store.path, force=True)
    assert Store.open(store.path).sessions == (SESSION,)
    assert not (store.path / "sessions" / f"{LATER}.npy").exists()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_reported_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    code = (
        "import resource, signal, sys; from arcuate.data.prepare import prepare; from arcuate.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: prepare(*sys.argv[1:])\nexcept UserError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert "cannot be written: a file is too large" in done.stdout, done.stderr
    assert not (tmp_path / "store").exists() and hidden(tmp_path) == []


def test_an_interruption_leaves_the_old_store_unchanged(source: Path, store: Store) -> None:
    def interrupt(done: int, total: int, description: str) -> None:
        if description.startswith(LATER):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, store.path, force=True, progress=interrupt)
    assert Store.open(store.path).find_changed() == []
    assert hidden(store.path.parent) == []


def test_two_preparations_of_one_store_exclude_each_other(source: Path, tmp_path: Path) -> None:
    def prepare_again(done: int, total: int, description: str) -> None:
        if description.startswith(LATER):
            for _ in range(2):  # the first refusal does not release the lock
                with pytest.raises(UserError, match="another"):
                    prepare(source, tmp_path / "store")

    prepare(source, tmp_path / "store", progress=prepare_again)
    assert len(Store.open(tmp_path / "store").trials) == 7


# --- opening -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "message"), [("stor", "did you mean"), ("x", "arcuate prepare"), ("", "not a store")])
def test_opening_something_else(store: Store, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Store.open(store.path.parent / name)


EDITS = [
    ('"usable": true', '"usable": false'),
    ('"block": 1', '"block": 2'),
    ('"corpus": null', '"corpus": "live"'),
    ('"simulated": false', '"simulated": true'),
    ('"train-val": 0', '"train-val": 1'),
    ('"text": "Bring."', '"text": "Sing."'),
    (f'"{LATER}": "', f'"{LATER}": "0'),
]


@pytest.mark.parametrize(("before", "after"), EDITS, ids=lambda text: text)
def test_an_edited_manifest_is_refused(store: Store, before: str, after: str) -> None:
    edit_manifest(store.path, before, after, sign=False)
    with pytest.raises(UserError, match="was changed after it was prepared"):
        Store.open(store.path)


def test_hashes_cover_what_a_split_contributes(store: Store) -> None:
    """The hash of the trials in use depends on flags, blocks and corpora, not on their order."""
    train = [t for t in store.trials if t.split == "train"]
    assert hash_trials(reversed(train)) == hash_trials(train) == store.hashes["train"]
    for change in ({"usable": False}, {"block": 9}, {"corpus": "live"}, {"text": "No."}):
        assert hash_trials([replace(train[0], **change), *train[1:]]) != store.hashes["train"], change
    assert hash_trials(train[1:]) != store.hashes["train"] != store.hashes["val"]


HOSTILE = [
    ('"n_channels": 8', '"n_channels": 0'),
    ('"n_channels": 8', '"n_channels": "many"'),
    ('"n_channels": 8', '"n_channels": 9'),
    ('"layout": "b2t25"', '"layout": "../../etc"'),
    (f'"{LATER}": "', '"../../etc": "'),
    ('"leakage": {', '"leakage": 3, "more": {'),
    ('"n_bins": 40', '"n_bins": -1'),
    ('"n_bins": 40', '"n_bins": 41'),
    ('"tokens": [7', '"tokens": [77'),
    ('"split": "val"', '"split": "holdout"'),
    ("/train/0000", "/train/0001"),
]


@pytest.mark.parametrize(("before", "after"), HOSTILE, ids=lambda text: text)
def test_a_manifest_that_contradicts_itself_is_refused(store: Store, before: str, after: str) -> None:
    edit_manifest(store.path, before, after)
    with pytest.raises(UserError, match="prepare the source again"):
        Store.open(store.path)


@pytest.mark.parametrize("content", ["", "[1]", "[" * 100_000, '{"format": "arcuate store", "version": 1}'], ids=len)
def test_a_damaged_manifest_raises(store: Store, content: str) -> None:
    (store.path / "manifest.json").write_text(content)
    with pytest.raises(UserError):
        Store.open(store.path)


def test_incomplete_copies_and_vanished_stores_are_told_apart(store: Store) -> None:
    opened, bins, statistics = (store, session_path(store.path, SESSION), statistics_path(store.path, SESSION))
    content, last = bins.read_bytes(), store.trials[5]
    bins.write_bytes(content[:-100])
    for read, words in (
        (lambda: Store.open(store.path), "bytes instead of"),
        (lambda: opened.read(last), "is damaged"),
    ):
        with pytest.raises(UserError, match=words):
            read()
    bins.unlink()
    for read, words in ((lambda: Store.open(store.path), "is missing"), (lambda: opened.read(last), "npy no longer")):
        with pytest.raises(UserError, match=words):
            read()
    bins.write_bytes(content)
    statistics.unlink()
    with pytest.raises(UserError, match="is missing"):
        Store.open(store.path)
    shutil.rmtree(store.path)
    for read in (opened.read_bins, opened.block_statistics):
        with pytest.raises(UserError, match="store no longer exists; was the store moved"):
            read(store.trials[0])


def test_changed_bins_and_statistics_are_found(store: Store) -> None:
    """Statistics as well: a changed one changes a score although every trial matches its hash."""
    assert store.find_changed() == []
    bins = np.load(session_path(store.path, SESSION), mmap_mode="r+")
    bins[0, 0] += 1
    bins.flush()
    assert Store.open(store.path).find_changed() == [store.trials[0].id]
    path = statistics_path(store.path, SESSION)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["block_mean"] = arrays["block_mean"] + 1
    np.savez(path, **arrays)
    with pytest.raises(UserError, match="statistics were changed"):
        Store.open(store.path).block_statistics(store.trials[1])


def test_a_linked_store_stays_a_link_and_its_target_is_replaced(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "source" / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())])
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "store")
    prepare(tmp_path / "source", tmp_path / "disk" / "store")
    write_hdf5(tmp_path / "source" / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())] * 2)
    prepare(tmp_path / "source", tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and len(Store.open(tmp_path / "disk" / "store").trials) == 2


def test_an_interrupted_replacement_is_named(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "source" / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())])
    prepare(tmp_path / "source", tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / ".store.old")
    for attempt in (Store.open, lambda path: prepare(tmp_path / "source", path)):
        with pytest.raises(UserError, match=r"interrupted; its previous content is .*\.store\.old"):
            attempt(tmp_path / "store")


def test_features_are_compared_with_those_of_training(tmp_path: Path) -> None:
    write_mat(tmp_path / "source" / "train" / "t12.2022.04.28.mat", [noise(30, 4)], ["Yes."])
    store = prepare(tmp_path / "source", tmp_path / "store", features="spikePow:6v")
    store.check_trained_on({"layout": "b2t24", "features": "spikePow:6v"})
    store.check_trained_on({"n_channels": 4})  # recorded by an earlier version
    with pytest.raises(UserError, match=r"trained on features tx1:6v, but store has spikePow:6v"):
        store.check_trained_on({"layout": "b2t24", "features": "tx1:6v"})
