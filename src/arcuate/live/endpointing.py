"""Sentences from a stream of bins: their start and end, the events they emit, and the gate.

The gate controls whether text is shown and recorded.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from arcuate.data.alphabet import BLANK, token_names
from arcuate.data.text import normalise_text
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis, Partial, word_alternatives
from arcuate.evaluation.metrics import align_words
from arcuate.evaluation.unlabelled import ErrorReference, TrialEvidence, estimate_error, measure_trial
from arcuate.live.config import LiveSettings
from arcuate.live.input import Mark

Event = dict[str, Any]
_ONSET_S = 0.5  # window in which onset frames are counted
_ESTIMATE_SENTENCES = 20  # latest sentences for which the error rate is estimated
_MAX_IDLE_FRAMES = 60  # without speech the decoder is reset after this many frames, so that memory stays bounded


class Endpointer:
    """Splits one stream of bins into sentences and emits their events.

    States: closed (bins are discarded), listening (waiting for speech), speaking (within a sentence). The gate
    `is_open` decides whether text is shown and recorded. With a closed gate and a start phrase, sentences are decoded
    only to recognise the phrase; to viewers the state is then "closed" too.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: LiveSettings,
        emit: Callable[[Event], None],
        on_decoded: Callable[[np.ndarray, np.ndarray], None] | None = None,
        error_reference: ErrorReference | None = None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.emit = emit
        self.on_decoded = on_decoded  # called with bins and frames while the gate is open
        self.reference: str | None = None
        self.trial: str | None = None
        self.n_sentences = 0
        self._totals = {"n_errors": 0, "n_words": 0, "n_sentences": 0}  # sums over sentences with a reference
        self.error_reference = error_reference  # of labelled trials, with which sentences are compared
        self._evidence: deque[TrialEvidence] = deque(maxlen=_ESTIMATE_SENTENCES)
        self._stride = decoder.layout.stride
        self._frame_s = self._stride * BIN_SECONDS
        self.state: Literal["closed", "listening", "speaking"] = "listening"
        self.is_open = not settings.start.closed
        self._published: str | None = None  # last published state
        self._await_sentence()

    def open(self) -> None:
        """Open the gate; a new sentence starts with the next bins."""
        if not self.is_open:
            self.is_open = True
            self.decoder.reset()
            self._await_sentence()

    def close(self) -> None:
        """Close the gate; the current sentence is cut off."""
        if self.is_open:
            self.end(cut=True)
            self.is_open = False
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
        if self.is_open and self.on_decoded:
            self.on_decoded(np.empty((0, self.decoder.n_channels), np.float32), log_probs)
        self._emit_partial(partial)
        return [time.perf_counter() - started]

    def start_trial(self, mark: Mark) -> None:
        """Start a marked trial; the current sentence is cut off."""
        self.end(cut=True)
        self.trial, self.reference = mark.trial, mark.reference
        if mark.session is not None or mark.statistics is not None:
            self.decoder.reset(mark.session, mark.statistics)
        if self.is_open:
            trial = {"trial": mark.trial, "session": self.decoder.session, "reference": mark.reference}
            self.emit({"type": "trial", **trial})

    def end(self, cut: bool = False) -> None:
        """End the current sentence if there is one; `cut` marks it as incomplete."""
        if self.state == "speaking" and (self.decoder.n_bins or self.decoder.n_frames):
            self._finish(cut)
        elif self.state != "closed":
            self.decoder.reset()
            self._await_sentence()

    # --- start and end ------------------------------------------------------------------------------------

    def _drop_reference_if_closed(self, n: int) -> None:
        """Drop the reference if part of its trial arrives at a closed gate: the rest must not be scored against it."""
        if n and not self.is_open:
            self.reference = None

    def _await_sentence(self) -> None:
        endpoints = self.settings.endpoints
        can_decode = self.is_open or self.settings.start.phrase is not None
        self.state = "closed" if not can_decode else "listening" if endpoints.enabled else "speaking"
        self._pre_roll: deque[np.ndarray] = deque(maxlen=max(1, round(endpoints.pre_roll_s / BIN_SECONDS)))
        self._speech: deque[bool] = deque(maxlen=max(endpoints.onset_frames, round(_ONSET_S / self._frame_s)))
        self._n_silent = 0
        self._last_partial: tuple[tuple[str, ...], int] = ((), 0)
        self._publish_state()

    def _publish_state(self) -> None:
        state = self.state if self.is_open else "closed"
        if state != self._published:
            self._published = state
            self.emit({"type": "state", "state": state})

    def _push_piece(self, piece: np.ndarray) -> bool:
        """Decode a few bins; return whether they completed a frame."""
        if self.state == "listening":
            self._pre_roll.extend(piece)
        partial = self.decoder.push(piece)
        if self.is_open and self.on_decoded:
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
        if self.decoder.layout.silence >= 0:
            silence = silence + np.exp(log_probs[:, self.decoder.layout.silence])
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
        current = (partial.words, partial.n_settled)
        if current == self._last_partial or not self.is_open:
            return
        self._last_partial = current
        text = {"words": list(partial.words), "n_settled": partial.n_settled, "n_frames": partial.n_frames}
        self.emit({"type": "partial", **text})

    def _finish(self, cut: bool = False) -> None:
        """End the sentence: emit its final text, or open the gate if it is the start phrase."""
        n_bins, phrase = self.decoder.n_bins, self.settings.start.phrase
        if self.error_reference is not None and self.is_open and not cut:
            self._evidence.append(measure_trial(self.decoder.sentence_log_probs()))
        nbest = self.decoder.finish_nbest(self.settings.alternatives, adapt=self.is_open and not cut)
        if self.is_open:
            self.n_sentences += 1
            final = self._final_event(nbest, n_bins, None if cut else self.reference)
            self.count_errors(final["alignment"])
            totals = {"running": dict(self._totals), "estimate": self._estimate_error()}
            self.emit({**final, **totals, "cut": cut})
        elif phrase is not None and normalise_text(nbest[0].text or "") == normalise_text(phrase):
            self.is_open = True
        self.trial = self.reference = None
        self._await_sentence()

    def _estimate_error(self) -> dict[str, Any] | None:
        """Estimated phoneme error rate of the last sentences, without references."""
        if self.error_reference is None:
            return None
        estimate = estimate_error(self._evidence, self.error_reference)
        return None if estimate is None else estimate.to_dict()

    def count_errors(self, alignment: list[dict[str, Any]] | None) -> None:
        """Add a sentence to the running word error rate, if it has a reference."""
        if alignment is not None:
            self._totals["n_errors"] += sum(part["op"] != "correct" for part in alignment)
            self._totals["n_words"] += sum(part["op"] != "insertion" for part in alignment)
            self._totals["n_sentences"] += 1

    def _final_event(self, nbest: list[Hypothesis], n_bins: int, reference: str | None) -> Event:
        best = nbest[0]
        words = best.words or tuple(token_names(best.tokens, self.decoder.layout.classes))
        return {
            "type": "final",
            "number": self.n_sentences,
            "words": list(words),
            "text": " ".join(words),
            "confidences": [round(p, 4) for p in best.confidences],
            "probability": best.probability,
            "doubtful": [i for i, accepted in enumerate(best.accepted) if not accepted],
            "times_s": [[round(t.first * self._frame_s, 3), round(t.last * self._frame_s, 3)] for t in best.times],
            "alternatives": _alternatives(words, nbest[1:]),
            "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in nbest],
            "score": best.total,
            "n_bins": n_bins,
            "session": self.decoder.session,
            "trial": self.trial,
            "reference": reference,
            "alignment": align_words(reference, words),
        }


def _alternatives(words: Sequence[str], nbest: Sequence[Hypothesis]) -> dict[int, list[str]]:
    return word_alternatives(words, [h.words for h in nbest], [h.total for h in nbest])
