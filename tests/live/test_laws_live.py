"""Laws of live decoding: for any chunking, the streamed result equals the offline result."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import RunningStatistics, Statistics
from arcuate.errors import UserError
from arcuate.models.config import GRUSettings, TransducerSettings
from arcuate.models.layout import Frames
from arcuate.models.model import Model
from support.cases import cases
from support.encoders import N_CHANNELS, make_batch, models
from support.live_parts import SEARCH, decoder_of, small_decoder, small_model
from support.live_parts import bins as values

NEAR_TIE = 1e-3  # nats
quick = settings(max_examples=cases())
causal = models(bidirectional=st.just(False))
near_ties = []


def offline(model: Model, bins: np.ndarray, session: int, past: Statistics) -> tuple[np.ndarray, list]:
    """Offline log-probabilities and the n-best list of the offline search."""
    from arcuate.models.acoustic import batch_statistics

    with torch.no_grad():
        outputs = model(
            torch.from_numpy(bins)[None],
            torch.tensor([len(bins)]),
            torch.tensor([session]),
            batch_statistics(past, torch.device("cpu")),
        )
    log_probs = outputs.log_probs["ctc"][0].numpy()
    return log_probs, SEARCH.search(Frames(log_probs), 2)


def assert_same_text(final, nbest) -> bool:
    """The same words; near ties may be resolved differently, and are counted."""
    if final.words != nbest[0].words:
        assert len(nbest) > 1 and nbest[0].total - nbest[1].total < NEAR_TIE
        near_ties.append(final.words)
        return False
    assert final.total == pytest.approx(nbest[0].total, abs=1e-2)
    return True


def trial(n: int) -> tuple[np.ndarray, int, Statistics]:
    bins, _, session, past = make_batch([max(n, 1)], seed=n)
    known = Statistics(past.mean[0].numpy(), past.sd[0].numpy(), int(past.n_bins[0]))
    return bins[0, :n].numpy(), int(session), known


def chunks(n: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(min(c, n) for c in cuts), n]
    return list(pairwise(edges))


@quick
@given(causal, st.integers(1, 90), st.lists(st.integers(0, 90), max_size=6), st.lists(st.booleans()))
def test_any_chunking_gives_the_offline_result(model, n, cuts, precompute):
    bins, session, past = trial(n)
    log_probs, nbest = offline(model, bins, session, past)
    stream = decoder_of(model, SEARCH, model.config.sessions[session], past)
    for chosen in (chunks(n, cuts), chunks(n, list(range(n)))):
        frames, settled = [], []
        for i, (first, last) in enumerate(chosen):
            partial = stream.push(bins[first:last])
            frames.append(partial.log_probs)
            settled.append(partial.words[: partial.n_settled])
            if precompute and precompute[i % len(precompute)]:
                stream.precompute()
        streamed = np.concatenate(frames)
        np.testing.assert_allclose(streamed, log_probs[: len(streamed)], atol=1e-4, rtol=0)
        final = stream.finish()
        assert_same_text(final, nbest)
        assert all(words == final.words[: len(words)] for words in settled)
    assert len(near_ties) <= 2


@quick
@given(causal, st.integers(1, 50), st.randoms(use_true_random=False))
def test_streams_over_one_set_of_weights_are_independent(model, n, random):
    trials = [trial(n + i) for i in range(3)]
    first = decoder_of(model, SEARCH)
    streams = [first.stream(model.config.sessions[s], past) for _, s, past in trials]
    left = [list(bins) for bins, _, _ in trials]
    while any(left):
        i = random.choice([k for k in range(3) if left[k]])
        streams[i].push(left[i].pop(0))
    for stream, (bins, session, past) in zip(streams, trials, strict=True):
        assert_same_text(stream.finish(), offline(model, bins, session, past)[1])


TRANSDUCERS = [
    TransducerSettings(enabled=True, width=8),
    TransducerSettings(enabled=True, width=8, predictor="lstm"),
]


@settings(quick, max_examples=cases(0.5))
@given(
    st.sampled_from(TRANSDUCERS),
    st.integers(0, 3),
    st.sampled_from(["transducer", "both"]),
    st.booleans(),
    st.integers(1, 90),
    st.lists(st.integers(0, 90), max_size=5),
)
def test_any_chunking_gives_the_offline_result_with_a_transducer(transducer, seed, head, words, n, cuts):
    """Tokens, words and scores of the n-best list, by the transducer or by both heads."""
    model = small_model(seed=seed, transducer=transducer)
    stream = decoder_of(model, SEARCH if words else None, head=head)
    bins = values(n, seed=seed)
    with torch.no_grad():
        outputs = model(torch.from_numpy(bins)[None], torch.tensor([n]), torch.tensor([1]))
    expected = stream.search.search(Frames(outputs.log_probs["ctc"][0].numpy(), outputs.frames[0].numpy()), 3)
    for chosen in (chunks(n, cuts), chunks(n, list(range(n)))):
        for first, last in chosen:
            stream.push(bins[first:last])
        found = stream.finish_nbest(3)
        assert [h.total for h in found] == pytest.approx([h.total for h in expected], abs=1e-2)
        if len(expected) > 1 and expected[0].total - expected[1].total < NEAR_TIE:
            continue  # either may come first
        assert (found[0].words, found[0].text) == (expected[0].words, expected[0].text)
        assert found[0].scores == pytest.approx(expected[0].scores, abs=1e-2)
        if not words:
            assert found[0].tokens == expected[0].tokens


def test_partial_results_of_both_heads() -> None:
    """Phonemes so far come from both heads; words come from CTC, and none is settled before the end."""
    model = small_model(transducer=TRANSDUCERS[0])
    phonemes = decoder_of(model, None, head="both")
    partial = phonemes.push(values(80))
    state = phonemes._now.search
    assert partial.words == phonemes.search.partial(state).words
    assert partial.words and partial.n_settled == 0
    words = decoder_of(model, SEARCH, head="both")
    by_ctc = decoder_of(model, SEARCH)
    partial, expected = words.push(values(80)), by_ctc.push(values(80))
    assert partial.words == expected.words and partial.n_settled == 0
    with pytest.raises(UserError, match="needs bins"):
        words.push_log_probs(np.full((2, len(CLASSES)), -np.log(len(CLASSES)), np.float32))


@pytest.mark.parametrize("normalise", ["block", "rolling"])
def test_without_statistics_a_stream_normalises_by_its_past(normalise: str) -> None:
    """The second sentence is normalised by the first: the same as offline with the first's statistics."""
    model = small_model(normalise=normalise)
    stream = decoder_of(model, SEARCH)
    first, second = values(120, seed=1), values(60, seed=2)
    stream.push(first)
    stream.finish()
    partial = stream.push(second)
    rolling = stream.model.rolling
    past = RunningStatistics.from_bins(first).statistics()
    log_probs, _ = offline(rolling, second, 1, past)
    np.testing.assert_allclose(partial.log_probs, log_probs[: len(partial.log_probs)], atol=1e-4)
    assert rolling.head.weight is model.head.weight  # one set of weights


def test_a_session_starts_with_known_statistics() -> None:
    """They are those of the session, replaced when another session starts, and follow the stream in between."""
    model = small_model(normalise="block")
    names, bins = model.config.sessions, [values(60, seed=k) for k in range(3)]
    past = {name: RunningStatistics.from_bins(values(300, seed=10 + k)) for k, name in enumerate(names)}
    stream = decoder_of(model, SEARCH, names[0])
    stream.seed_sessions(lambda session: past[session].statistics())
    running = past[names[0]]
    for session, trial in zip((0, 0, 1), bins, strict=True):
        if session:
            running = past[names[1]]
        stream.reset(names[session])
        n = min(1.0, stream.layout.rolling_bins / running.n_bins)
        partial = stream.push(trial)
        expected, _ = offline(stream.model.rolling, trial, session, running.statistics())
        np.testing.assert_allclose(partial.log_probs, expected[: len(partial.log_probs)], atol=1e-4)
        stream.finish()
        faded = replace(running, n=running.n * n, m2=running.m2 * n, n_bins=round(running.n_bins * n))
        running = faded.merge(RunningStatistics.from_bins(trial))


def test_the_future_never_changes_the_statistics() -> None:
    """Rolling normalisation: the result of the first bins does not depend on later ones."""
    model = small_model(normalise="block")
    heads = []
    for scale in (1.0, 50.0):
        bins = values(90)
        bins[60:] *= scale
        stream = decoder_of(model, SEARCH)
        heads.append(np.concatenate([stream.push(b).log_probs for b in bins[:60]]))
    np.testing.assert_array_equal(*heads)


def test_old_bins_fade_out_of_the_statistics() -> None:
    stream = decoder_of(small_model(normalise="rolling"), SEARCH)
    for _ in range(8):
        stream.push(values(300))
        stream.finish()
    assert stream._past.n_bins <= 1500 + 300


@quick
@given(causal)
def test_no_frame_exceeds_the_delay(model):
    stream = decoder_of(model)
    patch = model.config.settings.front_end.patch
    n_frames = 0
    for n_bins, b in enumerate(values(60, N_CHANNELS), start=1):
        n_frames = stream.push(b).n_frames
        due = n_bins - round((stream.delay.smoothing_ms + stream.delay.encoder_ms) / 20)
        assert n_frames >= (0 if due < patch.bins else (due - patch.bins) // patch.stride + 1)


def test_invalid_input_is_reported() -> None:
    stream = small_decoder(SEARCH)
    with pytest.raises(UserError, match=r"shape \(t, 6\), got \(3, 5\)"):
        stream.push(np.zeros((3, 5)))
    with pytest.raises(UserError, match="it was trained on day1, day2"):
        stream.reset("day9")
    both_ways = small_model().config.settings.model_copy(
        update={"encoder": GRUSettings(width=4, depth=1, bidirectional=True)}
    )
    model = Model(small_model().config.model_copy(update={"settings": both_ways}))
    with pytest.raises(UserError, match="bidirectional model cannot stream"):
        decoder_of(model, SEARCH)


def test_non_finite_bins_do_not_stop_a_stream() -> None:
    stream = small_decoder(SEARCH)
    bins = values(60)
    bins[10:14] = np.nan
    bins[20, 3] = np.inf
    partial = stream.push(bins)
    assert np.isfinite(partial.log_probs).all()
    assert stream.finish().total is not None
