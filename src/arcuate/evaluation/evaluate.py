"""Evaluate a run on a split: phoneme error rate with confidence interval, by session and block, one line per trial."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.known_sessions import log_missing_reference, log_new_sessions
from arcuate.adaptation.online import make_adapter
from arcuate.data.alphabet import CLASSES, error_rate_name, token_unit
from arcuate.data.selection import select_split
from arcuate.data.store import Store, TrialInfo
from arcuate.data.text import normalise_text
from arcuate.data.trial import BIN_SECONDS, SPLITS
from arcuate.decoding.frame_files import FrameLogProbs, write_frames
from arcuate.decoding.load import choose_head
from arcuate.decoding.transducer import TRANSDUCER_BEAM
from arcuate.errors import UserError
from arcuate.evaluation.adapted import AdaptationSummary, adapt_sessions, summarise_adaptation
from arcuate.evaluation.metrics import total, words_per_minute
from arcuate.evaluation.trials import (
    PhonemeMetrics,
    TrialResult,
    decode_trials,
    result_row,
    summarise,
    token_search,
    write_results,
)
from arcuate.evaluation.unlabelled import (
    MIN_TRIALS,
    ErrorEstimate,
    ErrorReference,
    estimate_error,
    make_reference,
    measure_trial,
)
from arcuate.files import FRAME_SCORES, check_writable, read_json, to_frame
from arcuate.models.acoustic import model_delay
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model, load_model_config
from arcuate.models.layout import Head
from arcuate.models.model import Model
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.progress import Progress, counted, logger, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, find_checkpoint, open_run, split_parent
from arcuate.training.checkpoint import checkpoint_stage
from arcuate.training.config import TrainingConfig, Validate, read_config
from arcuate.training.curriculum import stage_loss

ADAPTED_LABEL = "adapt-one-step"
_MAX_LABEL_BYTES = 100
_REFERENCE_TRIALS = 300  # labelled trials with which unlabelled ones are compared


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Result of `evaluate`."""

    run: Run
    trials: tuple[TrialResult, ...]
    metrics: PhonemeMetrics
    provenance: "Provenance"
    left_out: tuple[TrialInfo, ...] = ()  # trials of the split in sessions that the model has no layer for
    classes: tuple[str, ...] = CLASSES  # alphabet of the model
    delay_ms: float | None = None  # algorithmic delay of the model; None if it is not causal
    error_reference: ErrorReference | None = None  # of the labelled trials
    estimate: ErrorEstimate | None = None  # error rate of the trials without labels
    adaptation: AdaptationSummary | None = None  # with online adaptation

    def __repr__(self) -> str:
        return f"Evaluation('{self.run.path}': {self.summary().splitlines()[0]})"

    @property
    def words_per_minute(self) -> float | None:
        """Words per minute in the reference texts of the labelled trials."""
        scored = [r.trial for r in self.trials if r.score is not None]
        n_words = sum(len(normalise_text(t.text).split()) for t in scored if t.text)
        return words_per_minute(n_words, sum(t.n_bins for t in scored) * BIN_SECONDS)

    @property
    def per(self) -> float | None:
        """Error rate over the tokens of the alphabet (phonemes: PER); None if no trial has a label."""
        return self.metrics.per

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """95 % bootstrap interval of the PER; (None, None) for fewer than two scored trials."""
        return self.metrics.interval

    @property
    def by_session(self) -> dict[str, float | None]:
        """PER by session."""
        return self.metrics.per_by_session

    @property
    def results_file(self) -> Path:
        """The file with one line per trial."""
        return self.run.results_file(self.provenance.split, self.provenance.label)

    def summary(self) -> str:
        """The result in one sentence."""
        metrics, split = self.metrics, self.provenance.split
        rate, unit = error_rate_name(self.classes), token_unit(self.classes)
        estimated = "".join(f"\n{text}" for text in self._estimates(rate))
        if metrics.per is None:
            return f"{counted(metrics.n_trials, f'{split} trial')} decoded; {rate} needs labels{estimated}"
        caveat = " (the split the checkpoint was selected on)" if self.provenance.selected_on == split else ""
        caveat = " (the training data)" if split == "train" else caveat
        greedy = "" if metrics.per_greedy is None else f" (greedy {percent(metrics.per_greedy)})"
        return (
            f"{rate} {percent(metrics.per)}{greedy}, {metrics.interval_text}, on"
            f" {counted(metrics.n_scored, split + ' trial')}{caveat}: {metrics.substitutions} substitutions,"
            f" {metrics.insertions} insertions, {metrics.deletions} deletions in {metrics.n_tokens} {unit}s"
            f"{self._speed_text()}{self._adaptation_text(rate)}{estimated}"
        )

    def _estimates(self, rate: str) -> list[str]:
        """Estimated error rates of the trials without labels, by session if sessions were adapted."""
        sessions = self.adaptation.sessions if self.adaptation else ()
        by_session = [f"{s.session}: {s.estimate.summary(rate)}" for s in sessions if s.estimate is not None]
        return by_session if self.estimate is None else [self.estimate.summary(rate)]

    def _adaptation_text(self, rate: str) -> str:
        adaptation = self.adaptation
        if adaptation is None:
            return ""
        p = "" if adaptation.difference is None else f" (p = {adaptation.difference.p:.4f})"
        return (
            f"\nwithout adaptation {rate} {percent(adaptation.per_unadapted)}{p};"
            f" {1000 * (adaptation.seconds_per_trial or 0.0):.0f} ms of adaptation per trial,"
            f" {adaptation.peak_rss_mb:.0f} MB"
        )

    def _speed_text(self) -> str:
        pace = self.words_per_minute
        parts = [] if pace is None else [f"{pace:.1f} words per minute"]
        parts += [] if self.delay_ms is None else [f"delay of the model {self.delay_ms:g} ms"]
        return f"\n{'; '.join(parts)}" if parts else ""

    def to_dict(self) -> dict[str, Any]:
        """The values, as written to results/<split>.json."""
        return {
            **self.metrics.to_dict(),
            **self.provenance.to_dict(),
            "unit": token_unit(self.classes),
            "words_per_minute": self.words_per_minute,
            "delay_ms": self.delay_ms,
            "error_reference": None if self.error_reference is None else self.error_reference.to_dict(),
            **({} if self.estimate is None else {"estimate": self.estimate.to_dict()}),
            **({} if self.adaptation is None else self.adaptation.to_dict()),
            "left_out": {"trials": len(self.left_out), "sessions": _sessions(self.left_out)},
        }

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(result_row(result, self.classes) for result in self.trials)


@dataclass(frozen=True)
class Provenance:
    """The checkpoint, the trials and the search behind a result, and the split the checkpoint was selected on."""

    run: str
    recipe: str | None
    split: str
    label: str | None
    selected_on: str | None
    checkpoint: str
    step: int | None
    search: str
    beam: int | None  # None: greedy search
    head: Head
    data_hash: str | None
    data_differ_in: list[str] | None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "beam" or value is not None}


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint of a run, or a model folder of `arcuate import`."""

    run: Run
    checkpoint: Path  # folder with the weights
    config: TrainingConfig
    trained_on: dict[str, Any] | None  # the training store as recorded by the run; None for an imported model


@dataclass(frozen=True, eq=False)
class ScoredSplit:
    """The trials of a split, decoded by one checkpoint."""

    source: ModelSource
    store: Store
    model: Model
    head: Head
    beam: int | None  # width of the search; None: greedy search
    results: list[TrialResult]
    adaptation: AdaptationSummary | None = None


def evaluate(
    run: RunLike,
    *,
    split: str = "val",
    data: str | Path | Store | None = None,
    head: str | None = None,
    beam: int | None = None,
    label: str | None = None,
    scores: str | Path | None = None,
    adapt: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode and score a split; write `results/<split>[.<label>].jsonl`, `.json` and `.npz` into the run folder.

    Args:
        run: RUN or RUN@CHECKPOINT (best, last, step-NNNNNNNN or stage-NAME), a model folder, or hf:ORG/NAME.
        split: val, test, dev or train.
        data: Store to evaluate on; default: the store of the training run.
        head: ctc, transducer or both; default: both if the transducer was trained.
        beam: Width of the search, 1 = greedy; default: as in the recipe.
        label: Label of the results file; default: none, and adapt-one-step with `adapt`.
        scores: Also write all frame log-probabilities to this .npz file.
        adapt: Adapt the session layer online, without labels, trial by trial; sessions that are new to the model are
            then decoded too.
    """
    label = label or (ADAPTED_LABEL if adapt else None)
    scores = None if scores is None else Path(scores)
    check_outputs(label, scores)
    source = find_source(run)
    scored = score_split(source, split, data, head=head, beam=beam, adapt=adapt, progress=progress)
    config = scored.model.config
    if adapt:
        reference, estimate = None, None
    else:
        reference, estimate = _estimate_error(scored, split, progress)
    evaluation = Evaluation(
        source.run,
        tuple(scored.results),
        summarise(scored.results),
        find_provenance(scored, split, label),
        () if adapt else _left_out(scored.store, split, config),
        config.classes,
        model_delay(scored.model).total_ms if config.settings.encoder.causal else None,
        reference,
        estimate,
        scored.adaptation,
    )
    write_results(source.run, split, label, scored.results, evaluation.to_dict(), scored.store, evaluation.classes)
    if scores is not None:
        write_frame_scores(scores, scored.results, evaluation.classes)
    return evaluation


def _estimate_error(
    scored: ScoredSplit, split: str, progress: Progress | None
) -> tuple[ErrorReference | None, ErrorEstimate | None]:
    """Reference of the labelled trials, and estimated error rate of the others."""
    reference = None if split == "train" else _labelled_reference(scored.results)
    unlabelled = [measure_trial(r.log_probs) for r in scored.results if r.score is None and r.log_probs is not None]
    if len(unlabelled) < MIN_TRIALS:
        return reference, None
    known = find_error_reference(scored.source, scored.model, progress) or reference
    return reference, None if known is None else estimate_error(unlabelled, known)


def _labelled_reference(results: Sequence[TrialResult]) -> ErrorReference | None:
    scored = [(r.log_probs, r.score) for r in results if r.score is not None and r.log_probs is not None]
    return make_reference([measure_trial(log_probs) for log_probs, _ in scored], total(counts for _, counts in scored))


def find_error_reference(source: ModelSource, model: Model, progress: Progress | None = None) -> ErrorReference | None:
    """Reference of the trials that the checkpoint was selected on; None without the store of training."""
    path = Path(str((source.trained_on or {}).get("path", "")))
    if source.trained_on is None or not path.is_dir():
        return None
    store = Store.open(path)
    split = "dev" if source.config.data.dev_fraction > 0 else "val"
    settings = source.config
    trials = select_split(store, settings.data, settings.front_end.patch.count_frames, split, model.config.sessions)
    chosen = [t for t in trials if t.tokens is not None][:: max(1, len(trials) // _REFERENCE_TRIALS)]
    batch_size = settings.validate_.batch_size
    results = decode_trials(model, store, chosen, batch_size=batch_size, keep_log_probs=True, progress=progress)
    return _labelled_reference(results)


def score_split(
    source: ModelSource,
    split: str,
    data: str | Path | Store | None = None,
    *,
    head: str | None = None,
    beam: int | None = None,
    keep_frames: bool = False,
    adapt: bool = False,
    progress: Progress | None = None,
) -> ScoredSplit:
    """Decode every trial of a split and keep its frame scores; `keep_frames` keeps the transducer's inputs too."""
    config = source.config
    if adapt and head not in (None, "ctc"):
        raise UserError(f"adaptation uses the CTC head, got --head {head}; use --head ctc")
    chosen = choose_head(source.checkpoint, config.transducer.enabled, "ctc" if adapt else head)
    width = choose_beam(config.validate_, chosen, beam)
    store = open_store(source, data)
    model = load_model(source.checkpoint)
    trials = select_trials(source, store, split, model.config, with_new_sessions=adapt)
    machine = configure_runtime(
        available_runtime(config.runtime), config.encoder.width, 1 if adapt else config.validate_.batch_size
    )
    model = model.to(machine.device)
    if adapt:
        log_new_sessions(store, model, trials)
    else:
        _log_differences(source, store, split, model.config)
    store.check_unchanged(trials, progress)
    search = token_search(model, chosen, width)
    if adapt:
        if not set(store.sessions) & set(model.config.sessions):
            log_missing_reference()
        adapter = make_adapter(model, Adaptation(), config.augment)
        sessions = adapt_sessions(adapter, store, trials, search, progress=progress)
        results = [t.result for session in sessions for t in session.trials]
        unlabelled = any(r.score is None for r in results)
        reference = find_error_reference(source, model, progress) if unlabelled else None
        summary = summarise_adaptation(sessions, reference)
        return ScoredSplit(source, store, model, chosen, width, results, summary)
    results = decode_trials(
        model,
        store,
        trials,
        batch_size=config.validate_.batch_size,
        loss=stage_loss(config.loss, checkpoint_stage(source.checkpoint, config.stages)),
        keep_log_probs=True,
        keep_frames=keep_frames,
        search=search,
        progress=progress,
    )
    return ScoredSplit(source, store, model, chosen, width, results)


def find_source(run: RunLike) -> ModelSource:
    """Find the checkpoint of RUN or RUN@CHECKPOINT and read the settings it was trained with."""
    path, checkpoint = split_parent(os.fspath(run))
    return read_source(open_run(path), checkpoint)


def read_source(run: Run, checkpoint: str = "best") -> ModelSource:
    """A checkpoint by name and the settings it was trained with."""
    folder = find_checkpoint(run.path, checkpoint)
    if run.recipe_file.is_file():
        return ModelSource(run, folder, read_config(run), run.data())
    return ModelSource(run, folder, TrainingConfig(**dict(load_model_config(folder).settings)), None)


def open_store(source: ModelSource, data: str | Path | Store | None) -> Store:
    """Open the given store, or the one that the run was trained on; its features must be those of training."""
    if data is not None:
        store = data if isinstance(data, Store) else Store.open(Path(data))
        store.check_trained_on(source.trained_on)
        return store
    if source.trained_on is None:
        raise UserError(f"{source.run.path} is an imported model and records no store; give one with --data STORE")
    path = source.run.store_path()
    if not path.is_dir():
        raise UserError(f"the training store {path} of this run does not exist; give it with --data STORE")
    store = Store.open(path)
    store.check_trained_on(source.trained_on)
    return store


def check_outputs(label: str | None, scores: Path | None) -> None:
    """Check the label and the file of frame scores before any work is done."""
    if label is not None and not label.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--label {label!r} may contain only letters, digits, - and _")
    if label is not None and len(label.encode()) > _MAX_LABEL_BYTES:
        raise UserError(f"--label has {len(label)} characters; give a shorter one, it is part of a file name")
    if label == WORDS_LABEL:
        raise UserError(f"--label {label} is reserved for the words that arcuate decode writes; choose another label")
    if scores is not None and scores.is_dir():
        raise UserError(f"--scores {scores} is a folder; give a file, such as {scores / 'scores.npz'}")
    check_writable(scores, kind=FRAME_SCORES)


def choose_beam(settings: Validate, head: Head, beam: int | None) -> int | None:
    """Width of the search, None for the greedy search; default: the search of the recipe, or that of the transducer."""
    if beam is not None and beam < 1:
        raise UserError(f"--beam must be at least 1, got {beam}")
    if beam is None and head == "ctc":
        return settings.beam if settings.search == "beam" else None
    if head == "both":  # there is no greedy search of both heads
        return beam or TRANSDUCER_BEAM
    return None if beam == 1 else beam or TRANSDUCER_BEAM


def find_provenance(scored: ScoredSplit, split: str, label: str | None) -> Provenance:
    """Provenance of a scored split."""
    source, store = scored.source, scored.store
    selected_on = "dev" if source.config.data.dev_fraction > 0 else "val"
    state_file = source.checkpoint / "state.json"
    state = read_json(state_file) if state_file.exists() else {}
    return Provenance(
        source.run.name,
        source.run.recipe_tree().get("name") if source.trained_on is not None else None,
        split,
        label,
        None if source.trained_on is None else selected_on,
        source.checkpoint.name,
        state.get("step"),
        "greedy" if scored.beam is None else "beam",
        scored.beam,
        scored.head,
        store.hashes.get(split),
        _changed_splits(source, store),
    )


def write_frame_scores(path: Path, results: Sequence[TrialResult], classes: tuple[str, ...]) -> None:
    """Write the log-probabilities of all trials to one .npz file."""
    frames = tuple(r.log_probs for r in results if r.log_probs is not None)
    write_frames(path, FrameLogProbs(classes, frames, tuple(r.trial.id for r in results), path.name))


def select_trials(
    source: ModelSource, store: Store, split: str, config: ModelConfig, with_new_sessions: bool = False
) -> tuple[TrialInfo, ...]:
    """Trials of the split in the sessions of the model, and in sessions that are new to it if asked for."""
    if config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {config.n_channels} channels and {store.path.name} has {store.n_channels};"
            " prepare the data with the same channels as in training"
        )
    store.check_classes(config.classes)
    settings = source.config
    known = tuple(s for s in config.sessions if s in store.sessions) if with_new_sessions else config.sessions
    count_frames = settings.front_end.patch.count_frames
    trials = select_split(store, settings.data, count_frames, split, known) if known else ()
    if with_new_sessions:
        trials = (*trials, *(t for t in _left_out(store, split, config) if t.usable or split != "train"))
    if not trials:
        where = "" if with_new_sessions else " in the sessions of this model"
        raise UserError(f"{store.path.name} has no {split} trials{where}")
    return trials


def _left_out(store: Store, split: str, config: ModelConfig) -> tuple[TrialInfo, ...]:
    """Trials of a split in sessions that are unknown to the model; `dev` is a part of the training trials."""
    stored = "train" if split == "dev" else split
    return tuple(t for t in store.trials if t.split == stored and t.session not in config.sessions)


def _sessions(trials: Sequence[TrialInfo]) -> list[str]:
    return list(dict.fromkeys(t.session for t in trials))


def _log_differences(source: ModelSource, store: Store, split: str, config: ModelConfig) -> None:
    """Report content that differs from the training data, and sessions that are unknown to the model."""
    if differ := _changed_splits(source, store):
        logger.info(f"the {' and '.join(differ)} trials of {store.path} differ from those the run was trained with")
    if excluded := _left_out(store, split, config):
        sessions = _sessions(excluded)
        names = ", ".join(sessions[:3]) + (" …" if len(sessions) > 3 else "")
        logger.info(
            f"{counted(len(excluded), f'{split} trial')} in {counted(len(sessions), 'session')} unknown to the model"
            f" excluded: {names};"
            " evaluate them with --adapt, or calibrate the model"
        )


def _changed_splits(source: ModelSource, store: Store) -> list[str] | None:
    """Splits whose content differs from the training data; None if the run records no hashes."""
    trained_on = source.trained_on or {}
    before = trained_on.get("hashes")
    if not isinstance(before, dict):
        return None
    return [split for split in SPLITS if before.get(split) != store.hashes[split]]
