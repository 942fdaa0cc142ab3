"""Evaluation of online adaptation: recorded sessions in order, each trial decoded before it is adapted to."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.known_sessions import measure_confidence, normalised_bins, start_session
from arcuate.adaptation.online import OnlineAdapter, compute_log_probs
from arcuate.adaptation.state import DecodedTrial, SessionState, confidence
from arcuate.data.sessions import days_between
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.evaluation.evaluate import Search, TrialResult
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import score_difference
from arcuate.progress import Progress

# --- the loop over trials ----------------------------------------------------------------------------------------


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
    search: Search = greedy,
    keep_log_probs: bool = False,
    progress: Progress | None = None,
) -> list[AdaptedSession]:
    """Decode trials in recording order and adapt after each one; sessions are independent of each other."""
    done: list[AdaptedSession] = []
    n_done = 0
    known = measure_confidence(adapter, store, progress) if adapter.settings.method != "none" else {}
    for session, group in groupby(recording_order(trials, store.sessions), lambda t: t.session):
        state = start_session(adapter, store, session, known)
        adapted = []
        for trial in group:
            step, state = adapt_trial(adapter, state, store, trial, search, keep_log_probs)
            adapted.append(step)
            n_done += 1
            if progress:
                progress(n_done, len(trials), "decoding trials")
        done.append(AdaptedSession(state, session in adapter.model.card.sessions, tuple(adapted)))
    return done


def adapt_trial(
    adapter: OnlineAdapter,
    state: SessionState,
    store: Store,
    trial: TrialInfo,
    search: Search,
    keep_log_probs: bool,
) -> tuple[AdaptedTrial, SessionState]:
    """Decode one trial with the current state and return the state after it."""
    bins = normalised_bins(adapter, store, trial)
    log_probs = compute_log_probs(adapter.adapted_model(state, bins), bins)
    tokens = tuple(search(log_probs))
    adapting = adapter.settings.method != "none"
    unadapted = compute_log_probs(adapter.unadapted_model(state), bins) if adapting else log_probs
    started, before = time.process_time(), state
    fallback = None
    if adapting:
        label = tokens if adapter.labeller is greedy else tuple(adapter.labeller(log_probs))
        state, fallback = adapter.update(state, DecodedTrial(bins, log_probs, label), unadapted)
    seconds = time.process_time() - started
    reference = trial.tokens
    result = TrialResult(
        trial,
        tokens,
        score(reference, tokens) if reference is not None else None,
        None,
        log_probs if keep_log_probs else None,
        greedy_score=score(reference, greedy(log_probs))
        if reference is not None and search is not greedy
        else None,
    )
    adapted = AdaptedTrial(
        result,
        unadapted=score(reference, tuple(search(unadapted))) if reference is not None else None,
        confidence=confidence(log_probs),
        updated=state.n_steps > before.n_steps,
        fallback=fallback,
        layer_distance=adapter.layer(state).distance(state.initial),
        seconds=seconds,
    )
    return adapted, state


def recording_order(trials: Sequence[TrialInfo], sessions: Sequence[str]) -> list[TrialInfo]:
    """Sort trials by session, block, split and number: as recorded, as far as the store shows it."""
    position = {session: i for i, session in enumerate(sessions)}
    return sorted(trials, key=lambda t: (position[t.session], t.block, t.split, t.number))


# --- results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionResult:
    """Adaptation of one session in numbers."""

    session: str
    known: bool
    init_session: str
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


@dataclass(frozen=True, eq=False)
class AdaptationResult:
    """Error rates with and without adaptation over all trials, and by session."""

    metrics: Mapping[str, Any]  # of the adapted model
    provenance: Mapping[str, Any]
    settings: Adaptation
    pseudo_labels: str  # how pseudo-labels were made
    per_unadapted: float | None
    difference: float | None  # PER adapted minus unadapted, paired over trials
    difference_low: float | None
    difference_high: float | None
    p: float | None
    seconds_per_trial: float | None
    sessions: tuple[SessionResult, ...]
    peak_rss_mb: float

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.metrics,
            **self.provenance,
            "adapt": self.settings.model_dump(mode="json"),
            "pseudo_labels": self.pseudo_labels,
            "per_unadapted": self.per_unadapted,
            "difference": self.difference,
            "difference_low": self.difference_low,
            "difference_high": self.difference_high,
            "p": self.p,
            "seconds_per_trial": self.seconds_per_trial,
            "sessions": [asdict(session) for session in self.sessions],
            "peak_rss_mb": self.peak_rss_mb,
        }


def summarise_sessions(
    sessions: Sequence[AdaptedSession],
    metrics: Mapping[str, Any],
    provenance: Mapping[str, Any],
    settings: Adaptation,
    pseudo_labels: str,
    peak_rss_mb: float,
) -> AdaptationResult:
    """Compare adapted with unadapted error rates, paired over trials."""
    trials = [t for session in sessions for t in session.trials]
    pairs = [(t.result.score, t.unadapted) for t in trials if t.result.score and t.unadapted]
    adapted, unadapted = [a for a, _ in pairs], [b for _, b in pairs]
    difference = score_difference(adapted, unadapted) if pairs else None
    return AdaptationResult(
        metrics,
        provenance,
        settings,
        pseudo_labels,
        per_unadapted=total(unadapted).rate,
        difference=difference.rate if difference else None,
        difference_low=difference.low if difference else None,
        difference_high=difference.high if difference else None,
        p=difference.p if difference else None,
        seconds_per_trial=_mean([t.seconds for t in trials]),
        sessions=tuple(summarise_session(session) for session in sessions),
        peak_rss_mb=peak_rss_mb,
    )


def summarise_session(session: AdaptedSession) -> SessionResult:
    trials, state = session.trials, session.state
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
        confidence=_mean([t.confidence for t in trials]),
        seconds_per_trial=_mean([t.seconds for t in trials]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
