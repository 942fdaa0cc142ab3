"""Decode trials to words: reference texts, a word search over many trials, its error rates and cost."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.decoding.confidence import SessionWords, n_hypotheses, with_confidence
from arcuate.decoding.config import ConfidenceConfig, DecodingConfig
from arcuate.decoding.frame_files import check_unique_ids
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.confidence import ConfidenceMetrics, measure_confidence
from arcuate.evaluation.metrics import (
    Score,
    ScoredTrial,
    WordMetrics,
    score_text,
    summarise_words,
    total,
    words_per_minute,
)
from arcuate.files import fields_to_dict, read_jsonl
from arcuate.language.ngram.model import LanguageModel
from arcuate.models.layout import Frames
from arcuate.progress import Progress, peak_memory_bytes

if TYPE_CHECKING:
    from arcuate.decoding.joint import JointWordSearch
    from arcuate.decoding.word_search.search import WordSearch


@dataclass(frozen=True)
class Reference:
    """Identity of a trial and its reference text, if known."""

    id: str
    text: str | None = None
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None  # the sentence occurs in the language model's training text; None: unknown
    seconds: float | None = None  # length of the recording; None: unknown


@dataclass(frozen=True, eq=False)
class Transcript:
    """Decoding result of one trial."""

    reference: Reference
    n_best: tuple[Hypothesis, ...]  # best first; empty if every word sequence has probability 0
    seconds: float  # CPU time of the search

    @property
    def text(self) -> str:
        """The best hypothesis; empty if there is none."""
        return (self.n_best[0].text or "") if self.n_best else ""

    @property
    def scored(self) -> ScoredTrial | None:
        """Edit counts; None for a trial without a reference."""
        return score_reference(self.reference, self.text)

    @property
    def word_errors(self) -> Score | None:
        """Word edit counts; None for a trial without a reference."""
        return self.scored.score.words if self.scored else None

    def is_rejected(self, below: float | None) -> bool:
        """Whether the probability that the sentence is correct is below a limit; true for a sentence without words."""
        probability = self.n_best[0].probability if self.n_best else None
        return below is not None and (probability is None or probability < below)

    def to_row(self, lm: str, reject_below: float | None = None) -> dict[str, Any]:
        """The output line: best text with word times and confidences, and the n-best list with scores by source.

        For later scoring, it includes the language model and whether that model was trained on the sentence.
        """
        reference, errors = self.reference, self.word_errors
        best = self.n_best[0] if self.n_best else Hypothesis(())
        n_words = len(best.words)
        times, confidences = best.times or [None] * n_words, best.confidences or [None] * n_words
        return {
            "id": reference.id,
            "session": reference.session,
            "corpus": reference.corpus,
            "text": self.text,
            "score": best.total,
            "probability": best.probability,
            **({} if reject_below is None else {"rejected": self.is_rejected(reject_below)}),
            "words": [
                {
                    "word": word,
                    "first": span.first if span else None,
                    "last": span.last if span else None,
                    "confidence": value,
                    "accepted": accepted,
                }
                for word, span, value, accepted in zip(
                    best.words, times, confidences, best.accepted or [None] * n_words, strict=True
                )
            ],
            "lm": lm,
            "in_lm_text": reference.in_lm_text,
            "reference": reference.text,
            "errors": errors.errors if errors else None,
            "n_words": errors.length if errors else None,
            "seconds": self.seconds,
            "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in self.n_best],
        }


@dataclass(frozen=True)
class TranscriptionMetrics:
    """Error rates and cost of a word search over many trials."""

    words: WordMetrics
    n_without_hypothesis: int
    seconds_per_sentence: float | None
    seconds_p95: float | None
    peak_rss_mb: float
    confidence: ConfidenceMetrics | None = None  # None: no words with references, or no confidences
    words_per_minute: float | None = None  # in the reference texts; None: the lengths of the recordings are unknown
    correct_words_per_minute: float | None = None  # times (1 - WER)

    def to_dict(self) -> dict[str, Any]:
        absent = ("confidence",) if self.confidence is None else ()
        return self.words.to_dict() | fields_to_dict(self, "words", *absent)


def transcribe(
    search: "WordSearch | JointWordSearch",
    trials: Sequence[Frames],
    references: Sequence[Reference],
    n_best: int = 10,
    progress: Progress | None = None,
    confidence: DecodingConfig | None = None,
) -> list[Transcript]:
    """Search every trial once. The longest trial is searched first, untimed, to warm up caches and compiled code.

    `confidence`: settings of the search; the best hypothesis of every trial then has confidences, which follow the
    sessions as in a stream that decodes the trials in this order.
    """
    n_searched = n_best if confidence is None else n_hypotheses(search, n_best)
    if trials:
        longest = int(np.argmax([len(trial) for trial in trials]))
        _search_trial(search, trials[longest], references[longest], n_searched)
    transcripts: list[Transcript] = []
    sessions: dict[str, SessionWords] = {}
    for trial, reference in zip(trials, references, strict=True):
        started = time.process_time()
        hypotheses = _search_trial(search, trial, reference, n_searched)
        if confidence is not None:
            session = None
            if reference.session is not None:
                session = sessions.setdefault(reference.session, SessionWords(confidence.confidence))
            log_probs = search.word_search.order(trial.log_probs)
            hypotheses = with_confidence(hypotheses, log_probs, confidence, session=session)
        transcripts.append(Transcript(reference, tuple(hypotheses[:n_best]), time.process_time() - started))
        if progress:
            progress(len(transcripts), len(trials), "decoding words")
    return transcripts


def _search_trial(
    search: "WordSearch | JointWordSearch", trial: Frames, reference: Reference, n_best: int
) -> list[Hypothesis]:
    """Search one trial; errors name the trial."""
    try:
        return search.search(trial, n_best)
    except UserError as error:
        raise UserError(f"trial {reference.id}: {error}") from None


def summarise_transcripts(
    transcripts: Sequence[Transcript],
    lm: str | None = None,
    n_resamples: int = 2000,
    confidence: ConfidenceConfig | None = None,
) -> TranscriptionMetrics:
    """Error rates over the trials with a reference, and the cost of the search."""
    scored = [trial for t in transcripts if (trial := t.scored) is not None]
    seconds = [t.seconds for t in transcripts]
    return TranscriptionMetrics(
        summarise_words(scored, lm=lm, n_trials=len(transcripts), n_resamples=n_resamples),
        sum(not t.n_best for t in transcripts),
        float(np.mean(seconds)) if seconds else None,
        float(np.quantile(seconds, 0.95)) if seconds else None,
        peak_rss_mb(),
        measure_confidence(((t.n_best, t.reference.text) for t in transcripts), confidence) if confidence else None,
        *_speaking_rate(transcripts),
    )


def _speaking_rate(transcripts: Sequence[Transcript]) -> tuple[float | None, float | None]:
    """Words and correct words per minute of the trials with a reference and a known length."""
    timed = [(t.reference.seconds, e) for t in transcripts if t.reference.seconds and (e := t.word_errors) is not None]
    counts, seconds = total(errors for _, errors in timed), sum(seconds or 0.0 for seconds, _ in timed)
    pace = words_per_minute(counts.length, seconds)
    return pace, None if pace is None else pace * max(0.0, 1 - (counts.rate or 0.0))


def peak_rss_mb() -> float:
    """Peak resident memory of this process in megabytes."""
    return peak_memory_bytes() / (1 << 20)


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
        raise UserError(
            f"{path} has {len(rows)} lines, but the frame scores have {n_trials} trials; give one line per trial"
        )
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


def _optional_text(row: Mapping[str, Any], key: str) -> str | None:
    return str(row[key]) if row.get(key) is not None else None
