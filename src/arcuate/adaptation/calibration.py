"""Calibration with a few labelled sentences: which trials train, which are held out, and the calibration curve."""

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

_FLAT_CHECK_TRIALS = 20  # trials examined to check that at least one channel varies


@dataclass(frozen=True)
class CalibrationSplit:
    """The labelled trials of a session in two parts, each in recording order."""

    calibration: tuple[TrialInfo, ...]
    held_out: tuple[TrialInfo, ...]  # labelled trials recorded after them


def split_session(store: Store, session: str, n_sentences: int, patch: Patch) -> CalibrationSplit:
    """Take the first labelled training sentences of a session; hold out everything labelled after them."""
    if n_sentences < 1:
        raise UserError(
            f"--sentences {n_sentences} leaves nothing to calibrate on; give at least 1, or use --adapt instead"
        )
    if session not in store.sessions:
        raise UserError(f"{store.path.name} has no session {session}; it contains {', '.join(store.sessions)}")
    labelled = sorted(
        (t for t in store.trials if t.session == session and t.tokens is not None and t.split != "test"),
        key=lambda t: (t.block, t.split, t.number),
    )
    usable = [
        t
        for t in labelled
        if _is_training_trial(t) and t.usable and can_align(t.tokens or (), patch.count_frames(t.n_bins))
    ]
    if labelled:
        _check_not_flat(store, session, labelled[:_FLAT_CHECK_TRIALS])
    if not usable:
        raise UserError(_nothing_usable(store, session, [t for t in labelled if _is_training_trial(t)]))
    chosen = tuple(usable[:n_sentences])
    return CalibrationSplit(chosen, tuple(labelled[labelled.index(chosen[-1]) + 1 :]))


def _nothing_usable(store: Store, session: str, labelled: Sequence[TrialInfo]) -> str:
    alternative = "or adapt without labels: arcuate evaluate RUN --adapt one-step"
    if not labelled:
        return (
            f"{session} has no labelled training sentence to calibrate on; add its labels and prepare it again,"
            f" {alternative}"
        )
    return (
        f"none of the {len(labelled)} labelled training sentences of {session} is usable: all were rejected by the"
        f" quality checks or are too short for their labels; see {store.path / 'quality.csv'}, repair the recording"
        f" and prepare it again, {alternative}"
    )


def _is_training_trial(trial: TrialInfo) -> bool:
    """Training trials, and all labelled trials of a live session, which has no splits."""
    return trial.split == "train" or trial.corpus == LIVE_CORPUS


def _check_not_flat(store: Store, session: str, trials: Sequence[TrialInfo]) -> None:
    for trial in trials:
        bins = store.read_bins(trial)
        if len(bins) and (np.ptp(bins, axis=0) > 0).any():
            return
    raise UserError(
        f"every channel of {session} is flat in these sentences, so there is nothing to calibrate on;"
        " check the recording"
    )


@dataclass(frozen=True)
class MixedBatches:
    """Batches of new and known trials, given as indices: the new trials come first, the known ones after them."""

    n_new: int
    n_known: int
    batch_size: int
    known_fraction: float
    seed: int

    def draw(self, position: int) -> list[int]:
        """Indices of the batch at this position, a function of (seed, position)."""
        rng = np.random.default_rng((self.seed, 3, position))
        n_known = min(round(self.batch_size * self.known_fraction), self.n_known)
        n_new = self.batch_size - n_known
        rounds = -(-n_new // self.n_new)  # every new trial once before any is repeated
        new = np.concatenate([rng.permutation(self.n_new) for _ in range(rounds)])[:n_new]
        known = self.n_new + rng.permutation(self.n_known)[:n_known]
        return [int(i) for i in (*new, *known)]


@dataclass(frozen=True)
class CurvePoint:
    """PER on the held-out trials after calibration with a number of sentences, with its 95 % interval."""

    sentences: int
    per: float | None
    low: float | None
    high: float | None
    n_trials: int
    gain: float | None = None  # decrease of PER relative to no calibration, on the same trials
    gain_low: float | None = None
    gain_high: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def curve_sizes(n_sentences: int) -> tuple[int, ...]:
    """Numbers of sentences at which the curve is measured: none, a quarter, half and all."""
    return tuple(sorted({0, max(n_sentences // 4, 1), max(n_sentences // 2, 1), n_sentences}))


def curve_point(
    n_sentences: int, results: Sequence[TrialResult], uncalibrated: Sequence[TrialResult] | None = None
) -> CurvePoint:
    """Score held-out trials; `uncalibrated` are the same trials decoded without calibration."""
    scores = [r.score for r in results if r.score is not None]
    low, high = bootstrap_interval(scores)
    before = [r.score for r in uncalibrated or () if r.score is not None]
    difference = score_difference(before, scores) if before and scores else None
    gain = (difference.rate, difference.low, difference.high) if difference else (None, None, None)
    return CurvePoint(n_sentences, total(scores).rate, low, high, len(scores), *gain)
