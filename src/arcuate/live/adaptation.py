"""Online adaptation within a stream: after each sentence the session layer may be updated.

Updates run on a low-priority thread, so decoding never waits for them. The session state is immutable: a sentence is
decoded from its first to its last bin with the state at its start, and the next one with the newest state by then.
`wait` blocks until all sentences so far were processed; a stream that calls it after every sentence takes exactly the
steps of `arcuate evaluate --adapt` over the same trials.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.known_sessions import expected_confidence, measure_confidence
from arcuate.adaptation.online import OnlineAdapter, compute_log_probs, make_adapter, words_label
from arcuate.adaptation.state import DecodedTrial, SessionState, is_disabled
from arcuate.config import parse_settings
from arcuate.data.alphabet import token_unit
from arcuate.data.batching import BatchStatistics
from arcuate.data.config import AugmentationConfig
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import Statistics
from arcuate.data.store import Store, is_store
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.errors import UserError
from arcuate.models.acoustic import TorchModel, TorchState, batch_statistics, start_stream
from arcuate.models.model import Model, single_session_model
from arcuate.progress import Progress, logger
from arcuate.run import Run, split_parent

MAX_QUEUED = 4  # sentences that may wait for their update; further ones are skipped
_MAX_BINS = 6000  # 2 min; a longer sentence is skipped because its augmented copies would not fit in memory
_NICENESS = 10  # niceness of the update thread


@dataclass(frozen=True, eq=False)
class AdaptationSetup:
    """What all adapting streams of an engine share: the adapter, and reference values from known sessions."""

    adapter: OnlineAdapter
    uses_words: bool  # decoded words give the pseudo-labels, not greedy phonemes
    known: Mapping[str, Sequence[float]]  # confidence by known session

    def start(self, session: str) -> SessionState:
        return self.adapter.start(session, expected_confidence(session, self.known))


@dataclass(frozen=True)
class AdaptationStatus:
    """Status of a stream's adaptation, as sent to the page."""

    session: str
    init_session: str  # known session whose layer it started with
    state: Literal["adapting", "fell back", "off"]
    reason: str | None  # why it fell back or is off
    n_sentences: int
    n_steps: int
    n_fallbacks: int
    n_queued: int  # sentences waiting for their update
    n_skipped: int  # sentences without an update because too many were queued, or because they were too long
    layer_distance: float  # from the initial layer, relative to its norm


@dataclass(frozen=True, eq=False)
class DecodedSentence:
    """A finished sentence, input of one update."""

    model: Model  # model that normalised the bins
    bins: Tensor  # (T, C) raw
    statistics: BatchStatistics | None
    best: Hypothesis


class StreamAdapter:
    """Adaptation of one stream. `state` is the newest session state, an immutable value."""

    def __init__(self, setup: AdaptationSetup, model: TorchModel) -> None:
        self.setup, self._model = setup, model
        self.on_update: Callable[[], object] | None = None  # called on the update thread
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "adaptation", _lower_priority)
        self._pending: set[Future[None]] = set()
        self._generation = 0  # queued updates of an earlier generation are dropped

    def copy(self) -> "StreamAdapter":
        """Another adapter with the same set-up, for another stream."""
        return StreamAdapter(self.setup, self._model)

    def check_session(self, session: str) -> None:
        """A session new to the model starts with the layer of the nearest known one."""
        if not is_safe_name(session):
            known = ", ".join(self._model.layout.sessions)
            raise UserError(f"session {session!r:.60} is unknown to this model; it was trained on {known}")

    def start(self, session: str) -> None:
        """Start another session."""
        self._initial = self.setup.start(session)
        self.reset()

    def reset(self, state: SessionState | None = None) -> None:
        """Return to the start of the session or to an earlier state; drop queued updates."""
        with self._lock:
            self._generation += 1
            self._n_queued = self._n_skipped = 0
            self._fallback: str | None = None
            self._error: str | None = None
            self.state = self._initial if state is None else state

    def start_model(self, statistics: Statistics | None, rolling: bool) -> TorchState:
        """State of the model with the newest layer before the first bin of a sentence."""
        state, layer = self.state, self.setup.adapter.layer(self.state)
        base = self._model.rolling if rolling else self._model.model
        model = single_session_model(base, state.session, layer.weight, layer.bias)
        return start_stream(model, 0, batch_statistics(statistics, self._model.device))

    def submit(self, state: TorchState, bins: np.ndarray, best: Hypothesis) -> None:
        """Queue an update for a finished sentence."""
        values = torch.from_numpy(bins).to(self._model.device)
        sentence = DecodedSentence(state.model, values, state.statistics, best)
        with self._lock:
            if self._error is not None:  # under the lock, because the stream may be closed concurrently
                return
            if self._n_queued >= MAX_QUEUED or len(sentence.bins) > _MAX_BINS:
                self._n_skipped += 1
                return
            self._n_queued += 1
            done = self._pool.submit(self._update, sentence, self._generation)
            self._pending.add(done)
        done.add_done_callback(self._finish_update)

    def wait(self) -> None:
        """Block until all queued updates are done."""
        wait(list(self._pending))

    def close(self) -> None:
        """Drop queued updates and accept no more; the state stays as it is."""
        with self._lock:
            self._generation, self._n_queued, self._error = self._generation + 1, 0, "the stream is closed"
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def status(self) -> AdaptationStatus:
        with self._lock:
            state, fallback, error = self.state, self._fallback, self._error
            queued, skipped = self._n_queued, self._n_skipped
        phase: Literal["adapting", "fell back", "off"] = "fell back" if fallback else "adapting"
        if error or is_disabled(state):
            phase = "off"
        return AdaptationStatus(
            session=state.session,
            init_session=state.init_session,
            state=phase,
            reason=error or fallback,
            n_sentences=state.n_trials,
            n_steps=state.n_steps,
            n_fallbacks=state.comparison.n_fallbacks,
            n_queued=queued,
            n_skipped=skipped,
            layer_distance=self.setup.adapter.layer(state).distance(state.initial),
        )

    # --- update thread ------------------------------------------------------------------------------------

    def _finish_update(self, done: Future[None]) -> None:
        """Turn adaptation off if an update failed in an unexpected way, and report why."""
        self._pending.discard(done)
        failure = None if done.cancelled() else done.exception()
        if failure is None:
            return
        logger.error("an update of the session layer failed", exc_info=failure)
        with self._lock:
            self._n_queued, self._error = 0, f"the update failed unexpectedly ({type(failure).__name__})"
        if self.on_update is not None:
            self.on_update()

    def _update(self, sentence: DecodedSentence, generation: int) -> None:
        with self._lock:
            if generation != self._generation:
                return
            before, error = self.state, None
        try:
            after, fallback = adapt_to_sentence(self.setup, before, sentence)
        except (RuntimeError, MemoryError, UserError) as failure:  # out of memory, device lost: keep decoding
            after, fallback, error = before, None, f"the update failed: {str(failure).splitlines()[0]}"
        with self._lock:
            if generation != self._generation:
                return
            self._n_queued -= 1
            earlier = None if after.n_steps > before.n_steps else self._fallback  # shown until the next step
            self.state, self._fallback, self._error = after, fallback or earlier, error
        if self.on_update is not None:
            self.on_update()


def adapt_to_sentence(
    setup: AdaptationSetup, state: SessionState, sentence: DecodedSentence
) -> tuple[SessionState, str | None]:
    """Return the state after a sentence and the reason of a fall-back, as `adapt_sessions` does for a stored trial."""
    adapter = setup.adapter
    with torch.no_grad():
        bins = sentence.model.normalise(sentence.bins[None], sentence.statistics)[0]
    log_probs = compute_log_probs(adapter.adapted_model(state), bins)
    label = words_label(sentence.best, sentence.model.config.classes) if setup.uses_words else tuple(greedy(log_probs))
    return adapter.update(state, DecodedTrial(bins, log_probs, label))


def make_setup(
    model: Model,
    settings: Adaptation,
    augmentation: AugmentationConfig,
    uses_words: bool,
    store: Store | None = None,
    progress: Progress | None = None,
) -> AdaptationSetup:
    """Set up adaptation for streams; `store` has recordings of known sessions."""
    if uses_words and token_unit(model.config.classes) == "token":
        raise UserError("adaptation with words needs phoneme or character classes; decode tokens with lm=None")
    adapter = make_adapter(model, settings, augmentation)
    return AdaptationSetup(adapter, uses_words, measure_confidence(adapter, store, progress) if store else {})


def load_adapter(
    path: str | Path, decoder: Decoder, data: str | Path | Store | None = None, progress: Progress | None = None
) -> StreamAdapter:
    """Adapter for a run: with the augmentation of its training, and its own store unless `data` is given."""
    model = decoder.model
    assert isinstance(model, TorchModel)
    run = Run(split_parent(str(path))[0])
    tree = run.recipe_tree().get("augment", {}) if run.recipe_file.is_file() else {}  # a model folder has no recipe
    augmentation = parse_settings(AugmentationConfig, tree, str(run.recipe_file))
    store = _known_store(run, model.model, data)
    setup = make_setup(model.model, Adaptation(), augmentation, decoder.decodes_words, store, progress)
    return StreamAdapter(setup, model)


def _known_store(run: Run, model: Model, data: str | Path | Store | None) -> Store | None:
    """Open the store of the run's training, or `data`; None if the run has none that still exists."""
    if data is None and run.environment_file.is_file():
        data = str(run.data().get("path", ""))
        data = data if is_store(Path(data)) else None
    if data is None:
        return None
    store = data if isinstance(data, Store) else Store.open(data)
    store.check_trained_on(run.data() if run.environment_file.is_file() else None)
    if store.n_channels != model.config.n_channels:
        raise UserError(
            f"{store.path} has {store.n_channels} channels, but the model expects {model.config.n_channels}"
        )
    return store


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # on systems in which threads have a niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
