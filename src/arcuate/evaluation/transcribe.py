"""Trials to words: run the word search over many trials, measure it, score it, write it down."""

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
from arcuate.evaluation.metrics import Score, score_text
from arcuate.evaluation.word_errors import Reference, ScoredTrial, summarise_words
from arcuate.progress import Progress

Heard = TypeVar("Heard", bound=Sized, contravariant=True)  # a trial as a search takes it


@dataclass(frozen=True, eq=False)
class Transcript:
    """What the search made of one trial; `hypotheses` best first, none where no reading was possible."""

    reference: Reference
    hypotheses: tuple[Hypothesis, ...]
    seconds: float  # of CPU time

    @property
    def text(self) -> str:
        return (self.hypotheses[0].text or "") if self.hypotheses else ""

    @property
    def scored(self) -> ScoredTrial | None:
        """Its errors; None where the trial has no reference."""
        r = self.reference
        if r.text is None:
            return None
        return ScoredTrial(r.id, score_text(r.text, self.text), r.session, r.corpus, r.in_lm_text)

    @property
    def words(self) -> Score | None:
        """Word errors."""
        return self.scored.score.words if self.scored else None


class Searcher(Protocol[Heard]):
    """Whoever reads a trial in words: from frame scores, or from whatever else it takes."""

    def search(self, trial: Heard, n_best: int = 1, /) -> list[Hypothesis]: ...


def transcribe(
    search: Searcher[Heard],
    trials: Sequence[Heard],
    references: Sequence[Reference],
    n_best: int = 10,
    progress: Progress | None = None,
) -> list[Transcript]:
    """Every trial searched once, after a first search that warms everything up and is not counted."""
    if trials:
        longest = int(np.argmax([len(frames) for frames in trials]))
        search_named(search, trials[longest], references[longest], n_best)
    done: list[Transcript] = []
    for frames, reference in zip(trials, references, strict=True):
        started = time.process_time()
        hypotheses = search_named(search, frames, reference, n_best)
        done.append(Transcript(reference, tuple(hypotheses), time.process_time() - started))
        if progress:
            progress(len(done), len(trials), "searching words")
    return done


def search_named(
    search: Searcher[Heard], frames: Heard, reference: Reference, n_best: int
) -> list[Hypothesis]:
    """One search; what is wrong with a trial is said with its name."""
    try:
        return search.search(frames, n_best)
    except UserError as error:
        raise UserError(f"trial {reference.id}: {error}") from None


def summarise(
    transcripts: Sequence[Transcript], lm: str | None = None, n_resamples: int = 2000
) -> dict[str, Any]:
    """Error rates over all trials with a reference, and what the search cost."""
    scored = [trial for t in transcripts if (trial := t.scored) is not None]
    spent = [t.seconds for t in transcripts]
    return summarise_words(scored, lm=lm, n_trials=len(transcripts), n_resamples=n_resamples).to_dict() | {
        "n_without_reading": sum(not t.hypotheses for t in transcripts),
        "seconds_per_sentence": float(np.mean(spent)) if spent else None,
        "seconds_p95": float(np.quantile(spent, 0.95)) if spent else None,
        "peak_rss_mb": peak_rss_mb(),
    }


def peak_rss_mb() -> float:
    """Most memory this process ever had in use, in megabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def transcript_row(transcript: Transcript, lm: str) -> dict[str, Any]:
    """One line of the output: the best text, its score, and the n-best list with scores by source.

    It names its language model and whether that has read the sentence, for whatever is computed from it later.
    """
    reference = transcript.reference
    best = transcript.hypotheses[0] if transcript.hypotheses else Hypothesis(())
    counted = transcript.words
    return {
        "id": reference.id,
        "session": reference.session,
        "corpus": reference.corpus,
        "text": transcript.text,
        "score": best.total,
        "words": [
            {"word": word, "first": when.first if when else None, "last": when.last if when else None}
            for word, when in zip(best.words, best.times or [None] * len(best.words), strict=True)
        ],
        "lm": lm,
        "in_lm_text": reference.in_lm_text,
        "reference": reference.text,
        "errors": counted.errors if counted else None,
        "n_words": counted.length if counted else None,
        "seconds": transcript.seconds,
        "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in transcript.hypotheses],
    }


def read_weights(path: Path) -> tuple[DecodingConfig, dict[str, Any]]:
    """Settings from a YAML file, and what `arcuate tune` noted in it."""
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping of settings, such as 'lm_weight: 0.8'")
    tuned = tree.pop("tuned", None)
    return parse_weights(tree, str(path)), tuned if isinstance(tuned, dict) else {}


def parse_weights(tree: Mapping[str, Any], where: str) -> DecodingConfig:
    """Settings of the search, checked; `where` they come from is named with a mistake."""
    try:
        return DecodingConfig.model_validate(tree, context={"migrate": True})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        known = ", ".join(DecodingConfig.model_fields)
        raise UserError(f"{where}: {place}: {problem['msg']}; known settings are {known}") from None
