"""Decode recorded sessions in order with online adaptation: each trial is decoded before it is adapted to."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from arcuate.adaptation.known_sessions import expected_confidence, measure_confidence, normalised_bins
from arcuate.adaptation.online import OnlineAdapter, compute_log_probs
from arcuate.adaptation.state import DecodedTrial, SessionState, confidence
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_between
from arcuate.evaluation.metrics import Score, mean, score, total
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.evaluation.trials import TokenSearch, TrialResult, search_trial
from arcuate.evaluation.unlabelled import ErrorEstimate, ErrorReference, estimate_error, measure_trial
from arcuate.files import fields_to_dict
from arcuate.models.layout import Frames
from arcuate.progress import Progress, peak_memory_bytes


@dataclass(frozen=True, eq=False)
class AdaptedTrial:
    """One trial, decoded with and without the adaptation so far."""

    result: TrialResult
    unadapted: Score | None
    confidence: float
    updated: bool
    fallback: str | None  # the reason, if the session fell back after this trial
    layer_distance: float  # from the initial layer, relative to its norm
    seconds: float  # CPU time of adaptation without decoding


@dataclass(frozen=True, eq=False)
class AdaptedSession:
    """All trials of one session, and the state after the last of them."""

    state: SessionState
    known: bool  # the model has a layer for it
    trials: tuple[AdaptedTrial, ...]


def adapt_sessions(
    adapter: OnlineAdapter,
    store: Store,
    trials: Sequence[TrialInfo],
    search: TokenSearch | None = None,
    progress: Progress | None = None,
) -> list[AdaptedSession]:
    """Decode trials in recording order and adapt after each one; sessions are independent of each other.

    The pseudo-labels are the decoded tokens.
    """
    done: list[AdaptedSession] = []
    known = measure_confidence(adapter, store, progress)
    order = enumerate(recording_order(trials, store.sessions), start=1)
    for session, group in groupby(order, lambda numbered: numbered[1].session):
        state = adapter.start(session, expected_confidence(session, known))
        adapted = []
        for n, trial in group:
            step, state = _adapt_trial(adapter, state, store, trial, search or TokenSearch())
            adapted.append(step)
            if progress:
                progress(n, len(trials), "decoding trials")
        done.append(AdaptedSession(state, session in adapter.model.config.sessions, tuple(adapted)))
    return done


def _adapt_trial(
    adapter: OnlineAdapter, state: SessionState, store: Store, trial: TrialInfo, search: TokenSearch
) -> tuple[AdaptedTrial, SessionState]:
    """Decode one trial with the current state and return the state after it."""
    bins = normalised_bins(adapter, store, trial)
    log_probs = compute_log_probs(adapter.adapted_model(state), bins)
    result = search_trial(search, trial, Frames(log_probs))
    unadapted = compute_log_probs(adapter.unadapted_model(state), bins)
    started, before = time.process_time(), state
    state, fallback = adapter.update(state, DecodedTrial(bins, log_probs, result.tokens), unadapted)
    seconds = time.process_time() - started
    adapted = AdaptedTrial(
        result,
        unadapted=score(trial.tokens, search(Frames(unadapted))) if trial.tokens is not None else None,
        confidence=confidence(log_probs),
        updated=state.n_steps > before.n_steps,
        fallback=fallback,
        layer_distance=adapter.layer(state).distance(state.initial),
        seconds=seconds,
    )
    return adapted, state


def recording_order(trials: Sequence[TrialInfo], sessions: Sequence[str]) -> list[TrialInfo]:
    """Sort trials by session, block, split and number: the recording order as far as the store contains it."""
    position = {session: i for i, session in enumerate(sessions)}
    return sorted(trials, key=lambda t: (position[t.session], t.block, t.split, t.number))


# --- summaries -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionResult:
    """Summary of one adapted session."""

    session: str
    known: bool  # the model has a layer for it
    init_session: str  # known session whose layer it started with
    days_later: int | None  # from `init_session` to this session
    n_trials: int
    per: float | None
    per_unadapted: float | None
    n_steps: int
    n_fallbacks: int
    fallbacks: list[str]  # reasons
    layer_distance: float
    expected_confidence: float | None
    confidence: float | None
    seconds_per_trial: float | None
    estimate: ErrorEstimate | None = None  # of the trials without labels


@dataclass(frozen=True)
class AdaptationSummary:
    """What adaptation changed, over all trials and by session."""

    per_unadapted: float | None
    difference: Difference | None  # adapted minus unadapted, paired over trials
    seconds_per_trial: float | None
    sessions: tuple[SessionResult, ...]
    peak_rss_mb: float

    def to_dict(self) -> dict[str, Any]:
        difference = self.difference
        return {
            **fields_to_dict(self),
            "difference": difference.rate if difference else None,
            "difference_low": difference.low if difference else None,
            "difference_high": difference.high if difference else None,
            "p": difference.p if difference else None,
        }


def summarise_adaptation(
    sessions: Sequence[AdaptedSession], reference: ErrorReference | None = None
) -> AdaptationSummary:
    """Paired comparison with the unadapted model; `reference` as for `summarise_session`."""
    trials = [t for session in sessions for t in session.trials]
    pairs = [(t.result.score, t.unadapted) for t in trials if t.result.score and t.unadapted]
    adapted, unadapted = [a for a, _ in pairs], [b for _, b in pairs]
    return AdaptationSummary(
        total(unadapted).rate,
        score_difference(adapted, unadapted) if pairs else None,
        mean(t.seconds for t in trials),
        tuple(summarise_session(session, reference) for session in sessions),
        peak_memory_bytes() / (1 << 20),
    )


def summarise_session(session: AdaptedSession, reference: ErrorReference | None = None) -> SessionResult:
    """Summary of a session; with a reference, also an estimate of the error rate of its trials without labels."""
    trials, state = session.trials, session.state
    without = [t.result.log_probs for t in trials if t.result.score is None]
    evidence = [measure_trial(log_probs) for log_probs in without if log_probs is not None]
    fallbacks = [t.fallback for t in trials if t.fallback is not None]
    return SessionResult(
        session=state.session,
        known=session.known,
        init_session=state.init_session,
        days_later=days_between(state.session, state.init_session),
        n_trials=len(trials),
        per=total(t.result.score for t in trials if t.result.score).rate,
        per_unadapted=total(t.unadapted for t in trials if t.unadapted).rate,
        n_steps=sum(t.updated for t in trials),
        n_fallbacks=len(fallbacks),
        fallbacks=fallbacks,
        layer_distance=trials[-1].layer_distance if trials else 0.0,
        expected_confidence=state.expected.mean if state.expected else None,
        confidence=mean(t.confidence for t in trials),
        seconds_per_trial=mean(t.seconds for t in trials),
        estimate=None if reference is None else estimate_error(evidence, reference),
    )
