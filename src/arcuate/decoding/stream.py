"""`SentenceStream`: bins in, partial texts and n-best lists out, independent of the acoustic model.

`live/decoder.py` runs it with a torch model, `runtime.py` with an exported one. Importing it needs neither torch nor
pydantic.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.decoding.class_order import ClassOrder, check_log_probs, word_order
from arcuate.decoding.hypothesis import GreedyTokens, Hypothesis
from arcuate.errors import UserError
from arcuate.models.layout import Frames, Layout, ModelDelay


@dataclass(frozen=True)
class Partial:
    """Text of the sentence so far; the first `n_settled` words can no longer change."""

    words: tuple[str, ...]
    n_settled: int
    n_frames: int  # frames of the sentence so far
    log_probs: np.ndarray  # (f, V) of the frames that the last bins completed

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, eq=False)
class SentenceState:
    """Immutable state of model and search within one sentence."""

    model: Any
    search: Any
    new_frames: np.ndarray  # (f, V) of the last push
    frames: tuple[np.ndarray, ...] = ()  # (f, V) each, none empty
    bins: tuple[np.ndarray, ...] = ()  # kept for rolling normalisation and for adaptation
    n_frames: int = 0
    n_bins: int = 0
    greedy: GreedyTokens = field(default_factory=GreedyTokens)


class SentenceStream:
    """One stream: `push` bins as they arrive, `finish` the sentence, or `reset` to discard it.

    A subclass provides the acoustic model (`_start_model`, `_step_model`, `_finish_model`), and may replace the search.
    """

    engine: Any  # weights and search that streams share; has `search` (for words, or None) and `head`
    adapter: Any = None  # adapter of a stream that adapts online
    _now: SentenceState

    def __init__(
        self, layout: Layout, search: Any, lock: threading.Lock, session: str | None, joint: Any = None
    ) -> None:
        self.layout = layout
        self._words = search  # WordSearch, or None: phonemes are decoded
        self._joint = joint  # JointWordSearch or JointSearch, if the transducer is used
        self._searcher = joint or search
        self._lock = lock  # a search has one set of work buffers
        self._past = _initial_statistics(None, layout.n_channels)
        self._statistics: Statistics | None = None
        self._known_statistics: Callable[[str], Statistics | None] = lambda session: None
        self.session = session or layout.sessions[-1]
        self._session_words: dict[str, Any] = {}  # SessionWords by session; the class imports the word search

    # --- the acoustic model and the search ---------------------------------------------------------------

    def _start_model(self, statistics: Statistics | None) -> Any:
        """State of the model before the first bin of a sentence."""
        raise NotImplementedError

    def _step_model(self, chunk: np.ndarray) -> tuple[Frames, Any]:
        """Frames completed by the next bins (t, C), and the state of the model after them."""
        raise NotImplementedError

    def _finish_model(self) -> Frames:
        """Frames held back until the end of the sentence."""
        raise NotImplementedError

    def _search_frames(self, state: Any, frames: Frames) -> Any:
        """State of the search after new frames."""
        if self._joint is None:
            return self._searcher.step(state, self._columns(frames.log_probs))
        return self._joint.step(state, frames)

    @cached_property
    def _columns(self) -> ClassOrder:
        """Mapping from the classes of the model to those of the word search."""
        return word_order(self.layout.classes)

    @property
    def decodes_words(self) -> bool:
        """Whether the search is for words; otherwise partial texts are phonemes."""
        return self._words is not None

    def _tokens(self) -> tuple[int, ...]:
        """Phonemes so far."""
        if self._joint is None:
            return self._now.greedy.tokens
        state = self._now.search
        found: tuple[int, ...] = (
            self._joint.partial(state) if self._words is None else self._joint.token_search.partial(state.tokens)
        )
        return found

    # --- use ----------------------------------------------------------------------------------------------

    @property
    def n_channels(self) -> int:
        return self.layout.n_channels

    @property
    def sessions(self) -> tuple[str, ...]:
        return self.layout.sessions

    @property
    def delay(self) -> ModelDelay:
        """Algorithmic delay of the model: smoothing, patches and encoder."""
        return self.layout.delay

    @property
    def n_frames(self) -> int:
        return self._now.n_frames

    @property
    def n_bins(self) -> int:
        return self._now.n_bins

    def reset(self, session: str | None = None, statistics: Statistics | None = None) -> None:
        """Discard the sentence and start a new one, in another session or with other statistics if given."""
        if session is not None:
            self.check_session(session)
            changed, self.session = self.session != session, session
            self._statistics = None
            if changed:
                self._seed_from_known()
        if statistics is not None:
            self._statistics = statistics
        self._start_sentence()

    def seed_statistics(self, statistics: Statistics) -> None:
        """Initialise the running statistics (e.g. with those of the previous session)."""
        self._statistics = None
        self._past = _initial_statistics(statistics, self.n_channels)
        self._start_sentence()

    def seed_sessions(self, known: Callable[[str], Statistics | None]) -> None:
        """Initialise the running statistics of this session, and of every later one when it starts."""
        self._known_statistics = known
        self._statistics = None
        self._seed_from_known()
        self._start_sentence()

    def _seed_from_known(self) -> None:
        if (statistics := self._known_statistics(self.session)) is not None:
            self._past = _initial_statistics(statistics, self.n_channels)

    def push(self, bins: ArrayLike) -> Partial:
        """Decode the next bins, (t, C) or one bin (C,), and return the result so far."""
        chunk = self._check_shape(bins)
        frames, state = self._step_model(chunk)
        self._advance(frames, state, chunk)
        return self.partial()

    def push_log_probs(self, log_probs: np.ndarray) -> Partial:
        """Decode frames (f, V) of a model that runs elsewhere, in the order of this model's classes."""
        if self._joint is not None:
            head = self.engine.head
            raise UserError(f"--head {head} needs bins, but log-probabilities were given; use --head ctc")
        self._advance(Frames(check_log_probs(log_probs, self.layout.classes)), self._now.model, None)
        return self.partial()

    def precompute(self) -> None:
        """Called between bins: compute the part of the next frame that does not depend on further bins."""

    def partial(self) -> Partial:
        """Return the result so far."""
        now = self._now
        if not self.decodes_words:
            phonemes = tuple(self.layout.classes[token] for token in self._tokens())
            return Partial(phonemes, 0, now.n_frames, now.new_frames)
        with self._lock:
            words, n_settled = self._searcher.partial(now.search), self._searcher.n_settled(now.search)
        return Partial(tuple(words), n_settled, now.n_frames, now.new_frames)

    def partial_nbest(self, n: int) -> list[Hypothesis]:
        """Return the best hypotheses so far, cheaply: during a sentence, words come from the CTC head."""
        if self._joint is None or self._words is None:
            return self.nbest(n)
        with self._lock:
            found: list[Hypothesis] = self._words.finish(self._now.search.words, n)
        return found

    def nbest(self, n: int) -> list[Hypothesis]:
        """Return the best hypotheses if the sentence ended here, best first."""
        if self._searcher is None:
            best = float(self.log_probs().max(axis=1).sum()) if self.n_frames else 0.0
            return [Hypothesis(self._tokens(), {"acoustic": best}, total=best)]
        with self._lock:
            return self._searcher.finish(self._now.search, n) or [Hypothesis(())]

    def finish(self) -> Hypothesis:
        """End the sentence and return its best hypothesis. The stream is ready for the next one."""
        return self.finish_nbest(1)[0]

    def finish_nbest(self, n: int, adapt: bool = True) -> list[Hypothesis]:
        """End the sentence and return its best hypotheses.

        With `adapt=False` it causes no update of a stream that adapts (e.g. because it was cut off).
        """
        if self.n_bins or not self.n_frames:  # frames from elsewhere are complete already
            self._advance(self._finish_model(), self._now.model, None)
        hypotheses = self._final_nbest(n)
        if self.decodes_words:
            tokens = self._tokens()
            hypotheses = [replace(hypothesis, tokens=tokens) for hypothesis in hypotheses]
        if adapt:
            self._submit_update(hypotheses[0])
        self._update_statistics()
        self._start_sentence()
        return hypotheses[:n]

    def log_probs(self) -> np.ndarray:
        """All frames of the sentence so far, in the order of the model's classes. (F, V)"""
        return np.concatenate([self._no_frames, *self._now.frames])

    def check_session(self, session: str) -> None:
        """Raise `UserError` for a session that this stream cannot decode."""
        if session not in self.sessions:
            raise UserError(
                f"session {session!r:.60} is unknown to this model; it was trained on {', '.join(self.sessions)};"
                " adapt to a new session with adapt, or add it with arcuate calibrate"
            )

    # --- adaptation: none, unless a subclass provides it ------------------------------------------------

    @property
    def adaptation(self) -> Any:
        """Status of adaptation; None if this stream does not adapt."""
        return None

    @property
    def session_state(self) -> Any:
        """Newest state of adaptation; None if this stream does not adapt."""
        return None

    def reset_adaptation(self, state: Any = None) -> None:
        """Return to the initial layer, or to an earlier `session_state`."""
        raise UserError("this stream does not adapt; load it with adapt=True")

    def wait_for_adaptation(self) -> None:
        """Block until all finished sentences were processed. Otherwise a stream never waits for updates."""

    # --- decoding -----------------------------------------------------------------------------------------

    @property
    def _uses_running_statistics(self) -> bool:
        return self._statistics is None and self.layout.normalise != "none"

    @property
    def _keeps_bins(self) -> bool:
        return self._uses_running_statistics

    @property
    def _no_frames(self) -> np.ndarray:
        return np.empty((0, len(self.layout.classes)), np.float32)

    def _final_nbest(self, n: int) -> list[Hypothesis]:
        """The n-best list of a complete sentence, with confidences if words are decoded."""
        model = None if self._words is None else self._words.settings.confidence
        if model is None:  # phonemes, or an exported model of an earlier version
            return self.nbest(n)
        from arcuate.decoding.confidence import n_hypotheses  # imports the word search

        return self._with_confidence(self.nbest(n_hypotheses(self._searcher, n)))

    def _with_confidence(self, hypotheses: list[Hypothesis], scale: float = 1.0) -> list[Hypothesis]:
        from arcuate.decoding.confidence import SessionWords, with_confidence

        settings = self._words.settings
        session = self._session_words.setdefault(self.session, SessionWords(settings.confidence))
        return with_confidence(hypotheses, self._columns(self.log_probs()), settings, scale, session)

    def _submit_update(self, best: Hypothesis) -> None:
        """Pass the finished sentence on to adaptation."""

    def _start_sentence(self) -> None:
        statistics = self._past.statistics() if self._uses_running_statistics else self._statistics
        model = self._start_model(statistics)
        self._now = SentenceState(model, self._searcher.start() if self._searcher else None, self._no_frames)

    def _advance(self, new: Frames, state: Any, chunk: np.ndarray | None) -> None:
        """Run the search over new frames and replace the sentence state."""
        now, frames, search = self._now, new.log_probs, self._now.search
        if len(frames) and self._searcher is not None:
            with self._lock:
                search = self._search_frames(search, new)
        bins = (*now.bins, chunk) if self._keeps_bins and chunk is not None else now.bins
        all_frames = (*now.frames, frames) if len(frames) else now.frames
        n_bins = now.n_bins + (0 if chunk is None else len(chunk))
        greedy = now.greedy.extend(frames) if len(frames) else now.greedy
        self._now = SentenceState(state, search, frames, all_frames, bins, now.n_frames + len(frames), n_bins, greedy)

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


def _initial_statistics(statistics: Statistics | None, n_channels: int) -> RunningStatistics:
    """Statistics known beforehand as a starting value of running statistics; empty if there are none."""
    if statistics is None or statistics.n_bins <= 0:
        return RunningStatistics.empty(n_channels)
    n = np.full(n_channels, float(statistics.n_bins))
    sd = statistics.sd.astype(np.float64)
    return RunningStatistics(n, statistics.mean.astype(np.float64), n * sd**2, statistics.n_bins)
