"""The word search: frames, lexicon and n-gram to the best word sequences, whole or frame by frame.

Tokens pass through the lexicon tree; a token is a place in the tree, the state of the n-gram after the words before,
and two scores of the sound (ending in blank or not). The n-gram is asked the moment a pronunciation is complete, and
looked ahead to before that. `WordSearch` holds nothing of a trial: `start`, `step` and `finish` take and return it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from arcuate.decoding.backpointers import Log, empty_log
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis, WordTime
from arcuate.decoding.log_probs import check_log_probs
from arcuate.decoding.word_search.beam import RECORD, TOKEN, Memo, Models, Pool, Weights
from arcuate.decoding.word_search.kernel import LOG_FULL, POOL_FULL, SPROUTS_FULL, relocate, run_frames
from arcuate.decoding.word_search.lookahead import look_ahead, sprout_all, with_room
from arcuate.decoding.word_search.nbest import best_paths, endings, forget, n_settled, read_words
from arcuate.decoding.word_search.tree import Tree, grow_tree
from arcuate.errors import UserError
from arcuate.language.lexicon import Lexicon
from arcuate.language.ngram.model import LanguageModel

MEMO = 1 << 15
LOG_ROWS = 1 << 17  # forget what is not needed before a log grows beyond this
SPROUT_ROWS = 1 << 22  # lay all sprouts out anew before they take more than this
WARM_ROWS = 1 << 25  # lay out no more than this ahead of time: 12 bytes each


@dataclass(frozen=True, eq=False)
class WordState:
    """A trial half heard. A value: `step` returns a new one and leaves the old one as it was."""

    beam: np.ndarray  # (n,) TOKEN
    log: Log  # of RECORD
    n_frames: int = 0
    generation: int = 0  # of the sprouts that the beam points into


@dataclass(eq=False)
class Memory:
    """What a search may forget at any time without changing a result: scratch space and memos."""

    models: Models
    pool: Pool
    generation: int = 0
    warm_rows: int = 0  # room that was made ahead of time


@dataclass(frozen=True, eq=False)
class WordSearch:
    """A lexicon, an n-gram and their weights."""

    tree: Tree
    words: Sequence[str]  # of the lexicon
    model: LanguageModel
    classes: tuple[str, ...]
    boundary: int  # class of the silence between words, -1 where there is none; blank is 0
    settings: DecodingConfig = field(default_factory=DecodingConfig)
    oov_words: tuple[str, ...] = ()  # words of the lexicon that the n-gram does not know
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", Memory(self._models(), make_pool(1 << 13)))

    def _models(self) -> Models:
        ahead = look_ahead(self.tree, self.model.arrays, len(self.model.words), self.settings.lm_weight)
        memo = Memo(np.full(MEMO, -1, np.int64), np.empty(MEMO, np.float32), np.empty(MEMO, np.int32))
        return Models(self.tree, self.model.arrays, ahead, memo)

    @property
    def weights(self) -> Weights:
        s = self.settings
        return Weights(
            lm=float(s.lm_weight),
            word=float(s.word_bonus),
            silence=float(s.silence_bonus),
            join=float(s.missing_silence_bonus),
            threshold=float(s.threshold),
            width=int(s.beam),
            blank=0,
            boundary=self.boundary,
            summing=s.alignments == "sum",
            merging=s.merge_histories,
        )

    def warm_up(self, max_rows: int = WARM_ROWS) -> None:
        """Do now what would make single frames late: compile, make room, lay out the sprouts of likely words."""
        memory = self.memory
        memory.pool = make_pool(max(1 << 15, len(memory.pool.tokens)))
        memory.models = memory.models._replace(
            ahead=sprout_all(memory.models.ahead, self.model.arrays, self.tree, max_rows)
        )
        memory.warm_rows = len(memory.models.ahead.nodes)
        even = np.full((4, len(self.classes)), -np.log(len(self.classes)), np.float32)
        state = self.step(self.start(), even)
        self.partial(state), self.n_settled(state)
        self.finish(state, n_best=2)

    def start(self) -> WordState:
        beam = np.zeros(1, TOKEN)
        beam["log_token"], beam["last"], beam["first"] = -np.inf, -1, -1
        beam["history"], beam["word"], beam["row"] = -1, -1, -1
        beam["lm_state"] = self.model.start
        return WordState(beam, empty_log(RECORD, 1 << 12), generation=-1)

    def step(self, state: WordState, log_probs: np.ndarray) -> WordState:
        """The state after more frames: (F, V) natural-log probabilities."""
        frames = self.weigh(check_log_probs(log_probs, self.classes))
        return self._run(state, frames)

    def weigh(self, frames: np.ndarray) -> np.ndarray:
        """The sound as it counts: scaled, blank made dearer."""
        scaled = frames * np.float32(self.settings.acoustic_scale)
        scaled[:, 0] -= self.settings.blank_penalty
        return scaled

    def _run(self, state: WordState, frames: np.ndarray) -> WordState:
        memory, weights = self.memory, self.weights
        beam, log = self._located(state), state.log.with_room(1 << 10)
        done = 0
        while done < len(frames):
            beam, n_log, n, why = run_frames(
                frames[done:],
                beam,
                state.n_frames + done,
                log.rows,
                log.n,
                memory.models,
                weights,
                memory.pool,
            )
            done, log = done + n, log.appended(n_log)
            if why == POOL_FULL:
                memory.pool = make_pool(2 * len(memory.pool.tokens))
            elif why == LOG_FULL:
                beam, log = tidy(beam, log, 3 * int(memory.pool.n[0]))
            elif why == SPROUTS_FULL:
                memory.models = memory.models._replace(ahead=with_room(memory.models.ahead))
        return WordState(beam, log, state.n_frames + done, memory.generation)

    def _located(self, state: WordState) -> np.ndarray:
        """The beam with rows that point into the sprouts as they are now."""
        memory = self.memory
        if memory.models.ahead.used[0] > max(SPROUT_ROWS, memory.warm_rows):
            memory.models.ahead.heads[:] = -1
            memory.models.ahead.used[0] = 0
            memory.generation += 1
        if state.generation == memory.generation:
            return state.beam
        beam = state.beam.copy()
        while not relocate(beam, memory.models):
            memory.models = memory.models._replace(ahead=with_room(memory.models.ahead))
        return beam

    def partial(self, state: WordState) -> list[str]:
        """The words of the best reading so far; a word still being said is not among them."""
        if not len(state.beam):
            return []
        rank = np.maximum(state.beam["log_blank"], state.beam["log_token"])
        prior = self.settings.lm_weight * (state.beam["lm"] + state.beam["ahead"]) + state.beam["bonus"]
        best = int(np.argmax(rank + prior))
        rows = read_words(state.log.rows, state.beam["history"][best])
        return [self.words[w] for w in state.log.rows["word"][rows]]

    def n_settled(self, state: WordState) -> int:
        """How many words from the beginning on no later frame can change: all readings have them in common."""
        return int(n_settled(state.log.rows, state.beam["history"])) if len(state.beam) else 0

    def finish(self, state: WordState, n_best: int = 1) -> list[Hypothesis]:
        """The best readings of all that was heard, best first, the end of the sentence included.

        None where no word of the lexicon, nor silence, can be what was heard: some class had no probability at all.
        """
        settings = self.settings
        ends = endings(
            state.beam, self.model.arrays, self.model.eos, settings.lm_weight, settings.alignments == "sum"
        )
        scores, bounds, rows = best_paths(state.log.rows, *ends, n_best, 20 * n_best)
        return [
            self._hypothesis(state, scores[i], rows[bounds[i] : bounds[i + 1]]) for i in range(len(scores))
        ]

    def _hypothesis(self, state: WordState, scores: np.ndarray, rows: np.ndarray) -> Hypothesis:
        total, lm, bonus = (float(x) for x in scores)
        said = state.log.rows[rows]
        return Hypothesis(
            (),
            {"acoustic": total - self.settings.lm_weight * lm - bonus, "lm": lm, "bonus": bonus},
            tuple(self.words[w] for w in said["word"]),
            tuple(WordTime(int(a), int(b)) for a, b in zip(said["first"], said["last"], strict=True)),
            total,
        )

    def search(self, log_probs: np.ndarray, n_best: int = 1) -> list[Hypothesis]:
        """A whole trial: streaming with one chunk."""
        return self.finish(self.step(self.start(), log_probs), n_best)

    def with_settings(self, settings: DecodingConfig) -> "WordSearch":
        """The same lexicon and n-gram under other weights."""
        return replace(self, settings=settings)


def make_pool(room: int) -> Pool:
    return Pool(
        tokens=np.zeros(room, TOKEN),
        keys=np.empty(room, np.uint64),
        priors=np.empty(room),
        slots=np.empty(2 * room, np.int32),
        n=np.zeros(2, np.int64),
        chains=np.empty(room, np.int32),
    )


def tidy(beam: np.ndarray, log: Log, n_more: int) -> tuple[np.ndarray, Log]:
    """Room for more rows: by forgetting those that nothing leads to, by a longer log where that is not enough."""
    if log.n + n_more <= LOG_ROWS:
        return beam, log.with_room(max(n_more, log.n))
    beam, new = beam.copy(), np.empty(max(LOG_ROWS, 2 * log.n), RECORD)
    n = int(forget(log.rows, log.n, beam, new))
    return beam, Log(new, [n], n).with_room(n_more)


# A word search from its parts: a lexicon, a language model, weights, and words added on the way.


def build_word_search(
    lexicon: Lexicon,
    model: LanguageModel,
    settings: DecodingConfig | None = None,
    *,
    boundary: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> WordSearch:
    """A search over the words of a lexicon; `weights` in nat make some words likelier (hot words, names).

    Blank is class 0 and the boundary the last class, as `FrameScores` arranges them; `boundary=-1` for alphabets
    without one. Words that the model does not know are scored as its unknown word.
    """
    if not len(lexicon):
        raise UserError("the lexicon is empty; a search needs at least one word")
    classes = lexicon.classes
    edge = len(classes) - 1 if boundary is None else boundary
    said = set(np.unique(lexicon.tokens).tolist())
    if 0 in said or edge in said:
        raise UserError(f"{lexicon.name}: pronunciations must not contain the blank or the word boundary")
    ids = model.words.find_all(lexicon.words).astype(np.int32)
    oov_words = tuple(lexicon.words[i] for i in np.flatnonzero(ids < 0))
    extra = np.array([(weights or {}).get(word, 0.0) for word in lexicon.words], np.float32)
    absent = [word for word in weights or {} if word not in lexicon]
    if absent:
        raise UserError(f"{absent[0]!r} has a weight but no pronunciation; add it to the lexicon first")
    tree = grow_tree(
        lexicon.word_of, lexicon.tokens, lexicon.offsets, np.where(ids < 0, model.unk, ids), extra
    )
    return WordSearch(tree, lexicon.words, model, classes, edge, settings or DecodingConfig(), oov_words)


def with_words(
    search: WordSearch,
    lexicon: Lexicon,
    words: Mapping[str, float],
    pronunciations: Mapping[str, list[tuple[str, ...]]] | None = None,
) -> tuple[WordSearch, Lexicon]:
    """The search with further words, each with its weight; said as given, else as the dictionary or a rule says."""
    given = pronunciations or {}
    longer = lexicon.with_entries((word, phones) for word in given for phones in given[word])
    longer = longer.with_words(word for word in words if word not in longer)
    known = {word: float(w) for word, w in zip(search.words, search.tree.weights, strict=True) if w}
    boundary = search.boundary
    return build_word_search(
        longer, search.model, search.settings, boundary=boundary, weights=known | dict(words)
    ), longer
