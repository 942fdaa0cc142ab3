"""Decode a run or a file of frame log-probabilities to words, with a pronunciation lexicon and a language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.class_order import check_log_probs
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.load import choose_head, load, load_search, stored_words
from arcuate.decoding.options import SearchOptions
from arcuate.decoding.transducer import TransducerHead, require_transducer
from arcuate.errors import UserError
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
from arcuate.models.layout import Frames, Head, check_head
from arcuate.progress import Progress, logger, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, open_run

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
    checkpoint: str = "best"


@dataclass(frozen=True, eq=False)
class DecodingTask:
    """Trials and a search, loaded."""

    search: "WordSearch | JointWordSearch"
    trials: tuple[Frames, ...]
    references: list[Reference]
    description: SearchDescription
    tuned: dict[str, Any]  # record of `arcuate tune` in the settings file
    checkpoint: Path | None = None  # folder of the weights, if the trials are those of a run


@dataclass(frozen=True, eq=False)
class _Trials:
    """Frames and references of all trials."""

    frames: tuple[Frames, ...]
    classes: tuple[str, ...]  # of the frames
    references: list[Reference]
    head: Head = "ctc"
    transducer: TransducerHead | None = None  # None with the CTC head
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
        TrialSource(source, references, split, data, checkpoint),
        SearchOptions(lm=lm, lexicon=lexicon, config=config, beam=beam, head=check_head(head)),
        target,
        DECODINGS,
        progress,
        words,
    )
    settings = task.search.settings
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


def open_task(
    trials_from: TrialSource,
    options: SearchOptions,
    out: Path | None,
    kind: OutputKind,
    progress: Progress | None,
    words: Sequence[str] = (),
) -> DecodingTask:
    """Load the trials, the lexicon and the language model, and build the search.

    `out` is the file that will be written; it must not be one of the inputs.
    """
    path = local_path(trials_from.source)
    check_writable(out, path, trials_from.references, options.config, options.lexicon, options.lm, kind=kind)
    _check_applicable(path, trials_from)
    _, tuned = options.weights()
    if options.head not in (None, "ctc") and not path.is_dir() and not is_export(path):
        raise UserError(f"--head {options.head} needs a run folder; a file of frame scores contains the CTC head only")
    stored = None
    if is_export(path):
        file = open_export(path)
        stored = stored_words(file)
        trials = _score_export(file, trials_from, options.head, progress)
        if stored is None:
            logger.info(
                f"{path} contains no lexicon or language model; decoding with --lexicon {options.lexicon} and"
                f" --lm {options.lm}"
            )
    else:
        trials = (
            _score_run(path, trials_from, options.head, progress) if path.is_dir() else _read_file(path, trials_from)
        )
    search = load_search(trials.classes, options, words, stored, progress)
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
    references = mark_leakage(trials.references, search.model)
    if trials.transducer is None:
        return DecodingTask(search, trials.frames, references, description, tuned, trials.checkpoint)
    from arcuate.decoding.joint import JointWordSearch, joint_search

    joint = joint_search(trials.transducer, trials.head, search)
    assert isinstance(joint, JointWordSearch)
    return DecodingTask(joint, trials.frames, references, description, tuned, trials.checkpoint)


def _check_applicable(path: Path, trials: TrialSource) -> None:
    """Reject options that have no effect on an exported model or a file of frame scores."""
    given = {"--checkpoint": trials.checkpoint != "best"}
    if not is_export(path):
        given |= {"--split": trials.split != "val", "--data": trials.data is not None}
    if not path.is_dir() and (unused := [option for option, is_given in given.items() if is_given]):
        raise UserError(f"{' and '.join(unused)} cannot be applied to the file {path}; remove it, or give a run folder")


def _read_file(path: Path, trials: TrialSource) -> _Trials:
    """Read a file of frame log-probabilities or logits."""
    given = None if trials.references is None else Path(trials.references)
    texts = None if given is None else lambda n, ids: [r.text for r in read_references(given, n, ids)]
    scores = read_frames(path, texts)
    if given is not None:
        references = read_references(given, len(scores.trials), scores.ids)
    else:
        ids = scores.ids or tuple(map(str, range(len(scores.trials))))
        references = [
            Reference(identity, text) for identity, text in zip(ids, scores.texts or (None,) * len(ids), strict=True)
        ]
    logger.info(f"read {scores.summary(sum(r.text is not None for r in references))}")
    for frames, reference in zip(scores.trials, references, strict=True):
        check_log_probs(frames, scores.classes, f"trial {reference.id}")
    return _Trials(tuple(map(Frames, scores.trials)), scores.classes, references)


def _score_export(file: ExportedFile, trials: TrialSource, head: Head | None, progress: Progress | None) -> _Trials:
    """Compute the frames of a split of a store with an exported model."""
    from arcuate.data.store import Store

    if trials.data is None:
        raise UserError(f"{file.path} does not contain recordings; give a store to decode with --data")
    store, layout, chosen_head = (
        Store.open(Path(trials.data)),
        file.layout,
        choose_head(file, file.metadata.transducer is not None, head),
    )
    decoder = load(file.path)
    store.check_trained_on(file.trained_on)
    if store.n_channels != layout.n_channels:
        raise UserError(f"{store.path} has {store.n_channels} channels, but the model expects {layout.n_channels}")
    chosen = [t for t in store.trials if t.split == trials.split and t.session in layout.sessions and t.n_bins]
    if not chosen:
        raise UserError(f"{store.path} has no {trials.split} trials in sessions known to {file.path}")
    read = {"block": store.block_statistics, "rolling": store.past_statistics}.get(layout.normalise)
    frames, references = [], []
    for n, info in enumerate(chosen, start=1):
        statistics = None if read is None else read(info, layout.log1p)
        frames.append(decoder.frames(store.read_bins(info), info.session, statistics))
        references.append(_reference(info))
        if progress:
            progress(n, len(chosen), "running the exported model")
    if trials.references is not None:
        references = read_references(Path(trials.references), len(frames), [r.id for r in references])
    transducer = None if chosen_head == "ctc" else decoder.model.transducer
    return _Trials(tuple(frames), layout.classes, references, chosen_head, transducer)


def _reference(info: "TrialInfo") -> Reference:
    return Reference(info.id, info.text, info.session, info.corpus, seconds=info.n_bins * BIN_SECONDS)


def _score_run(path: Path, trials: TrialSource, head: Head | None, progress: Progress | None) -> _Trials:
    """Compute the frames of a split; the texts in the store are the references."""
    from arcuate.evaluation.evaluate import read_source, score_split

    source = read_source(open_run(path), trials.checkpoint)
    chosen = choose_head(source.checkpoint, source.config.transducer.enabled, head)
    scored = score_split(
        source, trials.split, trials.data, head="ctc", beam=1, keep_frames=chosen != "ctc", progress=progress
    )
    results = [r for r in scored.results if r.log_probs is not None]
    frames = tuple(Frames(r.log_probs, r.encoded) for r in results if r.log_probs is not None)
    references = [_reference(r.trial) for r in results]
    if trials.references is not None:
        references = read_references(Path(trials.references), len(frames), [r.id for r in references])
    transducer = None
    if chosen != "ctc":
        transducer = require_transducer(scored.model.transducer, str(path)).for_search()
    return _Trials(frames, scored.model.config.classes, references, chosen, transducer, scored.source.checkpoint)


def _tuned_on(task: DecodingTask) -> bool | None:
    """Whether the weights were tuned on these trials; None for trials without references."""
    if not any(r.text for r in task.references):
        return None
    return bool(task.tuned) and task.tuned.get("digest") == digest_references(task.references)
