"""`Decoder`: neural bins in, text out, as the bins arrive or trial by trial; offline is one chunk.

The acoustic model and the search are values behind two small protocols, `AcousticModel` (a torch model or an exported
one) and `Search` (greedy, words, joint); `decoding/load.py` builds them. Importing this needs neither torch nor numba.
"""

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.decoding.class_order import check_log_probs
from arcuate.decoding.hypothesis import GreedySearch, Hypothesis, Partial, Search
from arcuate.errors import UserError
from arcuate.models.layout import Frames, Head, Layout, ModelDelay, join_frames

if TYPE_CHECKING:
    from arcuate.data.trial import Trial
    from arcuate.decoding.options import SearchOptions
    from arcuate.decoding.transducer import TransducerHead
    from arcuate.decoding.word_search.search import WordSearch

_MAX_SAVED = 2**30  # bytes of a saved stream


class AcousticModel(Protocol):
    """Bins to frames. States are immutable: `step` returns a new one and leaves the old one valid."""

    @property
    def layout(self) -> Layout: ...

    @property
    def identity(self) -> str:
        """Hash of the weights."""
        ...

    @property
    def transducer(self) -> "TransducerHead | None": ...

    def start(self, session: str, statistics: Statistics | None, rolling: bool, /) -> Any:
        """State before the first bin; `rolling` uses running statistics for a model trained on block statistics."""
        ...

    def step(self, state: Any, bins: np.ndarray, /) -> tuple[Frames, Any]:
        """Next stored bins (t, C), any number -> the frames they complete, and the state after them."""
        ...

    def precompute(self, state: Any, /) -> Any:
        """Compute the part of the next frame that does not depend on the next bins."""
        ...

    def finish(self, state: Any, /) -> Frames:
        """Frames held back until the end of the trial."""
        ...


class Adapter(Protocol):
    """Adapts the session layer of a stream to its sentences."""

    on_update: Callable[[], object] | None  # called after an update, on another thread

    @property
    def state(self) -> Any:
        """Newest state of adaptation, an immutable value."""
        ...

    @property
    def status(self) -> Any: ...

    def copy(self) -> "Adapter":
        """Another adapter with the same set-up, for another stream."""
        ...

    def start(self, session: str) -> None:
        """Start another session."""
        ...

    def start_model(self, statistics: Statistics | None, rolling: bool, /) -> Any:
        """State of the adapted model before the first bin of a sentence."""
        ...

    def submit(self, state: Any, bins: np.ndarray, best: Hypothesis, /) -> None:
        """Queue an update for a finished sentence, whose model ended in `state`."""
        ...

    def check_session(self, session: str) -> None: ...

    def reset(self, state: Any = None) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Rescorer(Protocol):
    """Rescores the n-best list of a sentence."""

    @property
    def n_best(self) -> int:
        """Number of hypotheses to rescore."""
        ...

    def __call__(self, n_best: Sequence[Hypothesis], lm_weight: float, /) -> list[Hypothesis]: ...


@dataclass(frozen=True, eq=False)
class _Sentence:
    """Immutable state within one sentence."""

    model: Any
    search: Any
    new: np.ndarray  # (f, V) of the last push
    frames: tuple[np.ndarray, ...] = ()  # (f, V) each, none empty
    bins: tuple[np.ndarray, ...] = ()
    n_frames: int = 0
    n_bins: int = 0


class Decoder:
    """One stream: `push` bins as they arrive, `finish` the sentence, or `reset` to discard it; `decode` whole trials.

    `stream()` creates further streams that share all weights and nothing else.
    """

    _now: _Sentence

    def __init__(
        self,
        model: AcousticModel,
        search: Search | None = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        *,
        adapter: Adapter | None = None,
        rescorer: Rescorer | None = None,
    ) -> None:
        self.model, self.layout = model, model.layout
        self.search: Search = search or GreedySearch(self.layout.classes)
        self.adapter, self.rescorer = adapter, rescorer
        self._past = _initial_statistics(None, self.n_channels)
        self._statistics: Statistics | None = None
        self._known_statistics: Callable[[str], Statistics | None] = lambda session: None
        self._session_words: dict[str, Any] = {}  # SessionWords by session
        self.session = session or self.layout.sessions[-1]
        if adapter is not None:
            adapter.check_session(self.session)
            adapter.start(self.session)
        self.reset(self.session, statistics)

    @classmethod
    def load(
        cls,
        path: str | Path,
        search: "SearchOptions | None" = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        device: str = "cpu",
        warm: bool = True,
    ) -> "Decoder":
        """Load a run, a model folder or an exported model with a word search.

        Args:
            path: Run[@checkpoint], model folder, hf:ORG/NAME or .arcx.
            search: Language model, lexicon, weights and head; `SearchOptions(lm="none")` decodes phonemes.
            session: Session layer; default: the last one.
            statistics: Statistics of the block, if known; else a model that normalises uses those of its stream.
            device: Device of a torch model.
            warm: Decode zeros first, so that compilation does not delay the first sentence.
        """
        from arcuate.decoding.load import load
        from arcuate.decoding.options import SearchOptions

        decoder = load(path, search or SearchOptions(), device=device)
        if warm:
            decoder.warm_up()
        return decoder.stream(session, statistics)

    def __repr__(self) -> str:
        return (
            f"Decoder({len(self.sessions)} sessions, {len(self.classes)} classes,"
            f" {'words' if self.decodes_words else 'phonemes'})"
        )

    def stream(self, session: str | None = None, statistics: Statistics | None = None) -> "Decoder":
        """Create another stream over the same weights."""
        adapter = None if self.adapter is None else self.adapter.copy()
        return Decoder(
            self.model, self.search, session or self.session, statistics, adapter=adapter, rescorer=self.rescorer
        )

    # --- description --------------------------------------------------------------------------------------

    @property
    def classes(self) -> tuple[str, ...]:
        return self.layout.classes

    @property
    def sessions(self) -> tuple[str, ...]:
        return self.layout.sessions

    @property
    def n_channels(self) -> int:
        return self.layout.n_channels

    @property
    def delay(self) -> ModelDelay:
        """Algorithmic delay of the model: smoothing, patches and encoder."""
        return self.layout.delay

    @property
    def head(self) -> Head:
        return self.search.head

    @property
    def word_search(self) -> "WordSearch | None":
        """The word search; None if phonemes are decoded."""
        found: WordSearch | None = getattr(self.search, "word_search", None)
        return found

    @property
    def decodes_words(self) -> bool:
        """Whether the search is for words; otherwise partial texts are phonemes."""
        return self.word_search is not None

    @property
    def n_frames(self) -> int:
        """Frames of the sentence so far."""
        return self._now.n_frames

    @property
    def n_bins(self) -> int:
        """Bins of the sentence so far."""
        return self._now.n_bins

    # --- a stream -----------------------------------------------------------------------------------------

    def reset(self, session: str | None = None, statistics: Statistics | None = None) -> None:
        """Discard the sentence and start a new one, in another session or with other statistics if given."""
        if session is not None:
            self.check_session(session)
            changed, self.session = self.session != session, session
            self._statistics = None
            if changed:
                self._seed_from_known()
                if self.adapter is not None:
                    self.adapter.start(session)
        if statistics is not None:
            self._statistics = statistics
        self._start_sentence()

    def check_session(self, session: str) -> None:
        """Raise `UserError` for a session that this stream cannot decode."""
        if self.adapter is not None:
            self.adapter.check_session(session)
        elif session not in self.sessions:
            raise UserError(
                f"session {session!r:.60} is unknown to this model; it was trained on {', '.join(self.sessions)};"
                " adapt to a new session with adapt, or add it with arcuate calibrate"
            )

    def check_causal(self) -> None:
        """Raise `UserError` for a model that needs complete trials."""
        if not self.delay.is_finite:
            raise UserError(
                "a bidirectional model cannot stream; decode complete trials, or train with encoder.bidirectional=false"
            )

    def seed_sessions(self, known: Callable[[str], Statistics | None]) -> None:
        """Initialise the running statistics of this session, and of every later one when it starts."""
        self._known_statistics = known
        self._statistics = None
        self._seed_from_known()
        self._start_sentence()

    def push(self, bins: ArrayLike) -> Partial:
        """Decode the next bins, (t, C) or one bin (C,), and return the result so far."""
        self.check_causal()
        self._push(self._check_shape(bins))
        return self.partial()

    def push_log_probs(self, log_probs: np.ndarray) -> Partial:
        """Decode frames (f, V) of a model that runs elsewhere, in the order of this model's classes."""
        if self.head != "ctc":
            raise UserError(f"the head {self.head} needs bins, but log-probabilities were given; use ctc")
        self._advance(Frames(check_log_probs(log_probs, self.classes)), self._now.model)
        return self.partial()

    def precompute(self) -> None:
        """Between bins: compute the part of the next frame that does not depend on the next bins."""
        self._now = replace(self._now, model=self.model.precompute(self._now.model))

    def partial(self) -> Partial:
        """Return the result so far."""
        found = self.search.partial(self._now.search)
        return replace(found, n_frames=self.n_frames, log_probs=self._now.new)

    def nbest(self, n: int) -> list[Hypothesis]:
        """Return the best hypotheses if the sentence ended here, best first."""
        return self.search.finish(self._now.search, n) or [Hypothesis(())]

    def finish(self) -> Hypothesis:
        """End the sentence and return its best hypothesis. The stream is ready for the next one."""
        return self.finish_nbest(1)[0]

    def finish_nbest(self, n: int, adapt: bool = True) -> list[Hypothesis]:
        """End the sentence and return its best hypotheses.

        With `adapt=False` it causes no update of a stream that adapts (e.g. because it was cut off).
        """
        now = self._now
        if now.n_bins or not now.n_frames:  # frames from elsewhere are complete already
            self._advance(self.model.finish(now.model), now.model)
        hypotheses = self._final_nbest(n)
        if adapt and self.adapter is not None and now.bins:
            self.adapter.submit(now.model, np.concatenate(now.bins), hypotheses[0])
        self._update_statistics()
        self._start_sentence()
        return hypotheses[:n]

    def sentence_log_probs(self) -> np.ndarray:
        """All frames of the sentence so far, in the order of the model's classes. (F, V)"""
        return np.concatenate([self._no_frames, *self._now.frames])

    # --- complete trials ----------------------------------------------------------------------------------

    def decode(
        self, bins: "np.ndarray | Trial", session: str | None = None, statistics: Statistics | None = None
    ) -> Hypothesis:
        """Decode a complete trial. Arguments as for `frames`."""
        values, session = self._check_trial(bins, session, statistics)
        stream = Decoder(self.model, self.search, session, statistics, rescorer=self.rescorer)
        stream._push(values)
        return stream.finish()

    def log_probs(
        self, bins: "np.ndarray | Trial", session: str | None = None, statistics: Statistics | None = None
    ) -> np.ndarray:
        """Natural-log probabilities of all classes at every frame (F, V). Arguments as for `frames`."""
        return self.frames(bins, session, statistics).log_probs

    def frames(
        self, bins: "np.ndarray | Trial", session: str | None = None, statistics: Statistics | None = None
    ) -> Frames:
        """Outputs of the model for a complete trial.

        Args:
            bins: Bins (T, C), as stored, or a trial.
            session: Session layer; default: that of the stream.
            statistics: Needed by a model that normalises by block or by preceding trials:
                `store.block_statistics(info)` or `store.past_statistics(info)`.
        """
        values, session = self._check_trial(bins, session, statistics)
        first, state = self.model.step(self.model.start(session, statistics, False), values)
        return join_frames([first, self.model.finish(state)])

    def _check_trial(
        self, bins: "np.ndarray | Trial", session: str | None, statistics: Statistics | None
    ) -> tuple[np.ndarray, str]:
        if not isinstance(bins, np.ndarray):
            session, bins = session or bins.session, bins.bins
        values = self._check_shape(bins)
        if not len(values):
            raise UserError(f"bins must have shape (T, {self.n_channels}) with T >= 1, not {values.shape}")
        if not np.isfinite(values).all():
            raise UserError("bins contain NaN or infinite values; replace them (e.g. by 0)")
        session = session or self.session
        self.check_session(session)
        kind = self.layout.normalise
        if kind != "none" and statistics is None:
            raise UserError(
                f"this model normalises by {kind}: pass statistics=store.{'block' if kind == 'block' else 'past'}"
                f"_statistics(info{', log=True' if self.layout.log1p else ''})"
            )
        return values, session

    # --- adaptation ---------------------------------------------------------------------------------------

    @property
    def adaptation(self) -> Any:
        """Status of adaptation; None if this stream does not adapt."""
        return None if self.adapter is None else self.adapter.status

    def reset_adaptation(self, state: Any = None) -> None:
        """Return to the initial layer, or to an earlier state of the adapter."""
        if self.adapter is None:
            raise UserError("this stream does not adapt; load it with adapt=True")
        self.adapter.reset(state)

    def wait_for_adaptation(self) -> None:
        """Block until all finished sentences were processed. Otherwise a stream never waits for updates."""
        if self.adapter is not None:
            self.adapter.wait()

    # --- saving -------------------------------------------------------------------------------------------

    def save_state(self) -> bytes:
        """Serialise the stream; `load_state` restores it by decoding the bins of the sentence again."""
        past, known = self._past, self._statistics
        stream = io.BytesIO()
        np.savez(
            stream,
            allow_pickle=False,
            names=np.array([self.model.identity, self.session]),
            counts=np.array([past.n_bins, -1 if known is None else known.n_bins]),
            past=np.stack([past.n, past.mean, past.m2]),
            statistics=np.zeros((2, self.n_channels)) if known is None else np.stack([known.mean, known.sd]),
            bins=np.concatenate([np.empty((0, self.n_channels), np.float32), *self._now.bins]),
        )
        return stream.getvalue()

    def load_state(self, state: bytes) -> None:
        """Restore a stream from `save_state` of the same model; the sentence of this stream is discarded."""
        n = self.n_channels
        try:
            if len(state) > _MAX_SAVED:
                raise ValueError(f"it has {len(state):,} bytes")
            with np.load(io.BytesIO(state), allow_pickle=False) as stored:
                model, session = _expect(stored["names"], "U", (2,)).tolist()
                n_past, n_known = _expect(stored["counts"], "i", (2,)).tolist()
                count, mean, m2 = _expect(stored["past"], "f", (3, n)).astype(np.float64)
                means, sds = _expect(stored["statistics"], "f", (2, n)).astype(np.float32)
                bins = _expect(stored["bins"], "f", (None, n)).astype(np.float32)
        except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile, RecursionError, EOFError) as error:
            raise UserError(f"the saved state is damaged ({str(error)[:80]}); start a new sentence") from None
        if model != self.model.identity:
            raise UserError("the saved state belongs to another model; load the one that it was saved with")
        self.check_session(session)
        self.session, self._past = session, RunningStatistics(count, mean, m2, max(n_past, 0))
        self._statistics = None if n_known < 0 else Statistics(means, sds, n_known)
        self._start_sentence()
        if len(bins):
            self._push(bins)

    # --- decoding -----------------------------------------------------------------------------------------

    def warm_up(self, max_rows: int = 1 << 20) -> None:
        """Compile kernels and fill caches (12 bytes per row), so that the first sentence is not delayed."""
        if self.word_search is not None:
            self.word_search.warm_up(max_rows)
        stream = Decoder(self.model, self.search)
        for _ in range(self.layout.patch_bins + 26):
            stream._push(np.zeros((1, self.n_channels), np.float32))
            stream.precompute()
        stream.finish_nbest(2)

    @property
    def _uses_running_statistics(self) -> bool:
        return self._statistics is None and self.layout.normalise != "none"

    @property
    def _no_frames(self) -> np.ndarray:
        return np.empty((0, len(self.classes)), np.float32)

    def _seed_from_known(self) -> None:
        if (statistics := self._known_statistics(self.session)) is not None:
            self._past = _initial_statistics(statistics, self.n_channels)

    def _start_sentence(self) -> None:
        rolling = self._uses_running_statistics
        statistics = self._past.statistics() if rolling else self._statistics
        if self.adapter is None:
            model = self.model.start(self.session, statistics, rolling)
        else:
            self._adapted = self.adapter.state
            model = self.adapter.start_model(statistics, rolling)
        self._now = _Sentence(model, self.search.start(), self._no_frames)

    def _push(self, chunk: np.ndarray) -> None:
        is_new = not self.n_bins and not self.n_frames
        if is_new and self.adapter is not None and self._adapted is not self.adapter.state:
            self._start_sentence()  # with the updates made since the last sentence ended
        frames, state = self.model.step(self._now.model, chunk)
        self._advance(frames, state, chunk)

    def _advance(self, frames: Frames, model: Any, chunk: np.ndarray | None = None) -> None:
        """Run the search over new frames and replace the state of the sentence."""
        now, new = self._now, frames.log_probs
        self._now = _Sentence(
            model,
            self.search.step(now.search, frames) if len(new) else now.search,
            new,
            (*now.frames, new) if len(new) else now.frames,
            now.bins if chunk is None else (*now.bins, chunk),
            now.n_frames + len(new),
            now.n_bins + (0 if chunk is None else len(chunk)),
        )

    def _final_nbest(self, n: int) -> list[Hypothesis]:
        """The n-best list of a complete sentence, with confidences and rescored if words are decoded."""
        words = self.word_search
        if words is None:
            return self.nbest(n)
        from arcuate.decoding.confidence import SessionWords, n_hypotheses, with_confidence  # imports the word search

        settings, scale = words.settings, 1.0
        hypotheses = self.nbest(n_hypotheses(self.search, n) if self.rescorer is None else max(n, self.rescorer.n_best))
        if self.rescorer is not None and hypotheses[0].total is not None:
            # The rescorer divides acoustic scores by the weight of the n-gram.
            hypotheses, scale = self.rescorer(hypotheses, settings.lm_weight), settings.lm_weight
        session = self._session_words.setdefault(self.session, SessionWords(settings.confidence))
        frames = words.order(self.sentence_log_probs())
        return with_confidence(hypotheses, frames, settings, scale, session)

    def _update_statistics(self) -> None:
        """Add the finished sentence to the running statistics; older bins lose weight beyond `rolling_bins`."""
        if self._uses_running_statistics and self._now.bins:
            bins, past, limit = np.concatenate(self._now.bins), self._past, self.layout.rolling_bins
            decay = min(1.0, limit / max(past.n_bins, 1))
            faded = replace(past, n=past.n * decay, m2=past.m2 * decay, n_bins=min(past.n_bins, limit))
            self._past = faded.merge(RunningStatistics.from_bins(signed_log(bins) if self.layout.log1p else bins))

    def _check_shape(self, bins: ArrayLike) -> np.ndarray:
        chunk = np.array(bins, dtype=np.float32)  # a copy: the caller may reuse its buffer
        chunk = chunk[None] if chunk.ndim == 1 else chunk
        if chunk.ndim != 2 or chunk.shape[1] != self.n_channels:
            raise UserError(f"bins must have shape (t, {self.n_channels}), got {np.shape(bins)}")
        return chunk


StreamingDecoder = Decoder  # public name


def _initial_statistics(statistics: Statistics | None, n_channels: int) -> RunningStatistics:
    """Statistics known beforehand as a starting value of running statistics; empty if there are none."""
    if statistics is None or statistics.n_bins <= 0:
        return RunningStatistics.empty(n_channels)
    n = np.full(n_channels, float(statistics.n_bins))
    sd = statistics.sd.astype(np.float64)
    return RunningStatistics(n, statistics.mean.astype(np.float64), n * sd**2, statistics.n_bins)


def _expect(array: np.ndarray, kind: str, shape: tuple[int | None, ...]) -> np.ndarray:
    fits = array.ndim == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=True))
    if array.dtype.kind != kind or not fits:
        raise ValueError("an array has another type or shape")
    return array
