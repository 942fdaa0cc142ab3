"""Following a day inside a stream: the same course as offline, never in the way of text, to be taken back at any time."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import StreamingDecoder
from arcuate.adapt.adapter import Adapter, make_adapter
from arcuate.adapt.follow import Course, follow, in_order
from arcuate.adapt.settings import Adaptation
from arcuate.adapt.words import word_labels
from arcuate.decode.greedy import greedy
from arcuate.decode.words import WordSearch
from arcuate.errors import UserError
from arcuate.live import following
from arcuate.live.decoder import make_engine
from arcuate.live.following import WAITING, make_adapting
from arcuate.live.sources.replay import Prepared
from arcuate.models.files import load_model
from arcuate.models.model import Model, outline
from arcuate.run import Run
from arcuate.store import Store, TrialInfo
from arcuate.training.checkpoint import find_checkpoint
from days import DEAD, DRIFTED, SAME, SECOND
from live_parts import small_search

SEARCH = small_search()
NEAR_TIE = 1e-3  # nat
N_TRIALS = 8


def model_of(folder: Path, normalise: str) -> Model:
    """The model of the run, its bins normalised in another way; what it reads then matters little here."""
    model = load_model(find_checkpoint(folder / "run"))
    settings = model.card.settings
    front_end = settings.front_end.model_copy(update={"normalise": normalise, "rolling_bins": 200})
    card = model.card.model_copy(
        update={"settings": settings.model_copy(update={"front_end": front_end})}
    )
    other = outline(card)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def settings_of(method: str, **more: object) -> Adaptation:
    return Adaptation.model_validate({"method": method, "rate": 0.02, "copies": 4, "past": 3, **more})


def streaming(
    folder: Path, settings: Adaptation, normalise: str = "none", search: WordSearch | None = SEARCH
) -> StreamingDecoder:
    model, store = model_of(folder, normalise), Store.open(folder / "store")
    noise = Run(folder / "run").recipe().augment
    engine = make_engine(model, search)
    return StreamingDecoder(replace(engine, adapting=make_adapting(model, search, settings, noise, store)))


def offline(
    folder: Path, settings: Adaptation, trials: list[TrialInfo], normalise: str = "none", words: bool = True
) -> Course:
    label = word_labels(small_search()) if words else greedy
    noise = Run(folder / "run").recipe().augment
    adapter: Adapter = make_adapter(model_of(folder, normalise), settings, noise, label)
    return follow(adapter, Store.open(folder / "store"), trials, keep_scores=True)[0]


def trials_of(folder: Path, session: str = DRIFTED, n: int = N_TRIALS) -> list[TrialInfo]:
    store = Store.open(folder / "store")
    found = [t for t in store.trials if t.session == session and t.split == "train"]
    return in_order(found, store.sessions)[:n]


def prepared(folder: Path, normalise: str = "none") -> Prepared:
    return Prepared(Store.open(folder / "store"), (), normalise, False)


def heard(decoder: StreamingDecoder, source: Prepared, trial: TrialInfo, size: int = 7):
    """One trial as replay hands it over, in chunks; its final reading and its frames."""
    decoder.reset(trial.session, source.statistics(trial))
    bins = source.store.read_bins(trial)
    frames = [decoder.push(bins[i : i + size]).log_probs for i in range(0, len(bins), size)]
    return decoder.finish(), np.concatenate(frames)


LAW = [
    *(("one-step", how, True) for how in ("none", "rolling", "block")),
    ("one-step", "none", False),
    ("replay", "none", True),
    ("replay", "rolling", False),
    ("entropy", "rolling", True),
    ("statistics", "block", True),
    ("none", "block", False),
]


@pytest.mark.parametrize(("method", "normalise", "words"), LAW)
def test_a_stream_takes_the_course_that_offline_takes(
    new_days: Path, method: str, normalise: str, words: bool
) -> None:
    settings, trials = settings_of(method, own_input=False), trials_of(new_days)
    course = offline(new_days, settings, trials, normalise, words)
    decoder = streaming(new_days, settings, normalise, SEARCH if words else None)
    source, n_ties = prepared(new_days, normalise), 0
    for trial, whole in zip(trials, course.trials, strict=True):
        final, frames = heard(decoder, source, trial)
        decoder.settle()
        expected = whole.result.log_probs
        assert expected is not None
        np.testing.assert_allclose(frames, expected[: len(frames)], atol=1e-4, rtol=0)
        assert final.tokens == whole.result.tokens
        if words:
            best = SEARCH.search(expected, 2)
            n_ties += final.words != best[0].words
            assert final.words == best[0].words or best[0].total - best[1].total < NEAR_TIE
    assert n_ties <= 1
    day = decoder.day
    assert day is not None and day.n_steps == course.day.n_steps
    if method in ("one-step", "replay", "entropy"):
        assert day.n_steps > 0
    if not n_ties:
        torch.testing.assert_close(day.layer.weight, course.day.layer.weight, atol=0, rtol=0)
        assert day.trust == course.day.trust
