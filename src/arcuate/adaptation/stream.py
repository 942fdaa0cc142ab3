"""Trials of some days in the order they were recorded, each read by what was learned from those before it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.online import Adapter, input_sums, read
from arcuate.adaptation.state import Day, Expected, Heard, confidence
from arcuate.data.batching import read_statistics
from arcuate.data.sessions import days_between
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import score_difference
from arcuate.evaluation.trials import Search, TrialResult
from arcuate.progress import Progress

REFERENCE_TRIALS = 50  # of the known day, enough for means and variances
EXPECTED_TRIALS = 12  # of each known day, to know how sure the model usually is;
MOST_EXPECTED = 120  # fewer of each where there are many days, for a stream waits for them to be read
LEAST_DAY_SD = 0.1  # of days' means, as a share of the usual doubt, where few days are known
LEARNING = ("one-step", "replay", "entropy")  # methods that take steps
UNADAPTED = Adaptation(method="none")


@dataclass(frozen=True, eq=False)
class Followed:
    """One trial on the way: how it was read with and without what had been learned, and what it cost."""

    result: TrialResult
    unadapted: Score | None
    confidence: float
    learned: bool
    fell_back: str | None
    moved: float  # of the layer from where it began, relative to its norm
    seconds: float  # of CPU time spent on adapting, reading apart


@dataclass(frozen=True, eq=False)
class Course:
    """One session followed from its first trial to its last."""

    day: Day
    known: bool  # the model has a layer of its own for it
    trials: tuple[Followed, ...]


def follow(
    adapter: Adapter,
    store: Store,
    trials: Sequence[TrialInfo],
    search: Search = greedy,
    keep_scores: bool = False,
    progress: Progress | None = None,
) -> list[Course]:
    """Each session by itself, in the order of recording."""
    done: list[Course] = []
    n_done = 0
    known = known_confidence(adapter, store, progress) if adapter.settings.method != "none" else {}
    for session, group in groupby(in_order(trials, store.sessions), lambda t: t.session):
        day = start_day(adapter, store, session, known)
        followed = []
        for trial in group:
            step, day = follow_trial(adapter, day, store, trial, search, keep_scores)
            followed.append(step)
            n_done += 1
            if progress:
                progress(n_done, len(trials), "reading trials")
        done.append(Course(day, session in adapter.model.config.sessions, tuple(followed)))
    return done


def follow_trial(
    adapter: Adapter, day: Day, store: Store, trial: TrialInfo, search: Search, keep_scores: bool
) -> tuple[Followed, Day]:
    bins = normalised_bins(adapter, store, trial)
    log_probs = read(adapter.before(day, bins), bins)
    tokens = tuple(search(log_probs))
    adapting = adapter.settings.method != "none"
    unadapted = read(adapter.unadapted(day), bins) if adapting else log_probs
    started, before = time.process_time(), day
    reason = None
    if adapting:
        label = tokens if adapter.label is greedy else tuple(adapter.label(log_probs))
        day, reason = adapter.after(day, Heard(bins, log_probs, label), unadapted)
    seconds = time.process_time() - started
    said = trial.tokens
    result = TrialResult(
        trial,
        tokens,
        score(said, tokens) if said is not None else None,
        None,
        log_probs if keep_scores else None,
        greedy_score=score(said, greedy(log_probs)) if said is not None and search is not greedy else None,
    )
    plain = score(said, tuple(search(unadapted))) if said is not None else None
    learned = day.n_steps > before.n_steps
    moved = adapter.layer(day).distance(day.start)
    return Followed(result, plain, confidence(log_probs), learned, reason, moved, seconds), day


def normalised_bins(adapter: Adapter, store: Store, trial: TrialInfo) -> torch.Tensor:
    """One trial as the model sees it. (T, C)"""
    device = adapter.model.head.weight.device
    spec = adapter.model.config.settings.front_end.statistics_spec
    bins = torch.from_numpy(store.read_bins(trial))[None].to(device)
    statistics = read_statistics(store, [trial], spec)
    return adapter.model.normalise(bins, statistics.to(device) if statistics else None)[0]


def start_day(adapter: Adapter, store: Store, session: str, known: Mapping[str, Sequence[float]]) -> Day:
    """A day begins beside known days, of which `known` says how sure the model is."""
    expected = expected_confidence(session, known)
    if adapter.settings.method != "statistics":
        return adapter.start(session, expected=expected)
    like = adapter.start_like(session)
    trials = [t for t in store.trials if t.session == like and t.split == "train"][:REFERENCE_TRIALS]
    sums = [input_sums(adapter.model, normalised_bins(adapter, store, t)) for t in trials]
    return adapter.start(session, sum(sums[1:], sums[0]) if sums else None, expected)


def known_confidence(
    adapter: Adapter, store: Store, progress: Progress | None = None
) -> dict[str, tuple[float, ...]]:
    """How surely the model reads trials of each day it knows, ones it was not trained on where there are any."""
    sessions = [s for s in store.sessions if s in adapter.model.config.sessions]
    n_each = min(EXPECTED_TRIALS, max(MOST_EXPECTED // max(len(sessions), 1), 2))
    found = {}
    for i, session in enumerate(sessions, start=1):
        own = [t for t in store.trials if t.session == session and t.n_bins]
        trials = [t for t in own if t.split == "val"] or [t for t in own if t.split == "train"]
        model = adapter.unadapted(Adapter(adapter.model, UNADAPTED, adapter.noise).start(session))
        sure = [confidence(read(model, normalised_bins(adapter, store, t))) for t in trials[:n_each]]
        if sure:
            found[session] = tuple(sure)
        if progress:
            progress(i, len(sessions), "reading known days")
    return found


def expected_confidence(session: str, known: Mapping[str, Sequence[float]]) -> Expected | None:
    """How sure the model is of other days that it knows, each day alike; of this one only where there is no other.

    Trials of the day itself are still to come when it begins, and a day that drifted would be measured by its drift.
    """
    others = [sure for name, sure in known.items() if name != session] or list(known.values())
    if not others:
        return None
    means = [float(np.mean(sure)) for sure in others]
    usual = float(np.mean(means))
    within = [float(np.var(sure, ddof=1)) for sure in others if len(sure) > 1]
    between = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    return Expected(
        usual,
        day_sd=max(between, LEAST_DAY_SD * (1.0 - usual)),
        trial_sd=math.sqrt(float(np.mean(within))) if within else 0.0,
    )


def in_order(trials: Sequence[TrialInfo], sessions: Sequence[str]) -> list[TrialInfo]:
    """As they were recorded, as far as the store knows: by session, block, split and number."""
    place = {session: i for i, session in enumerate(sessions)}
    return sorted(trials, key=lambda t: (place[t.session], t.block, t.split, t.number))


def summarise_courses(courses: Sequence[Course]) -> dict[str, Any]:
    """Error rates with and without adaptation over all trials, and what happened on each day."""
    everything = [f for course in courses for f in course.trials]
    pairs = [(f.result.score, f.unadapted) for f in everything if f.result.score and f.unadapted]
    adapted, plain = [a for a, _ in pairs], [b for _, b in pairs]
    difference = score_difference(adapted, plain) if pairs else None
    return {
        "per_unadapted": total(plain).rate,
        "difference": difference.rate if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "p": difference.p if difference else None,
        "seconds_per_trial": float(np.mean([f.seconds for f in everything])) if everything else None,
        "days": [summarise_course(course) for course in courses],
    }


def summarise_course(course: Course) -> dict[str, Any]:
    trials = course.trials
    return {
        "session": course.day.session,
        "known": course.known,
        "layer_of": course.day.like,
        "days_later": days_between(course.day.session, course.day.like),
        "n_trials": len(trials),
        "per": total(f.result.score for f in trials if f.result.score).rate,
        "per_unadapted": total(f.unadapted for f in trials if f.unadapted).rate,
        "n_steps": sum(f.learned for f in trials),
        "n_falls": sum(f.fell_back is not None for f in trials),
        "fell_back": [f.fell_back for f in trials if f.fell_back],
        "moved": trials[-1].moved if trials else 0.0,
        "expected_confidence": course.day.expected.confidence if course.day.expected else None,
        "confidence": float(np.mean([f.confidence for f in trials])) if trials else None,
        "seconds_per_trial": float(np.mean([f.seconds for f in trials])) if trials else None,
    }
