"""Replay of prepared trials, bin by bin at the pace of the recording or faster."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.statistics import Statistics
from arcuate.data.store import MANIFEST_FILE, Store, TrialInfo
from arcuate.data.trial import BIN_SECONDS, nearest_session
from arcuate.decoding.decoder import Decoder
from arcuate.errors import UserError
from arcuate.exported.file import is_export
from arcuate.live.input import Chunk, End, Item, Mark, SessionChange, Source
from arcuate.progress import logger
from arcuate.run import Run

_PAUSE_S = 2.5  # between trials, most of it after the end of one so that its text can be read
_MAX_SPEED = 64.0


@dataclass(frozen=True)
class ReplayTrials:
    """Trials to replay, and how the model normalises them."""

    store: Store
    trials: tuple[TrialInfo, ...]
    normalise: str
    log: bool

    def statistics(self, info: TrialInfo) -> Statistics | None:
        """Statistics as in offline evaluation: of the block, or of the trials before."""
        if self.normalise == "block":
            return self.store.block_statistics(info, self.log)
        return self.store.past_statistics(info, self.log) if self.normalise == "rolling" else None


def open_replay(run: Path, decoder: Decoder, data: str | Path | None, split: str, session: str | None) -> ReplayTrials:
    """Open the trials to replay; with adaptation in recording order, including sessions new to the model.

    `data` is a store, by default the one that the run was trained on.
    """
    if data is None and is_export(run):
        raise UserError(f"{run} does not contain recordings; give a store to replay with --data")
    if data is None and not Run(run).environment_file.is_file():
        raise UserError(f"{run} does not record its training store; give a store with --data")
    store = _open_store(Path(data) if data else Run(run).store_path(), decoder)
    store.check_trained_on(_trained_on(run, decoder))
    layout, adapts = decoder.layout, decoder.adapter is not None
    sessions = store.sessions if adapts else decoder.sessions
    chosen = None if split == "all" else split
    found = select_trials(store, sessions, layout.normalise, layout.log1p, chosen, session)
    if not adapts:
        return found
    from arcuate.adaptation.known_sessions import log_new_sessions
    from arcuate.evaluation.adapted import recording_order
    from arcuate.models.acoustic import TorchModel

    trials = recording_order(found.trials, store.sessions)
    assert isinstance(decoder.model, TorchModel)
    log_new_sessions(store, decoder.model.model, trials)
    return replace(found, trials=tuple(trials))


def _open_store(path: Path, decoder: Decoder) -> Store:
    store = Store.open(path)
    if store.n_channels != decoder.n_channels:
        raise UserError(f"{store.path} has {store.n_channels} channels, but the model expects {decoder.n_channels}")
    return store


def _trained_on(run: Path, decoder: Decoder) -> dict[str, Any]:
    """Training data of a model as recorded with it; empty if unknown."""
    if is_export(run):
        return dict(getattr(decoder.model, "trained_on", {}))
    return Run(run).data() if Run(run).environment_file.is_file() else {}


def seed_statistics(run: Path, decoder: Decoder, data: str | Path | None) -> None:
    """Start the running statistics of a stream with those of recordings that existed before it.

    These are the last training block of the session in the store (`data`, by default the training data of the run), of
    the nearest session if it has none, or the last block of a store without training trials.
    """
    layout = decoder.layout
    if layout.normalise == "none":
        return
    path = Path(data or str(_trained_on(run, decoder).get("path") or ""))
    if data is None and not (path / MANIFEST_FILE).is_file():
        logger.info(
            "the statistics of normalisation start empty, so the first sentences may be wrong;"
            " name a store of earlier recordings with --data"
        )
        return
    store = _open_store(path, decoder)
    train = [t for t in store.trials if t.split == "train"]
    last = {t.session: t for t in train or store.trials}

    def known(session: str) -> Statistics | None:
        if not last:
            return None
        return store.block_statistics(last[nearest_session(session, tuple(last))], layout.log1p)

    decoder.seed_sessions(known)


def select_trials(
    store: Store,
    sessions: Sequence[str],
    normalise: str,
    log: bool,
    split: str | None = "val",
    session: str | None = None,
) -> ReplayTrials:
    """Select the trials of a split (all: None) in the given sessions, oldest session first."""
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
        raise UserError(f"{store.path} has no {split or 'prepared'} trials{where} in sessions known to the model")
    return ReplayTrials(store, trials, normalise, log)


class Replay(Source):
    """Replays trials in order and in a loop; can be paused, sped up and moved to another trial.

    A `continuous` replay marks no trials, as a rig that sends nothing but bins.
    """

    def __init__(
        self,
        trials: ReplayTrials,
        put: Callable[[Item], object],
        speed: float = 1.0,
        pause_s: float = _PAUSE_S,
        loop: bool = True,
        continuous: bool = False,
    ) -> None:
        super().__init__("replay")
        self.trials = trials
        self.put = put
        self.pause_s = pause_s
        self.loop = loop
        self.continuous = continuous
        self.speed = _check_speed(speed)
        self.paused = False
        self.position = 0
        self.done = threading.Event()
        self._target: int | None = None
        self._changed = threading.Condition()

    def stop(self) -> None:
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        super().stop()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self.paused = paused
            self._changed.notify_all()

    def set_speed(self, speed: float) -> None:
        with self._changed:
            self.speed = _check_speed(speed)
            self._changed.notify_all()

    def select(self, trial: str) -> None:
        ids = [info.id for info in self.trials.trials]
        if trial not in ids:
            raise UserError(f"trial {trial!r:.80} is not among the replayed trials")
        self._jump_to(ids.index(trial))

    def skip(self, n: int) -> None:
        self._jump_to((self.position + n) % len(self.trials.trials))

    def _jump_to(self, position: int) -> None:
        with self._changed:
            self._target, self.paused = position, False
            self._changed.notify_all()

    # --- replay thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        trials, session = self.trials.trials, None
        while not self._stopped.is_set() and self.position < len(trials):
            info = trials[self.position]
            bins = self.trials.store.read_bins(info)
            if not self.continuous:
                self.put(Mark(info.id, info.session, info.text))
            elif info.session != session:
                self.put(SessionChange(info.session))
            session = info.session
            if self._play(bins) and not self.continuous and self._pause_between(0.25):
                self.put(End())
                self._pause_between(0.75)
            self.position = self._next()
        if not self._stopped.is_set():  # else the sentence may be incomplete
            self.put(End())
        self.done.set()

    def _next(self) -> int:
        with self._changed:
            if self._target is not None:
                position, self._target = self._target, None
                return position
        next_position = self.position + 1
        return next_position % len(self.trials.trials) if self.loop else next_position

    def _play(self, bins: np.ndarray) -> bool:
        """Put bins at their pace; return False if interrupted."""
        due, first = time.monotonic(), 0
        while first < len(bins):
            n = max(1, round(self.speed / 4))  # several at once at high speed
            due = max(due + n * BIN_SECONDS / self.speed, time.monotonic() - 0.5)
            if not self._wait_until(due):
                return False
            if self._wait_while_paused():
                if self._interrupted:
                    return False
                due = time.monotonic()
            self.put(Chunk(bins[first : first + n]))
            first += n
        return True

    def _wait_while_paused(self) -> bool:
        """Wait while paused; return whether it was paused."""
        with self._changed:
            was_paused = self.paused
            self._changed.wait_for(lambda: not self.paused or self._interrupted)
        return was_paused

    def _pause_between(self, fraction: float) -> bool:
        """Wait for a fraction of the time between trials, longer if paused; return False if interrupted."""
        waited = self._wait_until(time.monotonic() + fraction * self.pause_s / self.speed)
        return waited and not (self._wait_while_paused() and self._interrupted)

    @property
    def _interrupted(self) -> bool:
        return self._stopped.is_set() or self._target is not None

    def _wait_until(self, due: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted, timeout=max(0.0, due - time.monotonic()))
            return not self._interrupted


def _check_speed(speed: float) -> float:
    if not 0.1 <= speed <= _MAX_SPEED:
        raise UserError(f"speed {speed!r:.20} is out of range; choose 0.1 to {_MAX_SPEED:g}")
    return float(speed)
