"""Which trials of a day calibrate, which are held back to score, and in which mix they are trained on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from arcuate.data.selection import can_align
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import LIVE_CORPUS
from arcuate.errors import UserError
from arcuate.evaluation.metrics import total
from arcuate.evaluation.significance import bootstrap_interval, score_difference
from arcuate.evaluation.trials import TrialResult
from arcuate.models.config import Patch

FLAT_TRIALS = 20  # looked at to find out whether anything is recorded at all


@dataclass(frozen=True)
class Sentences:
    """A day in two parts, each in the order of recording."""

    first: tuple[TrialInfo, ...]  # to calibrate on
    rest: tuple[TrialInfo, ...]  # to score on, later than those


def split_day(store: Store, session: str, n_sentences: int, patch: Patch) -> Sentences:
    """The first labelled training sentences of a day, and everything labelled that comes after them."""
    if n_sentences < 1:
        raise UserError(
            f"--sentences {n_sentences} leaves nothing to calibrate on; give at least 1, or use --adapt instead"
        )
    if session not in store.sessions:
        raise UserError(f"{store.path.name} has no session {session}; it holds {', '.join(store.sessions)}")
    labelled = sorted(
        (t for t in store.trials if t.session == session and t.tokens is not None and t.split != "test"),
        key=lambda t: (t.block, t.split, t.number),
    )
    usable = [
        t
        for t in labelled
        if is_to_learn(t) and t.usable and can_align(t.tokens or (), patch.count_frames(t.n_bins))
    ]
    if labelled:
        refuse_flat(store, session, labelled[:FLAT_TRIALS])
    if not usable:
        raise UserError(nothing_to_learn(store, session, [t for t in labelled if is_to_learn(t)]))
    first = tuple(usable[:n_sentences])
    after = {t.id for t in labelled} - {t.id for t in labelled[: labelled.index(first[-1]) + 1]}
    return Sentences(first, tuple(t for t in labelled if t.id in after))


def nothing_to_learn(store: Store, session: str, labelled: Sequence[TrialInfo]) -> str:
    """Why a day has no sentence to calibrate on, and what to do: labels are missing, or the recording is bad."""
    instead = "or follow it without labels: arcuate evaluate RUN --adapt one-step"
    if not labelled:
        return (
            f"{session} has no labelled training sentence to calibrate on; add its labels and prepare it again,"
            f" {instead}"
        )
    return (
        f"none of the {len(labelled)} labelled training sentences of {session} can be learned from: rejected by"
        f" quality, or too short for their labels; {store.path / 'quality.csv'} has the reasons; mend the recording"
        f" and prepare it again, {instead}"
    )


def is_to_learn(trial: TrialInfo) -> bool:
    """Training sentences, and all labelled ones of a live session, which knows no splits."""
    return trial.split == "train" or trial.corpus == LIVE_CORPUS


def refuse_flat(store: Store, session: str, trials: Sequence[TrialInfo]) -> None:
    """A day on which no electrode says anything cannot be learned."""
    if not live_channels(store, trials).any():
        raise UserError(
            f"every channel of {session} is flat in these sentences: no electrode is recorded, so there is nothing"
            " to calibrate on; check the recording"
        )


def live_channels(store: Store, trials: Sequence[TrialInfo]) -> np.ndarray:
    """Channels that vary within some trial. (C,) bool"""
    alive = np.zeros(store.n_channels, dtype=bool)
    for trial in trials:
        bins = store.read_bins(trial)
        alive |= np.ptp(bins, axis=0) > 0 if len(bins) else False
    return alive


@dataclass(frozen=True)
class MixedPlan:
    """Batches of new and old trials: the first `n_new` of a list, and those after them."""

    n_new: int
    n_old: int
    batch_size: int
    old_share: float
    seed: int

    def draw(self, position: int) -> list[int]:
        """Indices of the trials in the batch at this position, a function of (seed, position)."""
        rng = np.random.default_rng((self.seed, 3, position))
        n_old = min(round(self.batch_size * self.old_share), self.n_old)
        n_new = self.batch_size - n_old
        rounds = -(-n_new // self.n_new)  # every sentence once before any comes again
        new = np.concatenate([rng.permutation(self.n_new) for _ in range(rounds)])[:n_new]
        old = self.n_new + rng.permutation(self.n_old)[:n_old]
        return [int(i) for i in (*new, *old)]


# How much a sentence is worth: error rate of the rest of the day over sentences of calibration.


@dataclass(frozen=True)
class Point:
    """One point of the curve, with its 95 % interval over the trials scored."""

    sentences: int
    per: float | None
    low: float | None
    high: float | None
    n_trials: int
    gain: float | None = None  # PER less than without calibration, on the same trials
    gain_low: float | None = None
    gain_high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def curve_points(n_sentences: int) -> tuple[int, ...]:
    """None, a quarter, half and all of the sentences."""
    return tuple(sorted({0, max(n_sentences // 4, 1), max(n_sentences // 2, 1), n_sentences}))


def measure(
    sentences: int, results: Sequence[TrialResult], without: Sequence[TrialResult] | None = None
) -> Point:
    """A point from the trials held back; `without` are the same trials read without calibration."""
    scores = [r.score for r in results if r.score is not None]
    low, high = bootstrap_interval(scores)
    rate = total(scores).rate
    before = [r.score for r in without or () if r.score is not None]
    found = score_difference(before, scores) if before and scores else None
    gain = (found.rate, found.low, found.high) if found else (None, None, None)
    return Point(sentences, rate, low, high, len(scores), *gain)
