"""Adaptation within a stream: equal to offline adaptation, never delays text, can be reset at any time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import StreamingDecoder
from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.online import make_adapter, words_label
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.options import DecoderOptions
from arcuate.decoding.word_search.search import WordSearch
from arcuate.errors import UserError
from arcuate.evaluation.adapted import AdaptedSession, adapt_sessions, recording_order
from arcuate.evaluation.trials import TokenSearch
from arcuate.experiments.recipe import run_recipe
from arcuate.live import adaptation as stream_adaptation
from arcuate.live.adaptation import MAX_QUEUED, StreamAdapter, make_setup
from arcuate.live.endpointing import Endpointer
from arcuate.live.input import Command, Mark
from arcuate.live.load import load_decoder
from arcuate.live.options import LiveOptions
from arcuate.live.sources.replay import ReplayTrials
from arcuate.models.acoustic import TorchModel
from arcuate.models.io import load_model
from arcuate.models.layout import Frames
from arcuate.models.model import Model, build_on_meta
from arcuate.run import Run, find_checkpoint
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, SAME, SECOND
from support.live_parts import SEARCH, SessionRunner, adapting_decoder, bins, decoder_of, marked, wait_for

NEAR_TIE = 1e-3  # nats
N_TRIALS = 6


def model_of(folder: Path, normalise: str) -> Model:
    """The model of the run with another normalisation."""
    model = load_model(find_checkpoint(folder / "run"))
    settings = model.config.settings
    front_end = settings.front_end.model_copy(update={"normalise": normalise})
    config = model.config.model_copy(update={"settings": settings.model_copy(update={"front_end": front_end})})
    other = build_on_meta(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


SETTINGS = Adaptation(lr=0.02, copies=4)  # larger steps than usual


def streaming(
    folder: Path, settings: Adaptation = SETTINGS, normalise: str = "none", search: WordSearch | None = SEARCH
) -> StreamingDecoder:
    model, store = model_of(folder, normalise), Store.open(folder / "store")
    augmentation = run_recipe(Run(folder / "run")).augment
    acoustic = TorchModel(model)
    setup = make_setup(model, settings, augmentation, search is not None, store)
    return StreamingDecoder(acoustic, search, adapter=StreamAdapter(setup, acoustic))


class TokensOfWords(TokenSearch):
    """Tokens of the best words, as a stream with a language model adapts to them."""

    def __call__(self, frames: Frames) -> tuple[int, ...]:
        return words_label(SEARCH.search(frames)[0], self.classes)


def offline(folder: Path, trials: list[TrialInfo], normalise: str = "none", words: bool = True) -> AdaptedSession:
    model = model_of(folder, normalise)
    adapter = make_adapter(model, SETTINGS, run_recipe(Run(folder / "run")).augment)
    return adapt_sessions(adapter, Store.open(folder / "store"), trials, TokensOfWords() if words else None)[0]


def trials_of(folder: Path, session: str = DRIFTED, n: int = N_TRIALS) -> list[TrialInfo]:
    store = Store.open(folder / "store")
    found = [t for t in store.trials if t.session == session and t.split == "train"]
    return recording_order(found, store.sessions)[:n]


def prepared(folder: Path, normalise: str = "none") -> ReplayTrials:
    return ReplayTrials(Store.open(folder / "store"), (), normalise, False)


def decode(decoder: StreamingDecoder, source: ReplayTrials, trial: TrialInfo, size: int = 7):
    """Decode one trial in chunks, as replay does; return its best hypothesis and its frames."""
    decoder.reset(trial.session, source.statistics(trial))
    bins = source.store.read_bins(trial)
    frames = [decoder.push(bins[i : i + size]).log_probs for i in range(0, len(bins), size)]
    return decoder.finish(), np.concatenate(frames)


@pytest.mark.parametrize(
    ("normalise", "words"), [("none", True), ("rolling", True), ("block", True), ("none", False), ("rolling", False)]
)
def test_a_stream_adapts_exactly_as_offline(new_days: Path, normalise: str, words: bool) -> None:
    trials = trials_of(new_days)
    adapted = offline(new_days, trials, normalise, words)
    decoder = streaming(new_days, normalise=normalise, search=SEARCH if words else None)
    source, n_ties = prepared(new_days, normalise), 0
    for trial, offline_trial in zip(trials, adapted.trials, strict=True):
        final, frames = decode(decoder, source, trial)
        decoder.wait_for_adaptation()
        expected = offline_trial.result.log_probs
        assert expected is not None
        np.testing.assert_allclose(frames, expected[: len(frames)], atol=1e-4, rtol=0)
        assert final.tokens == tuple(greedy(expected))
        if words:
            best = SEARCH.search(Frames(expected), 2)
            n_ties += final.words != best[0].words
            assert final.words == best[0].words or best[0].total - best[1].total < NEAR_TIE
    assert n_ties <= 1
    state = decoder.adapter.state
    assert state is not None and state.n_steps == adapted.state.n_steps
    assert words or state.n_steps > 0  # with words, the small lexicon seldom agrees with the phonemes
    if not n_ties:
        torch.testing.assert_close(state.layer.weight, adapted.state.layer.weight, atol=0, rtol=0)
        assert state.comparison == adapted.state.comparison


# --- text is never delayed ---------------------------------------------------------------------------------------


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Updates wait for this event."""
    event, update = threading.Event(), stream_adaptation.adapt_to_sentence

    def wait_then_update(*arguments):
        assert event.wait(60)
        return update(*arguments)

    monkeypatch.setattr(stream_adaptation, "adapt_to_sentence", wait_then_update)
    return event


def test_text_does_not_wait_for_updates(new_days: Path, release: threading.Event) -> None:
    """During an update the next sentence is decoded with the state before it; the one after that is not."""
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    first, second, third = trials_of(new_days, n=3)
    unadapted = streaming(new_days, Adaptation(lr=0.0), search=None)
    decode(decoder, source, first)
    before, frames = decode(decoder, source, second)
    plain, expected = decode(unadapted, source, second)
    np.testing.assert_array_equal(frames, expected)
    assert before.words == plain.words and decoder.adaptation.n_queued == 2
    release.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_queued == 0 and decoder.adaptation.n_steps == 2
    assert not np.array_equal(decode(decoder, source, third)[1], decode(unadapted, source, third)[1])


def test_an_update_within_a_sentence_takes_effect_at_the_next(new_days: Path, release: threading.Event) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    trials = trials_of(new_days, n=2)
    decode(decoder, source, trials[0])
    bins = source.store.read_bins(trials[1])
    frames = [decoder.push(bins[:20]).log_probs]
    release.set()
    decoder.wait_for_adaptation()
    frames.append(decoder.push(bins[20:]).log_probs)
    unadapted = streaming(new_days, Adaptation(lr=0.0), search=None)
    unadapted.reset(DRIFTED)
    np.testing.assert_allclose(np.concatenate(frames), unadapted.push(bins).log_probs, atol=1e-5)


def test_sentences_beyond_the_queue_are_skipped_and_counted(new_days: Path, release: threading.Event) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    for trial in trials_of(new_days, n=MAX_QUEUED + 2):
        decode(decoder, source, trial)
    status = decoder.adaptation
    assert (status.n_queued, status.n_skipped) == (MAX_QUEUED, 2)
    release.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == MAX_QUEUED


def test_very_long_sentences_are_skipped(new_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    trial = trials_of(new_days, n=1)[0]
    monkeypatch.setattr(stream_adaptation, "_MAX_BINS", trial.n_bins - 1)
    assert decode(decoder, source, trial)[0].tokens
    decoder.wait_for_adaptation()
    assert (decoder.adaptation.n_skipped, decoder.adaptation.n_sentences) == (1, 0)


def test_a_closed_stream_drops_queued_updates(new_days: Path, release: threading.Event) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    for trial in trials_of(new_days, n=3):
        decode(decoder, source, trial)
    decoder.adapter.close()
    release.set()
    decoder.wait_for_adaptation()
    assert decode(decoder, source, trial)[0].tokens
    assert decoder.adaptation.state == "off" and decoder.adaptation.n_sentences == 0


def test_a_failed_update_is_reported_and_decoding_continues(new_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise RuntimeError("not enough memory\nand further lines")

    monkeypatch.setattr(stream_adaptation, "adapt_to_sentence", fail)
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    first, second = trials_of(new_days, n=2)
    decode(decoder, source, first)
    decoder.wait_for_adaptation()
    assert decoder.adaptation.state == "off"
    assert decoder.adaptation.reason == "the update failed: not enough memory"
    assert decode(decoder, source, second)[0].tokens
    decoder.reset_adaptation()
    assert decoder.adaptation.state == "adapting"


def test_an_update_that_fails_unexpectedly_turns_adaptation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(stream_adaptation, "adapt_to_sentence", fail)
    adapting = adapting_decoder()
    adapting.push(bins(60))
    adapting.finish()
    adapting.wait_for_adaptation()
    wait_for(lambda: adapting.adaptation.state == "off", 20)
    assert "failed unexpectedly (ValueError)" in adapting.adaptation.reason and adapting.adaptation.n_queued == 0


# --- reset ---------------------------------------------------------------------------------------


def test_adaptation_can_be_reset(new_days: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    trials = trials_of(new_days, n=4)
    original = decode(decoder, source, trials[0])[1]
    decoder.wait_for_adaptation()
    once = decoder.adapter.state
    after_one = decode(decoder, source, trials[0])[1]
    decoder.wait_for_adaptation()
    decoder.reset_adaptation(once)
    np.testing.assert_array_equal(decode(decoder, source, trials[0])[1], after_one)
    decoder.wait_for_adaptation()
    decoder.reset_adaptation()
    assert decoder.adaptation.n_steps == 0 and decoder.adaptation.layer_distance == 0.0
    np.testing.assert_array_equal(decode(decoder, source, trials[0])[1], original)


def test_a_reset_drops_queued_updates(new_days: Path, release: threading.Event) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    decode(decoder, source, trials_of(new_days, n=1)[0])
    decoder.reset_adaptation()
    release.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == 0 and decoder.adaptation.n_queued == 0


def test_a_ruined_layer_falls_back_with_a_reason(new_days: Path) -> None:
    decoder, source = streaming(new_days, Adaptation(lr=0.1), search=None), prepared(new_days)
    for trial in trials_of(new_days, DRIFTED, 40):
        decode(decoder, source, trial)
        decoder.wait_for_adaptation()
        if decoder.adaptation.n_fallbacks:
            break
    status = decoder.adaptation
    assert status.state == "fell back" and status.n_fallbacks == 1 and status.layer_distance == 0.0
    assert "unadapted model" in status.reason


def test_streams_adapt_independently(new_days: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    other = decoder.stream(DRIFTED)
    decode(decoder, source, trials_of(new_days, n=1)[0])
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_steps == 1 and other.adaptation.n_steps == 0


def test_another_session_starts_unadapted(new_days: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    decode(decoder, source, trials_of(new_days, n=1)[0])
    decoder.wait_for_adaptation()
    assert decoder.adaptation.init_session == SECOND
    decoder.reset(SAME)
    assert (decoder.adaptation.session, decoder.adaptation.n_steps) == (SAME, 0)


def test_a_flat_session_causes_no_update(new_days: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    for trial in trials_of(new_days, DEAD, 3):
        decode(decoder, source, trial)
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == 3 and decoder.adaptation.n_steps == 0


def test_valid_session_names(new_days: Path) -> None:
    decoder = streaming(new_days, search=None)
    decoder.reset("t15.2031.05.05")
    for name in ("../elsewhere", "", "x" * 500):
        with pytest.raises(UserError, match="is unknown to this model"):
            decoder.reset(name)
    plain = decoder_of(model_of(new_days, "none"))
    assert plain.adaptation is None and plain.adapter is None
    with pytest.raises(UserError, match="does not adapt"):
        plain.reset_adaptation()
    with pytest.raises(UserError, match="adapt to a new session with adapt, or add it with arcuate calibrate"):
        plain.reset(DRIFTED)


# --- a session ------------------------------------------------------------------------------------------------


def test_only_complete_sentences_of_an_open_session_cause_updates(new_days: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    endpointer = Endpointer(decoder, LiveOptions(phrase="open sesame"), lambda event: None)
    trials = trials_of(new_days, n=4)

    def push(info: TrialInfo, cut: bool = False) -> int:
        endpointer.start_trial(Mark(info.id, info.session))
        endpointer.push(source.store.read_bins(info))
        endpointer.end(cut)
        decoder.wait_for_adaptation()
        return decoder.adaptation.n_sentences

    assert push(trials[0]) == 0  # decoded only to find the phrase
    endpointer.open()
    assert push(trials[1]) == 1
    assert push(trials[2], cut=True) == 1
    assert push(trials[3]) == 2


def test_a_session_publishes_the_status_of_adaptation(new_days: Path, tmp_path: Path) -> None:
    decoder, source = streaming(new_days, search=None), prepared(new_days)
    runner = SessionRunner(decoder, record=tmp_path / "rec").start()
    session, statuses = runner.session, lambda: runner.events_of("adaptation")
    for n, info in enumerate(trials_of(new_days, n=2), start=1):
        for item in marked(info.id, source.store.read_bins(info), session=info.session):
            session.put(item)
        wait_for(lambda n=n: any(e["n_sentences"] == n and not e["n_queued"] for e in statuses()))
    session.put(Command("reset_adaptation"))
    wait_for(lambda: statuses()[-1]["n_steps"] == 0)
    session.stop()
    assert {e["session"] for e in statuses()[1:]} == {DRIFTED} and statuses()[-2]["n_steps"] == 2
    assert all(e["state"] == "adapting" for e in statuses())
    assert session.error is None
    journal = (tmp_path / "rec" / "journal.jsonl").read_text("utf-8")
    assert journal.count('"type": "adaptation"') + journal.count('"type":"adaptation"') == len(statuses())


# --- commands ---------------------------------------------------------------------------------------


def test_a_run_is_loaded_with_its_own_sessions_and_augmentation(new_days: Path) -> None:
    decoder = load_decoder(new_days / "run", DecoderOptions(lm="none", adapt=True, session=DRIFTED), warm=False)
    setup = decoder.adapter.setup
    assert setup is not None and set(setup.known) == {FIRST, SECOND}
    assert setup.adapter.augmentation == run_recipe(Run(new_days / "run")).augment
    assert decoder.session == DRIFTED and decoder.adaptation.init_session == SECOND


def test_bench_adapts_to_a_new_session(new_days: Path) -> None:
    words = ("--adapt", "--session", DRIFTED, "--data", new_days / "store")
    done = arcuate("bench", "live", new_days / "run", "--lm", "none", "--seconds", 4, *words, "--json")
    assert done.returncode == 0, done.stderr
    status = one_object(done.stdout)["adaptation"]
    assert status["session"] == DRIFTED and status["n_sentences"] + status["n_skipped"] >= 2
    assert f"{DRIFTED} is new to the model: decoded with the layer of {SECOND}, 8 days earlier" in done.stderr


def test_adaptation_needs_bins(new_days: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    assert_refused(arcuate("live", new_days / "run", "--adapt", "--source", "redis-logits"), "needs bins")
