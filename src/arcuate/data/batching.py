"""Batching: which trials form the batch at a given position, and how they are read and padded.

Batches are pure functions of (seed, position) without state between calls, so a resumed run, a different number of
workers or another process draws the same batches.
"""

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from arcuate.data.config import Batching, BucketedBatching, SessionBatching, ShuffledBatching, StatisticsSpec
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
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
            case SessionBatching():
                return self._draw_sessions(self.settings, position)
            case ShuffledBatching():
                rng = np.random.default_rng((self.seed, 1, position))
                size = min(self.settings.batch_size, self.n_trials)
                return [int(i) for i in rng.choice(self.n_trials, size=size, replace=False)]
            case BucketedBatching():
                epoch, within = divmod(position, self.batches_per_epoch)
                return list(_bucketed_epoch(self, self.settings, epoch)[within])

    def _draw_sessions(self, settings: SessionBatching, position: int) -> list[int]:
        rng = np.random.default_rng((self.seed, 0, position))
        n_sessions = min(settings.n_sessions, len(self.by_session))
        chosen = rng.choice(len(self.by_session), size=n_sessions, replace=False)
        return [int(i) for s in chosen for i in rng.choice(self.by_session[s], size=settings.n_trials)]


@lru_cache(maxsize=2)
def _bucketed_epoch(plan: BatchPlan, settings: BucketedBatching, epoch: int) -> tuple[tuple[int, ...], ...]:
    """One pass over all trials: shuffle, sort pools by length, cut into batches, shuffle the batches."""
    rng = np.random.default_rng((plan.seed, 2, epoch))
    order = rng.permutation(plan.n_trials)
    lengths = np.asarray(plan.n_bins)
    size, pool = settings.batch_size, settings.batch_size * settings.pool
    pools = [order[i : i + pool] for i in range(0, len(order), pool)]
    sorted_pools = [p[np.argsort(lengths[p], kind="stable")] for p in pools]
    batches = [tuple(int(i) for i in p[j : j + size]) for p in sorted_pools for j in range(0, len(p), size)]
    return tuple(batches[i] for i in rng.permutation(len(batches)))


def make_plan(trials: Sequence[TrialInfo], settings: Batching, seed: int) -> BatchPlan:
    """The batches over these trials; raises UserError if there are none."""
    if not trials:
        raise UserError("no usable training trials; quality.csv in the store lists the reasons")
    sessions: dict[str, list[int]] = {}
    for i, trial in enumerate(trials):
        sessions.setdefault(trial.session, []).append(i)
    return BatchPlan(settings, seed, tuple(t.n_bins for t in trials), tuple(tuple(s) for s in sessions.values()))


def padding_waste(batches: Sequence[Sequence[int]], n_bins: Sequence[int]) -> float:
    """Fraction of padding in these batches."""
    padded = sum(max(n_bins[i] for i in batch) * len(batch) for batch in batches)
    return 1.0 - sum(n_bins[i] for batch in batches for i in batch) / padded


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to the device without waiting for its queue; copies from pageable memory would block."""
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class BatchStatistics(NamedTuple):
    """Mean and SD for normalisation, of the trial's block or (rolling) of the bins before the trial.

    Where the model takes logarithms, these are statistics of the logarithms.
    """

    mean: torch.Tensor  # (B, C)
    sd: torch.Tensor  # (B, C)
    n_bins: torch.Tensor  # (B,)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "BatchStatistics":
        return BatchStatistics(*map(change, self))


_ON_DEVICE = ("bins", "n_bins", "tokens", "n_tokens")


@dataclass(frozen=True)
class Batch:
    """Padded trials with their true lengths.

    Lengths and sessions are also known on the host (`lengths`, `token_lengths`, `session`), so that a training step
    never has to read them back from the device.
    """

    bins: torch.Tensor  # (B, T, C) float32, zero beyond each true length
    n_bins: torch.Tensor  # (B,) int64
    tokens: torch.Tensor  # (B, U) int64, zero beyond each true length
    n_tokens: torch.Tensor  # (B,) int64
    session: torch.Tensor  # (B,) int64, index into the model's sessions; stays on the CPU
    statistics: BatchStatistics | None
    trials: tuple[TrialInfo, ...]
    position: int  # index in the training sequence; 0 outside training
    n_counted: int  # trials that count in the loss; 0 on a process that has no trials and repeats one
    all_trials: tuple[TrialInfo, ...]  # of the batch over all processes that share it

    @property
    def n_trials(self) -> int:
        """Number of trials over all processes."""
        return len(self.all_trials)

    @property
    def lengths(self) -> tuple[int, ...]:
        """`n_bins` on the host."""
        return tuple(t.n_bins for t in self.trials)

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """`n_tokens` on the host."""
        return tuple(len(t.tokens or ()) for t in self.trials)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device; the copies of a pinned batch do not block the host."""
        return self if device.type == "cpu" else self.map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Copy to pinned memory; called by the data loader."""
        return self.map(torch.Tensor.pin_memory)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that `to` copies."""
        return (*(getattr(self, name) for name in _ON_DEVICE), *(self.statistics or ()))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        moved: dict[str, Any] = {name: change(getattr(self, name)) for name in _ON_DEVICE}
        return replace(self, statistics=self.statistics and self.statistics.map(change), **moved)


def collate(
    store: Store, trials: Sequence[TrialInfo], sessions: dict[str, int], spec: StatisticsSpec, position: int = 0
) -> Batch:
    """Read these trials and pad them to one batch."""
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
        read_statistics(store, trials, spec),
        tuple(trials),
        position,
        len(trials),
        tuple(trials),
    )


def read_statistics(store: Store, trials: Sequence[TrialInfo], spec: StatisticsSpec) -> BatchStatistics | None:
    """Statistics of each trial's block, or of the bins before the trial."""
    if spec.kind == "none":
        return None
    read = store.block_statistics if spec.kind == "block" else store.past_statistics
    found = [read(t, spec.log) for t in trials]
    return BatchStatistics(
        torch.from_numpy(np.stack([s.mean for s in found])),
        torch.from_numpy(np.stack([s.sd for s in found])),
        torch.tensor([s.n_bins for s in found]),
    )


class BatchSampler(Protocol):
    """Gives the indices of the trials in the batch at a position."""

    def draw(self, position: int) -> list[int]: ...


class PlannedBatches(Dataset[Batch]):
    """The training sequence as a dataset: index = position in the plan."""

    def __init__(
        self,
        store: Store,
        trials: Sequence[TrialInfo],
        plan: BatchSampler,
        sessions: Sequence[str],
        spec: StatisticsSpec,
        rank_and_size: tuple[int, int] = (0, 1),
    ) -> None:
        self.store, self.trials, self.plan, self.spec = store, tuple(trials), plan, spec
        self.sessions = {name: i for i, name in enumerate(sessions)}
        self.rank, self.size = rank_and_size  # this process reads every size-th trial of a batch

    def __getitem__(self, position: int) -> Batch:
        drawn = [self.trials[i] for i in self.plan.draw(position)]
        own = drawn[self.rank :: self.size]
        batch = collate(self.store, own or drawn[:1], self.sessions, self.spec, position)
        return replace(batch, n_counted=len(own), all_trials=tuple(drawn))


def training_batches(
    data: PlannedBatches, start: int, stop: int | None, workers: int, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """Batches at positions start … stop-1 (or without end), prefetched by worker processes if there are any.

    The workers end with the generator: when it is closed, and when data cannot be read.
    """
    positions = count(start) if stop is None else range(start, stop)
    loader = DataLoader(
        _ReadErrors(data),
        batch_size=None,
        sampler=positions,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_ignore_signals,  # two batches per worker are prefetched
        pin_memory=pin_memory,
    )
    batches = iter(loader)
    try:
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch
    finally:
        _end_workers(batches)


class _ReadErrors(Dataset[Batch | Exception]):
    """A dataset that returns read errors instead of raising them.

    An exception that is raised in a worker would arrive with the worker's traceback as its message.
    """

    def __init__(self, data: PlannedBatches) -> None:
        self._data = data

    def __getitem__(self, position: int) -> Batch | Exception:
        try:
            batch = self._data[position]
            if get_worker_info() is not None:
                _share(batch)
        except (UserError, OSError) as error:
            return error
        return batch


def _share(batch: Batch) -> None:
    """Move a batch to the memory that a worker shares with training.

    torch would do so in the thread that sends the batch; if the memory is full, nothing is sent then, and training
    waits forever.
    """
    tensors = (*batch.tensors(), batch.session)
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        size = sum(tensor.nbytes for tensor in tensors) / 1e6
        raise UserError(
            f"a batch of {size:.0f} MB does not fit into the shared memory of the loader processes, /dev/shm"
            f" ({str(error).splitlines()[0]}); start the container with more of it (docker run --shm-size=8g or"
            " --ipc=host), lower data.workers, or set data.workers=0"
        ) from None


def _end_workers(batches: Any) -> None:
    """End the worker processes of a `DataLoader` iterator.

    torch ends them only when the iterator is garbage-collected, which does not happen while an exception refers to it.
    At program exit `multiprocessing` sends SIGTERM, which they ignore, and waits forever.
    """
    workers = getattr(batches, "_workers", ())
    if workers:
        batches._shutdown_workers()
    for worker in workers:
        if worker.is_alive():  # stuck in a read
            worker.kill()
            worker.join()


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device. On a GPU each is copied on a separate stream while the previous one is in use."""
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device)
        return
    stream = torch.cuda.Stream(device)

    def copy_next() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return batch.to(device)

    copied = copy_next()
    while copied is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in copied.tensors():
            tensor.record_stream(current)  # its memory was allocated on the other stream
        ready, copied = copied, copy_next()  # queue the copy before the step that uses `ready`
        yield ready


def _ignore_signals(worker: int) -> None:
    """A signal to the process group is handled by training, which needs its workers to finish the step."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if number := getattr(signal, name, None):  # Windows lacks SIGHUP
            signal.signal(number, signal.SIG_IGN)


def group_by_length(trials: Sequence[TrialInfo], batch_size: int) -> list[list[int]]:
    """Indices in batches of similar length for passes where the order does not matter."""
    order = sorted(range(len(trials)), key=lambda i: trials[i].n_bins)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def evaluation_batches(
    store: Store,
    trials: Sequence[TrialInfo],
    sessions: Sequence[str],
    spec: StatisticsSpec,
    batches: Sequence[Sequence[int]],
) -> Iterator[tuple[Sequence[int], Batch]]:
    """Batches for evaluation, each with the indices of its trials."""
    index = {name: i for i, name in enumerate(sessions)}
    for chosen in batches:
        yield chosen, collate(store, [trials[i] for i in chosen], index, spec)
