"""Several models as one: linear interpolation, with weights that fit held-out text best."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.perplexity import score_text
from arcuate.language.ngram.query import score_ngrams
from arcuate.language.ngram.trie import build_trie, to_tables
from arcuate.language.ngram.vocabulary import BOS, EOS, UNK, ZERO, Table, Tables, Vocabulary, vocabulary_of
from arcuate.progress import Progress

_LEAST = 1e-10  # a context never hands all or none of its mass to the shorter one


@dataclass(frozen=True)
class Weights:
    """What expectation maximisation found."""

    weights: tuple[float, ...]
    perplexity: float  # of the held-out text under the mixture, word by word
    single: tuple[float | None, ...]  # of each model alone, over the words it has
    n_tokens: int  # words and sentence ends that at least one model has


def tune_weights(
    models: Sequence[LanguageModel],
    sentences: Sequence[str],
    *,
    n_rounds: int = 500,
    tolerance: float = 1e-7,
    report: Progress | None = None,
) -> Weights:
    """Weights under which the mixture gives held-out text the highest probability."""
    scores = [score_text(model, sentences) for model in models]
    probs = np.stack([np.where(s.known, np.exp(s.log_probs), 0.0) for s in scores])  # (M, n_tokens)
    probs = probs[:, probs.sum(0) > 0]
    if not probs.size:
        raise UserError("no word of the held-out text is in any of the models; weights cannot be tuned on it")
    weights = np.full(len(models), 1 / len(models))
    for round_ in range(n_rounds):
        if report:
            report(round_, n_rounds, "finding weights")
        shares = weights[:, None] * probs
        updated = (shares / shares.sum(0)).mean(1)
        change, weights = np.abs(updated - weights).max(), updated
        if change < tolerance:
            break
    perplexity = float(np.exp(-np.log(weights @ probs).mean()))
    singles = tuple(s.perplexity for s in scores)
    return Weights(tuple(map(float, weights)), perplexity, singles, probs.shape[1])


def mix(models: Sequence[LanguageModel], weights: Sequence[float], report: Progress | None = None) -> Tables:
    """One back-off model that holds every n-gram of any of the models, at its mixed probability.

    A word that a model lacks has probability nought there, so the mixture still sums to one.
    """
    weights = normalised(weights, len(models))
    vocabulary, numbers = _union(models)
    orders: list[Table] = []
    every, keys = _all_ngrams(models, numbers, len(vocabulary))
    for k, ids in enumerate(every, start=1):
        if report:
            report(k - 1, max(m.order for m in models), f"mixing {k}-grams")
        probs = _mixed(models, weights, numbers, ids)
        if k == 1:
            probs[vocabulary.find(BOS)] = 0.0
        else:
            parents = np.divmod(keys[k - 1], len(vocabulary))[0]
            orders[-1] = _with_backoffs(orders, vocabulary, ids, probs, parents)
        with np.errstate(divide="ignore"):
            log_probs = np.clip(np.log(probs), ZERO, 0).astype(np.float32)
        orders.append(Table(ids, log_probs, np.zeros(len(ids), np.float32)))
    return Tables(vocabulary, tuple(orders), source=" + ".join(model.name for model in models))


def normalised(weights: Sequence[float], n_models: int) -> list[float]:
    """Weights that sum to one."""
    total = sum(weights)
    if len(weights) != n_models or min(weights) < 0 or not 0 < total < float("inf"):
        raise UserError(
            f"give one weight for each of the {n_models} models, none negative and not all nought"
        )
    return [weight / total for weight in weights]


def _union(models: Sequence[LanguageModel]) -> tuple[Vocabulary, list[tuple[np.ndarray, np.ndarray]]]:
    """All words, and per model the two maps (own id to common id, common id to own id or -1)."""
    names: dict[str, int] = dict.fromkeys((UNK, BOS, EOS), 0)
    own_names = []
    for model in models:
        own = list(model.words)
        for special, name in ((model.unk, UNK), (model.bos, BOS), (model.eos, EOS)):
            own[special] = name
        own_names.append(own)
        names.update(dict.fromkeys(own, 0))
    ids = {name: i for i, name in enumerate(names)}
    maps = []
    for own in own_names:
        common = np.array([ids[name] for name in own], np.int32)
        back = np.full(len(ids), -1, np.int32)
        back[common] = np.arange(len(own))
        maps.append((common, back))
    return vocabulary_of(names), maps


def _all_ngrams(
    models: Sequence[LanguageModel], numbers: list[tuple[np.ndarray, np.ndarray]], n_words: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The n-grams of each order that any model has, as common ids (n, k) and as sorted keys (row of parent, word)."""
    tables = [to_tables(model) for model in models]
    orders: list[np.ndarray] = [np.arange(n_words, dtype=np.int32)[:, None]]
    keys = [np.arange(n_words)]
    for k in range(2, max(model.order for model in models) + 1):
        found = []
        for table, (common, _) in zip(tables, numbers, strict=True):
            if k <= len(table.orders):
                ids = common[table.orders[k - 1].ids]
                found.append(_rows(keys, ids[:, :-1], n_words) * n_words + ids[:, -1])
        keys.append(np.unique(np.concatenate(found)))
        parents, words = np.divmod(keys[-1], n_words)
        orders.append(np.concatenate([orders[-1][parents], words[:, None].astype(np.int32)], axis=1))
    return orders, keys


def _rows(keys: list[np.ndarray], ids: np.ndarray, n_words: int) -> np.ndarray:
    """The row of each n-gram (n, k) in the sorted table of its order."""
    rows = ids[:, 0].astype(np.int64)
    for k in range(1, ids.shape[1]):
        rows = np.searchsorted(keys[k], rows * n_words + ids[:, k])
    return rows


def _mixed(
    models: Sequence[LanguageModel],
    weights: Sequence[float],
    numbers: list[tuple[np.ndarray, np.ndarray]],
    ids: np.ndarray,
) -> np.ndarray:
    """Weighted probability of the last word of each n-gram after the words before it."""
    probs = np.zeros(len(ids))
    for model, weight, (_, back) in zip(models, weights, numbers, strict=True):
        own = back[ids]
        has_word = own[:, -1] >= 0
        own[own < 0] = model.unk
        log_probs = np.empty(len(ids))
        score_ngrams(model.arrays, own, log_probs)
        probs += weight * np.where(has_word, np.exp(log_probs), 0.0)
    return probs


def _with_backoffs(
    orders: list[Table], vocabulary: Vocabulary, ids: np.ndarray, probs: np.ndarray, parents: np.ndarray
) -> Table:
    """The longest order so far with the back-offs that make each context's probabilities sum to one."""
    table = orders[-1]
    trie, _ = build_trie(Tables(vocabulary, tuple(orders)))
    shorter = np.empty(len(ids))
    score_ngrams(trie, np.ascontiguousarray(ids[:, 1:]), shorter)
    n = len(table)
    left = np.maximum(1 - np.bincount(parents, probs, n), _LEAST)
    spread = np.maximum(1 - np.bincount(parents, np.exp(shorter), n), _LEAST)
    has_children = np.bincount(parents, minlength=n) > 0
    backoffs = np.where(has_children, np.log(left / spread), 0.0)
    return Table(table.ids, table.log_probs, backoffs.astype(np.float32))
