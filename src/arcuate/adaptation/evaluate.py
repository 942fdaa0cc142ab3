"""Evaluation of online adaptation: recorded sessions in order, each trial decoded before it is adapted to."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.adaptation.config import Adaptation, resolve_adaptation
from arcuate.adaptation.known_sessions import (
    log_missing_reference,
    log_new_sessions,
    measure_confidence,
    normalised_bins,
    start_session,
)
from arcuate.adaptation.online import Labeller, OnlineAdapter, compute_log_probs, make_adapter, word_labeller
from arcuate.adaptation.state import DecodedTrial, SessionState, confidence
from arcuate.config import Overrides
from arcuate.data.alphabet import CLASSES, boundary_index, error_rate_name
from arcuate.data.selection import select_split
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_between
from arcuate.decoding.config import DecodingConfig, read_decoding_config
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.log_probs import reorder_for_words
from arcuate.errors import UserError
from arcuate.evaluation.card import refresh_card
from arcuate.evaluation.evaluate import (
    ModelSource,
    Provenance,
    ScoredSplit,
    check_outputs,
    choose_search,
    find_error_reference,
    find_provenance,
    find_source,
    open_store,
    write_frame_scores,
)
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.evaluation.transcribe import peak_rss_mb
from arcuate.evaluation.trials import PhonemeMetrics, Search, TrialResult, phoneme_search, summarise, write_results
from arcuate.evaluation.unlabelled import ErrorEstimate, ErrorReference, estimate_error, measure_trial
from arcuate.files import READ_ONLY, to_frame
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.progress import Progress, counted, logger, percent
from arcuate.run import Run, RunLike, open_run

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
        done.append(AdaptedSession(state, session in adapter.model.config.sessions, tuple(adapted)))
    return done


def adapt_trial(
    adapter: OnlineAdapter, state: SessionState, store: Store, trial: TrialInfo, search: Search, keep_log_probs: bool
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
        greedy_score=score(reference, greedy(log_probs)) if reference is not None and search is not greedy else None,
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
    """Sort trials by session, block, split and number: the recording order as far as the store contains it."""
    position = {session: i for i, session in enumerate(sessions)}
    return sorted(trials, key=lambda t: (position[t.session], t.block, t.split, t.number))


# --- API ---------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, eq=False)
class AdaptationResult:
    """Error rates with and without adaptation, over all trials and by session."""

    run: Run
    metrics: PhonemeMetrics  # error rates of the adapted model
    provenance: Provenance
    settings: Adaptation
    pseudo_labels: str  # how pseudo-labels were made
    per_unadapted: float | None
    difference: Difference | None  # adapted minus unadapted, paired over trials
    seconds_per_trial: float | None
    sessions: tuple[SessionResult, ...]
    peak_rss_mb: float
    classes: tuple[str, ...] = CLASSES  # alphabet of the model

    @property
    def results_file(self) -> Path:
        """The file with one line per trial."""
        return self.run.results_file(self.provenance.split, self.provenance.label)

    def summary(self) -> str:
        """The result in one sentence."""
        metrics, method, name = self.metrics, self.settings.method, error_rate_name(self.classes)
        if metrics.per is None:
            estimates = [f"{s.session}: {s.estimate.summary(name)}" for s in self.sessions if s.estimate is not None]
            return "\n".join([f"{counted(metrics.n_trials, 'trial')} decoded; {name} needs labels", *estimates])
        if method == "none":
            return f"{name} {percent(metrics.per)} unadapted, {metrics.interval_text}"
        p = "" if self.difference is None else f" (p = {self.difference.p:.4f})"
        return (
            f"{name} {percent(metrics.per)} with {method}, {metrics.interval_text}; {percent(self.per_unadapted)}"
            f" unadapted{p}; {1000 * (self.seconds_per_trial or 0.0):.0f} ms of adaptation per trial,"
            f" {self.peak_rss_mb:.0f} MB"
        )

    def to_dict(self) -> dict[str, Any]:
        """The values, as written to results/<split>.<label>.json."""
        difference = self.difference
        return {
            **self.metrics.to_dict(),
            **self.provenance.to_dict(),
            "adapt": self.settings.model_dump(mode="json"),
            "pseudo_labels": self.pseudo_labels,
            "per_unadapted": self.per_unadapted,
            "difference": difference.rate if difference else None,
            "difference_low": difference.low if difference else None,
            "difference_high": difference.high if difference else None,
            "p": difference.p if difference else None,
            "seconds_per_trial": self.seconds_per_trial,
            "sessions": [asdict(session) for session in self.sessions],
            "peak_rss_mb": self.peak_rss_mb,
        }

    def to_frame(self) -> Any:
        """One row per session, as a pandas DataFrame."""
        return to_frame(asdict(session) for session in self.sessions)


def evaluate_adaptation(
    run: RunLike,
    adapt: str | Adaptation = "one-step",
    *,
    settings: Overrides | None = None,
    split: str = "val",
    data: str | Path | None = None,
    checkpoint: str = "best",
    label: str | None = None,
    sessions: Sequence[str] = (),
    lm: str | None = None,
    lexicon: str = "default",
    decoding: DecodingConfig | str | Path | None = None,
    search: str | None = None,
    beam: int | None = None,
    head: str = "ctc",
    scores: str | Path | None = None,
    results_required: bool = True,
    progress: Progress | None = None,
) -> AdaptationResult:
    """Evaluate a run on recorded sessions with online adaptation, including sessions that are new to its model.

    `adapt` is a method or its settings; `settings` change those of a method, as {"lr": 5e-4}. `sessions` selects some
    of the store. With `lm` pseudo-labels come from a word search with this language model, `lexicon` and `decoding`
    (settings, or a file of `arcuate tune`). Results are written as by `evaluate`, under the label `adapt-<method>`
    unless another is given. If the run folder is read-only, they are not written and a warning is logged, unless they
    are required.
    """
    adaptation = resolve_adaptation(adapt, settings)
    label = label or f"adapt-{adaptation.method}"
    scores = None if scores is None else Path(scores)
    check_outputs(label, scores)
    if head != "ctc":
        raise UserError(f"--adapt uses the CTC head, got --head {head}; use --head ctc")
    if lm is None and (decoding is not None or lexicon != "default"):
        raise UserError("--lexicon and --config require a language model; give one with --lm")
    opened = open_run(run)
    source = find_source(opened, checkpoint)
    config, validate = source.config, choose_search(source.config.validate_, search, beam)
    store, model = open_store(source, data), load_model(source.checkpoint)
    trials = _select_trials(source, store, split, model.config, sessions)
    log_new_sessions(store, model, trials)
    machine = configure_runtime(available_runtime(config.runtime), config.encoder.width, 1)
    log_missing_reference(adaptation.method, bool(set(store.sessions) & set(model.config.sessions)))
    labeller = greedy if lm is None else _load_word_labeller(model.config.classes, lm, lexicon, decoding, progress)
    adapter = make_adapter(model.to(machine.device), adaptation, config.augment, labeller)
    store.check_unchanged(trials, progress)
    adapted = adapt_sessions(adapter, store, trials, phoneme_search(validate, model.config.classes), True, progress)
    results = [t.result for session in adapted for t in session.trials]
    scored = ScoredSplit(source, store, model, validate, "ctc", None, results)
    unlabelled = any(r.score is None for r in results)
    reference = find_error_reference(source, model, progress) if unlabelled else None
    result = AdaptationResult(
        opened,
        summarise(results),
        find_provenance(scored, split, label),
        adaptation,
        "greedy" if lm is None else f"words of {lm}",
        *compare_with_unadapted(adapted),
        sessions=tuple(summarise_session(session, reference) for session in adapted),
        peak_rss_mb=peak_rss_mb(),
        classes=model.config.classes,
    )
    try:
        write_results(opened, split, label, results, result.to_dict(), store, model.config.classes)
        refresh_card(opened)
    except OSError as error:
        if results_required or error.errno not in READ_ONLY:
            raise
        logger.warning(f"{opened.path} is read-only, so the results by trial are not saved in it")
    if scores is not None:
        write_frame_scores(scores, results, model.config.classes)
    return result


def _select_trials(
    source: ModelSource, store: Store, split: str, config: ModelConfig, sessions: Sequence[str]
) -> tuple[TrialInfo, ...]:
    """Trials of a split in known and new sessions."""
    if config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {config.n_channels} channels, {store.path.name} has {store.n_channels}; adaptation cannot"
            " add channels: prepare the same channels as for training"
        )
    store.check_classes(config.classes)
    if missing := [s for s in sessions if s not in store.sessions]:
        raise UserError(f"{store.path.name} has no session {missing[0]}; it contains {', '.join(store.sessions)}")
    chosen = set(sessions or store.sessions)
    data, patch = source.config.data, source.config.front_end.patch
    known = tuple(s for s in config.sessions if s in chosen)
    stored_split = "train" if split == "dev" else split
    of_known = select_split(store, data, patch.count_frames, split, known) if known else ()
    of_new = [
        t for t in store.trials if t.session in chosen and t.session not in config.sessions and t.split == stored_split
    ]
    trials = (*of_known, *(t for t in of_new if t.usable or split != "train"))
    if not trials:
        raise UserError(f"{store.path.name} has no {split} trials in these sessions")
    return trials


def _load_word_labeller(
    classes: tuple[str, ...],
    lm: str,
    lexicon: str,
    decoding: DecodingConfig | str | Path | None,
    progress: Progress | None,
) -> Labeller:
    # Imported here: the Numba kernels take half a second to load, and greedy pseudo-labels do not need them.
    from arcuate.decoding.word_search.search import build_word_search

    if not isinstance(decoding, DecodingConfig):
        decoding = DecodingConfig() if decoding is None else read_decoding_config(Path(decoding))[0]
    columns = reorder_for_words(classes, decoding)
    words, ngram = open_lexicon(lexicon, columns.classes), open_model(lm, progress)
    search = build_word_search(words, ngram, decoding, boundary=boundary_index(columns.classes))
    return word_labeller(search, columns=columns)


def compare_with_unadapted(sessions: Sequence[AdaptedSession]) -> tuple[float | None, Difference | None, float | None]:
    """Unadapted PER, paired difference to it, and CPU seconds of adaptation per trial."""
    trials = [t for session in sessions for t in session.trials]
    pairs = [(t.result.score, t.unadapted) for t in trials if t.result.score and t.unadapted]
    adapted, unadapted = [a for a, _ in pairs], [b for _, b in pairs]
    difference = score_difference(adapted, unadapted) if pairs else None
    return total(unadapted).rate, difference, _mean([t.seconds for t in trials])


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
        confidence=_mean([t.confidence for t in trials]),
        seconds_per_trial=_mean([t.seconds for t in trials]),
        estimate=None if reference is None else estimate_error(evidence, reference),
    )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
