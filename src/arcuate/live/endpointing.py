"""Sentences from a stream of bins: where they start and end, what is shown of them, when decoding is closed."""

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
_ONSET_S = 0.5  # window in which onset frames are counted
_MAX_IDLE_FRAMES = 60  # without speech the decoder is reset after this many frames, so that memory stays bounded


class Endpointer:
    """Splits one stream of bins into sentences and emits their events.

    States: closed (nothing is shown or recorded), listening (waiting for speech), speaking (within a sentence).
    """

    def __init__(
        self,
        decoder: StreamingDecoder,
        settings: LiveSettings,
        emit: Callable[[Event], None],
        on_decoded: Callable[[np.ndarray, np.ndarray], None] | None = None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.emit = emit
        self.on_decoded = on_decoded  # called with bins and frames while open
        self.reference: str | None = None
        self.trial: str | None = None
        self.n_sentences = 0
        self._stride = decoder.engine.model.config.settings.front_end.patch.stride
        self._frame_s = self._stride * BIN_SECONDS
        self.state: Literal["closed", "listening", "speaking"] = "listening"
        self._is_open = not settings.start.closed
        self._published: str | None = None  # last published state
        self._await_sentence()

    @property
    def is_open(self) -> bool:
        """Whether text may be shown and recorded."""
        return self._is_open

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.decoder.reset()
            self._await_sentence()

    def close(self) -> None:
        """Stop decoding; the current sentence is cut off."""
        if self._is_open:
            self.end(cut=True)
            self._is_open = False
            self._await_sentence()

    def push(self, bins: np.ndarray) -> list[float]:
        """Decode bins (t, C); return the seconds from the start of this call to each frame's text."""
        self._drop_reference_if_closed(len(bins))
        if self.state == "closed":
            return []
        started, seconds = time.perf_counter(), []
        step = self._stride if self.settings.endpoints.enabled else max(len(bins), 1)
        for first in range(0, len(bins), step):
            if self._push_piece(bins[first : first + step]):
                seconds.append(time.perf_counter() - started)
        return seconds

    def push_log_probs(self, log_probs: np.ndarray) -> list[float]:
        """Decode frames (f, V) of a model that runs elsewhere; returns seconds as `push` does."""
        self._drop_reference_if_closed(len(log_probs))
        if self.state == "closed":
            return []
        started = time.perf_counter()
        self.state = "speaking"
        partial = self.decoder.push_log_probs(log_probs)
        if self._is_open and self.on_decoded:
            self.on_decoded(np.empty((0, self.decoder.n_channels), np.float32), log_probs)
        self._emit_partial(partial)
        return [time.perf_counter() - started]

    def start_trial(self, mark: Mark) -> None:
        """Start a marked trial; the current sentence is cut off."""
        self.end(cut=True)
        self.trial, self.reference = mark.trial, mark.reference
        if mark.session is not None or mark.statistics is not None:
            self.decoder.reset(mark.session, mark.statistics)
        if self._is_open:
            event = {"trial": mark.trial, "session": self.decoder.session, "reference": mark.reference}
            self.emit({"type": "trial", **event})

    def end(self, cut: bool = False) -> None:
        """End the current sentence if there is one; `cut` marks it as incomplete."""
        if self.state == "speaking" and (self.decoder.n_bins or self.decoder.n_frames):
            self._finish(cut)
        elif self.state != "closed":
            self.decoder.reset()
            self._await_sentence()

    # --- start and end ------------------------------------------------------------------------------------

    def _drop_reference_if_closed(self, n: int) -> None:
        """What arrives while closed is discarded, so the rest must not be scored against the full reference."""
        if n and not self._is_open:
            self.reference = None

    def _await_sentence(self) -> None:
        endpoints = self.settings.endpoints
        decodes = self._is_open or self.settings.start.phrase is not None
        self.state = "closed" if not decodes else "listening" if endpoints.enabled else "speaking"
        self._pre_roll: deque[np.ndarray] = deque(maxlen=max(1, round(endpoints.pre_roll_s / BIN_SECONDS)))
        self._speech: deque[bool] = deque(maxlen=max(endpoints.onset_frames, round(_ONSET_S / self._frame_s)))
        self._n_silent = 0
        self._shown: tuple[tuple[str, ...], int] = ((), 0)
        self._publish_state()

    def _publish_state(self) -> None:
        state = self.state if self._is_open else "closed"
        if state != self._published:
            self._published = state
            self.emit({"type": "state", "state": state})

    def _push_piece(self, piece: np.ndarray) -> bool:
        """Decode a few bins; return whether they completed a frame."""
        if self.state == "listening":
            self._pre_roll.extend(piece)
        partial = self.decoder.push(piece)
        if self._is_open and self.on_decoded:
            self.on_decoded(piece, partial.log_probs)
        if not len(partial.log_probs):
            return False
        speech = self._is_speech(partial.log_probs)
        if self.state == "listening":
            self._detect_onset(speech)
        else:
            self._emit_partial(partial)
            self._detect_end(speech)
        return True

    def _is_speech(self, log_probs: np.ndarray) -> list[bool]:
        silence = np.exp(log_probs[:, BLANK])
        if self.decoder.engine.silence >= 0:
            silence = silence + np.exp(log_probs[:, self.decoder.engine.silence])
        return [bool(p) for p in 1 - silence > self.settings.endpoints.speech_threshold]

    def _detect_onset(self, speech: list[bool]) -> None:
        self._speech.extend(speech)
        started = sum(self._speech) >= self.settings.endpoints.onset_frames
        if started or self.decoder.n_frames > _MAX_IDLE_FRAMES:
            self.decoder.reset()
            partial = self.decoder.push(np.array(self._pre_roll))
        if started:
            self.state = "speaking"
            self._n_silent = 0
            self._publish_state()
            self._emit_partial(partial)

    def _detect_end(self, speech: list[bool]) -> None:
        endpoints = self.settings.endpoints
        if not endpoints.enabled:
            return
        for is_speech in speech:
            self._n_silent = 0 if is_speech else self._n_silent + 1
        is_silent = self._n_silent * self._frame_s >= endpoints.silence_s
        if is_silent or self.decoder.n_bins * BIN_SECONDS >= endpoints.max_s:
            self._finish()

    # --- events -------------------------------------------------------------------------------------------

    def _emit_partial(self, partial: Partial) -> None:
        now = (partial.words, partial.n_settled)
        if now == self._shown or not self._is_open:
            return
        self._shown = now
        event: Event = {"type": "partial", "words": list(partial.words), "n_settled": partial.n_settled}
        event["n_frames"] = partial.n_frames
        if self.decoder.engine.search is not None and len(partial.words) > partial.n_settled:
            nbest = [h.words for h in self.decoder.nbest(self.settings.alternatives)]
            event["alternatives"] = word_alternatives(partial.words, nbest)
        self.emit(event)

    def _finish(self, cut: bool = False) -> None:
        n_bins = self.decoder.n_bins
        nbest = self.decoder.finish_nbest(self.settings.alternatives, adapt=self._is_open and not cut)
        if self._is_open:
            self.n_sentences += 1
            self.emit({**self._final_event(nbest, n_bins, None if cut else self.reference), "cut": cut})
        elif self._is_phrase(nbest[0]):
            self._is_open = True
        self.trial = self.reference = None
        self._await_sentence()

    def _final_event(self, nbest: list[Hypothesis], n_bins: int, reference: str | None) -> Event:
        best = nbest[0]
        words = best.words or tuple(best.phonemes)
        return {
            "type": "final",
            "number": self.n_sentences,
            "words": list(words),
            "text": " ".join(words),
            "times_s": [[round(t.first * self._frame_s, 3), round(t.last * self._frame_s, 3)] for t in best.times],
            "alternatives": word_alternatives(words, [h.words for h in nbest[1:]]),
            "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in nbest],
            "score": best.total,
            "n_bins": n_bins,
            "session": self.decoder.session,
            "trial": self.trial,
            "reference": reference,
            "alignment": align_words(reference, words),
        }

    def _is_phrase(self, best: Hypothesis) -> bool:
        phrase = self.settings.start.phrase
        return phrase is not None and normalise_text(best.text or "") == normalise_text(phrase)


def word_alternatives(words: Sequence[str], nbest: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """For each position what other hypotheses have there, best hypothesis first."""
    found: dict[int, list[str]] = {}
    for hypothesis in nbest:
        for op in Levenshtein.opcodes(words, hypothesis):
            if op.tag != "replace":
                continue
            width, other = op.src_end - op.src_start, hypothesis[op.dest_start : op.dest_end]
            for k in range(width):  # word by word; surplus words go to the last position
                alternative = " ".join(other[k:] if k == width - 1 else other[k : k + 1])
                listed = found.setdefault(op.src_start + k, [])
                if alternative and alternative not in listed:
                    listed.append(alternative)
    return found


def align_words(reference: str | None, words: Sequence[str]) -> list[dict[str, Any]] | None:
    """Align decoded words with the reference: correct, substitution (with its reference), insertion, deletion."""
    if reference is None:
        return None
    expected = normalise_text(reference).split()
    aligned: list[dict[str, Any]] = []
    for op in Levenshtein.opcodes(expected, [normalise_text(word) for word in words]):
        source, target = expected[op.src_start : op.src_end], words[op.dest_start : op.dest_end]
        if op.tag == "equal":
            aligned += [{"word": word, "op": "correct"} for word in target]
        elif op.tag == "delete":
            aligned += [{"word": word, "op": "deletion"} for word in source]
        elif op.tag == "insert":
            aligned += [{"word": word, "op": "insertion"} for word in target]
        else:
            aligned += [
                {"word": word, "op": "substitution", "reference": wanted}
                for wanted, word in zip(source, target, strict=True)
            ]
    return aligned
