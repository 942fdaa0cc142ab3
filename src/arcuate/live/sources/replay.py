"""Prepared trials once more, bin by bin at the pace they were recorded, or faster."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.statistics import Statistics
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import BIN_SECONDS
from arcuate.errors import UserError
from arcuate.live.messages import Chunk, End, Item, Mark

REST_S = 2.5  # between trials, most of it after the end of one, so that a text can be read
MAX_SPEED = 64.0


@dataclass(frozen=True)
class Prepared:
    """Trials of a store that a model can hear, and how it wants them normalised."""

    store: Store
    trials: tuple[TrialInfo, ...]
    normalise: str
    log: bool

    def statistics(self, info: TrialInfo) -> Statistics | None:
        """As offline: of the block, or of what came before."""
        if self.normalise == "block":
            return self.store.block_statistics(info, self.log)
        return self.store.past_statistics(info, self.log) if self.normalise == "rolling" else None

    def mark(self, info: TrialInfo) -> Mark:
        return Mark(info.id, info.session, info.text, self.statistics(info))


class Replay:
    """Plays trials in order, again and again; a person may pause, hurry and pick."""

    def __init__(
        self,
        prepared: Prepared,
        put: Callable[[Item], object],
        speed: float = 1.0,
        rest_s: float = REST_S,
        loop: bool = True,
    ) -> None:
        self.prepared = prepared
        self.put = put
        self.rest_s = rest_s
        self.loop = loop
        self.speed = checked_speed(speed)
        self.paused = False
        self.at = 0
        self.done = threading.Event()
        self._stopped = False
        self._jump: int | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def pause(self, paused: bool) -> None:
        with self._changed:
            self.paused = paused
            self._changed.notify_all()

    def set_speed(self, speed: float) -> None:
        with self._changed:
            self.speed = checked_speed(speed)
            self._changed.notify_all()

    def pick(self, trial: str) -> None:
        ids = [info.id for info in self.prepared.trials]
        if trial not in ids:
            raise UserError(f"there is no trial {trial!r:.80} to replay")
        self._go(ids.index(trial))

    def skip(self, n: int) -> None:
        self._go((self.at + n) % len(self.prepared.trials))

    def _go(self, at: int) -> None:
        with self._changed:
            self._jump, self.paused = at, False
            self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        trials = self.prepared.trials
        while not self._stopped and self.at < len(trials):
            info = trials[self.at]
            bins = self.prepared.store.read_bins(info)
            self.put(self.prepared.mark(info))
            if self._play(bins) and self._rest(0.25):
                self.put(End())
                self._rest(0.75)
            self.at = self._next()
        if not self._stopped:  # else a sentence may be half said
            self.put(End(last=True))
        self.done.set()

    def _next(self) -> int:
        with self._changed:
            if self._jump is not None:
                at, self._jump = self._jump, None
                return at
        following = self.at + 1
        return following % len(self.prepared.trials) if self.loop else following

    def _play(self, bins: np.ndarray) -> bool:
        """Bins at their pace; False where a person wants something else."""
        due, first = time.monotonic(), 0
        while first < len(bins):
            n = max(1, round(self.speed / 4))  # at high speed several at a time
            due = max(due + n * BIN_SECONDS / self.speed, time.monotonic() - 0.5)
            if not self._wait_until(due):
                return False
            if self._held():
                if self._interrupted:
                    return False
                due = time.monotonic()
            self.put(Chunk(bins[first : first + n]))
            first += n
        return True

    def _held(self) -> bool:
        """Wait while paused; whether there was anything to wait for."""
        with self._changed:
            held = self.paused
            self._changed.wait_for(lambda: not self.paused or self._interrupted)
        return held

    def _rest(self, share: float) -> bool:
        """Part of the time between trials, longer where a person pauses; False where one wants something else."""
        rested = self._wait_until(time.monotonic() + share * self.rest_s / self.speed)
        return rested and not (self._held() and self._interrupted)

    @property
    def _interrupted(self) -> bool:
        return self._stopped or self._jump is not None

    def _wait_until(self, due: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted, timeout=max(0.0, due - time.monotonic()))
            return not self._interrupted


def checked_speed(speed: float) -> float:
    if not 0.1 <= speed <= MAX_SPEED:
        raise UserError(f"a speed of {speed!r:.20} is out of range; choose one from 0.1 to {MAX_SPEED:g}")
    return float(speed)


def prepare_replay(
    store: Store,
    sessions: Sequence[str],
    normalise: str,
    log: bool,
    split: str | None = "val",
    session: str | None = None,
) -> Prepared:
    """Trials of a split (all: None) whose sessions a model knows, oldest session first."""
    trials = tuple(
        info
        for info in store.trials
        if info.session in sessions
        and info.n_bins > 0
        and (split is None or info.split == split)
        and (session is None or info.session == session)
    )
    if not trials:
        where = f" of session {session}" if session else ""
        raise UserError(f"{store.path} has no {split or 'prepared'} trials{where} that the model knows")
    return Prepared(store, trials, normalise, log)
