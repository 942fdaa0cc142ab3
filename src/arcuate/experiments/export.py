"""`export`: write the model of a run as one file that decodes without torch (`arcuate export`)."""

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate import __version__
from arcuate.data.alphabet import error_rate_name
from arcuate.data.export import DataExport, export_data
from arcuate.data.store import MANIFEST_FILE
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.evaluation.card import CardResult, run_card, write_card
from arcuate.experiments.push import PushResult, push
from arcuate.exported.check import OPERATORS
from arcuate.exported.file import (
    CARD,
    LANGUAGE_MODEL,
    METADATA,
    SESSION_BIASES,
    SESSION_WEIGHTS,
    SILENT_FRAME,
    STARTS_AS_EXPORT,
    Content,
    Metadata,
    StateTensor,
    StoredLayout,
    TransducerSizes,
    lexicon_members,
    write_archive,
)
from arcuate.files import OutputKind, Result, check_writable, fields_to_dict
from arcuate.hub import is_hub_name
from arcuate.progress import Progress, logger
from arcuate.run import Run, RunLike, find_checkpoint, open_run, split_parent

if TYPE_CHECKING:
    from arcuate.decoding.word_search.search import WordSearch
    from arcuate.exported.graphs import ModelGraphs, StepGraph
    from arcuate.live.sources.replay import ReplayTrials
    from arcuate.models.layout import Head, Layout
    from arcuate.models.model import Model

MAX_INT8_LOSS = 0.002  # largest increase of PER by int8; above it, the export recommends fp32
_N_COMPARED = 200  # trials on which int8 is compared with fp32
_EXPORTS = OutputKind(STARTS_AS_EXPORT, "model.arcx")


@dataclass(frozen=True)
class Int8Comparison:
    """PER (of a character model: CER) of the int8 and the fp32 graph on the same trials, by greedy decoding."""

    measure: str
    n_trials: int
    per_fp32: float
    per_int8: float
    difference: float  # int8 − fp32, with a paired 95 % interval
    low: float
    high: float

    @property
    def is_acceptable(self) -> bool:
        return self.difference <= MAX_INT8_LOSS

    def summary(self) -> str:
        text = (
            f"{self.measure} {100 * self.per_int8:.2f} % in int8, {100 * self.per_fp32:.2f} % in fp32 on"
            f" {self.n_trials} trials: {100 * self.difference:+.2f} points, 95 % interval {100 * self.low:+.2f} to"
            f" {100 * self.high:+.2f}"
        )
        if self.is_acceptable:
            return text
        limit = f"{100 * MAX_INT8_LOSS:g} points"
        return f"{text}\nint8 costs more than {limit} of {self.measure} here: export in fp32, without --int8"

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self) | {"acceptable": self.is_acceptable}


@dataclass(frozen=True)
class ExportResult(Result):
    """Description of an exported file."""

    path: Path
    n_bytes: int
    precision: str
    sessions: tuple[str, ...]
    n_words: int  # of the lexicon; 0 without words
    lm: str | None
    delay_ms: float
    int8: Int8Comparison | None  # None: fp32, or no trials to compare on

    def summary(self) -> str:
        """Size and contents, and what int8 costs: one line each."""
        words = f"{self.n_words:,} words, {self.lm}" if self.lm else "phonemes only"
        text = (
            f"{self.path}: {self.n_bytes / 1e6:.1f} MB, {self.precision}, {len(self.sessions)} sessions, {words},"
            f" model delay {self.delay_ms:g} ms"
        )
        return text if self.int8 is None else f"{text}\n{self.int8.summary()}"


def export(
    source: RunLike,
    out: str | Path,
    session: str | None = None,
    int8: bool = False,
    search: SearchOptions | None = None,
    data: str | Path | None = None,
    public: bool = False,
    licence: str | None = None,
    *,
    progress: Progress | None = None,
) -> ExportResult | PushResult | CardResult | DataExport:
    """Export a model to one file that decodes without torch, a model to the Hugging Face Hub, or a store to NWB.

    Args:
        source: RUN[@CHECKPOINT], a model on the hub, an exported model (to the hub), or a store (to NWB).
        out: File to write, such as model.arcx; hf:ORG/NAME for the hub; a .md file for the model card alone; or a
            folder for the NWB files of a store.
        session: Keep the layer of this session only; default: all sessions.
        int8: Quantise matrix products to int8; the result is compared with fp32.
        search: The word search to include; with `lm` none, the file decodes to phonemes.
        data: Store with the trials on which int8 is compared; default: that of the run.
        public: Create a public repository on the hub instead of a private one.
        licence: Licence in the model card, such as cc-by-4.0.
    """
    if (Path(source) / MANIFEST_FILE).is_file():
        return export_data(Path(source), out, progress=progress)
    if Path(out).suffix == ".md":
        return write_card(source, out, licence=licence)
    if is_hub_name(out):
        named, checkpoint = split_parent(os.fspath(source))
        return push(named, os.fspath(out), checkpoint=checkpoint, public=public, licence=licence)
    return _export_model(source, Path(out), session, int8, search or SearchOptions(), data, licence, progress)


def _check_target(path: Path) -> None:
    if path.suffix != ".arcx":
        raise UserError(f"{path} must end in .arcx, the suffix of exported models")
    if find_spec("onnx") is None:
        raise UserError("exporting needs the onnx package; install with: pip install 'arcuate[export]'")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is not a regular file; choose another name")
    check_writable(path, kind=_EXPORTS)


def _export_model(
    source: RunLike,
    path: Path,
    session: str | None,
    int8: bool,
    options: SearchOptions,
    data: str | Path | None,
    licence: str | None,
    progress: Progress | None,
) -> ExportResult:
    from arcuate.decoding.load import choose_head, load_search
    from arcuate.models.io import load_model

    _check_target(path)
    if data is not None and not int8:
        raise UserError("--data names the trials for --int8; add it, or remove --data")
    named, which = split_parent(os.fspath(source))
    run = open_run(named)
    checkpoint = find_checkpoint(run, which)
    model = load_model(checkpoint)
    if session is not None and session not in model.config.sessions:
        known = ", ".join(model.config.sessions)
        raise UserError(f"session {session!r:.60} is unknown to this model; it was trained on {known}")
    search = load_search(model.config.classes, options) if options.lm != "none" else None
    sessions = model.config.sessions if session is None else (session,)
    trials = _validation_trials(run, model, sessions, data) if int8 else None  # refused before anything is written
    origin: dict[str, Any] = {"run": run.name, "checkpoint": checkpoint.name, "recipe_hash": _recipe_hash(run)}
    if run.environment_file.is_file():
        origin["data"] = {key: run.data().get(key) for key in ("layout", "features")}
    head = choose_head(checkpoint, model.transducer is not None, options.head)
    card = run_card(run, which, licence)
    layout, n_bytes = write_export(path, model, search, session, int8, head, origin, progress, card)
    return ExportResult(
        path,
        n_bytes,
        "int8" if int8 else "fp32",
        layout.sessions,
        0 if search is None else len(search.words),
        None if search is None else search.model.name,
        layout.delay.total_ms,
        None if trials is None else _compare_int8(path, model, trials, progress),
    )


def write_export(
    path: Path,
    model: "Model",
    search: "WordSearch | None",
    session: str | None = None,
    int8: bool = False,
    head: "Head" = "ctc",
    origin: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    card: str | None = None,
) -> "tuple[Layout, int]":
    """Write a causal model, lexicon, n-gram and settings of a word search, and a card; returns layout and size."""
    from arcuate.exported.graphs import build_graphs
    from arcuate.language.ngram.model import write_model
    from arcuate.models.acoustic import TorchModel

    _check_exportable(model, search, head)
    index = None if session is None else model.config.sessions.index(session)
    graphs = build_graphs(model, index, int8, transducer=head != "ctc")
    if unknown := {node.op_type for node in graphs.frame.model.graph.node} - OPERATORS:
        kind = model.config.settings.encoder.kind
        raise UserError(
            f"the encoder {kind} cannot be exported: it uses the operator {min(unknown)}, which exported models do not"
            " support; use the run folder instead"
        )
    layout = TorchModel(model).layout
    if session is not None:
        layout = replace(layout, sessions=(session,))
    members: dict[str, Content] = {METADATA: b"", **_graph_members(graphs)}
    n_layers = 0
    if index is None and model.front_end.session_layer.settings.enabled:
        members |= _session_members(model)
        n_layers = len(layout.sessions)
    metadata = Metadata(
        arcuate=__version__,
        model=StoredLayout(**vars(layout)),
        precision="int8" if int8 else "fp32",
        n_session_layers=n_layers,
        states={"bin": _describe_states(graphs.bin), "frame": _describe_states(graphs.frame)},
        head=head,
        source=dict(origin or {}),
    )
    words: dict[str, Any] = {}
    if graphs.predictor is not None and model.transducer is not None:
        settings = model.config.settings.transducer
        context = settings.context if settings.predictor == "stateless" else None
        sizes = TransducerSizes(width=settings.width, depth=settings.depth, context=context)
        metadata = metadata.model_copy(update={"transducer": sizes})
        members[SILENT_FRAME] = model.transducer.for_search().silent_frame().astype("<f4").tobytes()
    with tempfile.TemporaryDirectory() as scratch:
        if search is not None:
            assert search.lexicon is not None
            file = Path(scratch) / LANGUAGE_MODEL
            # without the hashes of its training sentences, which decoding does not use
            write_model(replace(search.model, sentences=None), file, progress)
            members |= {**lexicon_members(search.lexicon), LANGUAGE_MODEL: file}
            words = {"lm": search.model.name, "lexicon": search.lexicon.name}
            words["decoding"] = search.settings.model_dump(mode="json")
        members[METADATA] = metadata.model_copy(update=words).model_dump_json(indent=1).encode()
        if card is not None:
            members[CARD] = card.encode()
        return layout, write_archive(path, members)


def _check_exportable(model: "Model", search: "WordSearch | None", head: "Head") -> None:
    if not model.config.settings.encoder.causal:
        raise UserError(
            "the model has a bidirectional encoder, which needs complete trials and cannot be exported as a streaming"
            " step; train with encoder.bidirectional=false"
        )
    if model.config.settings.front_end.custom is not None:
        raise UserError("a model with a front-end step of its own (front_end.custom) cannot be exported")
    if head != "ctc" and search is not None and not search.order.is_identity:
        raise UserError(f"--head {head} needs a model whose classes are in the order of the word search; use ctc")


def _graph_members(graphs: "ModelGraphs") -> dict[str, Content]:
    members: dict[str, Content] = {}
    for name in ("bin", "frame", "predictor", "joiner"):
        graph = getattr(graphs, name)
        if graph is None:
            continue
        members[f"{name}.onnx"] = graph.model.SerializeToString(deterministic=True)
        for state in graph.states:
            if state.initial.any():  # others are zeros
                members[f"initial.{state.name}"] = state.initial.tobytes()
    return members


def _describe_states(graph: "StepGraph") -> tuple[StateTensor, ...]:
    described = ({"name": s.name, "dtype": s.initial.dtype.name, "shape": s.initial.shape} for s in graph.states)
    return tuple(map(StateTensor.model_validate, described))


def _session_members(model: "Model") -> dict[str, Content]:
    layer = model.front_end.session_layer
    weights = np.stack([w.detach().float().cpu().numpy() for w in layer.weights])
    biases = np.stack([b.detach().float().cpu().numpy() for b in layer.biases])
    return {SESSION_WEIGHTS: weights.astype("<f4").tobytes(), SESSION_BIASES: biases.astype("<f4").tobytes()}


def _recipe_hash(run: Run) -> str | None:
    if not run.recipe_file.is_file():
        return None
    return hashlib.blake2b(run.recipe_file.read_bytes(), digest_size=12).hexdigest()


def _validation_trials(
    run: Run, model: "Model", sessions: Sequence[str], data: str | Path | None
) -> "ReplayTrials | None":
    """Validation trials of `data`, or of the run's store: None, with a message, if there are none."""
    from arcuate.evaluation.evaluate import open_store, read_source
    from arcuate.live.sources.replay import select_trials

    try:
        store = open_store(read_source(run), data)
        if store.n_channels != model.config.n_channels:
            expected = model.config.n_channels
            raise UserError(f"{store.path} has {store.n_channels} channels, but the model expects {expected}")
        store.check_classes(model.config.classes)
        front_end = model.config.settings.front_end
        return select_trials(store, sessions, front_end.normalise, front_end.log1p)
    except UserError as error:
        if data is not None:
            raise
        logger.info(f"int8 was not compared with fp32: {error}")
        return None


def _compare_int8(
    path: Path, model: "Model", replay: "ReplayTrials", progress: Progress | None
) -> Int8Comparison | None:
    """PER of the written file against the torch model on validation trials; None if too few of them are labelled."""
    from arcuate.decoding.decoder import Decoder
    from arcuate.decoding.load import load
    from arcuate.evaluation.metrics import Score, score, total
    from arcuate.evaluation.significance import score_difference
    from arcuate.models.acoustic import TorchModel

    store = replay.store
    decoders = Decoder(TorchModel(model)), load(path)
    step = max(len(replay.trials) // _N_COMPARED, 1)
    scores: list[list[Score]] = [[], []]  # fp32, int8
    for n, info in enumerate(chosen := replay.trials[::step][:_N_COMPARED]):
        trial, statistics = store.read(info), replay.statistics(info)
        if trial.tokens is None:
            continue
        reference = trial.tokens.tolist()
        for found, decoder in zip(scores, decoders, strict=True):
            found.append(score(reference, decoder.decode(trial.bins, info.session, statistics).tokens))
        if progress:
            progress(n + 1, len(chosen), "comparing int8 with fp32")
    fp32, int8 = scores
    difference = score_difference(int8, fp32)
    if difference is None:
        logger.info("int8 was not compared with fp32: fewer than two labelled validation trials")
        return None
    per_fp32, per_int8 = (total(scores).rate or 0.0 for scores in (fp32, int8))
    measure = error_rate_name(model.config.classes)
    return Int8Comparison(measure, len(int8), per_fp32, per_int8, difference.rate, difference.low, difference.high)
