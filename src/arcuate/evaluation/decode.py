"""Decode a run or a file of frame log-probabilities to words, with a pronunciation lexicon and a language model."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.class_order import check_log_probs
from arcuate.decoding.confidence import SessionWords, n_hypotheses, with_confidence
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.load import choose_head, load, load_search, stored_words
from arcuate.decoding.options import SearchOptions
from arcuate.decoding.transducer import TransducerHead, require_transducer
from arcuate.errors import UserError
from arcuate.evaluation.confidence import ConfidenceMetrics, measure_confidence
from arcuate.evaluation.metrics import WordMetrics, mean, summarise_words, total, words_per_minute
from arcuate.evaluation.sentences import (
    Sentence,
    attach_references,
    digest_references,
    mark_leakage,
    score_sentences,
)
from arcuate.exported.file import ExportedFile, is_export, open_export
from arcuate.files import (
    DECODINGS,
    OutputKind,
    atomic_group,
    check_writable,
    fields_to_dict,
    read_json,
    to_frame,
    write_json,
    write_jsonl,
)
from arcuate.hub import local_path
from arcuate.models.layout import Frames, Head
from arcuate.progress import Progress, logger, peak_memory_bytes, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, open_run, split_parent

if TYPE_CHECKING:
    from arcuate.data.store import TrialInfo
    from arcuate.decoding.joint import JointWordSearch
    from arcuate.decoding.word_search.search import WordSearch


@dataclass(frozen=True)
class SearchDescription:
    """The models and limits of a word search."""

    scores: str
    lm: str
    lm_order: int
    lexicon: str
    n_lexicon_words: int
    n_pronunciations: int
    beam: int
    threshold: float
    head: str


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


@dataclass(frozen=True, eq=False)
class Transcription(Sequence[Sentence]):
    """Result of `decode`: a sequence of decoded sentences with error rates and cost."""

    sentences: tuple[Sentence, ...]
    metrics: TranscriptionMetrics
    search: SearchDescription
    tuned_on_these: bool | None  # the weights were tuned on these trials; None: unknown
    out: Path | None
    accept_above: float | None = None  # lowest confidence of an accepted word of trials without a session
    reject_below: float | None = None  # sentences with a lower probability are marked as rejected

    def __repr__(self) -> str:
        return f"Transcription({self.summary().splitlines()[0]})"

    @property
    def wer(self) -> float | None:
        """Word error rate; None if no trial has a reference."""
        return self.metrics.words.wer

    @property
    def cer(self) -> float | None:
        """Character error rate; None if no trial has a reference."""
        return self.metrics.words.cer

    def __len__(self) -> int:
        return len(self.sentences)

    @overload
    def __getitem__(self, index: int) -> Sentence: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Sentence, ...]: ...

    def __getitem__(self, index: int | slice) -> Sentence | tuple[Sentence, ...]:
        return self.sentences[index]

    @property
    def n_rejected(self) -> int:
        """Number of sentences whose probability is below `reject_below`."""
        return sum(s.is_rejected(self.reject_below) for s in self.sentences)

    @property
    def wer_accepted(self) -> float | None:
        """Word error rate of the sentences that were not rejected."""
        kept = [s.word_errors for s in self.sentences if not s.is_rejected(self.reject_below)]
        return total(errors for errors in kept if errors is not None).rate

    def rows(self) -> Iterator[dict[str, Any]]:
        """One output line per trial."""
        return (decoded_row(s, self.reject_below) for s in self.sentences)

    def summary(self) -> str:
        """Error rates, if there are references, and cost: one line each."""
        words, seconds = self.metrics.words, self.metrics.seconds_per_sentence
        caveat = " (the weights were tuned on these trials)" if self.tuned_on_these else ""
        heads = {"ctc": "", "transducer": "; transducer", "both": "; both heads"}[self.search.head]
        rates = (
            f"WER {percent(words.wer)}, 95 % interval {percent(words.wer_low)} to {percent(words.wer_high)};"
            f" CER {percent(words.cer)}; language model {self.search.lm}{heads}{caveat}\n"
        )
        rates = "" if words.wer is None else rates
        if (pace := self.metrics.words_per_minute) is not None:
            rates += f"{pace:.1f} words per minute, {self.metrics.correct_words_per_minute or 0:.1f} of them correct\n"
        if self.reject_below is not None:
            rest = "" if self.wer_accepted is None else f"; WER of the others {percent(self.wer_accepted)}"
            limit = f"probability below {self.reject_below:g}"
            rates += f"{self.n_rejected} of {len(self)} sentences rejected ({limit}){rest}\n"
        return (
            f"{rates}{len(self)} trials,"
            f" {'–' if seconds is None else f'{1000 * seconds:.1f}'} ms of search per sentence,"
            f" {self.metrics.peak_rss_mb:.0f} MB{f'; one line per trial in {self.out}' if self.out else ''}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All values but the sentences."""
        own = fields_to_dict(self, "sentences", "metrics", "search", "reject_below")
        if self.reject_below is not None:
            own |= {"reject_below": self.reject_below, "n_rejected": self.n_rejected, "wer_accepted": self.wer_accepted}
        return self.metrics.to_dict() | fields_to_dict(self.search) | own

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


@dataclass(frozen=True)
class TrialSource:
    """The trials to decode: a split of RUN or RUN@CHECKPOINT, or a file of frame log-probabilities."""

    source: RunLike
    references: str | Path | None = None
    split: str = "val"
    data: str | Path | None = None


@dataclass(frozen=True, eq=False)
class DecodingTask:
    """Trials and a search, loaded."""

    search: "WordSearch | JointWordSearch"
    trials: tuple[Frames, ...]
    sentences: list[Sentence]  # the trials without hypotheses
    description: SearchDescription
    tuned: dict[str, Any]  # record of `arcuate tune` in the settings file
    checkpoint: Path | None = None  # folder of the weights, if the trials are those of a run


@dataclass(frozen=True, eq=False)
class _Trials:
    """Frames and references of all trials."""

    frames: tuple[Frames, ...]
    classes: tuple[str, ...]  # of the frames
    sentences: list[Sentence]
    head: Head = "ctc"
    transducer: TransducerHead | None = None  # None with the CTC head
    checkpoint: Path | None = None  # folder of the weights of a run


def decode(
    source: RunLike,
    options: SearchOptions | None = None,
    *,
    split: str = "val",
    data: str | Path | None = None,
    references: str | Path | None = None,
    n_best: int = 10,
    reject_below: float | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Transcription:
    """Decode RUN or RUN@CHECKPOINT, an exported model with a store, or a file of frame log-probabilities to words.

    For a run, the lines and their summary are kept in the run folder, as `results/<split>.words.jsonl` and `.json`,
    where report, ledger and list of runs find them. Every word has a confidence, the probability that it is correct,
    and every sentence a probability.

    Args:
        source: RUN or RUN@CHECKPOINT, an exported model, a file of frame scores, or hf:ORG/NAME.
        options: Language model, lexicon, weights and head.
        split: Of a run or an exported model: val, test, dev or train.
        data: Store of a run or an exported model; default: that of the training run.
        references: JSON lines with `text`, and with `id` if the trials have ids.
        n_best: Hypotheses to write per trial.
        reject_below: Mark sentences as rejected if their probability of being correct is lower; their text is kept.
        out: JSON lines to write, one per trial with its n-best list.
    """
    if reject_below is not None and not 0.0 <= reject_below <= 1.0:
        raise UserError(f"--reject-below must be a probability between 0 and 1, not {reject_below:g}")
    target = None if out is None else Path(out)
    path, _ = _split_source(source)
    kept = open_run(path) if path.is_dir() else None
    if kept is not None:
        check_writable(kept.results_file(split, WORDS_LABEL), kind=DECODINGS)
    trials = TrialSource(source, references, split, data)
    task = open_task(trials, options or SearchOptions(), target, DECODINGS, progress)
    settings = task.search.settings
    sentences = transcribe(task.search, task.trials, task.sentences, n_best, progress, settings)
    tuned_on = None
    if any(s.reference for s in sentences):
        tuned_on = bool(task.tuned) and task.tuned.get("digest") == digest_references(sentences)
    transcription = Transcription(
        tuple(sentences),
        summarise_transcripts(sentences, task.description.lm, settings),
        task.description,
        tuned_on,
        kept.results_file(split, WORDS_LABEL) if target is None and kept is not None else target,
        settings.confidence.accept_above,
        reject_below,
    )
    if target is not None:
        write_jsonl(target, transcription.rows())
    if kept is not None and task.checkpoint is not None:
        _keep_in_run(kept, split, task.checkpoint, transcription)
    if n := transcription.metrics.n_without_hypothesis:
        logger.info(
            f"{n} trials have no hypothesis: classes of probability 0 exclude every word sequence; their text is empty"
        )
    if warning := transcription.metrics.words.leakage_warning:
        logger.info(warning)
    return transcription


def transcribe(
    search: "WordSearch | JointWordSearch",
    trials: Sequence[Frames],
    sentences: Sequence[Sentence],
    n_best: int = 10,
    progress: Progress | None = None,
    confidence: DecodingConfig | None = None,
) -> list[Sentence]:
    """Search every trial once. The longest trial is searched first, untimed, to warm up caches and compiled code.

    `confidence`: settings of the search; the best hypothesis of every trial then has confidences, which follow the
    sessions as in a stream that decodes the trials in this order.
    """
    n_searched = n_best if confidence is None else n_hypotheses(search, n_best)
    if trials:
        longest = int(np.argmax([len(trial) for trial in trials]))
        _search_trial(search, trials[longest], sentences[longest], n_searched)
    done: list[Sentence] = []
    sessions: dict[str, SessionWords] = {}
    for trial, sentence in zip(trials, sentences, strict=True):
        started = time.process_time()
        hypotheses = _search_trial(search, trial, sentence, n_searched)
        if confidence is not None:
            session = None
            if sentence.session is not None:
                session = sessions.setdefault(sentence.session, SessionWords(confidence.confidence))
            log_probs = search.word_search.order(trial.log_probs)
            hypotheses = with_confidence(hypotheses, log_probs, confidence, session=session)
        seconds = time.process_time() - started
        done.append(replace(sentence, n_best=tuple(hypotheses[:n_best]), search_seconds=seconds))
        if progress:
            progress(len(done), len(trials), "decoding words")
    return done


def _search_trial(
    search: "WordSearch | JointWordSearch", trial: Frames, sentence: Sentence, n_best: int
) -> list[Hypothesis]:
    """Search one trial; errors name the trial."""
    try:
        return search.search(trial, n_best)
    except UserError as error:
        raise UserError(f"trial {sentence.id}: {error}") from None


def summarise_transcripts(
    sentences: Sequence[Sentence], lm: str | None = None, settings: DecodingConfig | None = None
) -> TranscriptionMetrics:
    """Error rates over the trials with a reference, and the cost of the search; with `settings` also confidences."""
    seconds = [s.search_seconds for s in sentences if s.search_seconds is not None]
    timed = [(s.seconds, errors) for s in sentences if s.seconds and (errors := s.word_errors) is not None]
    counts = total(errors for _, errors in timed)
    pace = words_per_minute(counts.length, sum(length for length, _ in timed))
    decoded = ((s.n_best, s.reference) for s in sentences)
    return TranscriptionMetrics(
        summarise_words(score_sentences(sentences), lm=lm, n_trials=len(sentences)),
        sum(not s.n_best for s in sentences),
        mean(seconds),
        float(np.quantile(seconds, 0.95)) if seconds else None,
        peak_memory_bytes() / (1 << 20),
        None if settings is None else measure_confidence(decoded, settings.confidence),
        pace,
        None if pace is None else pace * max(0.0, 1 - (counts.rate or 0.0)),
    )


def decoded_row(sentence: Sentence, reject_below: float | None = None) -> dict[str, Any]:
    """The output line: best text with word times and confidences, and the n-best list with scores by source.

    For later scoring, it includes the language model and whether that model was trained on the sentence.
    """
    errors = sentence.word_errors
    best = sentence.n_best[0] if sentence.n_best else Hypothesis(())
    absent = [None] * len(best.words)
    words = zip(best.words, best.times or absent, best.confidences or absent, best.accepted or absent, strict=True)
    return {
        **dict.fromkeys(("id", "session", "corpus", "text", "reference", "lm", "in_lm_text")),
        **sentence.to_row(),
        "score": best.total,
        "probability": best.probability,
        **({} if reject_below is None else {"rejected": sentence.is_rejected(reject_below)}),
        "words": [
            {
                "word": word,
                "first": span.first if span else None,
                "last": span.last if span else None,
                "confidence": value,
                "accepted": accepted,
            }
            for word, span, value, accepted in words
        ],
        "errors": errors.errors if errors else None,
        "n_words": errors.length if errors else None,
        "seconds": sentence.search_seconds,
    }


def _keep_in_run(run: Run, split: str, checkpoint: Path, transcription: Transcription) -> None:
    """Write the lines and their summary into the run folder; a new decoding of a split replaces the previous one.

    `checkpoint` is the folder that was decoded: while a run trains, the best checkpoint may be another one by now.
    """
    state = read_json(checkpoint / "state.json") if (checkpoint / "state.json").is_file() else {}
    selected_on = run.environment().get("selected_on") if run.environment_file.is_file() else None
    origin = {"split": split, "checkpoint": checkpoint.name, "step": state.get("step"), "selected_on": selected_on}
    files = (run.results_file(split, WORDS_LABEL, ending) for ending in ("jsonl", "json"))
    with atomic_group(*files) as (rows_file, summary_file):
        write_jsonl(rows_file, transcription.rows())
        write_json(summary_file, transcription.to_dict() | origin)


def _split_source(source: RunLike) -> tuple[Path, str]:
    """Run folder or file, and the name of the checkpoint of a run."""
    path, checkpoint = split_parent(os.fspath(source))
    return local_path(os.fspath(path)), checkpoint


def open_task(
    trials_from: TrialSource, options: SearchOptions, out: Path | None, kind: OutputKind, progress: Progress | None
) -> DecodingTask:
    """Load the trials, the lexicon and the language model, and build the search.

    `out` is the file that will be written; it must not be one of the inputs.
    """
    path, checkpoint = _split_source(trials_from.source)
    check_writable(out, path, trials_from.references, options.config, options.lexicon, options.lm, kind=kind)
    _, tuned = options.weights()
    stored = None
    if path.is_dir():
        trials = _score_run(path, checkpoint, trials_from, options.head, progress)
    elif is_export(path):
        file = open_export(path)
        stored = stored_words(file)
        trials = _score_export(file, trials_from, options.head, progress)
        if stored is None:
            logger.info(
                f"{path} contains no lexicon or language model; decoding with --lexicon {options.lexicon} and"
                f" --lm {options.lm}"
            )
    else:
        trials = _read_file(path, trials_from, options.head)
    search = load_search(trials.classes, options, stored, progress)
    if search.boundary < 0:
        logger.info(
            "none of the classes is a word boundary (SIL, |, > or <space>); if there is one, rename it in the file"
        )
    if search.oov_words:
        logger.info(
            f"{len(search.oov_words):,} of {len(search.words):,} lexicon words are not in the vocabulary of the"
            f" language model and are scored as its unknown word, such as {', '.join(search.oov_words[:3])}"
        )
    description = SearchDescription(
        path.name,
        search.model.name or options.lm,
        search.model.order,
        search.lexicon.name or options.lexicon,
        len(search.words),
        len(search.lexicon),
        search.settings.beam,
        search.settings.threshold,
        trials.head,
    )
    sentences = [replace(s, lm=description.lm) for s in mark_leakage(trials.sentences, search.model)]
    if trials.transducer is None:
        return DecodingTask(search, trials.frames, sentences, description, tuned, trials.checkpoint)
    from arcuate.decoding.joint import JointWordSearch, joint_search

    joint = joint_search(trials.transducer, trials.head, search)
    assert isinstance(joint, JointWordSearch)
    return DecodingTask(joint, trials.frames, sentences, description, tuned, trials.checkpoint)


def _read_file(path: Path, trials: TrialSource, head: Head | None) -> _Trials:
    """Read a file of frame log-probabilities or logits."""
    given = {
        "--split": trials.split != "val",
        "--data": trials.data is not None,
        f"--head {head}": head not in (None, "ctc"),
    }
    if unused := [option for option, is_given in given.items() if is_given]:
        raise UserError(f"{' and '.join(unused)} cannot be applied to the file {path}; remove it, or give a run folder")

    def unread(n_trials: int, ids: tuple[str, ...] | None) -> list[Sentence]:
        sentences = [Sentence(str(name)) for name in ids or range(n_trials)]
        if trials.references is None:
            return sentences
        return attach_references(sentences, Path(trials.references), complete=True, by_position=ids is None)

    texts = None if trials.references is None else lambda n, ids: [s.reference for s in unread(n, ids)]
    scores = read_frames(path, texts)
    sentences = unread(len(scores.trials), scores.ids)
    if trials.references is None and scores.texts is not None:
        sentences = [replace(s, reference=text) for s, text in zip(sentences, scores.texts, strict=True)]
    logger.info(f"read {scores.summary(sum(s.reference is not None for s in sentences))}")
    for frames, sentence in zip(scores.trials, sentences, strict=True):
        check_log_probs(frames, scores.classes, f"trial {sentence.id}")
    return _Trials(tuple(map(Frames, scores.trials)), scores.classes, sentences)


def _score_export(file: ExportedFile, trials: TrialSource, head: Head | None, progress: Progress | None) -> _Trials:
    """Compute the frames of a split of a store with an exported model."""
    from arcuate.data.store import Store

    if trials.data is None:
        raise UserError(f"{file.path} does not contain recordings; give a store to decode with --data")
    store, layout = Store.open(Path(trials.data)), file.layout
    chosen_head = choose_head(file, file.metadata.transducer is not None, head)
    decoder = load(file.path)
    store.check_trained_on(file.trained_on)
    if store.n_channels != layout.n_channels:
        raise UserError(f"{store.path} has {store.n_channels} channels, but the model expects {layout.n_channels}")
    chosen = [t for t in store.trials if t.split == trials.split and t.session in layout.sessions and t.n_bins]
    if not chosen:
        raise UserError(f"{store.path} has no {trials.split} trials in sessions known to {file.path}")
    read = {"block": store.block_statistics, "rolling": store.past_statistics}.get(layout.normalise)
    frames = []
    for n, info in enumerate(chosen, start=1):
        statistics = None if read is None else read(info, layout.log1p)
        frames.append(decoder.frames(store.read_bins(info), info.session, statistics))
        if progress:
            progress(n, len(chosen), "running the exported model")
    transducer = None if chosen_head == "ctc" else decoder.model.transducer
    return _Trials(tuple(frames), layout.classes, _stored(chosen, trials), chosen_head, transducer)


def _stored(infos: Sequence["TrialInfo"], trials: TrialSource) -> list[Sentence]:
    """The trials of a store; their texts are the references, unless a file is given."""
    sentences = [Sentence(t.id, (), t.text, t.session, t.corpus, seconds=t.n_bins * BIN_SECONDS) for t in infos]
    if trials.references is None:
        return sentences
    return attach_references(sentences, Path(trials.references), complete=True)


def _score_run(
    path: Path, checkpoint: str, trials: TrialSource, head: Head | None, progress: Progress | None
) -> _Trials:
    """Compute the frames of a split; the texts in the store are the references."""
    from arcuate.evaluation.evaluate import read_source, score_split

    source = read_source(open_run(path), checkpoint)
    chosen = choose_head(source.checkpoint, source.config.transducer.enabled, head)
    scored = score_split(
        source, trials.split, trials.data, head="ctc", beam=1, keep_frames=chosen != "ctc", progress=progress
    )
    results = [r for r in scored.results if r.log_probs is not None]
    frames = tuple(Frames(r.log_probs, r.encoded) for r in results if r.log_probs is not None)
    transducer = None
    if chosen != "ctc":
        transducer = require_transducer(scored.model.transducer, str(path)).for_search()
    sentences = _stored([r.trial for r in results], trials)
    return _Trials(frames, scored.model.config.classes, sentences, chosen, transducer, scored.source.checkpoint)
