"""Which trials make up the batch at a given position: pure functions of (seed, position).

Nothing is remembered between calls, so a resumed run, another number of workers or another process draws
exactly the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from arcuate.batches.settings import Batching, Bucketed, Days, Shuffled
from arcuate.errors import UserError
from arcuate.store import TrialInfo


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
