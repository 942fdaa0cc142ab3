"""The same log-probabilities and text for any batch, padding, order, number of threads, chunking, and saved model.

Models of every encoder and head; the reference is each trial alone, complete, with one thread.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.decoding.joint import joint_search
from arcuate.decoding.prefix_beam import PrefixBeamSearch
from arcuate.models import transformer as attention
from arcuate.models.config import GRUSettings, ModelConfig, ModelSettings, Patch, SSMSettings, TransformerSettings
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model, save_model
from arcuate.models.layout import Frames
from arcuate.models.model import Model
from support.encoders import NO_TRANSDUCER, TRANSDUCERS, lengths, make_batch, models
from support.laws import BOUND, assert_same_frames, assert_same_text, cases, chunks, law, n_threads
from support.live_parts import small_search

WORDS = small_search()
transducers = st.sampled_from([NO_TRANSDUCER, *TRANSDUCERS])
any_model = models(transducer=transducers)
causal_model = models(bidirectional=st.just(False), transducer=transducers)
fillings = st.sampled_from([0.0, float("nan"), float("inf"), 1e6, -3e38])
threads = st.integers(1, 4)


@pytest.fixture(autouse=True, scope="module")
def short_windows():
    """Small attention blocks, so that short trials need several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_MIN_BLOCK", 3)
        yield


class ByCtc:
    """A search over the CTC log-probabilities with the interface of a search over both heads."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.start, self.finish = search.start, search.finish

    def step(self, state: Any, outputs: Frames) -> Any:
        return self.search.step(state, outputs.log_probs) if len(outputs) else state


class Greedy:
    """The greedy search over the frames so far."""

    def start(self) -> list[np.ndarray]:
        return []

    def step(self, state: list[np.ndarray], outputs: Frames) -> list[np.ndarray]:
        return [*state, outputs.log_probs]

    def finish(self, state: list[np.ndarray], n_best: int) -> list[Hypothesis]:
        """The second hypothesis is as far away as the closest decision between two classes."""
        frames = np.concatenate(state)
        best = np.partition(frames, -2, axis=1)
        margin = float((best[:, -1] - best[:, -2]).min(initial=np.inf))
        return [Hypothesis(tuple(greedy(frames)), total=0.0), Hypothesis((), total=-margin)]


SEARCHES: dict[str, Callable[[Model], Any]] = {
    "greedy": lambda model: Greedy(),
    "phonemes": lambda model: ByCtc(PrefixBeamSearch(beam=4)),
    "words": lambda model: WORDS,
    "transducer": lambda model: joint_search(model.transducer.for_search(), "transducer", width=3),
    "both": lambda model: joint_search(model.transducer.for_search(), "both", width=3),
}


def search_of(draw: st.DrawFn, model: Model) -> tuple[str, Any]:
    name = draw(st.sampled_from(list(SEARCHES)[: 3 if model.transducer is None else None]))
    return name, SEARCHES[name](model)


def decode(search: Any, pieces: list[Frames]) -> list[Hypothesis]:
    state = search.start()
    for piece in pieces:
        state = search.step(state, piece)
    return search.finish(state, 2)


def row_outputs(outputs: Outputs, row: int = 0) -> Frames:
    n = int(outputs.n_frames[row])
    return Frames(outputs.log_probs["ctc"][row, :n].numpy(), outputs.frames[row, :n].numpy())


def select_rows(batch: tuple, rows: list[int], n_bins: int | None = None) -> tuple:
    bins, n, session, past = batch
    past = BatchStatistics(past.mean[rows], past.sd[rows], past.n_bins[rows])
    return bins[rows, :n_bins], n[rows], session[rows], past


def saved_and_loaded(model: Model) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), model)
        return load_model(folder)


@law(2)
@given(st.data(), any_model, lengths, st.integers(0, 9), fillings, threads, st.booleans())
def test_batch_padding_order_and_threads(data, model, lengths, extra, filling, n, saved):
    batch = make_batch(lengths, seed=extra)
    order = data.draw(st.permutations(range(len(lengths))))
    bins = torch.nn.functional.pad(batch[0], (0, 0, 0, extra))
    for i, length in enumerate(lengths):
        bins[i, length:] = filling
    _, search = search_of(data.draw, model)
    used = saved_and_loaded(model) if saved else model
    with torch.no_grad():
        alone = [row_outputs(model(*select_rows(batch, [i], length))) for i, length in enumerate(lengths)]
        with n_threads(n):
            together = used(*select_rows((bins, *batch[1:]), order))
    for row, i in enumerate(order):
        found, context = row_outputs(together, row), f"trial {i} of {lengths}, row {row}, {n} threads, {filling=}"
        patch = model.config.settings.front_end.patch
        assert_same_frames("batch", found.log_probs, alone[i].log_probs, patch, context=context)
        assert_same_text("batch", decode(search, [found]), decode(search, [alone[i]]), context=context)
    cases["batch"] += 1


@law(5)
@given(st.data(), causal_model, st.integers(1, 60), threads)
def test_chunking(data, model, n, n_thread):
    cuts = data.draw(st.lists(st.integers(0, n), max_size=8) | st.just(list(range(n))))
    precomputes = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    name, search = search_of(data.draw, model)
    bins, n_bins, session, past = make_batch([n], seed=n)
    pieces: list[Frames] = []
    with torch.no_grad():
        whole = row_outputs(model(bins, n_bins, session, past))
        with n_threads(n_thread):
            state = model.start(int(session), past)
            for i, (first, last) in enumerate(chunks(n, cuts)):
                outputs, state = model.step(state, bins[:, first:last])
                pieces.append(row_outputs(outputs))
                state = model.precompute(state) if precomputes[i % len(precomputes)] else state
            pieces.append(row_outputs(model.finish(state)))
    found = np.concatenate([p.log_probs for p in pieces])
    context = f"{n} bins cut at {cuts}, {n_thread} threads"
    assert_same_frames("chunks", found, whole.log_probs, model.config.settings.front_end.patch, context=context)
    assert_same_text("chunks", decode(search, pieces), decode(search, [whole]), context=f"{name}, {context}")
    cases["chunks"] += 1


@law()
@given(st.data(), any_model, lengths)
def test_a_saved_model_is_the_same_to_the_last_bit(data, model, lengths):
    batch = make_batch(lengths, seed=len(lengths))
    _, search = search_of(data.draw, model)
    again = saved_and_loaded(model)
    with torch.no_grad():
        expected, found = model(*batch), again(*batch)
    for i in range(len(lengths)):
        before, after = row_outputs(expected, i), row_outputs(found, i)
        patch = model.config.settings.front_end.patch
        assert_same_frames("saved", after.log_probs, before.log_probs, patch, bound=0.0)
        assert np.array_equal(before.encoded, after.encoded)
    assert again.config == model.config
    row = (row_outputs(expected), row_outputs(found))
    searches = (
        search,
        replace(search, transducer=again.transducer.for_search()) if hasattr(search, "transducer") else search,
    )
    assert_same_text("saved", decode(searches[1], [row[1]]), decode(searches[0], [row[0]]), exact=True)
    cases["saved"] += 1


WIDE = {
    f"{kind.kind}, {'both directions' if both else 'causal'}": kind.model_copy(update={"bidirectional": both})
    for kind in (
        GRUSettings(width=96, depth=2),
        SSMSettings(width=96, depth=2, n_heads=4, state_dim=16),
        TransformerSettings(width=96, depth=2, n_heads=4, context=40),
    )
    for both in (False, True)
}


@pytest.mark.parametrize("kind", WIDE)
@law(0.1)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 4), sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_threads_on_wide_models(kind, seed, n, sizes):
    """Wide enough that torch divides the work among the threads."""
    torch.manual_seed(seed)
    config = ModelConfig(
        settings=ModelSettings(encoder=WIDE[kind]), n_channels=64, sessions=("s",), classes=CLASSES
    )  # fmt: skip
    model = Model(config).eval()
    bins, n_bins = torch.randn(len(sizes), max(sizes), 64), torch.tensor(sizes)
    session = torch.zeros(len(sizes), dtype=torch.int64)
    with torch.no_grad():
        with n_threads(1):
            one = model(bins, n_bins, session)
        with n_threads(n):
            several = model(bins, n_bins, session)
    for i in range(len(sizes)):
        expected, found = row_outputs(one, i), row_outputs(several, i)
        patch = config.settings.front_end.patch
        assert_same_frames("threads", found.log_probs, expected.log_probs, patch, context=f"{n} threads, {sizes=}")
        searches = decode(Greedy(), [found]), decode(Greedy(), [expected])
        assert_same_text("threads", *searches, context=f"{n} threads, {sizes=}")
    cases["threads"] += 1


def test_the_first_differing_frame_is_named() -> None:
    frames = np.log(np.full((5, 3), 1 / 3, np.float32))
    wrong = frames.copy()
    wrong[2, 1] += 2 * BOUND
    wrong[4] += 1.0
    with pytest.raises(AssertionError, match=r"the first differing frame is 2 of 5 \(bins 8 to 21\); class 1 is"):
        assert_same_frames("test", wrong, frames, Patch(bins=14, stride=4))
    wrong[1, 2] = np.nan
    with pytest.raises(AssertionError, match="frame is 1 of 5"):
        assert_same_frames("test", wrong, frames, Patch(bins=14, stride=4))
    with pytest.raises(AssertionError, match=r"number 1: .'S'. instead of .'T'."):
        assert_same_text("test", [words("S S")], [words("S T")])


def words(phonemes: str) -> Hypothesis:
    return Hypothesis(tuple(CLASSES.index(p) for p in phonemes.split()), {"acoustic": -1.0})
