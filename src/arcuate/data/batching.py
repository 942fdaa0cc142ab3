"""Which trials make up the batch at a given position: pure functions of (seed, position).

Nothing is remembered between calls, so a resumed run, another number of workers or another process draws
exactly the same batches.
"""

import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from arcuate.data.config import Batching, Bucketed, Days, Shuffled, Wanted
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError


@dataclass(frozen=True)
class Plan:
    """The infinite sequence of training batches over a fixed list of trials."""

    settings: Batching
    seed: int
    n_bins: tuple[int, ...]  # length of each trial
    by_session: tuple[tuple[int, ...], ...]  # indices of the trials of each session

    @property
    def n_trials(self) -> int:
        return len(self.n_bins)

    @property
    def batches_per_epoch(self) -> int:
        return max(1, -(-self.n_trials // self.settings.batch_size))

    def draw(self, position: int) -> list[int]:
        """Indices of the trials in the batch at this position."""
        match self.settings:
            case Days():
                return self._draw_days(self.settings, position)
            case Shuffled():
                rng = np.random.default_rng((self.seed, 1, position))
                size = min(self.settings.batch_size, self.n_trials)
                return [int(i) for i in rng.choice(self.n_trials, size=size, replace=False)]
            case Bucketed():
                epoch, within = divmod(position, self.batches_per_epoch)
                return list(bucketed_epoch(self, self.settings, epoch)[within])

    def _draw_days(self, settings: Days, position: int) -> list[int]:
        rng = np.random.default_rng((self.seed, 0, position))
        n_sessions = min(settings.n_sessions, len(self.by_session))
        chosen = rng.choice(len(self.by_session), size=n_sessions, replace=False)
        return [int(i) for s in chosen for i in rng.choice(self.by_session[s], size=settings.n_trials)]


@lru_cache(maxsize=2)
def bucketed_epoch(plan: Plan, settings: Bucketed, epoch: int) -> tuple[tuple[int, ...], ...]:
    """One pass over all trials: shuffle, sort pools by length, cut into batches, shuffle the batches."""
    rng = np.random.default_rng((plan.seed, 2, epoch))
    order = rng.permutation(plan.n_trials)
    lengths = np.asarray(plan.n_bins)
    size, pool = settings.batch_size, settings.batch_size * settings.pool
    pools = [order[i : i + pool] for i in range(0, len(order), pool)]
    sorted_pools = [p[np.argsort(lengths[p], kind="stable")] for p in pools]
    batches = [tuple(int(i) for i in p[j : j + size]) for p in sorted_pools for j in range(0, len(p), size)]
    return tuple(batches[i] for i in rng.permutation(len(batches)))


def make_plan(trials: Sequence[TrialInfo], settings: Batching, seed: int) -> Plan:
    if not trials:
        raise UserError("there is no usable training trial; see quality.csv in the store for the reasons")
    sessions: dict[str, list[int]] = {}
    for i, trial in enumerate(trials):
        sessions.setdefault(trial.session, []).append(i)
    return Plan(settings, seed, tuple(t.n_bins for t in trials), tuple(tuple(s) for s in sessions.values()))


def padding_waste(batches: Sequence[Sequence[int]], n_bins: Sequence[int]) -> float:
    """Share of a padded batch that is padding, over these batches."""
    padded = sum(max(n_bins[i] for i in batch) * len(batch) for batch in batches)
    return 1.0 - sum(n_bins[i] for batch in batches for i in batch) / padded


def by_length(trials: Sequence[TrialInfo], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length, for passes where the order does not matter."""
    order = sorted(range(len(trials)), key=lambda i: trials[i].n_bins)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


# Batch: trials side by side, padded, with their true lengths.


@dataclass(frozen=True)
class BatchStatistics:
    """What normalisation knows beforehand: of the trial's block, or (rolling) of the bins before the trial.

    Where the model takes logarithms, these are statistics of the logarithms.
    """

    mean: torch.Tensor  # (B, C)
    sd: torch.Tensor  # (B, C)
    n_bins: torch.Tensor  # (B,)


@dataclass(frozen=True)
class Batch:
    bins: torch.Tensor  # (B, T, C) float32, zero beyond each true length
    n_bins: torch.Tensor  # (B,) int64
    tokens: torch.Tensor  # (B, U) int64, zero beyond each true length
    n_tokens: torch.Tensor  # (B,) int64
    session: torch.Tensor  # (B,) int64, index into the model's sessions
    statistics: BatchStatistics | None
    trials: tuple[TrialInfo, ...]
    position: int  # place in the training sequence; 0 outside training
    n_counted: int  # trials that count here; the rest only keep an otherwise idle process company
    n_trials: int  # trials of the whole batch, over all processes that share it

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("bins", "n_bins", "tokens", "n_tokens", "session")
        }
        return replace(self, statistics=move_statistics(self.statistics, device), **moved)


def move_statistics(statistics: BatchStatistics | None, device: torch.device) -> BatchStatistics | None:
    if statistics is None:
        return None
    return BatchStatistics(statistics.mean.to(device), statistics.sd.to(device), statistics.n_bins.to(device))


def collate(
    store: Store,
    trials: Sequence[TrialInfo],
    sessions: dict[str, int],
    wanted: Wanted,
    position: int = 0,
) -> Batch:
    """Read these trials and lay them side by side."""
    n_bins = [t.n_bins for t in trials]
    tokens = [t.tokens or () for t in trials]
    bins = torch.zeros(len(trials), max(n_bins), store.n_channels)
    labels = torch.zeros(len(trials), max(1, max(len(u) for u in tokens)), dtype=torch.int64)
    for i, trial in enumerate(trials):
        store.read_bins(trial, out=bins[i, : n_bins[i]].numpy())
        labels[i, : len(tokens[i])] = torch.tensor(tokens[i], dtype=torch.int64)
    return Batch(
        bins,
        torch.tensor(n_bins),
        labels,
        torch.tensor([len(u) for u in tokens]),
        torch.tensor([sessions[t.session] for t in trials]),
        read_statistics(store, trials, wanted),
        tuple(trials),
        position,
        len(trials),
        len(trials),
    )


def read_statistics(store: Store, trials: Sequence[TrialInfo], wanted: Wanted) -> BatchStatistics | None:
    """What the model wants to know of each trial's block, or of what came before the trial."""
    if wanted.kind == "none":
        return None
    read = store.block_statistics if wanted.kind == "block" else store.past_statistics
    found = [read(t, wanted.log) for t in trials]
    return BatchStatistics(
        torch.from_numpy(np.stack([s.mean for s in found])),
        torch.from_numpy(np.stack([s.sd for s in found])),
        torch.tensor([s.n_bins for s in found]),
    )


class Draws(Protocol):
    """Anything that says which trials make up the batch at a position."""

    def draw(self, position: int) -> list[int]: ...


class PlannedBatches(Dataset[Batch]):
    """The training sequence as a dataset: index = position in the plan."""

    def __init__(
        self,
        store: Store,
        trials: Sequence[TrialInfo],
        plan: Draws,
        sessions: Sequence[str],
        wanted: Wanted,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.store, self.trials, self.plan, self.wanted = store, tuple(trials), plan, wanted
        self.sessions = {name: i for i, name in enumerate(sessions)}
        self.rank, self.size = share  # this process takes every size-th trial of a batch

    def __getitem__(self, position: int) -> Batch:
        drawn = [self.trials[i] for i in self.plan.draw(position)]
        mine = drawn[self.rank :: self.size]
        batch = collate(self.store, mine or drawn[:1], self.sessions, self.wanted, position)
        return replace(batch, n_counted=len(mine), n_trials=len(drawn))


def leave_signals(worker: int) -> None:
    """A signal to a whole group is for training to answer: it finishes its step, and needs its workers for that."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def training_batches(
    data: PlannedBatches, start: int, stop: int | None, workers: int, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Batches at positions start … stop-1 (or without end), read ahead by worker processes where asked for.

    Close it when done: its workers leave signals alone, so a program that fails would wait for them for ever.
    """
    options: dict[str, Any] = {}
    if workers:
        options = {
            "num_workers": workers,
            "persistent_workers": True,
            "prefetch_factor": 2,
            "worker_init_fn": leave_signals,
        }
    positions = count(start) if stop is None else range(start, stop)
    loader: DataLoader[Batch] = DataLoader(
        data, batch_size=None, sampler=positions, collate_fn=None, pin_memory=pin_memory, **options
    )
    yield from loader


def length_batches(
    store: Store,
    trials: Sequence[TrialInfo],
    sessions: Sequence[str],
    wanted: Wanted,
    batches: Sequence[Sequence[int]],
) -> Iterator[tuple[Sequence[int], Batch]]:
    """Batches for scoring, each with the indices of its trials."""
    index = {name: i for i, name in enumerate(sessions)}
    for chosen in batches:
        yield chosen, collate(store, [trials[i] for i in chosen], index, wanted)
