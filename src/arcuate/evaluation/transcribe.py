"""Decode trials to words: run a word search over many trials, time it, score it and format the output lines."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import yaml
from pydantic import ValidationError

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score
from arcuate.evaluation.word_errors import (
    Reference,
    ScoredTrial,
    WordMetrics,
    score_reference,
    summarise_words,
)
from arcuate.progress import Progress

_Input = TypeVar("_Input", bound=Sized, contravariant=True)  # one trial in the form that a search accepts


class Searcher(Protocol[_Input]):
    """A word search: over frame log-probabilities, or over the outputs of several heads."""

    def search(self, trial: _Input, n_best: int = 1, /) -> list[Hypothesis]: ...


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

    def to_row(self, lm: str) -> dict[str, Any]:
        """The output line: best text with word times, and the n-best list with scores by source.

        For later scoring it names the language model and says whether that was trained on the sentence.
        """
        reference, errors = self.reference, self.word_errors
        best = self.n_best[0] if self.n_best else Hypothesis(())
        return {
            "id": reference.id,
            "session": reference.session,
            "corpus": reference.corpus,
            "text": self.text,
            "score": best.total,
            "words": [
                {"word": word, "first": span.first if span else None, "last": span.last if span else None}
                for word, span in zip(best.words, best.times or [None] * len(best.words), strict=True)
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

    def to_dict(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key != "words"}
        return self.words.to_dict() | own


def transcribe(
    search: Searcher[_Input],
    trials: Sequence[_Input],
    references: Sequence[Reference],
    n_best: int = 10,
    progress: Progress | None = None,
) -> list[Transcript]:
    """Search every trial once. The longest trial is searched first, untimed, to warm up caches and compiled code."""
    if trials:
        longest = int(np.argmax([len(trial) for trial in trials]))
        _search_trial(search, trials[longest], references[longest], n_best)
    transcripts: list[Transcript] = []
    for trial, reference in zip(trials, references, strict=True):
        started = time.process_time()
        hypotheses = _search_trial(search, trial, reference, n_best)
        transcripts.append(Transcript(reference, tuple(hypotheses), time.process_time() - started))
        if progress:
            progress(len(transcripts), len(trials), "searching words")
    return transcripts


def _search_trial(search: Searcher[_Input], trial: _Input, reference: Reference, n_best: int) -> list[Hypothesis]:
    """Search one trial; errors name the trial."""
    try:
        return search.search(trial, n_best)
    except UserError as error:
        raise UserError(f"trial {reference.id}: {error}") from None


def summarise_transcripts(
    transcripts: Sequence[Transcript], lm: str | None = None, n_resamples: int = 2000
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
    )


def peak_rss_mb() -> float:
    """Peak resident memory of this process in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def read_weights(path: Path) -> tuple[DecodingConfig, dict[str, Any]]:
    """Read search settings from a YAML file, with the record of `arcuate tune` if there is one."""
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping of settings, such as 'lm_weight: 0.8'")
    tuned = tree.pop("tuned", None)
    return parse_weights(tree, str(path)), tuned if isinstance(tuned, dict) else {}


def parse_weights(tree: Mapping[str, Any], where: str) -> DecodingConfig:
    """Validate search settings; errors name their origin `where`."""
    try:
        return DecodingConfig.model_validate(tree, context={"migrate": True})
    except ValidationError as error:
        problem = error.errors()[0]
        setting = ".".join(str(part) for part in problem["loc"])
        known = ", ".join(DecodingConfig.model_fields)
        raise UserError(f"{where}: {setting}: {problem['msg']}; known settings are {known}") from None
