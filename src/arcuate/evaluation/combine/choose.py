"""How much each candidate's vote weighs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.evaluation.combine.fit import Choice, Feature, cross_fit, features_of, fold_of, prior_of
from arcuate.evaluation.combine.lists import CandidateList
from arcuate.evaluation.combine.mbr import minimum_risk, softmax
from arcuate.evaluation.combine.rover import rover
from arcuate.evaluation.metrics import Score, score, score_text, total
from arcuate.evaluation.significance import score_difference
from arcuate.evaluation.word_errors import ScoredTrial, summarise_words

Voters = Literal["equal", "agreement"]


def n_seats(lists: Sequence[CandidateList]) -> int | None:
    """How many voters there are, where every trial has one candidate of each and none are scored; else None."""
    sizes = {len(c.texts) for c in lists}
    if len(sizes) != 1 or any(c.scores is not None for c in lists):
        return None
    return sizes.pop() or None


def agreement(lists: Sequence[CandidateList]) -> np.ndarray:
    """A weight per seat from how often it agrees with all seats together; no reference is looked at. (seats,)

    The log odds of being right, as an expert's vote is weighed if experts err independently.
    """
    together = [minimum_risk(c.texts).split() for c in lists]
    rates = []
    for seat in range(len(lists[0].texts)):
        counted = total(score(t, c.texts[seat].split()) for t, c in zip(together, lists, strict=True))
        rates.append(counted.rate or 0.0)
    p = np.clip(np.array(rates), 1e-4, 0.5 - 1e-4)
    return np.log((1 - p) / p)


def vote_weights(
    lists: Sequence[CandidateList], voters: Voters = "equal", scale: float = 1.0
) -> list[np.ndarray]:
    """Weights of every trial's candidates: by score where there are scores, else by seat."""
    seats = agreement(lists) if voters == "agreement" and n_seats(lists) else None
    weights = []
    for found in lists:
        if found.scores is not None:
            weights.append(softmax(found.scores, scale))
        else:
            weights.append(seats if seats is not None else np.ones(len(found.texts)))
    return weights


# One text per trial from its candidates, by any of the methods, and what that does to the error rate.


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
    summary = summarise_words(trials, lm=lm, n_trials=len(lists)).to_dict()
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
