"""Validation during training: phoneme errors, word errors if they are requested, and a sample of the predictions."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arcuate.data.alphabet import token_names
from arcuate.data.selection import Selection
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.load import load_search
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.evaluation.metrics import score_text, total
from arcuate.evaluation.trials import TokenSearch, TrialResult, decode_trials, session_sums, summarise_sums
from arcuate.models.layout import Frames
from arcuate.models.model import Model
from arcuate.training.config import TrainingConfig
from arcuate.training.environment import Distributed
from arcuate.training.metrics import Validation
from arcuate.training.state import TrainingState

if TYPE_CHECKING:
    from arcuate.decoding.transducer import TransducerHead
    from arcuate.decoding.word_search.search import WordSearch

ShowSample = Callable[[Sequence[str], Sequence[str]], None]


def open_word_search(
    config: TrainingConfig, trials: Sequence[TrialInfo], classes: tuple[str, ...]
) -> "WordSearch | None":
    """Open the word search of the validation settings; None if words are not decoded."""
    if config.validate_.lm == "none" or not trials:
        return None
    if not any(trial.text for trial in trials):
        raise UserError(
            "validate.lm needs reference texts, but none of the validation trials has one; set validate.lm=none"
        )
    return load_search(classes, SearchOptions(lm=config.validate_.lm, lexicon=config.validate_.lexicon))


def make_validator(
    state: TrainingState,
    store: Store,
    selection: Selection,
    words: "WordSearch | None",
    show_sample: ShowSample,
    distributed: Distributed,
) -> Callable[[Model], Validation]:
    """Function that scores this rank's part of the validation trials; the sums are added over all ranks.

    Loss settings and heads are those of the current stage of `state`. Predictions are those of rank 0.
    """
    trials = selection.validation[distributed.rank :: distributed.size]
    settings = state.recipe.validate_
    search = TokenSearch(beam=settings.beam if settings.search == "beam" else None, classes=store.classes)
    n_sampled = min(len(trials), settings.predictions)
    sampled = [i * len(trials) // n_sampled for i in range(n_sampled)]  # the same at every validation

    def validate(model: Model) -> Validation:
        started = time.perf_counter()
        transducer: TransducerHead | None = None
        if words is not None and model.transducer is not None and state.decodes_words_by_both_heads:
            transducer = model.transducer.for_search()
        results = decode_trials(
            model,
            store,
            trials,
            batch_size=settings.batch_size,
            loss=state.loss,
            keep_log_probs=words is not None,
            keep_frames=transducer is not None,
            search=search,
        )
        if results and results[0].trial.tokens is not None:
            show_sample(*(token_names(part, store.classes) for part in (results[0].trial.tokens, results[0].tokens)))
        sums = distributed.sum(session_sums(results, selection.sessions))
        row = {"split": selection.selected_on, **summarise_sums(sums, selection.sessions)}
        cost = {"seconds": time.perf_counter() - started}
        texts: list[str] | None = None
        if words is not None:
            with torch.inference_mode():
                texts = [_decode_words(words, r, transducer) for r in results]
            row |= _word_errors(results, texts, distributed)
            row["wer_head"] = "ctc" if transducer is None else "both"
            cost["seconds_words"] = time.perf_counter() - started - cost["seconds"]
        predictions = tuple(_prediction(results[i], texts[i] if texts else None, store.classes) for i in sampled)
        return Validation(row | {"cost": cost}, predictions)

    return validate


def _decode_words(search: "WordSearch", result: TrialResult, transducer: "TransducerHead | None") -> str:
    """Decode one trial to text, by both heads if the transducer is given."""
    log_probs = result.log_probs
    if log_probs is None or not len(log_probs) or not np.isfinite(log_probs.max(axis=1)).all():
        return ""  # the model has diverged
    frames = Frames(log_probs, result.encoded)
    if transducer is None or result.encoded is None or not search.order.is_identity:
        found = search.search(frames, 1)
    else:
        from arcuate.decoding.joint import JointWordSearch

        found = JointWordSearch(search, transducer).search(frames, 1)
    return (found[0].text or "") if found else ""


def _word_errors(results: Sequence[TrialResult], texts: Sequence[str], distributed: Distributed) -> dict[str, Any]:
    scores = [
        score_text(result.trial.text, text).words
        for result, text in zip(results, texts, strict=True)
        if result.trial.text is not None
    ]
    own = torch.tensor([total(scores).errors, total(scores).length], dtype=torch.float64)
    n_errors, n_words = (int(value) for value in distributed.sum(own).tolist())
    return {"wer": n_errors / n_words if n_words else None, "word_errors": n_errors, "n_words": n_words}


def _prediction(result: TrialResult, text: str | None, classes: Sequence[str]) -> dict[str, Any]:
    """One line of predictions.jsonl, without its step; the names are those of results/<split>.jsonl."""
    trial = result.trial
    return {
        "trial": trial.id,
        "text": trial.text,
        "reference": None if trial.tokens is None else " ".join(token_names(trial.tokens, classes)),
        "hypothesis": " ".join(token_names(result.tokens, classes)),
        **({} if text is None else {"decoded_text": text}),
    }
