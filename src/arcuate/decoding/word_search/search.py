"""Word search: frame log-probabilities, a lexicon and an n-gram to the best word sequences.

`WordSearch` holds no state of a trial. `start`, `step` and `finish` take and return an immutable `WordState`; decoding
a complete trial is one `step`. One frame is computed in `kernel.py` (recurrence) and `beam.py` (candidates and
pruning), with the tables of `lookahead.py`; `nbest.py` traces the result.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from arcuate.data.alphabet import BLANK, boundary_index
from arcuate.decoding.class_order import ClassOrder, check_log_probs
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import GreedyState, Hypothesis, Partial, WordTime
from arcuate.decoding.word_search.beam import (
    BACKPOINTER,
    BEAM_ENTRY,
    Backpointers,
    Candidates,
    LmCache,
    SearchModels,
    SearchWeights,
    make_candidates,
    refresh_lookahead,
)
from arcuate.decoding.word_search.kernel import BACKPOINTERS_FULL, CANDIDATES_FULL, LOOKAHEAD_FULL, run_frames
from arcuate.decoding.word_search.lookahead import Tree, build_tree, cache_likely_contexts, grow_cache, make_lookahead
from arcuate.decoding.word_search.nbest import best_paths, compact, final_hypotheses, n_common_words, trace_words
from arcuate.errors import UserError
from arcuate.language.lexicon import Lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.models.layout import Frames, Head

_LM_CACHE_SIZE = 1 << 15
_MAX_BACKPOINTERS = 1 << 17  # unreachable back-pointers are removed before a buffer grows beyond this
_MAX_CACHE_ROWS = 1 << 22  # the lookahead cache is cleared before it exceeds this
_CANDIDATES_PER_ENTRY = 20  # real frames stay below 14, flat ones slightly exceed 20
_MIN_CANDIDATES = 1_000
_MAX_HALVINGS = 3  # times the threshold is halved if a frame has too many candidates; then they are truncated
_WARM_UP_ROWS = 1 << 25  # upper limit of rows cached by warm_up, 12 bytes each


@dataclass(frozen=True, eq=False)
class WordState:
    """Search state within a trial. `step` returns a new one and leaves the old one valid."""

    beam: np.ndarray  # (n,) BEAM_ENTRY
    backpointers: Backpointers
    greedy: GreedyState = field(default_factory=GreedyState)
    n_frames: int = 0
    generation: int = -1  # generation of the lookahead cache that the beam points into


@dataclass(eq=False)
class _Workspace:
    """Scratch memory and caches of a search. Clearing them changes no result."""

    models: SearchModels
    candidates: Candidates
    generation: int = 0
    warm_up_rows: int = 0  # cache capacity made by warm_up
    lock: threading.Lock = field(default_factory=threading.Lock)  # streams share one workspace


@dataclass(frozen=True, eq=False)
class WordSearch:
    """A lexicon, an n-gram and their weights."""

    tree: Tree
    lexicon: Lexicon
    model: LanguageModel
    order: ClassOrder  # maps the classes of the model to those of the lexicon
    settings: DecodingConfig = field(default_factory=DecodingConfig)
    oov_words: tuple[str, ...] = ()  # lexicon words that are not in the n-gram
    merge_histories: bool = True  # recombine hypotheses with the same n-gram state; n-best lists contain all of them
    workspace: _Workspace = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "workspace", _Workspace(self._models(), self._make_candidates(1 << 13)))

    @property
    def word_search(self) -> "WordSearch":
        return self

    @property
    def head(self) -> Head:
        return "ctc"

    @property
    def boundary(self) -> int:
        """Class of the silence between words, or -1."""
        return boundary_index(self.classes)

    @property
    def words(self) -> tuple[str, ...]:
        return self.lexicon.words

    @property
    def classes(self) -> tuple[str, ...]:
        return self.lexicon.classes

    def _make_candidates(self, capacity: int) -> Candidates:
        return make_candidates(min(capacity, self._max_candidates))

    @property
    def _max_candidates(self) -> int:
        """Limit on candidates per frame, which bounds the time of a frame."""
        return max(_MIN_CANDIDATES, _CANDIDATES_PER_ENTRY * self.settings.beam)

    def _models(self) -> SearchModels:
        lookahead = make_lookahead(self.tree, self.model.arrays, len(self.model.words), self.settings.lm_weight)
        cache = LmCache(
            np.full(_LM_CACHE_SIZE, -1, np.int64),
            np.empty(_LM_CACHE_SIZE, np.float32),
            np.empty(_LM_CACHE_SIZE, np.int32),
        )
        return SearchModels(self.tree, self.model.arrays, lookahead, cache)

    def with_settings(self, settings: DecodingConfig) -> "WordSearch":
        """The same lexicon and n-gram with other settings."""
        return replace(self, settings=settings)

    @property
    def weights(self) -> SearchWeights:
        s = self.settings
        return SearchWeights(
            lm=float(s.lm_weight),
            word=float(s.word_bonus),
            silence=float(s.silence_bonus),
            missing_silence=float(s.missing_silence_bonus),
            threshold=float(s.threshold),
            beam=int(s.beam),
            blank=BLANK,
            boundary=self.boundary,
            merge_histories=self.merge_histories,
        )

    def warm_up(self, max_rows: int = _WARM_UP_ROWS) -> None:
        """Compile, allocate, and cache the lookahead of likely words, so that no single frame is late."""
        workspace = self.workspace
        workspace.candidates = self._make_candidates(max(1 << 15, len(workspace.candidates.entries)))
        workspace.models = workspace.models._replace(
            lookahead=cache_likely_contexts(workspace.models.lookahead, self.model.arrays, self.tree, max_rows)
        )
        workspace.warm_up_rows = len(workspace.models.lookahead.row_nodes)
        n_classes = len(self.order.model_classes)
        state = self.step(self.start(), Frames(np.full((4, n_classes), -np.log(n_classes), np.float32)))
        self.partial(state)
        self.finish(state, n_best=2)

    def search(self, frames: Frames, n_best: int = 1) -> list[Hypothesis]:
        """Decode a complete trial."""
        return self.finish(self.step(self.start(), frames), n_best)

    def start(self) -> WordState:
        beam = np.zeros(1, BEAM_ENTRY)
        beam["log_token"], beam["last_token"], beam["first_frame"] = -np.inf, -1, -1
        beam["backpointer"], beam["pending_word"], beam["row"] = -1, -1, -1
        beam["lm_state"] = self.model.start
        return WordState(beam, Backpointers.empty(BACKPOINTER, 1 << 12))

    def step(self, state: WordState, frames: Frames) -> WordState:
        """Advance the state over further frames."""
        log_probs = check_log_probs(frames.log_probs, self.order.model_classes)
        ordered = self.order(log_probs).copy()
        ordered[:, BLANK] -= self.settings.blank_penalty
        with self.workspace.lock:
            return replace(self._run(state, ordered), greedy=state.greedy.extend(log_probs))

    def _run(self, state: WordState, frames: np.ndarray) -> WordState:
        """Advance over frames; a frame with too many candidates is repeated with half the threshold, and so on.

        The bound is on candidates, not on time, so the result depends on the frames alone.
        """
        workspace = self.workspace
        beam, backpointers = self._refreshed_beam(state), state.backpointers.reserve(1 << 10)
        done = halvings = 0
        while done < len(frames):
            beam, n_rows, n, status = run_frames(
                frames[done : done + 1] if halvings else frames[done:],
                beam,
                state.n_frames + done,
                backpointers.rows,
                backpointers.n,
                workspace.models,
                self._narrowed_weights(halvings),
                workspace.candidates,
            )
            if n:
                halvings = 0
            done, backpointers = done + n, backpointers.appended(n_rows)
            capacity = len(workspace.candidates.entries)
            if status == CANDIDATES_FULL and capacity == self._max_candidates:
                halvings += 1
            elif status == CANDIDATES_FULL:
                workspace.candidates = self._make_candidates(2 * capacity)
            elif status == BACKPOINTERS_FULL:
                beam, backpointers = _make_room(beam, backpointers, 3 * int(workspace.candidates.counts[0]))
            elif status == LOOKAHEAD_FULL:
                self._grow_lookahead()
        return WordState(beam, backpointers, state.greedy, state.n_frames + done, workspace.generation)

    def _narrowed_weights(self, halvings: int) -> SearchWeights:
        weights = self.weights
        threshold = weights.threshold / 2 ** min(halvings, _MAX_HALVINGS)
        return weights._replace(threshold=threshold, truncate=halvings > _MAX_HALVINGS)

    def _grow_lookahead(self) -> None:
        models = self.workspace.models
        self.workspace.models = models._replace(lookahead=grow_cache(models.lookahead))

    def _refreshed_beam(self, state: WordState) -> np.ndarray:
        """The beam with rows of the current lookahead cache. Clears the cache when it is too large."""
        workspace = self.workspace
        lookahead = workspace.models.lookahead
        if lookahead.n_rows[0] > max(_MAX_CACHE_ROWS, workspace.warm_up_rows):
            lookahead.roots[:] = -1
            lookahead.n_rows[0] = 0
            workspace.generation += 1
        if state.generation == workspace.generation:
            return state.beam
        beam = state.beam.copy()
        while not refresh_lookahead(beam, workspace.models):
            self._grow_lookahead()
        return beam

    def partial(self, state: WordState) -> Partial:
        """Complete words of the best hypothesis so far; those that all hypotheses share can no longer change."""
        if not len(state.beam):
            return Partial((), state.greedy.tokens)
        acoustic = np.maximum(state.beam["log_blank"], state.beam["log_token"])
        language = self.settings.lm_weight * (state.beam["lm"] + state.beam["lookahead"]) + state.beam["bonus"]
        best = int(np.argmax(acoustic + language))
        rows = trace_words(state.backpointers.rows, state.beam["backpointer"][best])
        words = tuple(self.words[w] for w in state.backpointers.rows["word"][rows])
        n_settled = int(n_common_words(state.backpointers.rows, state.beam["backpointer"]))
        return Partial(words, state.greedy.tokens, n_settled)

    def finish(self, state: WordState, n_best: int = 1) -> list[Hypothesis]:
        """N-best list of all frames so far, including the end-of-sentence probability.

        Empty if the frames rule out every word of the lexicon and silence: a required class had probability zero.
        """
        settings = self.settings
        ends = final_hypotheses(state.beam, self.model.arrays, self.model.eos, settings.lm_weight)
        scores, offsets, rows = best_paths(state.backpointers.rows, *ends, n_best, 20 * n_best)
        return [self._hypothesis(state, scores[i], rows[offsets[i] : offsets[i + 1]]) for i in range(len(scores))]

    def _hypothesis(self, state: WordState, scores: np.ndarray, rows: np.ndarray) -> Hypothesis:
        total, lm, bonus = (float(x) for x in scores)
        words = state.backpointers.rows[rows]
        return Hypothesis(
            state.greedy.tokens,
            {"acoustic": total - self.settings.lm_weight * lm - bonus, "lm": lm, "bonus": bonus},
            tuple(self.words[w] for w in words["word"]),
            tuple(WordTime(int(a), int(b)) for a, b in zip(words["first_frame"], words["last_frame"], strict=True)),
            total,
        )


def _make_room(beam: np.ndarray, backpointers: Backpointers, n_more: int) -> tuple[np.ndarray, Backpointers]:
    """Make room for `n_more` rows: grow the buffer up to a limit, then remove unreachable rows first."""
    if backpointers.n + n_more <= _MAX_BACKPOINTERS:
        return beam, backpointers.reserve(max(n_more, backpointers.n))
    beam, rows = beam.copy(), np.empty(max(_MAX_BACKPOINTERS, 2 * backpointers.n), BACKPOINTER)
    n = int(compact(backpointers.rows, backpointers.n, beam, rows))
    return beam, Backpointers(rows, [n], n).reserve(n_more)


def build_word_search(
    lexicon: Lexicon,
    model: LanguageModel,
    settings: DecodingConfig | None = None,
    *,
    order: ClassOrder | None = None,
    weights: Mapping[str, float] | None = None,
    merge_histories: bool = True,
) -> WordSearch:
    """Build a search over the words of a lexicon. `weights` in nats favour some words (hot words, names).

    `order` maps the classes of the frames to those of the lexicon, if they differ. Words that the n-gram does not
    contain are scored as its unknown word. `merge_histories=False` keeps hypotheses with the same n-gram state apart,
    so that the scores of all n-best entries are exact.
    """
    if not len(lexicon):
        raise UserError("the lexicon is empty; a word search needs at least one word")
    classes = lexicon.classes
    if {BLANK, boundary_index(classes)} & set(np.unique(lexicon.tokens).tolist()):
        raise UserError(f"{lexicon.name}: pronunciations must not contain the blank or the word boundary")
    ids = model.find_all(lexicon.words)
    oov_words = tuple(lexicon.words[i] for i in np.flatnonzero(ids < 0))
    bonuses = np.array([(weights or {}).get(word, 0.0) for word in lexicon.words], np.float32)
    absent = [word for word in weights or {} if word not in lexicon]
    if absent:
        raise UserError(f"{absent[0]!r} has a weight but no pronunciation; add it to the lexicon first")
    tree = build_tree(lexicon.word_of, lexicon.tokens, lexicon.offsets, np.where(ids < 0, model.unk, ids), bonuses)
    return WordSearch(
        tree,
        lexicon,
        model,
        order or ClassOrder(tuple(classes), tuple(classes), tuple(range(len(classes)))),
        settings or DecodingConfig(),
        oov_words,
        merge_histories=merge_histories,
    )
