"""Following a day inside a stream: what a sentence taught reads those after it.

Learning happens on a thread of its own that stands behind everything else, so text never waits for it. The day is a
value: a sentence is read from its first bin to its last with the day as it was when it began, and the next one with
the newest day there is by then. `settle` waits until everything heard was learned from; with it, a stream takes the
same course as `arcuate evaluate --adapt` takes over the same trials, step for step.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from arcuate.adaptation.config import METHODS, Adaptation
from arcuate.adaptation.online import Adapter, Label, make_adapter, read
from arcuate.adaptation.safety import gave_up
from arcuate.adaptation.state import Day, Heard
from arcuate.adaptation.stream import expected_confidence, known_confidence, start_day
from arcuate.adaptation.word_labels import said_as_tokens, word_labels
from arcuate.config import parse_settings
from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.data.config import AugmentationConfig
from arcuate.data.store import Store, is_store
from arcuate.decoding.greedy import greedy
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.search import WordSearch
from arcuate.errors import UserError
from arcuate.models.model import Model, single_session_model
from arcuate.progress import Progress
from arcuate.run import Run

WAITING = 4  # sentences that may wait to be learned from; more teach nothing
LONGEST = 6000  # bins of a sentence, two minutes; what is longer is no sentence, and its copies would fill the memory
BEHIND = 10  # niceness of the thread that learns


@dataclass(frozen=True, eq=False)
class Adapting:
    """What streams that follow their days share: the adapter, and what known days are like."""

    adapter: Adapter
    search: WordSearch | None  # whose words are the labels; None: phonemes are
    store: Store | None  # of known days
    known: Mapping[str, Sequence[float]]  # how surely the model reads trials of each of them

    def start(self, session: str) -> Day:
        if self.store is None:
            return self.adapter.start(session, expected=expected_confidence(session, self.known))
        return start_day(self.adapter, self.store, session, self.known)


@dataclass(frozen=True)
class Standing:
    """How a day is being followed."""

    method: str
    session: str
    layer_of: str  # the known session whose layer it began with
    state: Literal["following", "fell back", "off"]
    why: str | None  # it fell back or is off
    n_sentences: int
    n_steps: int
    n_falls: int
    n_waiting: int  # sentences still to be learned from
    n_skipped: int  # sentences that ended while too many waited, or never seemed to end
    moved: float  # of the layer from where it began, relative to its norm


@dataclass(frozen=True, eq=False)
class Lesson:
    """A sentence as it was heard, to be learned from."""

    model: Model  # that normalised it
    bins: Tensor  # (T, C) raw
    statistics: BatchStatistics | None
    reading: Hypothesis


class Follower:
    """One stream's day. `day` is the newest one; whoever takes it keeps a value that nobody changes."""

    def __init__(self, shared: Adapting, session: str) -> None:
        self.shared = shared
        self.changed: Callable[[], object] | None = None  # is called on the learning thread
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "learning", _stand_behind)
        self._lessons: set[Future[None]] = set()
        self._turn = 0  # lessons of an earlier one are dropped
        self.start(session)

    def start(self, session: str) -> None:
        """Another day begins."""
        self._first = self.shared.start(session)
        self.reset()

    def reset(self, day: Day | None = None) -> None:
        """Back to how the day began, or to an earlier day; sentences still waiting teach nothing."""
        with self._lock:
            self._turn += 1
            self._n_waiting = self._n_skipped = 0
            self._why: str | None = None
            self._failed: str | None = None
            self.day = self._first if day is None else day

    def model(self, base: Model, day: Day) -> Model:
        """The model that reads a sentence of this day; its session is numbered 0."""
        layer = self.shared.adapter.layer(day)
        return single_session_model(base, day.session, layer.weight, layer.bias)

    def learn(self, lesson: Lesson) -> None:
        """Learn from a sentence that was read, soon."""
        if self.shared.adapter.settings.method == "none":
            return
        with self._lock:
            if self._failed is not None:  # asked here, for a stream may be closed at any moment
                return
            if self._n_waiting >= WAITING or len(lesson.bins) > LONGEST:
                self._n_skipped += 1
                return
            self._n_waiting += 1
            done = self._pool.submit(self._take, lesson, self._turn)
            self._lessons.add(done)
        done.add_done_callback(self._lessons.discard)

    def close(self) -> None:
        """Learn no more: sentences still waiting teach nothing. The day stays as it is."""
        with self._lock:
            self._turn, self._n_waiting, self._failed = self._turn + 1, 0, "the stream is over"
        self._pool.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait until everything heard so far was learned from."""
        wait(list(self._lessons))

    @property
    def standing(self) -> Standing:
        with self._lock:
            day, why, failed = self.day, self._why, self._failed
            waiting, skipped = self._n_waiting, self._n_skipped
        settings = self.shared.adapter.settings
        state: Literal["following", "fell back", "off"] = "fell back" if why else "following"
        if failed or settings.method == "none" or gave_up(day, settings.safety):
            state, why = "off", failed or why
        return Standing(
            method=settings.method,
            session=day.session,
            layer_of=day.like,
            state=state,
            why=why,
            n_sentences=day.n_trials,
            n_steps=day.n_steps,
            n_falls=day.trust.n_falls,
            n_waiting=waiting,
            n_skipped=skipped,
            moved=self.shared.adapter.layer(day).distance(day.start),
        )

    # --- the thread that learns ---------------------------------------------------------------------------

    def _take(self, lesson: Lesson, turn: int) -> None:
        with self._lock:
            if turn != self._turn:
                return
            day, failed = self.day, None
        try:
            after, reason = hear(self.shared, day, lesson)
        except (RuntimeError, MemoryError, UserError) as error:  # no room, no device: reading goes on without
            after, reason, failed = day, None, f"learning failed: {str(error).splitlines()[0]}"
        with self._lock:
            if turn != self._turn:
                return
            self._n_waiting -= 1
            kept = (
                None if after.n_steps > day.n_steps else self._why
            )  # a fall-back is told until a step is taken
            self.day, self._why, self._failed = after, reason or kept, failed
        if self.changed is not None:
            self.changed()


def hear(shared: Adapting, day: Day, lesson: Lesson) -> tuple[Day, str | None]:
    """The day after a sentence, and why it fell back if it did: what `follow_trial` does for a trial of a store."""
    adapter = shared.adapter
    with torch.no_grad():
        bins = lesson.model.normalise(lesson.bins[None], lesson.statistics)[0]
    log_probs = read(adapter.before(day), bins)
    said = greedy(log_probs) if shared.search is None else said_as_tokens(shared.search, [lesson.reading])
    return adapter.after(day, Heard(bins, log_probs, tuple(said)))


def make_adapting(
    model: Model,
    search: WordSearch | None,
    settings: Adaptation,
    noise: AugmentationConfig,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Adapting:
    """An adapter for streams: a trial's own input is never there before it is read."""
    if search is not None and model.config.classes != CLASSES:
        raise UserError(
            "adapting to words needs the classes of this benchmark; decode phonemes, with lm=None"
        )
    settings = settings.model_copy(update={"own_input": False})
    label: Label = greedy
    if search is not None and settings.method == "replay":  # reads past sentences anew, with room of its own
        label = word_labels(search.with_settings(search.settings), n_frames=1)
    adapter = make_adapter(model, settings, noise, label)
    known = known_confidence(adapter, store, progress) if store and settings.method != "none" else {}
    return Adapting(adapter, search, store, known)


def open_adapting(
    path: str | Path,
    model: Model,
    search: WordSearch | None,
    adapt: str | Adaptation,
    data: str | Path | Store | None = None,
    progress: Progress | None = None,
) -> Adapting:
    """The adapter of a run: with the noise of its training, and its own store where none is named."""
    if isinstance(adapt, str):
        if adapt not in METHODS:
            raise UserError(f"there is no way to adapt called {adapt!r}; choose {', '.join(METHODS)}")
        adapt = Adaptation.model_validate({"method": adapt})
    run = Run(Path(path))
    noise = training_noise(run)
    return make_adapting(model, search, adapt, noise, known_days(run, model, data), progress)


def training_noise(run: Run) -> AugmentationConfig:
    """The augmentation a run was trained with; none for a model folder without a recipe."""
    if not run.recipe_file.is_file():
        return AugmentationConfig()
    return parse_settings(
        AugmentationConfig, run.recipe_tree().get("augment", {}), str(run.recipe_file), migrate=True
    )


def known_days(run: Run, model: Model, data: str | Path | Store | None) -> Store | None:
    """A store with days that the model knows; None where it has none that fits."""
    if data is None and run.environment_file.is_file():
        data = str(run.data().get("path", ""))
        data = data if is_store(Path(data)) else None
    if data is None:
        return None
    store = data if isinstance(data, Store) else Store.open(data)
    if store.n_channels != model.config.n_channels:
        raise UserError(
            f"{store.path} has {store.n_channels} channels where the model reads {model.config.n_channels}"
        )
    return store


def _stand_behind() -> None:
    with suppress(OSError, AttributeError):  # where niceness is of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)


def to_event(standing: Standing) -> dict[str, Any]:
    return {"type": "adaptation", **vars(standing)}
