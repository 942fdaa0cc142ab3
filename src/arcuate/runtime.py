"""`Decoder`: decode with an exported model (`.arcx`). Needs numpy, onnxruntime and (words only) numba; not torch.

    decoder = Decoder.load("model.arcx")
    for bins in stream:                    # (t, C), as they arrive
        print(decoder.push(bins).text)
    print(decoder.finish().text)

The file is written by `arcuate export`; docs/export.md describes it.
"""

import hashlib
import io
import json
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcuate.data.statistics import RunningStatistics, Statistics
from arcuate.decoding.hypothesis import GreedyTokens
from arcuate.decoding.stream import Partial, SentenceState, SentenceStream
from arcuate.errors import UserError
from arcuate.exported.model import ExportedModel, ExportedState, StepOutputs
from arcuate.exported.read import ExportedFile, load_model, load_transducer, load_word_search, open_export
from arcuate.models.layout import Frames, Head, check_head
from arcuate.models.layout import ModelDelay as ModelDelay

__all__ = ["Decoder", "ModelDelay", "Partial", "Statistics", "UserError"]

_WARM_UP_ROWS = 1 << 20  # rows of the lookahead cache to fill: 12 MB
_STATE_MAGIC = b"arcuate-state-1\n"
_DIGEST_BYTES = 20


@dataclass(frozen=True, eq=False)
class RuntimeEngine:
    """Model and word search, shared by all streams of a file."""

    file: ExportedFile
    model: ExportedModel
    search: Any  # WordSearch or None
    lock: threading.Lock
    head: Head = "ctc"
    joint: Any = None  # JointWordSearch or JointSearch, if the transducer is used


class Decoder(SentenceStream):
    """One stream over an exported model: `push` bins as they arrive, `finish` the sentence, or `reset` to discard it.

    `stream()` creates further streams that share all weights and nothing else. Results are bit-identical for any
    chunking of the bins.
    """

    def __init__(self, engine: RuntimeEngine, session: str | None = None, statistics: Statistics | None = None) -> None:
        super().__init__(engine.file.layout, engine.search, engine.lock, session, engine.joint)
        self.engine = engine
        self.reset(self.session, statistics)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        words: bool = True,
        beam: int | None = None,
        head: str | None = None,
        session: str | None = None,
        statistics: Statistics | None = None,
        threads: int = 1,
        warm: bool = True,
    ) -> "Decoder":
        """Load an exported model.

        `words=False` decodes phonemes, as does a file without a language model. `beam` overrides the beam of the word
        search in the file. `head` is ctc to leave out the transducer of a file that has one. `session` selects the
        session layer (default: the last one). `statistics` are those of the block if known; without them a model that
        normalises uses running statistics of its stream. `warm` decodes zeros, so that compilation does not delay the
        first sentence.
        """
        file = open_export(path)
        search = load_word_search(file, beam) if words and file.has_words else None
        chosen = _choose_head(file, head)
        joint = None if chosen == "ctc" else _joint_search(file, search, chosen, threads)
        engine = RuntimeEngine(file, load_model(file, threads), search, threading.Lock(), chosen, joint)
        if warm:
            _warm_up(engine)
        return cls(engine, session, statistics)

    def stream(self, session: str | None = None, statistics: Statistics | None = None) -> "Decoder":
        """Create another stream over the same weights."""
        return Decoder(self.engine, session or self.session, statistics)

    def check_session(self, session: str) -> None:
        """Raise `UserError` for a session that the file does not contain."""
        if session not in self.sessions:
            raise UserError(
                f"session {session!r:.60} is not in {self.engine.file.path}, which has {', '.join(self.sessions)};"
                " export a run that was calibrated for it"
            )

    def _start_model(self, statistics: Statistics | None) -> ExportedState:
        index = self.sessions.index(self.session)
        return self.engine.model.start(index, statistics, rolling=self._uses_running_statistics)

    def _step_model(self, chunk: np.ndarray) -> tuple[Frames, ExportedState]:
        outputs, state = self.engine.model.step(self._now.model, chunk)
        return Frames(outputs.log_probs, outputs.joiner_frames), state

    def _finish_model(self) -> Frames:
        outputs = self.engine.model.finish(self._now.model)
        return Frames(outputs.log_probs, outputs.joiner_frames)

    def trial_outputs(self, bins: ArrayLike) -> StepOutputs:
        """Model outputs of a complete trial (T, C), including the frames at its end; no search."""
        model = self.engine.model
        step, state = model.step(self._start_model(self._statistics), self._check_shape(bins))
        return step.followed_by(model.finish(state))

    def trial_log_probs(self, bins: ArrayLike) -> np.ndarray:
        """Log-probabilities of a complete trial (T, C). (F, V)"""
        return self.trial_outputs(bins).log_probs

    # --- saving a stream ----------------------------------------------------------------------------------

    def save_state(self) -> bytes:
        """Serialise the stream, within a sentence or between sentences; `load_state` restores it."""
        now, model = self._now, self._now.model
        arrays = {f"tensor.{name}": value for name, value in model.tensors.items()}
        arrays["past"] = np.stack([self._past.n, self._past.mean, self._past.m2])
        if self._statistics is not None:
            arrays["statistics"] = np.stack([self._statistics.mean, self._statistics.sd]).astype(np.float32)
        arrays |= {"frames": self.log_probs(), "bins": np.concatenate([self._no_bins, *now.bins])}
        if self._joint is not None:  # load_state repeats the search over these frames
            arrays["joiner_frames"] = self._joiner_frames()
        elif now.search is not None:
            pointers = now.search.backpointers
            arrays |= {"beam": now.search.beam, "backpointers": pointers.rows[: pointers.n]}
        about = {
            "model": self.engine.file.archive.digest,
            "session": self.session,
            "n_statistics": None if self._statistics is None else self._statistics.n_bins,
            "n_past": self._past.n_bins,
            "n_new": len(now.new_frames),
            "n_bins": now.n_bins,
            "n_pushed": model.n_pushed,
            "head": self.engine.head,
            "n_searched": 0 if now.search is None or self._joint is not None else now.search.n_frames,
        }
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        content = stream.getvalue()
        return _STATE_MAGIC + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content

    def load_state(self, state: bytes) -> None:
        """Restore a stream from `save_state` of the same file; the current sentence of this stream is discarded."""
        arrays, about = _read_state(state)
        if about.get("model") != self.engine.file.archive.digest:
            raise UserError("the saved state belongs to another exported model; load the file that it was saved with")
        try:
            self._restore(arrays, about)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            self._start_sentence()
            raise UserError(f"the saved state does not match this model ({str(error)[:80]}); save it again") from None

    def _restore(self, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        n = self.n_channels
        self.check_session(about["session"])
        self.session = about["session"]
        past = _expect(arrays, "past", np.float64, (3, n))
        self._past = RunningStatistics(past[0], past[1], past[2], _count(about, "n_past"))
        self._statistics = None
        if about["n_statistics"] is not None:
            mean, sd = _expect(arrays, "statistics", np.float32, (2, n))
            self._statistics = Statistics(mean, sd, _count(about, "n_statistics"))
        self._start_sentence()
        fresh = self._now.model
        tensors = {
            name: _expect(arrays, f"tensor.{name}", value.dtype, value.shape) for name, value in fresh.tensors.items()
        }
        frames = _expect(arrays, "frames", np.float32, (None, len(self.layout.classes)))
        bins = _expect(arrays, "bins", np.float32, (None, n))
        n_bins, n_new = _count(about, "n_bins"), _count(about, "n_new")
        model = replace(fresh, tensors=tensors, n_bins=n_bins, n_pushed=_count(about, "n_pushed"))
        search = self._now.search
        if about["head"] != self.engine.head:
            raise ValueError(f"it was saved with the head {about['head']!r:.20}")
        if self._joint is not None:
            width = self._joint.head.width
            joiner_frames = _expect(arrays, "joiner_frames", np.float32, (len(frames), width))
            if len(frames):
                with self._lock:
                    search = self._search_frames(search, Frames(frames, joiner_frames))
        elif search is not None:
            from arcuate.decoding.word_search.search import restore_state

            n_searched = _count(about, "n_searched")
            search = restore_state(self.engine.search, arrays["beam"], arrays["backpointers"], n_searched)
        self._now = SentenceState(
            model,
            search,
            frames[len(frames) - n_new :],
            (frames,) if len(frames) else (),
            (bins,) if len(bins) else (),
            len(frames),
            n_bins,
            GreedyTokens().extend(frames),
        )

    def _joiner_frames(self) -> np.ndarray:
        """Frames of the sentence so far, projected for the joiner. (F, W)"""
        state = self._now.search
        frames = state.frames if self._words is None else state.tokens.frames
        empty = np.empty((0, self._joint.head.width), np.float32)
        return np.concatenate([empty, *(f.for_transducer for f in frames)])

    @property
    def _no_bins(self) -> np.ndarray:
        return np.empty((0, self.n_channels), np.float32)


def _read_state(state: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    start = len(_STATE_MAGIC) + _DIGEST_BYTES
    content = state[start:]
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    if state[:start] != _STATE_MAGIC + digest:
        raise UserError("the saved state is damaged: its checksum does not match; start a new sentence")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        about = json.loads(arrays.pop("about").tobytes())
    except (ValueError, KeyError, OSError, zipfile.BadZipFile, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise UserError("the saved state cannot be read; start a new sentence")
    return arrays, about


def _expect(arrays: dict[str, np.ndarray], name: str, dtype: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    array = arrays[name]
    fits = array.ndim == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=True))
    if array.dtype != dtype or not fits:
        raise ValueError(f"{name} has another shape")
    return array


def _count(about: dict[str, Any], key: str) -> int:
    value = about[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}")
    return value


def _choose_head(file: ExportedFile, head: str | None) -> Head:
    chosen = file.head if head is None else check_head(head)
    if chosen != "ctc" and file.head == "ctc":
        raise UserError(f"{file.path} has no transducer; use --head ctc, or export it with --head {chosen}")
    return chosen


def _joint_search(file: ExportedFile, search: Any, head: Head, threads: int) -> Any:
    """Search with the transducer for words, or for tokens without a word search."""
    from arcuate.decoding.joint import joint_search

    return joint_search(load_transducer(file, threads), head, search)


def _warm_up(engine: RuntimeEngine) -> None:
    """Compile kernels and fill caches, so that the first sentence is not delayed."""
    if engine.search is not None:
        engine.search.warm_up(_WARM_UP_ROWS)
    stream = Decoder(engine)
    stream.push(np.zeros((engine.file.layout.patch_bins + 8, stream.n_channels), np.float32))
    stream.finish_nbest(2)
