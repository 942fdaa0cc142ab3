"""Sentences out of a stream of bins: where they begin and end, what they read, when nothing may be read at all."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import BLANK
from arcuate.data.text import normalise_text
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.live.config import LiveSettings
from arcuate.live.decoder import Partial, StreamingDecoder
from arcuate.live.messages import Mark

Event = dict[str, Any]
Emit = Callable[[Event], None]
ONSET_S = 0.5  # onset frames lie within this
IDLE_FRAMES = 60  # a decoder that hears nothing begins anew after so many


class Listener:
    """One stream of bins as sentences. Closed: nothing is read; listening: waiting for speech; speaking."""

    def __init__(
        self,
        decoder: StreamingDecoder,
        settings: LiveSettings,
        emit: Emit,
        heard: Callable[[np.ndarray, np.ndarray], None] | None = None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.emit = emit
        self.heard = heard  # is told of bins and frames that were decoded, while open
        self.reference: str | None = None
        self.trial: str | None = None
        self.n_sentences = 0
        self._stride = decoder.engine.model.config.settings.front_end.patch.stride
        self._frame_s = self._stride * BIN_SECONDS
        self.state: Literal["closed", "listening", "speaking"] = "listening"
        self._opened = not settings.start.closed
        self._told: str | None = None  # the state that others know of
        self._wait()

    # --- what others may do -------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Whether text may be shown and recorded."""
        return self._opened

    def open(self) -> None:
        if not self._opened:
            self._opened = True
            self.decoder.reset()
            self._wait()

    def close(self) -> None:
        """Nothing is read from here on; the sentence being said is cut off."""
        if self._opened:
            self.end(cut=True)
            self._opened = False
            self._wait()

    def hear(self, bins: np.ndarray) -> list[float]:
        """Bins (t, C), any number; gives the seconds since the beginning of this call at which frames were read."""
        self._miss(len(bins))
        if self.state == "closed":
            return []
        began, spent = time.perf_counter(), []
        step = self._stride if self.settings.endpoints.enabled else max(len(bins), 1)
        for first in range(0, len(bins), step):
            piece = bins[first : first + step]
            if self._hear_piece(piece):
                spent.append(time.perf_counter() - began)
        return spent

    def read(self, log_probs: np.ndarray) -> list[float]:
        """Frames (f, V) of a model that runs elsewhere; as `hear`."""
        self._miss(len(log_probs))
        if self.state == "closed":
            return []
        began = time.perf_counter()
        self.state = "speaking"
        partial = self.decoder.push_scores(log_probs)
        if self._opened and self.heard:
            self.heard(self._no_bins, log_probs)
        self._show(partial)
        return [time.perf_counter() - began]

    @property
    def _no_bins(self) -> np.ndarray:
        return np.empty((0, self.decoder.n_channels), np.float32)

    def mark(self, mark: Mark) -> None:
        """A trial begins: whatever was being said is cut off."""
        self.end(cut=True)
        self.trial, self.reference = mark.trial, mark.reference
        if mark.session is not None or mark.statistics is not None:
            self.decoder.reset(mark.session, mark.statistics)
        if self._opened:
            about = {"trial": mark.trial, "session": self.decoder.session, "reference": mark.reference}
            self.emit({"type": "trial", **about})

    def end(self, cut: bool = False) -> None:
        """The sentence is over, if one was being said; `cut`: it was not said to its end."""
        if self.state == "speaking" and (self.decoder.n_bins or self.decoder.n_frames):
            self._finish(cut)
        elif self.state != "closed":
            self.decoder.reset()
            self._wait()

    # --- inside -------------------------------------------------------------------------------------------

    def _miss(self, n: int) -> None:
        """What was said while closed is not kept, so the rest must not be scored against the whole sentence."""
        if n and not self._opened:
            self.reference = None

    def _wait(self) -> None:
        """Before the next sentence."""
        endpoints = self.settings.endpoints
        hears = self._opened or self.settings.start.phrase is not None
        self.state = "closed" if not hears else "listening" if endpoints.enabled else "speaking"
        self._ring: deque[np.ndarray] = deque(maxlen=max(1, round(endpoints.pre_roll_s / BIN_SECONDS)))
        self._speech: deque[bool] = deque(maxlen=max(endpoints.onset_frames, round(ONSET_S / self._frame_s)))
        self._n_silent = 0
        self._shown: tuple[tuple[str, ...], int] = ((), 0)
        self._tell_state()

    def _tell_state(self) -> None:
        shown = self.state if self._opened else "closed"
        if shown != self._told:
            self._told = shown
            self.emit({"type": "state", "state": shown})

    def _hear_piece(self, piece: np.ndarray) -> bool:
        """Decode a few bins; whether they completed a frame."""
        if self.state == "listening":
            self._ring.extend(piece)
        partial = self.decoder.push(piece)
        if self._opened and self.heard:
            self.heard(piece, partial.log_probs)
        if not len(partial.log_probs):
            return False
        speech = self._is_speech(partial.log_probs)
        if self.state == "listening":
            self._look_for_onset(speech)
        else:
            self._show(partial)
            self._look_for_end(speech)
        return True

    def _is_speech(self, log_probs: np.ndarray) -> list[bool]:
        quiet = np.exp(log_probs[:, BLANK])
        if self.decoder.engine.silence >= 0:
            quiet = quiet + np.exp(log_probs[:, self.decoder.engine.silence])
        return [bool(p) for p in 1 - quiet > self.settings.endpoints.speech]

    def _look_for_onset(self, speech: list[bool]) -> None:
        self._speech.extend(speech)
        begun = sum(self._speech) >= self.settings.endpoints.onset_frames
        if begun or self.decoder.n_frames > IDLE_FRAMES:
            self.decoder.reset()
            partial = self.decoder.push(np.array(self._ring))
        if begun:
            self.state = "speaking"
            self._n_silent = 0
            self._tell_state()
            self._show(partial)

    def _look_for_end(self, speech: list[bool]) -> None:
        endpoints = self.settings.endpoints
        if not endpoints.enabled:
            return
        for said in speech:
            self._n_silent = 0 if said else self._n_silent + 1
        silent = self._n_silent * self._frame_s >= endpoints.silence_s
        if silent or self.decoder.n_bins * BIN_SECONDS >= endpoints.max_s:
            self._finish()

    def _show(self, partial: Partial) -> None:
        now = (partial.words, partial.n_settled)
        if now == self._shown or not self._opened:
            return
        self._shown = now
        event: Event = {"type": "partial", "words": list(partial.words), "n_settled": partial.n_settled}
        event["n_frames"] = partial.n_frames
        if self.decoder.engine.search is not None and len(partial.words) > partial.n_settled:
            readings = [h.words for h in self.decoder.readings(self.settings.alternatives)]
            event["alternatives"] = alternatives(partial.words, readings)
        self.emit(event)

    def _finish(self, cut: bool = False) -> None:
        n_bins = self.decoder.n_bins
        readings = self.decoder.finish_all(self.settings.alternatives, learn=self._opened and not cut)
        if self._opened:
            self.n_sentences += 1
            self.emit({**self._final(readings, n_bins, None if cut else self.reference), "cut": cut})
        elif self._is_phrase(readings[0]):
            self._opened = True
        self.trial = self.reference = None
        self._wait()

    def _final(self, readings: list[Hypothesis], n_bins: int, reference: str | None) -> Event:
        best = readings[0]
        words = best.words or tuple(best.phonemes)
        others = [reading.words for reading in readings[1:]]
        return {
            "type": "final",
            "number": self.n_sentences,
            "words": list(words),
            "text": " ".join(words),
            "times_s": [
                [round(t.first * self._frame_s, 3), round(t.last * self._frame_s, 3)] for t in best.times
            ],
            "alternatives": alternatives(words, others),
            "readings": [{"text": r.text or "", "score": r.total, **r.scores} for r in readings],
            "score": best.total,
            "n_bins": n_bins,
            "session": self.decoder.session,
            "trial": self.trial,
            "reference": reference,
            "compared": against(reference, words),
        }

    def _is_phrase(self, best: Hypothesis) -> bool:
        phrase = self.settings.start.phrase
        return phrase is not None and normalise_text(best.text or "") == normalise_text(phrase)


# Texts side by side: other readings of a word, and errors against what was meant.


def alternatives(words: Sequence[str], readings: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """For the place of each word what other readings have there, best reading first."""
    found: dict[int, list[str]] = {}
    for reading in readings:
        for op in Levenshtein.opcodes(words, reading):
            if op.tag != "replace":
                continue
            width, other = op.src_end - op.src_start, reading[op.dest_start : op.dest_end]
            for k in range(width):  # one word against one; what is left over goes to the last place
                said = " ".join(other[k:] if k == width - 1 else other[k : k + 1])
                places = found.setdefault(op.src_start + k, [])
                if said and said not in places:
                    places.append(said)
    return found


def against(reference: str | None, words: Sequence[str]) -> list[dict[str, Any]] | None:
    """The decoded words marked right, wrong (with what was meant) or extra, and the missing ones between them."""
    if reference is None:
        return None
    meant = normalise_text(reference).split()
    marked: list[dict[str, Any]] = []
    for op in Levenshtein.opcodes(meant, [normalise_text(word) for word in words]):
        source, target = meant[op.src_start : op.src_end], words[op.dest_start : op.dest_end]
        if op.tag == "equal":
            marked += [{"word": word, "is": "right"} for word in target]
        elif op.tag == "delete":
            marked += [{"word": word, "is": "missing"} for word in source]
        elif op.tag == "insert":
            marked += [{"word": word, "is": "extra"} for word in target]
        else:
            marked += [
                {"word": word, "is": "wrong", "meant": said}
                for said, word in zip(source, target, strict=True)
            ]
    return marked
