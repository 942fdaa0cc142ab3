"""One text per trial from its candidates, by any of the methods, and what that does to the error rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.combine.features import Feature, features_of, prior_of
from arcuate.combine.fit import Choice, cross_fit, fold_of
from arcuate.combine.lists import CandidateList
from arcuate.combine.risk import minimum_risk
from arcuate.combine.rover import rover
from arcuate.combine.voters import n_seats
from arcuate.metrics import Score, score, total
from arcuate.paired import score_difference
from arcuate.text import normalise_text
from arcuate.word_scores import ScoredTrial, score_text, summarise_words


@dataclass(frozen=True)
class Fitted:
    """Texts chosen by fitted weights, and the weights."""

    texts: list[str]
    names: tuple[str, ...]
    weights: np.ndarray  # (k,) fitted on all trials
    cross_fitted: bool
    same_set: list[str] | None = None  # what the weights fitted on all trials choose: flatters where scored


def choose_by_risk(lists: Sequence[CandidateList], weights: Sequence[np.ndarray]) -> list[str]:
    return [minimum_risk(found.texts, w) for found, w in zip(lists, weights, strict=True)]


def choose_by_vote(lists: Sequence[CandidateList], weights: Sequence[np.ndarray]) -> list[str]:
    return [rover(found.texts, w) for found, w in zip(lists, weights, strict=True)]


def choose_by_features(
    lists: Sequence[CandidateList],
    votes: Sequence[np.ndarray],
    extra: Sequence[Feature] = (),
    *,
    weights: np.ndarray | None = None,
    n_folds: int = 5,
) -> Fitted:
    """Choose by given weights, or by weights fitted on the trials of other folds."""
    tables = [features_of(found, vote, extra) for found, vote in zip(lists, votes, strict=True)]
    names, prior = prior_of(extra)
    if weights is not None:
        return Fitted([table.choose(weights) for table in tables], names, weights, False)
    choices = [
        Choice(table.values, word_errors(found.reference, table.texts), n_words(found.reference))
        if found.reference is not None and table.texts
        else None
        for found, table in zip(lists, tables, strict=True)
    ]
    folds = fold_of([found.session for found in lists], n_folds)
    apart, whole = cross_fit(choices, folds, prior, free=[names.index("length")])
    texts = [table.choose(w) for table, w in zip(tables, apart, strict=True)]
    return Fitted(texts, names, whole, True, [table.choose(whole) for table in tables])


def word_errors(reference: str, texts: Sequence[str]) -> np.ndarray:
    """Word edits of each text: (n,)"""
    said = normalise_text(reference).split()
    return np.array([score(said, text.split()).errors for text in texts], dtype=np.float64)


def n_words(reference: str) -> int:
    return len(normalise_text(reference).split())


def scored_trials(lists: Sequence[CandidateList], texts: Sequence[str]) -> list[ScoredTrial]:
    """Scores of the trials that have a reference."""
    return [
        ScoredTrial(
            found.id, score_text(found.reference, text), found.session, found.corpus, found.in_lm_text
        )
        for found, text in zip(lists, texts, strict=True)
        if found.reference is not None
    ]


def summarise_choice(lists: Sequence[CandidateList], texts: Sequence[str], lm: str | None) -> dict[str, Any]:
    """Word error rates of the chosen texts, beside those of the single voters and of the best candidates."""
    trials = scored_trials(lists, texts)
    summary = summarise_words(trials, lm=lm, n_trials=len(lists))
    labelled = [found for found in lists if found.reference is not None]
    summary["n_candidates"] = sum(len(found.texts) for found in lists)
    summary["n_empty"] = sum(not found.texts for found in lists)
    summary["oracle_wer"] = oracle(labelled).rate
    if not labelled or n_seats(lists) is None:
        return summary
    single = [seat_scores(labelled, seat) for seat in range(len(labelled[0].texts))]
    rates = [total(s).rate for s in single]
    best = min(range(len(rates)), key=lambda seat: rates[seat] or 0.0)
    gap = score_difference([t.score.words for t in trials], single[best])
    return summary | {
        "single_wer": rates,
        "single_wer_mean": float(np.mean([r for r in rates if r is not None]))
        if rates[0] is not None
        else None,
        "best_single": best + 1,
        "best_single_wer": rates[best],
        "against_best_single": vars(gap) if gap else None,
    }


def seat_scores(lists: Sequence[CandidateList], seat: int) -> list[Score]:
    return [score_text(found.reference or "", found.texts[seat]).words for found in lists]


def oracle(lists: Sequence[CandidateList]) -> Score:
    """The best candidate of each list, chosen with the reference in hand: what no choice can beat."""
    best = []
    for found in lists:
        said = normalise_text(found.reference or "").split()
        options = [score(said, text.split()) for text in dict.fromkeys(found.texts)] or [score(said, [])]
        best.append(min(options, key=lambda s: s.errors))
    return total(best)
