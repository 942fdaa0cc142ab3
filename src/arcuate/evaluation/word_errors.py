"""Reference texts of trials, and word and letter error rates of decoded texts.

A WER depends on the language model, so every summary names it and reports how many of the scored sentences occur in
its training text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from arcuate.data.text import normalise_text
from arcuate.decoding.log_probs import check_unique_ids
from arcuate.errors import UserError
from arcuate.evaluation.metrics import TextScore, score_text, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import read_jsonl
from arcuate.language.ngram.model import LanguageModel


@dataclass(frozen=True)
class Reference:
    """Identity of a trial and its reference text, if known."""

    id: str
    text: str | None = None
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None  # the sentence occurs in the language model's training text; None: unknown


@dataclass(frozen=True)
class ScoredTrial:
    """Edit counts of one decoded text with the attributes that results are grouped by."""

    id: str
    score: TextScore
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None


@dataclass(frozen=True)
class WordMetrics:
    """Word and letter error rates with 95 % bootstrap intervals, in total, by session and by corpus."""

    wer: float | None
    wer_low: float | None
    wer_high: float | None
    cer: float | None
    cer_low: float | None
    cer_high: float | None
    lm: str | None
    n_trials: int  # including those without a reference
    n_scored: int
    n_words: int
    substitutions: int
    insertions: int
    deletions: int
    n_sentences_correct: int
    n_in_lm_text: int | None  # None: unknown
    wer_without_lm_text: float | None
    wer_by_session: dict[str, float | None]
    wer_by_corpus: dict[str, float | None]

    @property
    def leakage_warning(self) -> str | None:
        """One sentence if scored sentences occur in the language model's training text."""
        if not self.n_in_lm_text:
            return None
        rate = self.wer_without_lm_text
        without = "no others were scored" if rate is None else f"without them the WER is {100 * rate:.2f} %"
        return (
            f"leakage: the training text of the language model ({self.lm or 'unnamed'}) contains"
            f" {self.n_in_lm_text} of {self.n_scored} sentences scored here; {without}"
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def summarise_words(
    trials: Sequence[ScoredTrial], *, lm: str | None, n_trials: int | None = None, n_resamples: int = 2000
) -> WordMetrics:
    """Error rates of scored trials; `n_trials` also counts the trials without a reference."""
    words = [trial.score.words for trial in trials]
    letters = [trial.score.letters for trial in trials]
    known = [t for t in trials if t.in_lm_text is not None]
    unseen = [t.score.words for t in known if not t.in_lm_text]
    counts = total(words)
    return WordMetrics(
        counts.rate,
        *bootstrap_interval(words, n_resamples=n_resamples),
        total(letters).rate,
        *bootstrap_interval(letters, n_resamples=n_resamples),
        lm,
        len(trials) if n_trials is None else n_trials,
        len(trials),
        counts.length,
        counts.substitutions,
        counts.insertions,
        counts.deletions,
        sum(not s.errors for s in words),
        sum(bool(t.in_lm_text) for t in known) if known else None,
        total(unseen).rate if known else None,
        _rates_by(trials, lambda t: t.session),
        _rates_by(trials, lambda t: t.corpus),
    )


def score_reference(reference: Reference, text: str) -> ScoredTrial | None:
    """Score of a decoded text; None for a trial without a reference text."""
    if reference.text is None:
        return None
    counts = score_text(reference.text, text)
    return ScoredTrial(reference.id, counts, reference.session, reference.corpus, reference.in_lm_text)


def occurs_in_lm_text(lm: LanguageModel, text: str | None, known: bool | None) -> bool | None:
    """Whether a sentence occurs in the model's training text, by the model's own record or by `known`."""
    recorded = lm.contains(text) if text is not None else None
    return known if recorded is None else recorded or bool(known)


def mark_leakage(references: Sequence[Reference], lm: LanguageModel) -> list[Reference]:
    """Set `in_lm_text` of each reference."""
    return [replace(r, in_lm_text=occurs_in_lm_text(lm, r.text, r.in_lm_text)) for r in references]


def read_references(path: Path, n_trials: int, ids: Sequence[str] | None) -> list[Reference]:
    """Read the references of a frame-score file: by `id` if both files have ids, else line by line."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("text"), str):
            raise UserError(f"{path} line {number} has no text; every line needs the reference text of a trial")
    if all("id" in row for row in rows):
        check_unique_ids(str(path), [str(row["id"]) for row in rows])
    if ids is not None and all("id" in row for row in rows):
        by_id = {str(row["id"]): row for row in rows}
        missing = [name for name in ids if name not in by_id]
        if missing:
            raise UserError(f"{path} has no line with id {missing[0]!r}, which the frame scores have")
        rows = [by_id[name] for name in ids]
    if len(rows) != n_trials:
        raise UserError(f"{path} has {len(rows)} lines and the frame scores {n_trials} trials; give one line per trial")
    return [
        Reference(
            str(row.get("id", i)),
            row["text"],
            _optional_text(row, "session"),
            _optional_text(row, "corpus"),
            row["in_lm_text"] if isinstance(row.get("in_lm_text"), bool) else None,
        )
        for i, row in enumerate(rows)
    ]


def digest_references(references: Sequence[Reference]) -> str:
    """Hash of the reference texts in any order; identifies the trials that weights were tuned on."""
    texts = json.dumps(sorted(normalise_text(r.text) for r in references if r.text is not None))
    return hashlib.blake2b(texts.encode("utf-8"), digest_size=12).hexdigest()


def _rates_by(trials: Iterable[ScoredTrial], key: Callable[[ScoredTrial], str | None]) -> dict[str, float | None]:
    """WER of each group; trials without a key belong to no group."""
    known = sorted((t for t in trials if key(t) is not None), key=lambda t: str(key(t)))
    return {str(k): total(t.score.words for t in group).rate for k, group in groupby(known, key)}


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    return str(row[key]) if row.get(key) is not None else None
