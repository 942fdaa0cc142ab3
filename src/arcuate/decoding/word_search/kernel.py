"""Compiled frame loop of the word search: token passing over the lexicon tree (Young et al. 1989) with CTC topology.

Differences from textbook token passing: every beam entry carries two acoustic scores, as in CTC prefix beam search,
and entries with equal word history, node and last token are merged within the frame. The score of a word sequence is
therefore the sum over all its alignments, silences and pronunciations.

Recurrence. Let b and k be the log-scores of the alignments of entry e that end in blank and in its last token a, and
p(c) the log-probability of class c at this frame. `⊕` is log-sum. SIL is the class `weights.boundary`.

    stay     b' = (b ⊕ k) + p(blank)                        same entry
             k' = k + p(a)                                  same entry: the last token is repeated
    silence  k' = (b ⊕ k) + p(SIL) + silence                at the root; only b if a is already SIL
    advance  k' = (b ⊕ k) + p(c)                            child node with token c; only b if c = a, because CTC
                                                            needs a blank between equal tokens
    end      the same arc, if a pronunciation ends at the child: back to the root with n-gram score and word bonus

The total score of an entry is acoustic score + language score, where language score = weights.lm · (n-gram score +
lookahead) + bonuses. A word that follows another without silence also gets `missing_silence`, on its first token.

Pruning order within a frame: stay transitions first, which give a good running best score at once; then entries, arcs
and word ends are skipped when even their optimistic total is below best − threshold. What remains is a candidate, and
`beam.prune` selects the next beam from all candidates.

All scores are sums of logarithms in float64; log_add never exponentiates a positive number, and impossible events are
−inf, which is tested for before infinities could be subtracted. Cost per frame: O(entries · arcs per node) arc tests,
of which few pass the threshold; one hash insertion per passing arc.
"""

import numpy as np

from arcuate.decoding.word_search.beam import (
    Candidates,
    LmCache,
    SearchModels,
    SearchWeights,
    attach_successor_rows,
    candidate_key,
    collect_beam,
    find_or_insert,
    prune,
)
from arcuate.decoding.word_search.lookahead import bigram_context
from arcuate.language.jit import NEG_INF, Row, hash_append, log_add, njit, unmanaged
from arcuate.language.ngram.query import NGramArrays, advance, backoff

DONE, CANDIDATES_FULL, BACKPOINTERS_FULL, LOOKAHEAD_FULL = 0, 1, 2, 3


@njit(cache=True)
def run_frames(
    frames: np.ndarray,  # (F, V) float32, blank penalty included
    beam: np.ndarray,  # (n,) BEAM_ENTRY
    t0: int,  # index of the first frame in the trial
    backpointers: np.ndarray,  # (capacity,) BACKPOINTER, appended to
    n_rows: int,
    models: SearchModels,
    weights: SearchWeights,
    candidates: Candidates,
) -> tuple[np.ndarray, int, int, int]:
    """Advance the beam over the frames; return (beam, back-pointer rows, frames done, status).

    A status other than DONE names the buffer that was too small. The failing frame has not been applied:
    enlarge the buffer and call again from that frame.
    """
    models, candidates = unmanaged(models), unmanaged(candidates)  # views without reference counting
    backpointers = unmanaged(backpointers)
    for t in range(frames.shape[0]):
        candidates.counts[:] = 0
        candidates.slots[:] = -1
        _expand(unmanaged(beam), unmanaged(frames[t]), t0 + t, models, weights, candidates)
        if candidates.counts[1] and not weights.truncate:
            return beam, n_rows, t, CANDIDATES_FULL
        if n_rows + 3 * candidates.counts[0] > backpointers.shape[0]:
            return beam, n_rows, t, BACKPOINTERS_FULL
        kept = prune(candidates, weights)
        if not attach_successor_rows(candidates, kept, models):
            return beam, n_rows, t, LOOKAHEAD_FULL
        beam, n_rows = collect_beam(candidates, kept, t0 + t, backpointers, n_rows)
    return beam, n_rows, frames.shape[0], DONE


@njit(cache=True)
def _expand(
    beam: np.ndarray,
    log_probs: np.ndarray,  # (V,)
    t: int,
    models: SearchModels,
    weights: SearchWeights,
    candidates: Candidates,
) -> None:
    """Insert all candidates of one frame that are within the threshold of the best so far."""
    best = _stay(beam, log_probs, weights, candidates)
    best_class = NEG_INF  # best class other than blank
    for c in range(log_probs.shape[0]):
        if c != weights.blank:
            best_class = max(best_class, log_probs[c])
    for i in range(beam.shape[0]):
        entry = beam[i]
        acoustic = log_add(entry.log_blank, entry.log_token)
        total = acoustic + weights.lm * (entry.lm + entry.lookahead) + entry.bonus
        if total + best_class + max(weights.silence, weights.missing_silence, 0.0) < best - weights.threshold:
            continue  # no arc of this entry can survive
        if entry.node == 0 and weights.boundary >= 0:
            best = _emit_silence(entry, acoustic, log_probs, weights, candidates, best)
        best = _advance_in_tree(entry, acoustic, log_probs, t, models, weights, candidates, best)


@njit(cache=True, inline="always")
def _stay(beam: np.ndarray, log_probs: np.ndarray, weights: SearchWeights, candidates: Candidates) -> float:
    """Blank and repetition of the last token. Returns the best total score."""
    best = NEG_INF
    for i in range(beam.shape[0]):
        entry = beam[i]
        at, _ = find_or_insert(candidates, candidate_key(entry.history_hash, entry.node, entry.last_token))
        if at < 0:
            return best
        new = candidates.entries[at]
        candidates.entries[at] = entry
        new.log_blank = log_add(entry.log_blank, entry.log_token) + log_probs[weights.blank]
        new.log_token = entry.log_token + log_probs[entry.last_token] if entry.last_token >= 0 else NEG_INF
        candidates.language_scores[at] = weights.lm * (entry.lm + entry.lookahead) + entry.bonus
        best = max(best, candidates.language_scores[at] + max(new.log_blank, new.log_token))
    return best


@njit(cache=True, inline="always")
def _emit_silence(
    entry: Row,
    entry_acoustic: float,
    log_probs: np.ndarray,
    weights: SearchWeights,
    candidates: Candidates,
    best: float,
) -> float:
    """Silence between words; a second one needs a blank before it."""
    before = entry.log_blank if entry.last_token == weights.boundary else entry_acoustic
    acoustic = before + log_probs[weights.boundary] + weights.silence
    language_score = weights.lm * (entry.lm + entry.lookahead) + entry.bonus
    if acoustic + language_score < best - weights.threshold or acoustic == NEG_INF:
        return best
    at, inserted = find_or_insert(candidates, candidate_key(entry.history_hash, 0, weights.boundary))
    if at < 0:
        return best
    new = candidates.entries[at]
    if inserted:
        candidates.entries[at] = entry
        new.last_token, new.log_blank, new.log_token = weights.boundary, NEG_INF, acoustic
        candidates.language_scores[at] = language_score
    else:
        _merge_alignment(new, acoustic, entry.backpointer, -1, entry.first_frame)
    return max(best, acoustic + language_score)


@njit(cache=True, inline="always")
def _advance_in_tree(
    entry: Row,
    entry_acoustic: float,  # of all alignments
    log_probs: np.ndarray,
    t: int,
    models: SearchModels,
    weights: SearchWeights,
    candidates: Candidates,
    best: float,
) -> float:
    """Follow every arc of the tree node, and end the words whose pronunciation is complete.

    Children and successor rows are both sorted by node, so one merge pass matches them.
    """
    tree, lookahead = models.tree, models.lookahead
    first_children, tokens, first_entries = tree.first_children, tree.tokens, tree.first_entries
    row_nodes, best_unigrams = lookahead.row_nodes, lookahead.best_unigrams
    history_score = weights.lm * entry.lm + entry.bonus  # language score without the lookahead
    if entry.node == 0 and entry.last_token >= 0 and entry.last_token != weights.boundary:
        history_score += weights.missing_silence
    bound = history_score + weights.lm * entry.lookahead
    p = end = 0
    if entry.row >= 0:
        p, end = lookahead.row_children[entry.row], lookahead.row_children[entry.row + 1]
    last_token, log_blank = entry.last_token, entry.log_blank
    for node in range(first_children[entry.node], first_children[entry.node + 1]):
        token = tokens[node]
        acoustic = log_probs[token] + (log_blank if token == last_token else entry_acoustic)
        # The parent's lookahead bounds the child's, so this test needs no lookup.
        if acoustic + bound < best - weights.threshold or acoustic == NEG_INF:
            continue
        while p < end and row_nodes[p] < node:
            p += 1
        row, value = -1, entry.unigram_backoff + best_unigrams[node]
        if p < end and row_nodes[p] == node:
            row, value = p, max(value, entry.context_backoff + lookahead.row_scores[p])
        if acoustic + history_score + weights.lm * value < best - weights.threshold:
            continue
        if first_children[node] < first_children[node + 1]:
            best = _enter_node(entry, node, token, acoustic, history_score, value, row, t, weights, candidates, best)
        for word_entry in range(first_entries[node], first_entries[node + 1]):
            word = tree.entry_words[word_entry]
            best = _end_word(entry, word, token, acoustic + history_score, t, models, weights, candidates, best)
    return best


@njit(cache=True, inline="always")
def _enter_node(
    entry: Row,
    node: int,
    token: int,
    acoustic: float,
    history_score: float,  # including missing_silence
    value: float,  # lookahead at the node
    row: int,
    t: int,
    weights: SearchWeights,
    candidates: Candidates,
    best: float,
) -> float:
    """Candidate inside a word."""
    missing_silence = history_score - weights.lm * entry.lm - entry.bonus
    at, inserted = find_or_insert(candidates, candidate_key(entry.history_hash, node, token))
    if at < 0:
        return best
    new = candidates.entries[at]
    first_frame = t if entry.node == 0 else entry.first_frame
    if inserted:
        candidates.entries[at] = entry
        new.log_blank, new.log_token = NEG_INF, acoustic + missing_silence
        new.node, new.last_token, new.first_frame = node, token, first_frame
        new.row, new.lookahead = row, value
        candidates.language_scores[at] = history_score - missing_silence + weights.lm * value
    else:
        _merge_alignment(new, acoustic + missing_silence, entry.backpointer, -1, first_frame)
    return max(best, acoustic + history_score + weights.lm * value)


@njit(cache=True, inline="always")
def _end_word(
    entry: Row,
    word: int,
    token: int,
    score: float,  # before the word's n-gram score and bonus
    t: int,
    models: SearchModels,
    weights: SearchWeights,
    candidates: Candidates,
    best: float,
) -> float:
    """Candidate whose word has just ended: the n-gram score replaces the lookahead."""
    lm, state = _lm_score(models.lm_cache, models.ngram, entry.lm_state, models.tree.lm_words[word])
    context, context_backoff = bigram_context(models.lookahead, models.ngram, state)
    value = context_backoff + models.lookahead.best_next[context]
    bonus = weights.word + models.tree.word_bonuses[word]
    total = score + weights.lm * (lm + value) + bonus
    if total < best - weights.threshold:
        return best
    history_hash = hash_append(entry.history_hash, np.uint64(word + 1))
    at, inserted = find_or_insert(candidates, candidate_key(history_hash, 0, token))
    if at < 0:
        return best
    new = candidates.entries[at]
    acoustic = score - weights.lm * entry.lm - entry.bonus
    first_frame = t if entry.node == 0 else entry.first_frame
    if not inserted:
        _merge_alignment(new, acoustic, entry.backpointer, word, first_frame)
        return max(best, total)
    new.history_hash, new.log_blank, new.log_token = history_hash, NEG_INF, acoustic
    new.lm, new.bonus, new.lm_state = entry.lm + lm, entry.bonus + bonus, state
    new.lookahead, new.context_backoff = value, context_backoff
    new.unigram_backoff = context_backoff + backoff(models.ngram, context)
    new.node, new.row, new.last_token = 0, -1, token
    new.backpointer, new.pending_word, new.first_frame = entry.backpointer, word, first_frame
    candidates.language_scores[at] = weights.lm * (new.lm + value) + new.bonus
    return max(best, total)


@njit(cache=True, inline="always")
def _merge_alignment(new: Row, acoustic: float, backpointer: int, word: int, first_frame: int) -> None:
    """Add a further alignment to an existing candidate; the best alignment determines the word times."""
    if acoustic > max(new.log_blank, new.log_token):
        new.backpointer, new.pending_word, new.first_frame = backpointer, word, first_frame
    new.log_token = log_add(new.log_token, acoustic)


@njit(cache=True, inline="always")
def _lm_score(cache: LmCache, ngram: NGramArrays, state: int, word: int) -> tuple[float, int]:
    """Return the log-probability of a word after a state and the next state, cached."""
    key = (np.int64(state) << 32) | np.int64(word)
    at = np.int64(hash_append(np.uint64(key), np.uint64(0)) & np.uint64(cache.keys.shape[0] - 1))
    if cache.keys[at] != key:
        log_prob, after = advance(ngram, state, word)
        cache.keys[at], cache.log_probs[at], cache.states[at] = key, log_prob, after
    return cache.log_probs[at], cache.states[at]
