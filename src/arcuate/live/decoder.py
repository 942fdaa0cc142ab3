"""At the end of a sentence: its n-best readings scored anew with a causal language model."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.state import Day
from arcuate.data.alphabet import SILENCE, SILENCE_NAME, boundary_index
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import Statistics
from arcuate.data.store import Store
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.decoder import batch_statistics
from arcuate.decoding.greedy import greedy
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.log_probs import check_log_probs, reorder_classes
from arcuate.decoding.word_search.search import WordSearch, WordState, build_word_search
from arcuate.errors import UserError
from arcuate.evaluation.rescoring.causal import CausalModel, load_causal, score_sentences
from arcuate.evaluation.rescoring.rescore import ScoreWeights
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.io import open_model
from arcuate.live.adaptation import Adapting, Follower, Lesson, Standing, open_adapting
from arcuate.live.history import as_past, hold_still, remember, rolling_model
from arcuate.live.latency import Delay, find_delay
from arcuate.models.interfaces import require_causal
from arcuate.models.io import load_model
from arcuate.models.model import Model, StreamState
from arcuate.models.runtime import choose_device
from arcuate.progress import Progress
from arcuate.run import find_checkpoint

N_BEST = 20
ALPHA = 0.5


@dataclass(frozen=True, eq=False)
class Rescorer:
    """A causal model, and how much it counts against the n-gram."""

    model: CausalModel
    alpha: float = ALPHA
    n_best: int = N_BEST

    def __call__(self, readings: Sequence[Hypothesis], lm_weight: float) -> list[Hypothesis]:
        """The readings by their new totals, best first, with the causal model's score as `llm`."""
        texts = [reading.text or "" for reading in readings]
        causal = score_sentences(self.model, texts)
        acoustic = np.array([reading.scores["acoustic"] + reading.scores["bonus"] for reading in readings])
        ngram = np.array([reading.scores["lm"] for reading in readings])
        weights = ScoreWeights(1 / lm_weight if lm_weight > 1e-6 else 1.0, self.alpha)
        totals = weights.interpolate(acoustic, ngram, causal)
        scored = [
            replace(reading, scores={**reading.scores, "llm": float(llm)}, total=float(total))
            for reading, llm, total in zip(readings, causal, totals, strict=True)
        ]
        order = sorted(range(len(scored)), key=lambda i: (-round(float(totals[i]), 9), i))
        return [scored[i] for i in order]


def load_rescorer(path: str | Path, alpha: float = ALPHA, n_best: int = N_BEST) -> Rescorer:
    return Rescorer(load_causal(Path(path)), alpha, n_best)


# `StreamingDecoder`: bins in, words out, one stream over weights that many streams may share.


@dataclass(frozen=True)
class Partial:
    """What is known after the last bins; the first `n_settled` words will not change any more."""

    words: tuple[str, ...]
    n_settled: int
    n_frames: int  # of the sentence so far
    log_probs: np.ndarray  # (f, V) of the frames that the last bins completed

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, eq=False)
class Engine:
    """All that streams share: weights, search, rescorer. Nothing of a stream is in here."""

    model: Model  # normalises as it was trained to
    rolling: Model  # the same weights, normalising by the past
    search: WordSearch | None  # None: phonemes
    rescorer: Rescorer | None
    order: tuple[int, ...]  # columns of the model in the order of the search
    silence: int  # column of the model for silence, -1 where there is none
    delay: Delay
    lock: threading.Lock  # the search has one scratch space
    adapting: Adapting | None = None  # None: nothing is learned


@dataclass(frozen=True, eq=False)
class _Sentence:
    """A sentence half heard; a value."""

    model: StreamState
    words: WordState | None
    fresh: np.ndarray  # (f, V) frames of the last push
    frames: tuple[np.ndarray, ...] = ()  # (f, V) each, none empty
    bins: tuple[np.ndarray, ...] = ()  # kept for the statistics of the next sentence, or to learn from
    n_frames: int = 0
    n_bins: int = 0


class StreamingDecoder:
    """One stream. `push` bins as they come, `finish` the sentence, `reset` to drop it.

    Streams of one process come from `stream()`: they share all weights and nothing else.
    """

    def __init__(
        self, engine: Engine, session: str | None = None, statistics: Statistics | None = None
    ) -> None:
        self.engine = engine
        self._past = as_past(None, engine.model.config.n_channels)
        self._now: _Sentence
        self._statistics: Statistics | None = None
        self.session = session or engine.model.config.sessions[-1]
        self.follower: Follower | None = None
        if engine.adapting is not None:
            self.check_session(self.session)
            self.follower = Follower(engine.adapting, self.session)
        self.reset(self.session, statistics)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        lm: str | None = "default",
        lexicon: str = "default",
        decoding: DecodingConfig | None = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        llm: str | Path | None = None,
        adapt: str | Adaptation | None = None,
        data: str | Path | Store | None = None,
        checkpoint: str = "best",
        device: str = "cpu",
        warm: bool = True,
        progress: Progress | None = None,
    ) -> "StreamingDecoder":
        """The model of a run with a language model and a lexicon; `lm=None` gives phonemes.

        `session` says which session layer to hear through (the last one unless named). `statistics` are those of
        the block, where they are known; without them a model that normalises does so from the past of its stream.
        `llm` is a causal language model that scores the readings of every sentence anew at its end.

        `adapt` is a method of `arcuate evaluate --adapt`: after each sentence its session layer may learn from what
        was read, and `session` may be a day the model does not know. `data` is a store with days it knows, to tell
        by how much this one has drifted; the run's own unless named. They are read first: `progress` hears of it.
        """
        model = load_model(find_checkpoint(Path(path), checkpoint)).to(choose_device(device, "device"))
        search = None if lm is None else open_search(model, lm, lexicon, decoding or DecodingConfig())
        if llm is not None and search is None:
            raise UserError("rescoring needs words: name a language model with lm, such as lm='default'")
        rescorer = None if llm is None else load_rescorer(llm)
        engine = make_engine(model, search, rescorer)
        if adapt is not None:
            engine = replace(engine, adapting=open_adapting(path, model, search, adapt, data, progress))
        if warm:
            warm_up(engine)
        return cls(engine, session, statistics)

    def stream(self, session: str | None = None, statistics: Statistics | None = None) -> "StreamingDecoder":
        """Another stream over the same weights."""
        return StreamingDecoder(self.engine, session or self.session, statistics)

    @property
    def n_channels(self) -> int:
        return self.engine.model.config.n_channels

    @property
    def sessions(self) -> tuple[str, ...]:
        return self.engine.model.config.sessions

    @property
    def delay(self) -> Delay:
        """How far the model's smoothing, patches and encoder look ahead."""
        return self.engine.delay

    @property
    def n_frames(self) -> int:
        return self._now.n_frames

    @property
    def n_bins(self) -> int:
        return self._now.n_bins

    @property
    def adaptation(self) -> Standing | None:
        """How the day is being followed; None where nothing is learned."""
        return None if self.follower is None else self.follower.standing

    @property
    def day(self) -> Day | None:
        """The newest day: a value, for `reset_adaptation` to come back to."""
        return None if self.follower is None else self.follower.day

    def reset_adaptation(self, day: Day | None = None) -> None:
        """Forget what was learned of this day, or all that was learned since an earlier `day`."""
        if self.follower is None:
            raise UserError("this stream does not adapt; load it with adapt='one-step' or another method")
        self.follower.reset(day)

    def settle(self) -> None:
        """Wait until everything heard was learned from. Without, learning never keeps a stream waiting."""
        if self.follower is not None:
            self.follower.settle()

    def reset(self, session: str | None = None, statistics: Statistics | None = None) -> None:
        """Drop the sentence and begin a new one, in another session or with other statistics where given."""
        if session is not None:
            self.check_session(session)
            self.session = session
            self._statistics = None
            if self.follower is not None and self.follower.day.session != session:
                self.follower.start(session)
        if statistics is not None:
            self._statistics = statistics
        self._begin()

    def seed(self, statistics: Statistics) -> None:
        """What the past was like before this stream began, such as the last session's; from now on it rolls."""
        self._statistics = None
        self._past = as_past(statistics, self.n_channels)
        self._begin()

    def push(self, bins: ArrayLike) -> Partial:
        """The next bins, (t, C) or one bin (C,), any number of them -> what is known now."""
        chunk = self._check(bins)
        self._take_day()
        with torch.inference_mode():
            outputs, state = self._model.step(self._now.model, torch.from_numpy(chunk)[None].to(self._device))
        self._take(outputs.log_probs["ctc"], state, chunk)
        return self.partial()

    def push_scores(self, log_probs: np.ndarray) -> Partial:
        """Frames (f, V) of a model that runs elsewhere, in the order of this model's classes."""
        frames = check_log_probs(log_probs, self.engine.model.config.classes)
        self._take(torch.from_numpy(frames)[None], self._now.model, None)
        return self.partial()

    def ahead(self) -> None:
        """Use the time until the next bins: what can be done of the next frame is done now."""
        with torch.inference_mode():
            self._now = replace(self._now, model=self._model.precompute(self._now.model))

    def partial(self) -> Partial:
        """What is known now."""
        now, search = self._now, self.engine.search
        if search is None or now.words is None:
            return Partial(tuple(self._phonemes()), 0, now.n_frames, now.fresh)
        with self.engine.lock:
            words, n_settled = search.partial(now.words), search.n_settled(now.words)
        return Partial(tuple(words), n_settled, now.n_frames, now.fresh)

    def readings(self, n_best: int) -> list[Hypothesis]:
        """The best readings if the sentence ended here, best first."""
        search, words = self.engine.search, self._now.words
        if search is None or words is None:
            return [self._spelled()]
        with self.engine.lock:
            return search.finish(words, n_best) or [Hypothesis(())]

    def finish(self) -> Hypothesis:
        """End the sentence: its best reading. The stream is ready for the next one."""
        return self.finish_all(1)[0]

    def finish_all(self, n_best: int, learn: bool = True) -> list[Hypothesis]:
        """End the sentence: its best readings, rescored where there is a causal model.

        `learn=False`: it teaches nothing, as where it was cut off.
        """
        if self.n_bins or not self.n_frames:  # else the frames came from elsewhere, whole
            with torch.inference_mode():
                outputs = self._model.finish(self._now.model)
            self._take(outputs.log_probs["ctc"], self._now.model, None)
        rescorer, search = self.engine.rescorer, self.engine.search
        readings = self.readings(max(n_best, rescorer.n_best if rescorer else 1))
        if rescorer and search and readings[0].total is not None:
            readings = rescorer(readings, search.settings.lm_weight)
        tokens = self._tokens()
        if learn:
            self._learn(readings[0])
        self._remember()
        self._begin()
        return [replace(reading, tokens=tokens) for reading in readings[:n_best]]

    def log_probs(self) -> np.ndarray:
        """All frames of the sentence so far, in the order of the model's classes: (F, V)"""
        return np.concatenate([self._no_frames, *self._now.frames])

    def check_session(self, session: str) -> None:
        """Refuse a session that this stream cannot hear."""
        if self.engine.adapting is not None and is_safe_name(session):
            return  # a day that the model does not know is read with the layer of the nearest one
        if session not in self.sessions:
            new = "; follow a new day with adapt, or add it with arcuate calibrate"
            raise UserError(
                f"session {session!r:.60} is unknown to this model; it knows {', '.join(self.sessions)}"
                + ("" if self.engine.adapting is not None else new)
            )

    # --- inside -------------------------------------------------------------------------------------------

    @property
    def _normalises(self) -> bool:
        return self.engine.model.config.settings.front_end.normalise != "none"

    @property
    def _no_frames(self) -> np.ndarray:
        return np.empty((0, len(self.engine.model.config.classes)), np.float32)

    @property
    def _device(self) -> torch.device:
        return self.engine.model.head.weight.device

    def _begin(self) -> None:
        engine, statistics = self.engine, self._statistics
        self._base = engine.model if statistics is not None or not self._normalises else engine.rolling
        if statistics is None and self._normalises:
            statistics = self._past.statistics()
        if self.follower is not None:
            self._day = self.follower.day
            self._model, session = self.follower.model(self._base, self._day), 0
        else:
            self._model, session = self._base, self.sessions.index(self.session)
        state = self._model.start(session, batch_statistics(statistics, self._device))
        self._now = _Sentence(state, engine.search.start() if engine.search else None, self._no_frames)

    def _take_day(self) -> None:
        """Before the first bins of a sentence: read it with what was learned since the last one ended."""
        fresh = not self.n_bins and not self.n_frames
        if self.follower is not None and fresh and self._day is not self.follower.day:
            self._begin()

    def _learn(self, reading: Hypothesis) -> None:
        if self.follower is not None and self._now.bins:
            bins = torch.from_numpy(np.concatenate(self._now.bins)).to(self._device)
            statistics = self._now.model.front_end.statistics
            self.follower.learn(Lesson(self._base, bins, statistics, reading))

    def _take(self, log_probs: torch.Tensor, state: StreamState, chunk: np.ndarray | None) -> None:
        frames, now, search = log_probs[0].float().cpu().numpy(), self._now, self.engine.search
        words = now.words
        if search is not None and words is not None and len(frames):
            with self.engine.lock:
                words = search.step(words, frames[:, self.engine.order])
        keep = chunk is not None and (self._rolls or self.follower is not None)
        kept = (*now.bins, chunk) if keep and chunk is not None else now.bins
        heard = (*now.frames, frames) if len(frames) else now.frames
        n_bins = now.n_bins + (0 if chunk is None else len(chunk))
        self._now = _Sentence(state, words, frames, heard, kept, now.n_frames + len(frames), n_bins)

    @property
    def _rolls(self) -> bool:
        return self._normalises and self._statistics is None

    def _remember(self) -> None:
        if self._rolls and self._now.bins:
            front_end = self.engine.model.config.settings.front_end
            bins = np.concatenate(self._now.bins)
            self._past = remember(self._past, bins, front_end.log1p, front_end.rolling_bins)

    def _tokens(self) -> tuple[int, ...]:
        return tuple(greedy(self.log_probs()))

    def _phonemes(self) -> list[str]:
        return [self.engine.model.config.classes[token] for token in self._tokens()]

    def _spelled(self) -> Hypothesis:
        best = float(self.log_probs().max(axis=1).sum()) if self._now.n_frames else 0.0
        return Hypothesis(self._tokens(), {"acoustic": best}, total=best)

    def _check(self, bins: ArrayLike) -> np.ndarray:
        chunk = np.array(bins, dtype=np.float32)  # a copy: the caller keeps theirs
        chunk = chunk[None] if chunk.ndim == 1 else chunk
        if chunk.ndim != 2 or chunk.shape[1] != self.n_channels:
            raise UserError(f"bins must have shape (t, {self.n_channels}), not {np.shape(bins)}")
        return chunk


def open_search(model: Model, lm: str, lexicon: str, decoding: DecodingConfig) -> WordSearch:
    """The word search of `arcuate decode`, over the classes of a model."""
    names = model.config.classes
    _, classes = reorder_classes(np.zeros((1, len(names)), np.float32), names, "the model", decoding.boundary)
    words, ngram = open_lexicon(lexicon, classes), open_model(lm)
    if tuple(words.classes) != classes:
        raise UserError(f"the lexicon {lexicon} is over other classes than the model; give one that fits")
    return build_word_search(words, ngram, decoding, boundary=boundary_index(classes))


def make_engine(model: Model, search: WordSearch | None, rescorer: Rescorer | None = None) -> Engine:
    require_causal(model.config.settings.encoder.causal)
    model = model.eval()
    hold_still(model)
    rolls = model.config.settings.front_end.normalise == "block"
    rolling = rolling_model(model) if rolls else model
    names = model.config.classes
    columns, _ = reorder_classes(np.arange(len(names), dtype=np.float32)[None], names, "the model")
    silence = names.index(SILENCE_NAME) if SILENCE_NAME in names else SILENCE if len(names) > SILENCE else -1
    order = tuple(int(c) for c in columns[0])
    return Engine(model, rolling, search, rescorer, order, silence, find_delay(model), threading.Lock())


def warm_up(engine: Engine) -> None:
    """Everything that is slow the first time happens now, not in the first sentence."""
    if engine.search is not None:
        engine.search.warm_up()
    stream = StreamingDecoder(engine)
    for _ in range(40):
        stream.push(np.zeros((1, stream.n_channels), np.float32))
        stream.ahead()
    stream.finish_all(2)
    stream.settle()
