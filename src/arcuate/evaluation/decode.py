"""Decode a run or a file of frame log-probabilities to words, with a pronunciation lexicon and a language model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from arcuate.data.alphabet import boundary_index
from arcuate.data.text import normalise_text
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.class_order import check_log_probs, word_order
from arcuate.decoding.config import DecodingConfig, parse_decoding_config, read_decoding_config
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.card import refresh_card
from arcuate.evaluation.metrics import total
from arcuate.evaluation.transcribe import (
    Reference,
    Transcript,
    TranscriptionMetrics,
    digest_references,
    mark_leakage,
    read_references,
    summarise_transcripts,
    transcribe,
)
from arcuate.exported.archive import is_export
from arcuate.exported.read import ExportedFile, open_export, read_language_model, read_lexicon
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
from arcuate.language.lexicon import Lexicon, open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.models.layout import Frames, Head, check_head
from arcuate.progress import Progress, logger, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, open_run

if TYPE_CHECKING:
    from arcuate.data.store import TrialInfo
    from arcuate.decoding.joint import JointWordSearch

_MAX_WORD_WEIGHT = 1000.0  # nats, of a word added at run time; more would outweigh any acoustic score


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


@dataclass(frozen=True, eq=False)
class Transcription(Sequence[Transcript]):
    """Result of `decode`: a sequence of transcripts with error rates and cost."""

    transcripts: tuple[Transcript, ...]
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
        return len(self.transcripts)

    @overload
    def __getitem__(self, index: int) -> Transcript: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Transcript, ...]: ...

    def __getitem__(self, index: int | slice) -> Transcript | tuple[Transcript, ...]:
        return self.transcripts[index]

    @property
    def n_rejected(self) -> int:
        """Number of sentences whose probability is below `reject_below`."""
        return sum(t.is_rejected(self.reject_below) for t in self.transcripts)

    @property
    def wer_accepted(self) -> float | None:
        """Word error rate of the sentences that were not rejected."""
        kept = [t.word_errors for t in self.transcripts if not t.is_rejected(self.reject_below)]
        return total(errors for errors in kept if errors is not None).rate

    def rows(self) -> Iterator[dict[str, Any]]:
        """One output line per trial."""
        return (t.to_row(self.search.lm, self.reject_below) for t in self.transcripts)

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
        """All values but the transcripts."""
        own = fields_to_dict(self, "transcripts", "metrics", "search", "reject_below")
        if self.reject_below is not None:
            own |= {"reject_below": self.reject_below, "n_rejected": self.n_rejected, "wer_accepted": self.wer_accepted}
        return self.metrics.to_dict() | fields_to_dict(self.search) | own

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


@dataclass(frozen=True)
class TrialSource:
    """The trials to decode: a split of a run folder, or an .npz file of frame log-probabilities."""

    source: RunLike
    references: str | Path | None
    split: str
    data: str | Path | None
    head: str | None = "ctc"  # None: both if the transducer was trained
    checkpoint: str = "best"


@dataclass(frozen=True)
class SearchSource:
    """The models and settings of a word search, as `decode` takes them."""

    lexicon: str | Path
    lm: str | Path
    config: str | Path | None
    beam: int | None
    threshold: float | None
    words: Sequence[str] = ()

    def settings(self, exported: ExportedFile | None = None) -> tuple[DecodingConfig, dict[str, Any]]:
        """Settings of the file, overridden by the given limits, and the record of `arcuate tune` in the file."""
        settings, tuned = read_decoding_config(Path(self.config)) if self.config else (DecodingConfig(), {})
        if self.config is None and exported is not None and exported.has_words:
            stored = {name: value for name, value in asdict(exported.settings).items() if value is not None}
            settings = parse_decoding_config(stored, str(exported.path))
        limits = {"beam": self.beam, "threshold": self.threshold}
        given = {name: value for name, value in limits.items() if value is not None}
        return parse_decoding_config(settings.model_dump() | given, "the command line"), tuned


@dataclass(frozen=True, eq=False)
class DecodingTask:
    """Trials and a search, loaded."""

    search: WordSearch
    trials: tuple[np.ndarray, ...]
    references: list[Reference]
    description: SearchDescription
    tuned: dict[str, Any]  # record of `arcuate tune` in the settings file
    joint: "tuple[JointWordSearch, tuple[Frames, ...]] | None" = None  # with head="both"
    checkpoint: Path | None = None  # folder of the weights, if the trials are those of a run


@dataclass(frozen=True, eq=False)
class _Trials:
    """Frame log-probabilities and references of all trials."""

    log_probs: tuple[np.ndarray, ...]
    classes: tuple[str, ...]
    boundary: int
    references: list[Reference]
    head: Head = "ctc"
    transducer: Any = None  # torch module or TransducerHead, unless the head is CTC
    frames: tuple[Any, ...] = ()  # encoder outputs, unless the head is CTC
    checkpoint: Path | None = None  # folder of the weights of a run


def decode(
    source: RunLike,
    *,
    split: str = "val",
    lexicon: str | Path = "default",
    lm: str | Path = "default",
    out: str | Path | None = None,
    n_best: int = 10,
    config: str | Path | None = None,
    references: str | Path | None = None,
    beam: int | None = None,
    threshold: float | None = None,
    words: Sequence[str] = (),
    data: str | Path | None = None,
    head: str | None = None,
    checkpoint: str = "best",
    reject_below: float | None = None,
    progress: Progress | None = None,
) -> Transcription:
    """Decode a run folder, an exported model with a store, or an .npz file of frame log-probabilities to words.

    `config`: search weights of `arcuate tune`. `references`: JSON lines with `text`. `words`: added to the lexicon, as
    word, word=weight or word=weight=PHONEMES. `split`, `data`, `head` and `checkpoint` apply to runs; `head` is ctc,
    transducer or both (default: both if the transducer was trained). `out`: write one JSON line per trial with its
    n-best list. For a run, the same lines and their summary are kept in the run folder, as
    `results/<split>.words.jsonl` and `.json`, where report, ledger and list of runs find them.

    Every word has a confidence, the probability that it is correct, and every sentence a probability. `reject_below`
    marks sentences whose probability is lower as rejected; their text is kept.
    """
    if reject_below is not None and not 0.0 <= reject_below <= 1.0:
        raise UserError(f"--reject-below must be a probability between 0 and 1, not {reject_below:g}")
    target = None if out is None else Path(out)
    source = local_path(source)
    kept = open_run(source) if source.is_dir() else None
    if kept is not None:
        check_writable(kept.results_file(split, WORDS_LABEL), kind=DECODINGS)
    task = open_task(
        TrialSource(source, references, split, data, head, checkpoint),
        SearchSource(lexicon, lm, config, beam, threshold, words),
        target,
        DECODINGS,
        progress,
    )
    settings = task.search.settings
    if task.joint is not None:
        transcripts = transcribe(*task.joint, task.references, n_best, progress, settings)
    else:
        transcripts = transcribe(task.search, task.trials, task.references, n_best, progress, settings)
    transcription = Transcription(
        tuple(transcripts),
        summarise_transcripts(
            transcripts,
            task.description.lm,
            confidence=settings.confidence,
        ),
        task.description,
        _tuned_on(task),
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
    refresh_card(run)


def open_task(
    trials_from: TrialSource, models: SearchSource, out: Path | None, kind: OutputKind, progress: Progress | None
) -> DecodingTask:
    """Load the trials, the lexicon and the language model, and build the search.

    `out` is the file that will be written; it must not be one of the inputs.
    """
    path, lexicon, lm = local_path(trials_from.source), models.lexicon, models.lm
    check_writable(out, path, trials_from.references, models.config, lexicon, lm, kind=kind)
    _check_applicable(path, trials_from)
    settings, tuned = models.settings()
    head = None if trials_from.head is None else check_head(trials_from.head)
    if head not in (None, "ctc") and not path.is_dir() and not is_export(path):
        raise UserError(f"--head {head} needs a run folder; a file of frame scores contains the CTC head only")
    exported = open_export(path) if is_export(path) else None
    if exported is not None:
        settings = models.settings(exported)[0]
        trials = _score_export(exported, trials_from, progress)
    else:
        is_run = path.is_dir()
        trials = _score_run(path, trials_from, progress) if is_run else _read_file(path, trials_from)
    has_words = exported is not None and exported.has_words
    if exported is not None and not has_words:
        logger.info(f"{path} contains no lexicon or language model; decoding with --lexicon {lexicon} and --lm {lm}")
    entries = read_lexicon(exported) if exported and has_words and str(lexicon) == "default" else None
    entries = entries or open_lexicon(str(lexicon), trials.classes)
    ngram = read_language_model(exported) if exported and has_words and str(lm) == "default" else None
    ngram = ngram or open_model(str(lm), progress)
    if tuple(entries.classes) != trials.classes:
        raise UserError(
            f"the classes of the lexicon {lexicon} differ from those of the frame scores; give a lexicon over"
            f" {' '.join(trials.classes[:4])} …"
        )
    entries, weights = _add_words(entries, models.words)
    search = build_word_search(entries, ngram, settings, boundary=trials.boundary, weights=weights)
    if trials.boundary < 0:
        logger.info(
            "none of the classes is a word boundary (SIL, |, > or <space>); if there is one, rename it in the file"
        )
    if search.oov_words:
        logger.info(
            f"{len(search.oov_words):,} of {len(entries.words):,} lexicon words are not in the vocabulary of the"
            f" language model and are scored as its unknown word, such as {', '.join(search.oov_words[:3])}"
        )
    description = SearchDescription(
        path.name,
        ngram.name or str(lm),
        ngram.order,
        entries.name or str(lexicon),
        len(entries.words),
        len(entries),
        settings.beam,
        settings.threshold,
        trials.head,
    )
    joint = None
    if trials.transducer is not None:
        from arcuate.decoding.joint import JointWordSearch, joint_search

        outputs = tuple(Frames(logp, frames) for logp, frames in zip(trials.log_probs, trials.frames, strict=True))
        found = joint_search(trials.transducer, trials.head, search)
        assert isinstance(found, JointWordSearch)
        joint = found, outputs
    return DecodingTask(
        search, trials.log_probs, mark_leakage(trials.references, ngram), description, tuned, joint, trials.checkpoint
    )


def _check_applicable(path: Path, trials: TrialSource) -> None:
    """Reject options that have no effect on an exported model or a file of frame scores."""
    given = {"--checkpoint": trials.checkpoint != "best"}
    if not is_export(path):
        given |= {"--split": trials.split != "val", "--data": trials.data is not None}
    if not path.is_dir() and (unused := [option for option, is_given in given.items() if is_given]):
        raise UserError(f"{' and '.join(unused)} cannot be applied to the file {path}; remove it, or give a run folder")


def _read_file(path: Path, trials: TrialSource) -> _Trials:
    """Read a file of frame log-probabilities or logits."""
    scores = read_frames(path)
    if trials.references is not None:
        references = read_references(Path(trials.references), len(scores.trials), scores.ids)
    else:
        ids = scores.ids or tuple(map(str, range(len(scores.trials))))
        texts = scores.texts or (None,) * len(ids)
        references = [Reference(identity, text) for identity, text in zip(ids, texts, strict=True)]
    for frames, reference in zip(scores.trials, references, strict=True):
        check_log_probs(frames, scores.classes, f"trial {reference.id}")
    columns = word_order(scores.classes)
    log_probs = tuple(columns(frames) for frames in scores.trials)
    return _Trials(log_probs, columns.classes, boundary_index(columns.classes), references)


def _score_export(file: ExportedFile, trials: TrialSource, progress: Progress | None) -> _Trials:
    """Compute the frame log-probabilities of a split of a store with an exported model."""
    from arcuate.data.store import Store
    from arcuate.runtime import Decoder

    if trials.data is None:
        raise UserError(f"{file.path} does not contain recordings; give a store to decode with --data")
    store, layout = Store.open(Path(trials.data)), file.layout
    decoder = Decoder.load(file.path, words=False, head=trials.head)
    store.check_trained_on(file.trained_on)
    if store.n_channels != layout.n_channels:
        raise UserError(f"{store.path} has {store.n_channels} channels, but the model expects {layout.n_channels}")
    chosen = [t for t in store.trials if t.split == trials.split and t.session in layout.sessions and t.n_bins]
    if not chosen:
        raise UserError(f"{store.path} has no {trials.split} trials in sessions known to {file.path}")
    read = {"block": store.block_statistics, "rolling": store.past_statistics}.get(layout.normalise)
    columns = word_order(layout.classes)
    outputs, references = [], []
    for n, info in enumerate(chosen, start=1):
        decoder.reset(info.session, None if read is None else read(info, layout.log1p))
        outputs.append(decoder.trial_outputs(store.read_bins(info)))
        references.append(_reference(info))
        if progress:
            progress(n, len(chosen), "running the exported model")
    log_probs = tuple(columns(o.log_probs) for o in outputs)
    if trials.references is not None:
        references = read_references(Path(trials.references), len(log_probs), [r.id for r in references])
    classes, boundary, joint = columns.classes, boundary_index(columns.classes), decoder.engine.joint
    if joint is None:
        return _Trials(log_probs, classes, boundary, references)
    frames = tuple(o.joiner_frames for o in outputs)
    return _Trials(log_probs, classes, boundary, references, decoder.engine.head, joint.head, frames)


def _reference(info: "TrialInfo") -> Reference:
    return Reference(info.id, info.text, info.session, info.corpus, seconds=info.n_bins * BIN_SECONDS)


def _score_run(path: Path, trials: TrialSource, progress: Progress | None) -> _Trials:
    """Compute the frame log-probabilities of a split; the texts in the store are the references."""
    from arcuate.decoding.transducer import require_transducer
    from arcuate.evaluation.evaluate import choose_head, read_source, score_split

    source = read_source(open_run(path), trials.checkpoint)
    head = choose_head(source, trials.head)
    scored = score_split(
        source, trials.split, trials.data, head="ctc", beam=1, keep_frames=head != "ctc", progress=progress
    )
    results = scored.results
    columns = word_order(scored.model.config.classes)
    log_probs = [columns(r.log_probs) for r in results if r.log_probs is not None]
    classes, boundary = columns.classes, boundary_index(columns.classes)
    references = [_reference(r.trial) for r in results]
    if trials.references is not None:
        references = read_references(Path(trials.references), len(log_probs), [r.id for r in references])
    if head == "ctc":
        return _Trials(tuple(log_probs), classes, boundary, references, checkpoint=scored.source.checkpoint)
    transducer = require_transducer(scored.model.transducer, str(path)).for_search()
    if not columns.is_identity:  # the transducer's outputs cannot be reordered
        raise UserError(f"--head {head} needs a model whose classes are in the order of the word search; use ctc")
    frames = tuple(r.encoded for r in results if r.encoded is not None)
    return _Trials(tuple(log_probs), classes, boundary, references, head, transducer, frames, scored.source.checkpoint)


def _add_words(lexicon: Lexicon, words: Sequence[str]) -> tuple[Lexicon, dict[str, float]]:
    """Add words given as `word`, `word=weight` or `word=weight=PH ON EMES`; returns their weights too."""
    weights: dict[str, float] = {}
    for given in words:
        word, weight, phones = _parse_word(given, lexicon)
        weights[word] = weight
        if phones is not None:
            unknown = [p for p in phones if p not in lexicon.classes]
            if unknown or not phones:
                wrong = f"{unknown[0]!r} is not a class of the frame scores" if unknown else "no phonemes given"
                raise UserError(f"--word {given!r}: {wrong}")
            lexicon = lexicon.with_entries([(word, phones)])
    return lexicon.with_words(word for word in weights if word not in lexicon), weights


def _parse_word(given: str, lexicon: Lexicon) -> tuple[str, float, list[str] | None]:
    """Word, weight and pronunciation of one --word; a word that is not in the lexicon is normalised."""
    typed, *rest = given.split("=")
    word = typed if typed in lexicon else normalise_text(typed)
    expected = "should be word, word=weight or word=weight=PHONEMES"
    if len(rest) > 2 or len(word.split()) != 1:
        raise UserError(f"--word {given!r} {expected}")
    try:
        weight = float(rest[0]) if rest and rest[0] else 0.0
    except ValueError:
        raise UserError(f"--word {given!r} {expected}") from None
    if not -_MAX_WORD_WEIGHT <= weight <= _MAX_WORD_WEIGHT:
        raise UserError(
            f"--word {given!r}: expected a weight between -{_MAX_WORD_WEIGHT:g} and {_MAX_WORD_WEIGHT:g} nats"
        )
    return word, weight, rest[1].split() if len(rest) > 1 else None


def _tuned_on(task: DecodingTask) -> bool | None:
    """Whether the weights were tuned on these trials; None for trials without references."""
    if not any(r.text for r in task.references):
        return None
    return bool(task.tuned) and task.tuned.get("digest") == digest_references(task.references)
