"""`arcuate decode` and `arcuate tune`: frame scores, a lexicon and a language model to words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import yaml

from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.data.text import normalise_text
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.log_probs import check_log_probs, read_log_probs, reorder_classes
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.transcribe import (
    Transcript,
    parse_weights,
    read_weights,
    summarise,
    transcribe,
    transcript_row,
)
from arcuate.evaluation.word_errors import (
    Reference,
    digest_references,
    leakage_warning,
    mark_leakage,
    read_references,
)
from arcuate.files import check_target
from arcuate.language.lexicon import Lexicon, open_lexicon
from arcuate.language.ngram.io import open_model
from arcuate.run import write_aside, write_lines

if TYPE_CHECKING:
    from torch import Tensor

    from arcuate.decoding.word_search.joint import HeadOutputs, JointWordSearch
    from arcuate.models.transducer import Transducer

HEAVIEST = 1000.0  # nat, of a word added at run time; more would drown every sound
HeardByTransducer: TypeAlias = "tuple[Transducer, list[Tensor]]"


@dataclass(frozen=True)
class Source:
    """What to decode, and with what."""

    scores: Path  # an .npz file, or a run folder
    lexicon: str
    model: str
    config: Path | None = None
    references: Path | None = None
    beam: int | None = None
    threshold: float | None = None
    split: str = "val"
    data: Path | None = None
    words: tuple[str, ...] = ()  # added at run time, as word or word=weight
    head: str = "ctc"  # of a run: ctc, or both
    checkpoint: str = "best"  # of a run


@dataclass(frozen=True, eq=False)
class Task:
    """A source, opened: everything that is loaded once."""

    search: WordSearch
    trials: tuple[np.ndarray, ...]
    references: list[Reference]
    facts: dict[str, Any]
    tuned: dict[str, Any]
    both: "tuple[JointWordSearch, tuple[HeadOutputs, ...]] | None" = None  # where the transducer is asked too


def decode_command(source: Source, hyps: Path, n_best: int, as_json: bool) -> None:
    check_target(hyps, *files_read(source))
    summary, transcripts = decode_source(source, hyps, n_best)
    if as_json:
        emit_json(summary)
    else:
        show(summary, transcripts)


def decode_source(source: Source, hyps: Path, n_best: int) -> tuple[dict[str, Any], list[Transcript]]:
    """Everything `arcuate decode` does; returns what it prints as JSON, and what it found."""
    task = open_task(source)
    with progress("searching words") as report:
        if task.both is not None:
            transcripts = transcribe(*task.both, task.references, n_best, report)
        else:
            transcripts = transcribe(task.search, task.trials, task.references, n_best, report)
    write_lines(hyps, (transcript_row(t, task.facts["lm"]) for t in transcripts))
    summary = {
        **summarise(transcripts, task.facts["lm"]),
        **task.facts,
        "tuned_on_these": tuned_on_these(task),
        "out": str(hyps),
    }
    if n := summary["n_without_reading"]:
        say(
            f"{n} trials cannot be read with these words: scores of nought rule all of them out; their text is empty"
        )
    if warning := leakage_warning(summary):
        say(warning)
    return summary, transcripts


def files_read(source: Source) -> tuple[Path | str | None, ...]:
    return source.scores, source.references, source.config, source.lexicon, source.model


def tune_command(source: Source, weights: Path, budget: float, folds: int, as_json: bool) -> None:
    from arcuate.evaluation.tune import tune

    check_target(weights, *files_read(source))
    if folds == 1:
        raise UserError("--folds 1 leaves no other fold to tune on; give at least 2, or 0 for none")
    task = open_task(source)
    if not any(r.text for r in task.references):
        raise UserError("tuning needs the true words: give them with --references REFS.jsonl")
    share = budget / (folds + 1) if folds else budget
    crossed = cross_fit(task, folds, share) if folds else {}
    settings, how = tune(task.search, task.trials, task.references, share, say)
    transcripts = transcribe(task.search.with_settings(settings), task.trials, task.references, 1)
    tuned = {
        "on": task.facts["scores"],
        "digest": digest_references(task.references),
        "n_trials": len(task.trials),
        "lm": task.facts["lm"],
        "lexicon": task.facts["lexicon"],
        **how,
        **crossed,
    }
    result = summarise(transcripts)
    tree = settings.model_dump(mode="json") | {"tuned": tuned | {"wer_on_tuned_trials": result["wer"]}}
    write_aside(weights, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    summary = {**settings.model_dump(mode="json"), **tuned, "wer": result["wer"], "cer": result["cer"]}
    summary |= {
        "n_without_reading": result["n_without_reading"],
        "tuned_on_these": True,
        "seconds_per_sentence": result["seconds_per_sentence"],
        "out": str(weights),
    }
    if as_json:
        emit_json(summary)
        return
    out.print(f"WER {percent(result['wer'])} on the very trials the weights were tuned on", soft_wrap=True)
    if crossed:
        out.print(f"WER {percent(crossed['wer_cross_fitted'])} cross-fitted over {folds} folds of sessions")
    say(f"weights in {weights}; use them with: arcuate decode … --config {weights}")


def cross_fit(task: Task, n_folds: int, budget: float) -> dict[str, Any]:
    """WER of every fold under weights tuned on the others."""
    from arcuate.evaluation.tune import fold_of_sessions, tune

    folds = fold_of_sessions(task.references, n_folds)
    transcripts: list[Transcript] = []
    for k in range(n_folds):
        say(f"fold {k + 1} of {n_folds}")
        inside, outside = np.flatnonzero(folds != k), np.flatnonzero(folds == k)
        settings, _ = tune(
            task.search, [task.trials[i] for i in inside], [task.references[i] for i in inside], budget, say
        )
        transcripts += transcribe(
            task.search.with_settings(settings),
            [task.trials[i] for i in outside],
            [task.references[i] for i in outside],
            1,
        )
    crossed = summarise(transcripts)
    return {"folds": n_folds, "wer_cross_fitted": crossed["wer"], "cer_cross_fitted": crossed["cer"]}


def open_task(source: Source) -> Task:
    settings, tuned = read_weights(source.config) if source.config else (DecodingConfig(), {})
    asked = {"beam": source.beam, "threshold": source.threshold}
    given = {name: value for name, value in asked.items() if value is not None}
    settings = parse_weights(settings.model_dump() | given, "the command line")
    if source.head not in ("ctc", "both"):
        raise UserError(f"--head {source.head!r} is unknown; choose ctc or both")
    if source.head == "both" and not source.scores.is_dir():
        raise UserError(
            "--head both needs a run folder: a file of frame scores knows nothing of a transducer"
        )
    trials, classes, boundary, references, heard = read_trials(source, settings)
    with progress("reading the lexicon and the language model") as report:
        lexicon = open_lexicon(source.lexicon, classes)
        model = open_model(source.model, report)
    if tuple(lexicon.classes) != classes:
        raise UserError(
            f"the lexicon {source.lexicon} is over other classes than the scores; give one that fits"
        )
    lexicon, weights = add_words(lexicon, source.words)
    search = build_word_search(lexicon, model, settings, boundary=boundary, weights=weights)
    if boundary < 0:
        say(
            "none of the classes is a word boundary (SIL, | and such); name it as `boundary` in --config if one is"
        )
    if search.oov_words:
        say(
            f"{len(search.oov_words):,} of {len(lexicon.words):,} lexicon words are unknown to the language model and"
            f" count as its unknown word, such as {', '.join(search.oov_words[:3])}"
        )
    facts = {
        "scores": source.scores.name,
        "lm": model.name or source.model,
        "lm_order": model.order,
        "lexicon": lexicon.name or source.lexicon,
        "n_lexicon_words": len(lexicon.words),
        "n_pronunciations": len(lexicon),
        "beam": settings.beam,
        "threshold": settings.threshold,
        "head": source.head,
    }
    both = None if heard is None else both_heads(search, lexicon, trials, *heard)
    return Task(search, trials, mark_leakage(references, model), facts, tuned, both)


def both_heads(
    search: WordSearch,
    lexicon: Lexicon,
    trials: Sequence[np.ndarray],
    head: "Transducer",
    frames: "Sequence[Tensor]",
) -> "tuple[JointWordSearch, tuple[HeadOutputs, ...]]":
    from arcuate.decoding.word_search.joint import HeadOutputs, JointWordSearch

    heard = tuple(HeadOutputs(scores, f) for scores, f in zip(trials, frames, strict=True))
    return JointWordSearch(search, lexicon, head), heard


def read_trials(
    source: Source, settings: DecodingConfig
) -> "tuple[tuple[np.ndarray, ...], tuple[str, ...], int, list[Reference], HeardByTransducer | None]":
    """Frames, classes, boundary and references, from a score file or from a run folder."""
    if source.scores.is_dir():
        return run_trials(source)
    scores = read_log_probs(source.scores, settings.boundary, settings.fold)
    names = scores.ids or tuple(str(i) for i in range(len(scores.trials)))
    references = (
        read_references(source.references, len(scores.trials), scores.ids)
        if source.references
        else [Reference(name) for name in names]
    )
    for frames, reference in zip(scores.trials, references, strict=True):
        check_log_probs(frames, scores.classes, f"trial {reference.id}")
    return scores.trials, scores.classes, scores.boundary, references, None


def run_trials(
    source: Source,
) -> "tuple[tuple[np.ndarray, ...], tuple[str, ...], int, list[Reference], HeardByTransducer | None]":
    """The trials of a split as one checkpoint of a run hears them; their own texts are the references."""
    from arcuate.data.alphabet import CLASSES, SILENCE
    from arcuate.decoding.transducer import require_transducer
    from arcuate.evaluation.evaluate import check_transducer, find_source, score_split
    from arcuate.run import open_run

    both, run = source.head == "both", open_run(source.scores)
    if both:
        check_transducer(find_source(run, source.checkpoint))
    with progress("scoring trials") as report:
        scored = score_split(
            run, source.split, source.data, source.checkpoint, keep_frames=both, progress=report
        )
    results = scored.results
    frames = [
        reorder_classes(r.log_probs, CLASSES, r.trial.id)[0] for r in results if r.log_probs is not None
    ]
    references = [Reference(r.trial.id, r.trial.text, r.trial.session, r.trial.corpus) for r in results]
    if source.references:
        references = read_references(source.references, len(frames), [r.id for r in references])
    heard = None
    if both:
        head = require_transducer(scored.model.transducer, str(source.scores))
        heard = head, [r.frames for r in results if r.frames is not None]
    return tuple(frames), CLASSES, SILENCE, references, heard


def add_words(lexicon: Lexicon, words: Sequence[str]) -> tuple[Lexicon, dict[str, float]]:
    """Words given as `word`, `word=weight` or `word=weight=PH ON EMES`."""
    weights: dict[str, float] = {}
    for given in words:
        word, weight, phones = parse_word(given, lexicon)
        weights[word] = weight
        if phones is not None:
            unknown = [p for p in phones if p not in lexicon.classes]
            if unknown or not phones:
                raise UserError(
                    f"--word {given!r}: {unknown[0] if unknown else 'nothing'!r} is no class of the scores"
                )
            lexicon = lexicon.with_entries([(word, phones)])
    return lexicon.with_words(word for word in weights if word not in lexicon), weights


def parse_word(given: str, lexicon: Lexicon) -> tuple[str, float, list[str] | None]:
    """Word, weight and pronunciation of a --word; a word the lexicon has not as it stands is normalised."""
    typed, *rest = given.split("=")
    word = typed if typed in lexicon else normalise_text(typed)
    shape = "should be word, word=weight or word=weight=PHONEMES"
    if len(rest) > 2 or len(word.split()) != 1:
        raise UserError(f"--word {given!r} {shape}")
    try:
        weight = float(rest[0]) if rest and rest[0] else 0.0
    except ValueError:
        raise UserError(f"--word {given!r} {shape}") from None
    if not -HEAVIEST <= weight <= HEAVIEST:
        raise UserError(f"--word {given!r}: the weight should lie between -{HEAVIEST:g} and {HEAVIEST:g} nat")
    return word, weight, rest[1].split() if len(rest) > 1 else None


def tuned_on_these(task: Task) -> bool | None:
    """Whether the weights were tuned on these very trials; None where that cannot be known."""
    if not any(r.text for r in task.references):
        return None
    return bool(task.tuned) and task.tuned.get("digest") == digest_references(task.references)


def show(summary: dict[str, Any], transcripts: Sequence[Transcript]) -> None:
    """The result for a person."""
    for transcript in transcripts[:3]:
        out.print(f"  {transcript.text}", soft_wrap=True, markup=False)
    if summary["wer"] is not None:
        flag = " (the weights were tuned on these trials)" if summary["tuned_on_these"] else ""
        out.print(
            f"WER {percent(summary['wer'])}, 95 % interval {percent(summary['wer_low'])} to"
            f" {percent(summary['wer_high'])}; CER {percent(summary['cer'])}; language model {summary['lm']}{flag}",
            soft_wrap=True,
        )
    spent = summary["seconds_per_sentence"]
    out.print(
        f"{summary['n_trials']} trials, {'–' if spent is None else f'{1000 * spent:.1f}'} ms of search per sentence,"
        f" {summary['peak_rss_mb']:.0f} MB; one line per trial in {summary['out']}",
        soft_wrap=True,
    )
