import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import psutil
import pytest
import torch

from arcuate.data.batching import collate, make_plan, padding_waste
from arcuate.data.config import (
    BucketedBatching,
    DataConfig,
    SessionBatching,
    ShuffledBatching,
)
from arcuate.data.selection import select, select_split
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.models.config import FrontEndSettings, Patch
from arcuate.models.front_end import normalise

COUNT_FRAMES = Patch().count_frames


def info(session: str, number: int, n_bins: int) -> TrialInfo:
    return TrialInfo(
        id=f"{session}/train/{number:04d}",
        session=session,
        split="train",
        number=number,
        block=1,
        n_bins=n_bins,
        tokens=(1, 40),
        text="ah",
        corpus=None,
        mode=None,
        usable=True,
        flags=(),
    )


@pytest.fixture
def trials() -> list[TrialInfo]:
    lengths = np.random.default_rng(0).lognormal(5.6, 0.35, size=300).astype(int) + 30
    return [info(f"s{i % 5}", i, int(n)) for i, n in enumerate(lengths)]


def test_session_batching_draws_the_official_composition(trials: list[TrialInfo]) -> None:
    plan = make_plan(trials, SessionBatching(n_sessions=4, n_trials=16), seed=1)
    for position in range(20):
        drawn = Counter(trials[i].session for i in plan.draw(position))
        assert sorted(drawn.values()) == [16, 16, 16, 16]
    repeated = sum(len(set(plan.draw(p))) < 64 for p in range(20))
    assert repeated > 0  # with replacement


def test_shuffled_draws_without_replacement_from_all(trials: list[TrialInfo]) -> None:
    plan = make_plan(trials, ShuffledBatching(batch_size=64), seed=1)
    assert all(len(set(plan.draw(p))) == 64 for p in range(10))


def test_bucketed_visits_every_trial_once_per_epoch(trials: list[TrialInfo]) -> None:
    plan = make_plan(trials, BucketedBatching(batch_size=16), seed=1)
    for epoch in range(3):
        start = epoch * plan.batches_per_epoch
        visited = [i for p in range(plan.batches_per_epoch) for i in plan.draw(start + p)]
        assert sorted(visited) == list(range(len(trials)))


def test_bucketing_needs_little_padding(trials: list[TrialInfo]) -> None:
    plan = make_plan(trials, BucketedBatching(batch_size=16), seed=1)
    epoch = [plan.draw(p) for p in range(plan.batches_per_epoch)]
    random = np.random.default_rng(0).permutation(len(trials)).reshape(-1, 20).tolist()
    assert padding_waste(epoch, plan.n_bins) < 0.10 < padding_waste(random, plan.n_bins)


@pytest.mark.parametrize(
    "settings", [SessionBatching(), ShuffledBatching(batch_size=8), BucketedBatching(batch_size=8)]
)
def test_a_batch_is_a_function_of_seed_and_position(trials: list[TrialInfo], settings: SessionBatching) -> None:
    plan, again = make_plan(trials, settings, seed=3), make_plan(trials, settings, seed=3)
    forward = [plan.draw(p) for p in range(60)]
    assert [again.draw(p) for p in reversed(range(60))] == forward[::-1]
    other = make_plan(trials, settings, seed=4)
    assert [other.draw(p) for p in range(60)] != forward


def test_no_trials_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no usable"):
        make_plan([], BucketedBatching(), seed=0)


def test_dev_and_train_are_disjoint(cohort_store) -> None:
    store = Store.open(cohort_store)
    whole, carved = (
        select(store, DataConfig(), COUNT_FRAMES),
        select(store, DataConfig(dev_fraction=0.2), COUNT_FRAMES),
    )
    assert whole.selected_on == "val" and carved.selected_on == "dev"
    assert {t.split for t in whole.validation} == {"val"}
    assert not {t.text for t in carved.train} & {t.text for t in carved.validation}
    assert len(carved.train) + len(carved.validation) == len(whole.train)
    assert 0.1 < len(carved.validation) / len(whole.train) < 0.3
    dev = select_split(store, DataConfig(dev_fraction=0.2), COUNT_FRAMES, "dev", store.sessions)
    assert dev == carved.validation


def test_selection_by_session_and_size(cohort_store) -> None:
    store = Store.open(cohort_store)
    assert select(store, DataConfig(max_sessions=2), COUNT_FRAMES).sessions == store.sessions[:2]
    assert select(store, DataConfig(sessions=store.sessions[1:2]), COUNT_FRAMES).sessions == store.sessions[1:2]
    for settings, message in (({"sessions": ("t15.1999.01.01",)}, "not in"), ({"release": "b2t25"}, "512 channels")):
        with pytest.raises(UserError, match=message):
            select(store, DataConfig(**settings), COUNT_FRAMES)


@pytest.mark.parametrize("log", [False, True])
def test_block_normalised_bins_have_mean_0_and_sd_1(cohort_store, log: bool) -> None:
    """Statistics of the store match the normalisation of the model, also for logarithms."""
    store, front_end = Store.open(cohort_store), FrontEndSettings(normalise="block", log1p=log)
    first = store.trials[0]
    block = [t for t in store.trials if (t.session, t.split, t.block) == (first.session, first.split, first.block)]
    batch = collate(store, block, {s: i for i, s in enumerate(store.sessions)}, front_end.statistics_spec)
    scores, _ = normalise(batch.bins, batch.statistics, front_end)
    bins = torch.cat([scores[i, : t.n_bins] for i, t in enumerate(block)])
    live = bins.std(0) > 0
    torch.testing.assert_close(bins.mean(0), torch.zeros(store.n_channels), atol=1e-4, rtol=0)
    torch.testing.assert_close(bins.std(0, correction=0)[live], torch.ones(int(live.sum())), atol=1e-3, rtol=0)


UNREADABLE = """
import multiprocessing
import sys
from pathlib import Path
from arcuate.data.batching import PlannedBatches, make_plan, training_batches
from arcuate.data.config import BucketedBatching, DataConfig, StatisticsSpec
from arcuate.data.selection import select
from arcuate.data.store import Store, session_path
from arcuate.models.config import Patch

path = Path(sys.argv[1])
store = Store.open(path)
trials = select(store, DataConfig(), Patch().count_frames).train
plan = make_plan(trials, BucketedBatching(batch_size=4), seed=0)
batches = training_batches(PlannedBatches(store, trials, plan, store.sessions, StatisticsSpec("none")), 0, None, 2)
next(batches)
print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
for session in store.sessions:
    session_path(path, session).write_bytes(b"")
for _ in batches:
    pass
"""


def test_unreadable_data_end_the_program_and_its_workers(cohort_store, tmp_path) -> None:
    """The error of a worker is one sentence, and neither the worker nor the exception keeps the program alive."""
    store = shutil.copytree(cohort_store, tmp_path / "store")
    program = [sys.executable, "-c", UNREADABLE, str(store)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    workers = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == 1 and len(workers) == 2
    assert not any(psutil.pid_exists(pid) for pid in workers)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("arcuate.errors.UserError: ") and "is damaged" in last, done.stderr
    assert "Caught UserError" not in done.stderr
