"""Calibration with a few labelled sentences: which trials train, which are held out, and how batches mix them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.selection import can_align
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import LIVE_CORPUS
from arcuate.errors import UserError
from arcuate.models.config import Patch

BATCH_SIZE = 16
_KNOWN_FRACTION = 0.5  # of a batch, if there are trials of known sessions
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
    alternative = "or adapt without labels: arcuate evaluate RUN --adapt"
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

    def draw(self, position: int) -> list[int]:
        """Indices of the batch at this position, a function of the position."""
        rng = np.random.default_rng((0, 3, position))
        n_known = min(round(BATCH_SIZE * _KNOWN_FRACTION), self.n_known)
        n_new = BATCH_SIZE - n_known
        rounds = -(-n_new // self.n_new)  # every new trial once before any is repeated
        new = np.concatenate([rng.permutation(self.n_new) for _ in range(rounds)])[:n_new]
        known = self.n_new + rng.permutation(self.n_known)[:n_known]
        return [int(i) for i in (*new, *known)]


def curve_sizes(n_sentences: int) -> tuple[int, ...]:
    """Numbers of sentences at which the curve is measured: none, a quarter, half and all."""
    return tuple(sorted({0, max(n_sentences // 4, 1), max(n_sentences // 2, 1), n_sentences}))
