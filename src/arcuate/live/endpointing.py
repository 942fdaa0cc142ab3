"""Sentences from a stream of bins: their start and end, the events they emit, and the gate.

The gate controls whether text is shown and recorded.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from arcuate.data.alphabet import BLANK, token_names
from arcuate.data.text import normalise_text
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis, Partial, word_alternatives
from arcuate.evaluation.metrics import align_words
from arcuate.evaluation.unlabelled import ErrorReference, estimate_error, measure_trial
from arcuate.live.input import Mark
from arcuate.live.options import LiveOptions

Event = dict[str, Any]
_SPEECH_THRESHOLD = 0.5  # probability of phonemes above which a frame counts as speech
_ONSET_FRAMES = 2  # speech frames within _ONSET_S that start a sentence
_ONSET_S = 0.5
_PRE_ROLL_S = 0.6  # before the onset, included in the sentence
_N_BEST = 5  # hypotheses from which word alternatives are taken
_ESTIMATE_SENTENCES = 20  # latest sentences for which the error rate is estimated
_MAX_IDLE_FRAMES = 60  # without speech the decoder is reset after this many frames, so that memory stays bounded


class Endpointer:
    """Splits one stream of bins into sentences and emits their events.

    States: closed (bins are discarded), listening (waiting for speech), speaking (within a sentence). A marked trial is
    one sentence from its first bin to its end; only `max_s` ends it earlier. The gate `is_open` decides whether text is
    shown and recorded. With a closed gate and a start phrase, sentences are decoded only to recognise the phrase; to
    viewers the state is then "closed" too.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: LiveOptions,
        emit: Callable[[Event], None],
        on_decoded: Callable[[np.ndarray, np.ndarray], None] | None = None,
        error_reference: ErrorReference | None = None,
    ) -> None:
        self.decoder = decoder
        self.options = options
        self.emit = emit
        self.on_decoded = on_decoded  # called with bins and frames while the gate is open
        self.n_sentences = 0
        self._mark: Mark | None = None  # of the current trial
        self._reference: str | None = None
        self._totals = {"n_errors": 0, "n_words": 0, "n_sentences": 0}  # sums over sentences with a reference
        self.error_reference = error_reference  # of labelled trials, with which sentences are compared
        self._evidence: deque[np.ndarray] = deque(maxlen=_ESTIMATE_SENTENCES)
        self._stride = decoder.layout.stride
        self._frame_s = self._stride * BIN_SECONDS
        self.state: Literal["closed", "listening", "speaking"] = "listening"
        self.is_open = not options.closed and options.phrase is None
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
        started, seconds, first = time.perf_counter(), [], 0
        while first < len(bins):
            step = self._stride if self._mark is None else len(bins)
            if self._push_piece(bins[first : first + step]):
                seconds.append(time.perf_counter() - started)
            first += step
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
        self._mark, self._reference = mark, mark.reference
        if mark.session is not None or mark.statistics is not None:
            self.decoder.reset(mark.session, mark.statistics)
        self._await_sentence()
        if self.is_open:
            trial = {"trial": mark.trial, "session": self.decoder.session, "reference": mark.reference}
            self.emit({"type": "trial", **trial})

    def change_session(self, session: str) -> None:
        """Decode the next bins with the layer of another session; the current sentence is cut off."""
        self.end(cut=True)
        self.decoder.reset(session)

    def end(self, cut: bool = False) -> None:
        """End the current sentence if there is one, and the trial; `cut` marks it as incomplete."""
        if self.state == "speaking" and (self.decoder.n_bins or self.decoder.n_frames):
            self._finish(cut)
        elif self.state != "closed":
            self.decoder.reset()
            self._mark = self._reference = None
            self._await_sentence()

    # --- start and end ------------------------------------------------------------------------------------

    def _drop_reference_if_closed(self, n: int) -> None:
        """Drop the reference if part of its trial arrives at a closed gate: the rest must not be scored against it."""
        if n and not self.is_open:
            self._reference = None

    def _await_sentence(self) -> None:
        can_decode = self.is_open or self.options.phrase is not None
        self.state = "closed" if not can_decode else "listening" if self._mark is None else "speaking"
        self._pre_roll: deque[np.ndarray] = deque(maxlen=round(_PRE_ROLL_S / BIN_SECONDS))
        self._speech: deque[bool] = deque(maxlen=max(_ONSET_FRAMES, round(_ONSET_S / self._frame_s)))
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
        if self.state == "listening":
            self._detect_onset(self._is_speech(partial.log_probs))
        else:
            self._emit_partial(partial)
            self._detect_end(self._is_speech(partial.log_probs))
        return True

    def _is_speech(self, log_probs: np.ndarray) -> list[bool]:
        silence = np.exp(log_probs[:, BLANK])
        if self.decoder.layout.silence >= 0:
            silence = silence + np.exp(log_probs[:, self.decoder.layout.silence])
        return [bool(p) for p in 1 - silence > _SPEECH_THRESHOLD]

    def _detect_onset(self, speech: list[bool]) -> None:
        self._speech.extend(speech)
        started = sum(self._speech) >= _ONSET_FRAMES
        if started or self.decoder.n_frames > _MAX_IDLE_FRAMES:
            self.decoder.reset()
            partial = self.decoder.push(np.array(self._pre_roll))
        if started:
            self.state = "speaking"
            self._n_silent = 0
            self._publish_state()
            self._emit_partial(partial)

    def _detect_end(self, speech: list[bool]) -> None:
        """End the sentence at its maximum length, and at a silence unless it is a marked trial."""
        for is_speech in speech:
            self._n_silent = 0 if is_speech else self._n_silent + 1
        is_marked = self._mark is not None
        if self.decoder.n_bins * BIN_SECONDS >= self.options.max_s:
            self._finish(cut=is_marked)
        elif not is_marked and self._n_silent * self._frame_s >= self.options.silence_s:
            self._finish()

    # --- events -------------------------------------------------------------------------------------------

    def _emit_partial(self, partial: Partial) -> None:
        current = (partial.words, partial.n_settled)
        if current == self._last_partial or not self.is_open:
            return
        self._last_partial = current
        kinds = ("words", "tokens") if self.decoder.decodes_words else ("tokens", "words")
        texts = dict(zip(kinds, (list(partial.words), []), strict=True))
        self.emit({"type": "partial", **texts, "n_settled": partial.n_settled, "n_frames": partial.n_frames})

    def _finish(self, cut: bool = False) -> None:
        """End the sentence: emit its final text, or open the gate if it is the start phrase."""
        n_bins, phrase = self.decoder.n_bins, self.options.phrase
        if self.error_reference is not None and self.is_open and not cut:
            self._evidence.append(measure_trial(self.decoder.sentence_log_probs()))
        nbest = self.decoder.finish_nbest(_N_BEST, adapt=self.is_open and not cut)
        if self.is_open:
            self.n_sentences += 1
            final = self._final_event(nbest, n_bins, None if cut else self._reference)
            self.count_errors(final["alignment"])
            totals = {"running": dict(self._totals), "estimate": self._estimate_error()}
            self.emit({**final, **totals, "cut": cut})
        elif phrase is not None and normalise_text(nbest[0].text or "") == normalise_text(phrase):
            self.is_open = True
        self._mark = self._reference = None
        self._await_sentence()

    def _estimate_error(self) -> dict[str, Any] | None:
        """Estimated phoneme error rate of the last sentences, without references."""
        if self.error_reference is None:
            return None
        estimate = estimate_error(self._evidence, self.error_reference)
        return None if estimate is None else estimate.to_dict()

    def count_errors(self, alignment: list[dict[str, Any]] | None) -> None:
        """Add a sentence to the running word error rate, if words were decoded and it has a reference."""
        if alignment is not None:
            self._totals["n_errors"] += sum(part["op"] != "correct" for part in alignment)
            self._totals["n_words"] += sum(part["op"] != "insertion" for part in alignment)
            self._totals["n_sentences"] += 1

    def _final_event(self, nbest: list[Hypothesis], n_bins: int, reference: str | None) -> Event:
        best = nbest[0]
        tokens = token_names(best.tokens, self.decoder.layout.classes)
        decodes_words = self.decoder.decodes_words
        return {
            "type": "final",
            "number": self.n_sentences,
            "words": list(best.words),
            "text": best.text or "",
            "tokens": tokens,
            "empty": not (best.words if decodes_words else tokens),
            "confidences": [round(p, 4) for p in best.confidences],
            "probability": best.probability,
            "doubtful": [i for i, accepted in enumerate(best.accepted) if not accepted],
            "times_s": [[round(t.first * self._frame_s, 3), round(t.last * self._frame_s, 3)] for t in best.times],
            "alternatives": word_alternatives(best.words, [h.words for h in nbest[1:]], [h.total for h in nbest[1:]]),
            "nbest": [{"text": h.text or "", "score": h.total, **h.scores} for h in nbest],
            "score": best.total,
            "n_bins": n_bins,
            "session": self.decoder.session,
            "trial": None if self._mark is None else self._mark.trial,
            "reference": reference,
            "alignment": align_words(reference, best.words) if decodes_words else None,
        }
