"""Linear interpolation of several models into one, with weights that maximise the likelihood of held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.model import LanguageModel, check_can_write, write_model
from arcuate.language.ngram.open import ModelInfo, open_model
from arcuate.language.ngram.perplexity import score_text, score_tokens
from arcuate.language.ngram.query import NGramArrays, score_ngrams
from arcuate.language.ngram.text import BOS, EOS, LOG_ZERO, UNK, read_sentences
from arcuate.language.ngram.trie import (
    NGramTable,
    NGramTables,
    build_trie,
    find_nodes,
    model_from_tables,
    tables_from_model,
)
from arcuate.progress import Progress

_MIN_MASS = 1e-10  # lower bound of the probability mass of explicit and of backed-off words in a context
_MAX_ITERATIONS, _TOLERANCE = 500, 1e-7  # of the expectation maximisation


@dataclass(frozen=True)
class MixResult:
    """Result of `mix_models`."""

    info: ModelInfo
    weights: tuple[float, ...]
    tuning: "TunedWeights | None" = None
    held_out: str | None = None  # text that the weights were tuned on
    perplexity: float | None = None  # perplexity of the mixed model on that text

    def to_dict(self) -> dict[str, Any]:
        result = self.info.to_dict() | {"weights": list(self.weights)}
        if self.tuning is not None:
            result["tuned_on"] = {
                "text": self.held_out,
                "n_tokens": self.tuning.n_tokens,
                "perplexity_word_by_word": self.tuning.perplexity,
                "perplexity": self.perplexity,
                "perplexity_single": list(self.tuning.single),
            }
        return result


def mix_models(
    models: Sequence[str | Path],
    path: str | Path,
    *,
    tune: str | Path | None = None,
    weights: Sequence[float] = (),
    progress: Progress | None = None,
) -> MixResult:
    """Interpolate several models into one.

    Args:
        models: Two or more models.
        path: Model file to write.
        tune: Held-out text to tune the weights on.
        weights: Weights, one per model.
    """
    if len(models) < 2:
        raise UserError("give at least two models and the file to write: arcuate lm mix A B OUT --tune TEXT")
    if (tune is None) == (not weights):
        raise UserError("give either held-out text with --tune or one of --weights per model")
    path = Path(path)
    if path.exists():
        raise UserError(f"{path} exists; name the file to write last, or delete it if it is an earlier mixture")
    check_can_write(path, *models, tune)
    opened = [open_model(name, progress, verify=True) for name in models]
    held_out = read_sentences(tune) if tune else None
    tuning = tune_weights(opened, held_out, progress) if held_out else None
    normalised = _normalise_weights(tuning.weights if tuning else weights, len(opened))
    tables = interpolate(opened, normalised, progress)
    metadata, hashes = _merge_sentence_hashes(opened)
    metadata |= {"made_by": "linear interpolation", "models": [str(name) for name in models], "weights": normalised}
    mixed = model_from_tables(tables, metadata, hashes, progress)
    write_model(mixed, path, progress)
    return MixResult(
        ModelInfo.of(mixed, path),
        tuple(normalised),
        tuning,
        None if tune is None else str(tune),
        score_text(mixed, held_out).perplexity if held_out else None,
    )


def _merge_sentence_hashes(models: Sequence[LanguageModel]) -> tuple[dict[str, Any], np.ndarray | None]:
    """Training sentences of all models, and whether some models do not store theirs."""
    known = [model.sentences for model in models if model.sentences is not None]
    in_part = len(known) < len(models) or any(model.metadata.get("sentences_in_part") for model in models)
    return {"sentences_in_part": in_part}, np.unique(np.concatenate(known)) if known else None


@dataclass(frozen=True)
class TunedWeights:
    """Interpolation weights found by expectation maximisation."""

    weights: tuple[float, ...]
    perplexity: float  # perplexity of the held-out text under the interpolation, word by word
    single: tuple[float | None, ...]  # perplexity of each model alone, over the words in its vocabulary
    n_tokens: int  # words and sentence ends in the vocabulary of at least one model


def tune_weights(
    models: Sequence[LanguageModel],
    sentences: Sequence[str],
    progress: Progress | None = None,
) -> TunedWeights:
    """Find the weights that maximise the likelihood of held-out text, by expectation maximisation."""
    scores = [score_tokens(model, sentences) for model in models]
    probs = np.stack([np.where(s.known, np.exp(s.log_probs), 0.0) for s in scores])  # (M, n_tokens)
    probs = probs[:, probs.sum(0) > 0]
    if not probs.size:
        raise UserError("no word of the held-out text is in any of the models; choose another text for --tune")
    weights = np.full(len(models), 1 / len(models))
    for iteration in range(_MAX_ITERATIONS):
        if progress:
            progress(iteration, _MAX_ITERATIONS, "tuning weights")
        joint = weights[:, None] * probs
        updated = (joint / joint.sum(0)).mean(1)  # mean posterior of each model
        change, weights = np.abs(updated - weights).max(), updated
        if change < _TOLERANCE:
            break
    perplexity = float(np.exp(-np.log(weights @ probs).mean()))
    singles = tuple(s.perplexity() for s in scores)
    return TunedWeights(tuple(map(float, weights)), perplexity, singles, probs.shape[1])


def interpolate(
    models: Sequence[LanguageModel], weights: Sequence[float], progress: Progress | None = None
) -> NGramTables:
    """Back-off model with every n-gram of any of the models, at its interpolated probability.

    A word outside a model's vocabulary has probability zero there, so the interpolation still sums to one.
    """
    weights = _normalise_weights(weights, len(models))
    words, id_maps = _merge_vocabularies(models)
    listed = [tables_from_model(model) for model in models]
    ids = np.arange(len(words), dtype=np.int32)[:, None]
    probs = _interpolated_probs(models, weights, id_maps, ids)
    probs[words.index(BOS)] = 0.0
    orders = [_table(ids, probs)]
    for k in range(2, max(model.order for model in models) + 1):
        if progress:
            progress(k - 1, max(m.order for m in models), f"mixing {k}-grams")
        trie, _, _ = build_trie(NGramTables(words, tuple(orders)))
        first = len(trie.words) - len(orders[-1])  # node of the first context
        found = [common[t.orders[k - 1].ids] for t, (common, _) in zip(listed, id_maps, strict=True) if k <= t.order]
        rows = np.concatenate(found)
        nodes = find_nodes(trie, np.ascontiguousarray(rows[:, :-1]))
        parents, last = np.divmod(np.unique((nodes - first) * len(words) + rows[:, -1]), len(words))
        ids = np.column_stack([orders[-1].ids[parents], last.astype(np.int32)])
        probs = _interpolated_probs(models, weights, id_maps, ids)
        orders[-1] = _with_backoffs(orders[-1], trie, ids, probs, parents)
        orders.append(_table(ids, probs))
    return NGramTables(words, tuple(orders), source=" + ".join(model.name for model in models))


def _table(ids: np.ndarray, probs: np.ndarray) -> NGramTable:
    """n-grams without back-offs, which follow from the next longer order."""
    with np.errstate(divide="ignore"):
        log_probs = np.clip(np.log(probs), LOG_ZERO, 0).astype(np.float32)
    return NGramTable(ids, log_probs, np.zeros(len(ids), np.float32))


def _normalise_weights(weights: Sequence[float], n_models: int) -> list[float]:
    """Scale weights to sum to one."""
    total = sum(weights)
    if len(weights) != n_models or min(weights) < 0 or not 0 < total < float("inf"):
        raise UserError(f"give one non-negative weight for each of the {n_models} models, at least one above zero")
    return [weight / total for weight in weights]


def _merge_vocabularies(models: Sequence[LanguageModel]) -> tuple[list[str], list[tuple[np.ndarray, np.ndarray]]]:
    """Common vocabulary, and per model two maps: own id to common id, common id to own id or -1."""
    ids: dict[str, int] = {word: i for i, word in enumerate((UNK, BOS, EOS))}
    commons = []
    for model in models:
        special = {model.unk: UNK, model.bos: BOS, model.eos: EOS}
        own = [special.get(i, word) for i, word in enumerate(model.words)]
        commons.append(np.array([ids.setdefault(word, len(ids)) for word in own], np.int32))
    maps = []
    for common in commons:
        back = np.full(len(ids), -1, np.int32)
        back[common] = np.arange(len(common))
        maps.append((common, back))
    return list(ids), maps


def _interpolated_probs(
    models: Sequence[LanguageModel],
    weights: Sequence[float],
    id_maps: list[tuple[np.ndarray, np.ndarray]],
    ids: np.ndarray,
) -> np.ndarray:
    """Interpolated probability of the last word of each n-gram given the preceding words."""
    probs = np.zeros(len(ids))
    for model, weight, (_, back) in zip(models, weights, id_maps, strict=True):
        own = back[ids]
        has_word = own[:, -1] >= 0
        own[own < 0] = model.unk
        log_probs = np.empty(len(ids))
        score_ngrams(model.arrays, own, log_probs)
        probs += weight * np.where(has_word, np.exp(log_probs), 0.0)
    return probs


def _with_backoffs(
    table: NGramTable, trie: NGramArrays, ids: np.ndarray, probs: np.ndarray, parents: np.ndarray
) -> NGramTable:
    """The longest order of a trie with back-offs that make the probabilities after each context sum to one.

    `ids` are the n-grams of the next order, whose contexts are the rows `parents`.
    """
    shorter = np.empty(len(ids))
    score_ngrams(trie, np.ascontiguousarray(ids[:, 1:]), shorter)
    n = len(table)
    free_mass = np.maximum(1 - np.bincount(parents, probs, n), _MIN_MASS)
    lower_mass = np.maximum(1 - np.bincount(parents, np.exp(shorter), n), _MIN_MASS)
    has_children = np.bincount(parents, minlength=n) > 0
    return replace(table, backoffs=np.where(has_children, np.log(free_mass / lower_mass), 0.0).astype(np.float32))
