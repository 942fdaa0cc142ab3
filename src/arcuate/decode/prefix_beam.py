"""CTC prefix beam search: the most probable token sequences, summed over all their alignments.

A prefix keeps two scores: all alignments that end in blank, and all that end in its last token. A token equal to the
last one starts anew only after a blank; without one it prolongs what is there. With an unlimited beam the scores
are exact, which `tests/test_prefix_beam.py` holds against enumeration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.decode.history import Log, empty_log
from arcuate.decode.hypothesis import Hypothesis
from arcuate.decode.prefix_kernel import ENTRY, PREFIX, Prior, read_back, step_frames
from arcuate.decode.scores import check_frames
from arcuate.errors import UserError
from arcuate.lm.model import LanguageModel
from arcuate.lm.query import NGramArrays, advance
from arcuate.tokens import BLANK, CLASSES

BLOCK = 64  # frames per compiled call


@dataclass(frozen=True, eq=False)
class TokenModel:
    """An n-gram over tokens, with the word of the n-gram that each class is."""

    arrays: NGramArrays
    words: np.ndarray  # (V,) int64; empty: no model
    start: int = 0
    end: int = 0  # the word </s>

    def endings(self, states: np.ndarray) -> np.ndarray:
        """What ending here is worth, by state."""
        if not len(self.words):
            return np.zeros(len(states))
        return np.array([advance(self.arrays, state, self.end)[0] for state in states])


def read_only(values: Sequence[float], dtype: type) -> np.ndarray:
    array: np.ndarray = np.array(values, dtype)
    array.flags.writeable = False  # as arrays of a mapped file are: one compiled version serves both
    return array


NO_NGRAM = NGramArrays(
    words=read_only([-1], np.int32),
    log_probs=read_only([0.0], np.float32),
    backoffs=read_only([0.0], np.float32),
    firsts=read_only([1, 1], np.int32),
    suffixes=read_only([0], np.int32),
    nexts=read_only([], np.int32),
)
NO_MODEL = TokenModel(NO_NGRAM, np.empty(0, np.int64))


def token_model(model: LanguageModel, classes: Sequence[str] = CLASSES, blank: int = BLANK) -> TokenModel:
    """An n-gram whose words are the names of the classes; every class but blank must be among them."""
    words = np.array([model.words.find(name) for name in classes], np.int64)
    missing = [name for i, name in enumerate(classes) if words[i] < 0 and i != blank]
    if missing:
        raise UserError(
            f"the phoneme n-gram does not know {', '.join(missing)}; build it from lines of phoneme names"
        )
    return TokenModel(model.arrays, words, model.start, model.eos)


@dataclass(frozen=True, eq=False)
class PrefixState:
    """The beam after some frames. A value: `step` returns a new one and leaves the old one as it was."""

    beam: np.ndarray  # (n,) PREFIX, best first
    log: Log
    n_frames: int = 0


@dataclass(frozen=True, eq=False)
class PhonemeSearch:
    """What a search needs to know; nothing of a trial is in it."""

    beam: int = 20
    classes: tuple[str, ...] = CLASSES
    blank: int = BLANK
    model: TokenModel = NO_MODEL
    lm_weight: float = 0.0
    token_bonus: float = 0.0

    def start(self) -> PrefixState:
        beam = np.zeros(1, PREFIX)
        beam["log_token"], beam["last"], beam["entry"] = -np.inf, -1, -1
        beam["lm_state"] = self.model.start
        return PrefixState(beam, empty_log(ENTRY, self.beam * BLOCK))

    def step(self, state: PrefixState, log_probs: np.ndarray) -> PrefixState:
        """The state after more frames: (F, V) natural-log probabilities."""
        frames = check_frames(log_probs, self.classes)
        for first in range(0, len(frames), BLOCK):
            state = self._step(state, frames[first : first + BLOCK])
        return state

    def _step(self, state: PrefixState, frames: np.ndarray) -> PrefixState:
        log = state.log.with_room(self.beam * len(frames))
        prior = Prior(self.model.arrays, self.model.words, self.lm_weight, self.token_bonus)
        beam, n = step_frames(frames, state.beam, log.rows, log.n, prior, self.blank, self.beam)
        return PrefixState(beam, log.appended(n), state.n_frames + len(frames))

    def partial(self, state: PrefixState) -> tuple[int, ...]:
        """The best prefix so far."""
        return tuple(read_back(state.log.rows, state.beam["entry"][0]).tolist())

    def finish(self, state: PrefixState, n_best: int = 1) -> list[Hypothesis]:
        """The best token sequences, best first, with their scores by source."""
        beam, endings = state.beam, self.model.endings(state.beam["lm_state"])
        acoustic = np.logaddexp(beam["log_blank"], beam["log_token"])
        totals = acoustic + beam["prior"] + self.lm_weight * endings
        best = np.argsort(-totals, kind="stable")[:n_best]
        return [
            Hypothesis(
                tuple(read_back(state.log.rows, beam["entry"][i]).tolist()),
                {
                    "acoustic": float(acoustic[i]),
                    "lm": float(beam["lm"][i] + endings[i]),
                    "bonus": self.token_bonus * int(beam["n_tokens"][i]),
                },
                total=float(totals[i]),
            )
            for i in best
        ]

    def search(self, log_probs: np.ndarray, n_best: int = 1) -> list[Hypothesis]:
        """A whole trial: streaming with one chunk."""
        return self.finish(self.step(self.start(), log_probs), n_best)

    def tokens(self, log_probs: np.ndarray) -> list[int]:
        """The best token sequence of one trial."""
        return list(self.search(log_probs)[0].tokens)
