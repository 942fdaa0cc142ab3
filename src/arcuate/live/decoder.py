"""`StreamingDecoder`: neural bins in, words out, as the bins arrive."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from arcuate.adaptation.config import Adaptation, optional_adaptation
from arcuate.adaptation.state import SessionState
from arcuate.config import Overrides
from arcuate.data.readers.source import is_safe_name
from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.data.store import Store
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.decoder import batch_statistics
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.decoding.joint import HeadOutputs, JointTokenSearch, JointWordSearch, JointWordState, TokenState
from arcuate.decoding.log_probs import check_log_probs
from arcuate.decoding.word_search.search import WordSearch, WordState
from arcuate.errors import UserError
from arcuate.evaluation.causal import load_causal
from arcuate.evaluation.evaluate import choose_head, find_source
from arcuate.live.adaptation import AdaptationStatus, DecodedSentence, StreamAdapter, load_setup
from arcuate.live.engine import Engine, ModelDelay, Rescorer, load_search, make_engine
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model
from arcuate.models.model import StreamState
from arcuate.models.runtime import choose_device
from arcuate.progress import Progress, logger
from arcuate.run import open_run


@dataclass(frozen=True)
class Partial:
    """Text of the sentence so far; the first `n_settled` words can no longer change."""

    words: tuple[str, ...]
    n_settled: int
    n_frames: int  # of the sentence so far
    log_probs: np.ndarray  # (f, V) of the frames that the last bins completed

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, eq=False)
class _SentenceState:
    """Immutable state of model and search within one sentence."""

    model: StreamState
    search: WordState | JointWordState | TokenState | None
    new_frames: np.ndarray  # (f, V) of the last push
    frames: tuple[np.ndarray, ...] = ()  # (f, V) each, none empty
    bins: tuple[np.ndarray, ...] = ()  # kept for rolling normalisation and for adaptation
    n_frames: int = 0
    n_bins: int = 0


class StreamingDecoder:
    """One stream: `push` bins as they arrive, `finish` the sentence, or `reset` to discard it.

    `stream()` creates further streams that share all weights and nothing else.
    """

    def __init__(self, engine: Engine, session: str | None = None, statistics: Statistics | None = None) -> None:
        self.engine = engine
        self._past = _initial_statistics(None, engine.model.config.n_channels)
        self._now: _SentenceState
        self._statistics: Statistics | None = None
        self.session = session or engine.model.config.sessions[-1]
        self.adapter: StreamAdapter | None = None
        if engine.adaptation is not None:
            self.check_session(self.session)
            self.adapter = StreamAdapter(engine.adaptation, self.session)
        self.reset(self.session, statistics)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        lm: str | None = "default",
        lexicon: str = "default",
        decoding: DecodingConfig | str | Path | None = None,
        beam: int | None = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        llm: str | Path | None = None,
        head: str | None = None,
        adapt: str | Adaptation | None = None,
        adapt_settings: Overrides | None = None,
        data: str | Path | Store | None = None,
        checkpoint: str = "best",
        device: str = "cpu",
        warm: bool = True,
        progress: Progress | None = None,
    ) -> "StreamingDecoder":
        """Load the model of a run with a language model and a lexicon; `lm=None` decodes phonemes.

        `decoding` are settings of the word search or a file of `arcuate tune`; `beam` overrides their beam. `session`
        selects the session layer (default: the last one). `statistics` are those of the block if known; without them a
        model that normalises uses running statistics of its stream. `llm` is a causal language model that rescores the
        n-best list at the end of every sentence. `head`: ctc, transducer or both; default: both if the model has a
        trained transducer. `warm` decodes zeros, so that compilation does not delay the first sentence.

        `adapt` is a method of `arcuate evaluate --adapt`: after each sentence the session layer may be updated, and
        `session` may be new to the model. `adapt_settings` change the settings of the method, as {"lr": 5e-4}. `data`
        is a store with known sessions against which drift is measured (default: the run's own); their trials are
        decoded first, which `progress` reports.
        """
        adaptation = optional_adaptation(adapt, adapt_settings)
        source = find_source(open_run(path), checkpoint)
        model = load_model(source.checkpoint).to(choose_device(device, "device"))
        chosen = choose_head(source, head)
        search = None if lm is None else load_search(model, lm, lexicon, decoding, beam)
        if llm is not None and search is None:
            raise UserError("rescoring needs words: name a language model with lm, such as lm='default'")
        engine = make_engine(model, search, None if llm is None else Rescorer(load_causal(Path(llm))), chosen)
        if model.transducer is not None:
            used = {"ctc": "the CTC head", "transducer": "the transducer", "both": "both heads, CTC and transducer"}
            logger.info(f"decoding with {used[chosen]}")
        if adaptation is not None:
            engine = replace(engine, adaptation=load_setup(path, model, search, adaptation, data, progress))
        if warm:
            warm_up(engine)
        return cls(engine, session, statistics)

    def stream(self, session: str | None = None, statistics: Statistics | None = None) -> "StreamingDecoder":
        """Create another stream over the same weights."""
        return StreamingDecoder(self.engine, session or self.session, statistics)

    @property
    def n_channels(self) -> int:
        return self.engine.model.config.n_channels

    @property
    def sessions(self) -> tuple[str, ...]:
        return self.engine.model.config.sessions

    @property
    def delay(self) -> ModelDelay:
        """Delay by design of the model's smoothing, patches and encoder."""
        return self.engine.delay

    @property
    def n_narrowed(self) -> int:
        """Frames of the sentence in which the word search reached its bound on candidates and was narrowed."""
        state = self._now.search
        state = state.words if isinstance(state, JointWordState) else state
        return state.n_narrowed if isinstance(state, WordState) else 0

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
            self.session = session
            self._statistics = None
            if self.adapter is not None and self.adapter.state.session != session:
                self.adapter.start(session)
        if statistics is not None:
            self._statistics = statistics
        self._start_sentence()

    def seed_statistics(self, statistics: Statistics) -> None:
        """Initialise the running statistics (e.g. with those of the previous session)."""
        self._statistics = None
        self._past = _initial_statistics(statistics, self.n_channels)
        self._start_sentence()

    def push(self, bins: ArrayLike) -> Partial:
        """Decode the next bins, (t, C) or one bin (C,), and return the result so far."""
        chunk = self._check_shape(bins)
        self._use_newest_state()
        with torch.inference_mode():
            outputs, state = self._model.step(self._now.model, torch.from_numpy(chunk)[None].to(self._device))
        self._advance(outputs, state, chunk)
        return self.partial()

    def push_log_probs(self, log_probs: np.ndarray) -> Partial:
        """Decode frames (f, V) of a model that runs elsewhere, in the order of this model's classes."""
        if self.engine.joint is not None:
            raise UserError(f"--head {self.engine.head} needs bins, but log-probabilities were given; use --head ctc")
        frames = torch.from_numpy(check_log_probs(log_probs, self.engine.model.config.classes))[None]
        n_frames = torch.tensor([frames.shape[1]])
        self._advance(Outputs(frames, n_frames, {"ctc": frames}), self._now.model, None)
        return self.partial()

    def precompute(self) -> None:
        """Between bins: compute the part of the next frame that does not depend on the next bins."""
        with torch.inference_mode():
            self._now = replace(self._now, model=self._model.precompute(self._now.model))

    def partial(self) -> Partial:
        """Return the result so far."""
        now, search = self._now, self._word_search
        if search is None:
            phonemes = tuple(self.engine.model.config.classes[token] for token in self._tokens())
            return Partial(phonemes, 0, now.n_frames, now.new_frames)
        with self.engine.lock:
            words, n_settled = search.partial(now.search), search.n_settled(now.search)  # type: ignore[arg-type]
        return Partial(tuple(words), n_settled, now.n_frames, now.new_frames)

    def partial_nbest(self, n: int) -> list[Hypothesis]:
        """Return the best hypotheses so far, cheaply: during a sentence, words come from the CTC head."""
        state = self._now.search
        if isinstance(state, JointWordState) and self.engine.search is not None:
            with self.engine.lock:
                return self.engine.search.finish(state.words, n)
        return self.nbest(n)

    def nbest(self, n: int) -> list[Hypothesis]:
        """Return the best hypotheses if the sentence ended here, best first."""
        search, state = self.engine.joint or self.engine.search, self._now.search
        if search is None:
            best = float(self.log_probs().max(axis=1).sum()) if self.n_frames else 0.0
            return [Hypothesis(self._tokens(), {"acoustic": best}, total=best)]
        with self.engine.lock:
            return search.finish(state, n) or [Hypothesis(())]  # type: ignore[arg-type]

    def finish(self) -> Hypothesis:
        """End the sentence and return its best hypothesis. The stream is ready for the next one."""
        return self.finish_nbest(1)[0]

    def finish_nbest(self, n: int, adapt: bool = True) -> list[Hypothesis]:
        """End the sentence and return its best hypotheses, rescored if there is a causal language model.

        With `adapt=False` it causes no update (e.g. because it was cut off).
        """
        if self.n_bins or not self.n_frames:  # frames from elsewhere are complete already
            with torch.inference_mode():
                outputs = self._model.finish(self._now.model)
            self._advance(outputs, self._now.model, None)
        rescorer, search = self.engine.rescorer, self.engine.search
        hypotheses = self.nbest(max(n, rescorer.n_best if rescorer else 1))
        if rescorer and search and hypotheses[0].total is not None:
            hypotheses = rescorer(hypotheses, search.settings.lm_weight)
        if self._word_search is not None:
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
        if self.engine.adaptation is not None and is_safe_name(session):
            return  # a new session starts with the layer of the nearest known one
        if session not in self.sessions:
            remedy = "; adapt to a new session with adapt, or add it with arcuate calibrate"
            raise UserError(
                f"session {session!r:.60} is unknown to this model; it was trained on {', '.join(self.sessions)}"
                + ("" if self.engine.adaptation is not None else remedy)
            )

    # --- adaptation ---------------------------------------------------------------------------------------

    @property
    def adaptation(self) -> AdaptationStatus | None:
        """Status of adaptation; None if this stream does not adapt."""
        return None if self.adapter is None else self.adapter.status

    @property
    def session_state(self) -> SessionState | None:
        """Newest state of adaptation, an immutable value that `reset_adaptation` accepts."""
        return None if self.adapter is None else self.adapter.state

    def reset_adaptation(self, state: SessionState | None = None) -> None:
        """Return to the initial layer, or to an earlier `session_state`."""
        if self.adapter is None:
            raise UserError("this stream does not adapt; load it with adapt='one-step' or another method")
        self.adapter.reset(state)

    def wait_for_adaptation(self) -> None:
        """Block until all finished sentences were processed. Otherwise a stream never waits for updates."""
        if self.adapter is not None:
            self.adapter.wait()

    def _use_newest_state(self) -> None:
        """Before the first bins of a sentence: switch to the updates made since the last one ended."""
        is_new = not self.n_bins and not self.n_frames
        if self.adapter is not None and is_new and self._state is not self.adapter.state:
            self._start_sentence()

    def _submit_update(self, best: Hypothesis) -> None:
        if self.adapter is not None and self._now.bins:
            bins = torch.from_numpy(np.concatenate(self._now.bins)).to(self._device)
            statistics = self._now.model.front_end.statistics
            self.adapter.submit(DecodedSentence(self._base, bins, statistics, best))

    # --- decoding -----------------------------------------------------------------------------------------

    @property
    def _uses_running_statistics(self) -> bool:
        return self._statistics is None and self.engine.model.config.settings.front_end.normalise != "none"

    @property
    def _no_frames(self) -> np.ndarray:
        return np.empty((0, len(self.engine.model.config.classes)), np.float32)

    @property
    def _device(self) -> torch.device:
        return self.engine.model.head.weight.device

    def _start_sentence(self) -> None:
        engine, statistics = self.engine, self._statistics
        self._base = engine.rolling_model if self._uses_running_statistics else engine.model
        if self._uses_running_statistics:
            statistics = self._past.statistics()
        if self.adapter is not None:
            self._state = self.adapter.state
            self._model, session = self.adapter.model(self._base, self._state), 0
        else:
            self._model, session = self._base, self.sessions.index(self.session)
        state = self._model.start(session, batch_statistics(statistics, self._device))
        search = engine.joint or engine.search
        self._now = _SentenceState(state, search.start() if search else None, self._no_frames)

    def _advance(self, outputs: Outputs, state: StreamState, chunk: np.ndarray | None) -> None:
        """Run the search over new frames (a batch of one) and replace the sentence state."""
        now, engine = self._now, self.engine
        frames = outputs.log_probs["ctc"][0].float().cpu().numpy()
        search = now.search
        if len(frames):
            with engine.lock:
                if engine.joint is not None:
                    search = engine.joint.step(search, HeadOutputs(frames, outputs.frames[0]))  # type: ignore[arg-type]
                elif engine.search is not None:
                    search = engine.search.step(search, frames[:, engine.columns])  # type: ignore[arg-type]
        keep_bins = self._uses_running_statistics or self.adapter is not None
        bins = (*now.bins, chunk) if keep_bins and chunk is not None else now.bins
        all_frames = (*now.frames, frames) if len(frames) else now.frames
        n_bins = now.n_bins + (0 if chunk is None else len(chunk))
        self._now = _SentenceState(state, search, frames, all_frames, bins, now.n_frames + len(frames), n_bins)

    def _update_statistics(self) -> None:
        """Add the finished sentence to the running statistics; bins older than `rolling_bins` fade out."""
        if self._uses_running_statistics and self._now.bins:
            front_end = self.engine.model.config.settings.front_end
            bins, past, limit = np.concatenate(self._now.bins), self._past, front_end.rolling_bins
            decay = min(1.0, limit / max(past.n_bins, 1))
            faded = replace(past, n=past.n * decay, m2=past.m2 * decay, n_bins=min(past.n_bins, limit))
            self._past = faded.merge(RunningStatistics.from_bins(signed_log(bins) if front_end.log1p else bins))

    @property
    def _word_search(self) -> WordSearch | JointWordSearch | None:
        """The search for words; None if phonemes are decoded."""
        joint = self.engine.joint
        return joint if isinstance(joint, JointWordSearch) else self.engine.search

    def _tokens(self) -> tuple[int, ...]:
        """Phonemes so far."""
        state, joint = self._now.search, self.engine.joint
        if isinstance(joint, JointWordSearch) and isinstance(state, JointWordState):
            return joint.token_search.partial(state.tokens)
        if isinstance(joint, JointTokenSearch) and isinstance(state, TokenState):
            return joint.partial(state)
        return tuple(greedy(self.log_probs()))

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


def warm_up(engine: Engine) -> None:
    """Run everything that is slow the first time."""
    if engine.search is not None:
        engine.search.warm_up()
    stream = StreamingDecoder(engine)
    for _ in range(40):
        stream.push(np.zeros((1, stream.n_channels), np.float32))
        stream.precompute()
    stream.finish_nbest(2)
    stream.wait_for_adaptation()
