"""Following a day inside a stream: the course of offline, never in the way of text, to be taken back at any time."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import StreamingDecoder
from arcuate.adaptation.config import Adaptation
from arcuate.adaptation.online import OnlineAdapter, make_adapter
from arcuate.adaptation.evaluate import AdaptedSession, adapt_sessions, recording_order
from arcuate.adaptation.pseudo_labels import word_labeller
from arcuate.cli._live import Asked, check
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.decoding.word_search.search import WordSearch
from arcuate.errors import UserError
from arcuate.experiments.recipe import run_recipe
from arcuate.live import adaptation as stream_adaptation
from arcuate.live.adaptation import MAX_QUEUED, make_setup
from arcuate.live.config import Endpoints, LiveSettings, Start
from arcuate.live.engine import make_engine
from arcuate.live.endpointing import Endpointer
from arcuate.live.messages import Chunk, Command, End
from arcuate.live.recorder import Recorder
from arcuate.live.session import LiveSession
from arcuate.live.sources.replay import ReplayTrials
from arcuate.models.io import load_model
from arcuate.models.model import Model, build_on_meta
from arcuate.run import Run, find_checkpoint
from support.cli import one_object
from support.days import DEAD, DRIFTED, FIRST, SAME, SECOND
from support.forking import arcuate
from support.live_parts import small_search
from support.live_sources import wait_for

SEARCH = small_search()
NEAR_TIE = 1e-3  # nat
N_TRIALS = 6


def model_of(folder: Path, normalise: str) -> Model:
    """The model of the run, its bins normalised in another way; what it reads then matters little here."""
    model = load_model(find_checkpoint(folder / "run"))
    settings = model.config.settings
    front_end = settings.front_end.model_copy(update={"normalise": normalise, "rolling_bins": 200})
    config = model.config.model_copy(
        update={"settings": settings.model_copy(update={"front_end": front_end})}
    )
    other = build_on_meta(config)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def settings_of(method: str, **more: object) -> Adaptation:
    """Short steps made long; the words of the small search are far from what is said, and teach all the same."""
    words = {"safety": {"max_disagreement": 10}}
    return Adaptation.model_validate(
        {"method": method, "lr": 0.02, "copies": 4, "replay_trials": 3, **words, **more}
    )


def streaming(
    folder: Path, settings: Adaptation, normalise: str = "none", search: WordSearch | None = SEARCH
) -> StreamingDecoder:
    model, store = model_of(folder, normalise), Store.open(folder / "store")
    noise = run_recipe(Run(folder / "run")).augment
    engine = make_engine(model, search)
    return StreamingDecoder(replace(engine, adaptation=make_setup(model, search, settings, noise, store)))


def offline(
    folder: Path, settings: Adaptation, trials: list[TrialInfo], normalise: str = "none", words: bool = True
) -> AdaptedSession:
    label = word_labeller(small_search()) if words else greedy
    noise = run_recipe(Run(folder / "run")).augment
    adapter: OnlineAdapter = make_adapter(model_of(folder, normalise), settings, noise, label)
    return adapt_sessions(adapter, Store.open(folder / "store"), trials, keep_log_probs=True)[0]


def trials_of(folder: Path, session: str = DRIFTED, n: int = N_TRIALS) -> list[TrialInfo]:
    store = Store.open(folder / "store")
    found = [t for t in store.trials if t.session == session and t.split == "train"]
    return recording_order(found, store.sessions)[:n]


def prepared(folder: Path, normalise: str = "none") -> ReplayTrials:
    return ReplayTrials(Store.open(folder / "store"), (), normalise, False)


def heard(decoder: StreamingDecoder, source: ReplayTrials, trial: TrialInfo, size: int = 7):
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
    settings, trials = settings_of(method, use_current_trial=False), trials_of(new_days)
    course = offline(new_days, settings, trials, normalise, words)
    decoder = streaming(new_days, settings, normalise, SEARCH if words else None)
    source, n_ties = prepared(new_days, normalise), 0
    for trial, whole in zip(trials, course.trials, strict=True):
        final, frames = heard(decoder, source, trial)
        decoder.wait_for_adaptation()
        expected = whole.result.log_probs
        assert expected is not None
        np.testing.assert_allclose(frames, expected[: len(frames)], atol=1e-4, rtol=0)
        assert final.tokens == whole.result.tokens
        if words:
            best = SEARCH.search(expected, 2)
            n_ties += final.words != best[0].words
            assert final.words == best[0].words or best[0].total - best[1].total < NEAR_TIE
    assert n_ties <= 1
    day = decoder.session_state
    assert day is not None and day.n_steps == course.state.n_steps
    if method in ("one-step", "replay", "entropy"):
        assert day.n_steps > 0
    if not n_ties:
        torch.testing.assert_close(day.layer.weight, course.state.layer.weight, atol=0, rtol=0)
        assert day.comparison == course.state.comparison


# --- never in the way ---------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Learning waits for this."""
    go, learn = threading.Event(), stream_adaptation.adapt_to_sentence

    def wait_then_hear(*arguments):
        assert go.wait(60)
        return learn(*arguments)

    monkeypatch.setattr(stream_adaptation, "adapt_to_sentence", wait_then_hear)
    return go


def test_text_does_not_wait_for_learning(new_days: Path, held: threading.Event) -> None:
    """While a sentence is being learned from, the next is read with the day before it; the one after it is not."""
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    first, second, third = trials_of(new_days, n=3)
    unadapted = streaming(new_days, settings_of("none"))
    heard(decoder, source, first)
    before, frames = heard(decoder, source, second)
    plain, expected = heard(unadapted, source, second)
    np.testing.assert_array_equal(frames, expected)
    assert before.words == plain.words and decoder.adaptation.n_queued == 2
    held.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_queued == 0 and decoder.adaptation.n_steps == 2
    assert not np.array_equal(heard(decoder, source, third)[1], heard(unadapted, source, third)[1])


def test_a_day_that_comes_in_mid_sentence_waits_for_the_next(new_days: Path, held: threading.Event) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    trials = trials_of(new_days, n=2)
    heard(decoder, source, trials[0])
    bins = source.store.read_bins(trials[1])
    frames = [decoder.push(bins[:20]).log_probs]
    held.set()
    decoder.wait_for_adaptation()
    frames.append(decoder.push(bins[20:]).log_probs)
    unadapted = streaming(new_days, settings_of("none"))
    unadapted.reset(DRIFTED)
    np.testing.assert_allclose(np.concatenate(frames), unadapted.push(bins).log_probs, atol=1e-5)


def test_sentences_that_come_too_fast_are_skipped_and_counted(new_days: Path, held: threading.Event) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    for trial in trials_of(new_days, n=MAX_QUEUED + 2):
        heard(decoder, source, trial)
    status = decoder.adaptation
    assert (status.n_queued, status.n_skipped) == (MAX_QUEUED, 2)
    held.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == MAX_QUEUED


def test_what_never_ends_teaches_nothing(new_days: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    trial = trials_of(new_days, n=1)[0]
    monkeypatch.setattr(stream_adaptation, "_MAX_BINS", trial.n_bins - 1)
    assert heard(decoder, source, trial)[0].tokens
    decoder.wait_for_adaptation()
    assert (decoder.adaptation.n_skipped, decoder.adaptation.n_sentences) == (1, 0)


def test_a_closed_stream_lets_waiting_sentences_go(new_days: Path, held: threading.Event) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    for trial in trials_of(new_days, n=3):
        heard(decoder, source, trial)
    decoder.adapter.close()
    held.set()
    decoder.wait_for_adaptation()
    assert heard(decoder, source, trial)[0].tokens  # text goes on
    assert decoder.adaptation.state == "off" and decoder.adaptation.n_sentences == 0


def test_learning_that_fails_is_told_and_text_goes_on(
    new_days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_):
        raise RuntimeError("not enough memory\nand a long story")

    monkeypatch.setattr(stream_adaptation, "adapt_to_sentence", fail)
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    first, second = trials_of(new_days, n=2)
    heard(decoder, source, first)
    decoder.wait_for_adaptation()
    assert decoder.adaptation.state == "off"
    assert decoder.adaptation.reason == "learning failed: not enough memory"
    assert heard(decoder, source, second)[0].tokens
    decoder.reset_adaptation()
    assert decoder.adaptation.state == "adapting"


# --- to be taken back ---------------------------------------------------------------------------------------


def test_what_was_learned_can_be_forgotten(new_days: Path) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    trials = trials_of(new_days, n=4)
    original = heard(decoder, source, trials[0])[1]
    decoder.wait_for_adaptation()
    once = decoder.session_state
    after_one = heard(decoder, source, trials[0])[1]
    decoder.wait_for_adaptation()
    decoder.reset_adaptation(once)
    np.testing.assert_array_equal(heard(decoder, source, trials[0])[1], after_one)
    decoder.wait_for_adaptation()
    decoder.reset_adaptation()
    assert decoder.adaptation.n_steps == 0 and decoder.adaptation.layer_distance == 0.0
    np.testing.assert_array_equal(heard(decoder, source, trials[0])[1], original)


def test_sentences_that_wait_teach_nothing_after_a_reset(new_days: Path, held: threading.Event) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    heard(decoder, source, trials_of(new_days, n=1)[0])
    decoder.reset_adaptation()
    held.set()
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == 0 and decoder.adaptation.n_queued == 0


def test_a_ruined_layer_falls_back_and_says_so(new_days: Path) -> None:
    ruinous = settings_of("one-step", lr=0.1, max_distance=10.0, safety={"window": 3, "max_fallbacks": 0})
    decoder, source = streaming(new_days, ruinous, search=None), prepared(new_days)
    for trial in trials_of(new_days, DRIFTED, 30):
        heard(decoder, source, trial)
        decoder.wait_for_adaptation()
        if decoder.adaptation.n_fallbacks:
            break
    status = decoder.adaptation
    assert status.state == "off" and status.n_fallbacks == 1 and status.layer_distance == 0.0
    assert "unadapted model" in status.reason


def test_streams_follow_their_days_each_for_itself(new_days: Path) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    other = decoder.stream(DRIFTED)
    heard(decoder, source, trials_of(new_days, n=1)[0])
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_steps == 1 and other.adaptation.n_steps == 0


def test_another_day_begins_anew(new_days: Path) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    heard(decoder, source, trials_of(new_days, n=1)[0])
    decoder.wait_for_adaptation()
    assert decoder.adaptation.init_session == SECOND
    decoder.reset(SAME)
    assert (decoder.adaptation.session, decoder.adaptation.n_steps) == (SAME, 0)


def test_a_silent_day_teaches_nothing(new_days: Path) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    for trial in trials_of(new_days, DEAD, 3):
        heard(decoder, source, trial)
    decoder.wait_for_adaptation()
    assert decoder.adaptation.n_sentences == 3 and decoder.adaptation.n_steps == 0


def test_which_days_may_be_named(new_days: Path) -> None:
    decoder = streaming(new_days, settings_of("one-step"))
    decoder.reset("t15.2031.05.05")
    for name in ("../elsewhere", "", "x" * 500):
        with pytest.raises(UserError, match="is unknown to this model"):
            decoder.reset(name)
    plain = StreamingDecoder(make_engine(model_of(new_days, "none"), None))
    assert plain.adaptation is None and plain.session_state is None
    with pytest.raises(UserError, match="does not adapt"):
        plain.reset_adaptation()
    with pytest.raises(UserError, match="follow a new day with adapt, or add it with arcuate calibrate"):
        plain.reset(DRIFTED)


def test_statistics_in_a_stream_need_a_known_day(new_days: Path, tmp_path: Path) -> None:
    model = model_of(new_days, "none")
    adapting = make_setup(
        model, None, settings_of("statistics"), run_recipe(Run(new_days / "run")).augment
    )
    with pytest.raises(UserError, match="nearest known day"):
        StreamingDecoder(replace(make_engine(model, None), adaptation=setup))


# --- a session ------------------------------------------------------------------------------------------------


def test_only_whole_sentences_of_an_open_session_teach(new_days: Path) -> None:
    settings = LiveSettings(
        endpoints=Endpoints(enabled=False), start=Start(closed=True, phrase="open sesame")
    )
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    endpointer = Endpointer(decoder, settings, lambda event: None)
    trials = trials_of(new_days, n=4)

    def say(trial: TrialInfo, cut: bool = False) -> int:
        endpointer.start_trial(source.mark(trial))
        endpointer.push(source.store.read_bins(trial))
        endpointer.end(cut)
        decoder.wait_for_adaptation()
        return decoder.adaptation.n_sentences

    assert say(trials[0]) == 0  # read to find the phrase, and forgotten
    endpointer.open()
    assert say(trials[1]) == 1
    assert say(trials[2], cut=True) == 1
    assert say(trials[3]) == 2


def test_a_session_tells_how_the_day_is_followed(new_days: Path, tmp_path: Path) -> None:
    decoder, source = streaming(new_days, settings_of("one-step")), prepared(new_days)
    events: list = []
    recorder = Recorder(tmp_path / "rec", decoder.n_channels)
    session = LiveSession(decoder, LiveSettings(endpoints=Endpoints(enabled=False)), events.append, recorder)
    session.start()

    def told() -> list[dict]:
        return [e for e in list(events) if isinstance(e, dict) and e["type"] == "adaptation"]

    for n, trial in enumerate(trials_of(new_days, n=2), start=1):
        session.put(source.mark(trial))
        session.put(Chunk(source.store.read_bins(trial)))
        session.put(End())
        wait_for(lambda n=n: any(e["n_sentences"] == n and not e["n_queued"] for e in told()))
    session.put(Command("reset_adaptation"))
    wait_for(lambda: told()[-1]["n_steps"] == 0)
    session.stop()
    assert {e["session"] for e in told()[1:]} == {DRIFTED} and told()[-2]["n_steps"] == 2
    assert all(e["state"] == "adapting" and e["method"] == "one-step" for e in told())
    assert session.error is None
    journal = (tmp_path / "rec" / "journal.jsonl").read_text("utf-8")
    assert journal.count('"type": "adaptation"') + journal.count('"type":"adaptation"') == len(told())


# --- as a user meets it ---------------------------------------------------------------------------------------


def test_a_run_is_loaded_with_its_own_days_and_noise(new_days: Path) -> None:
    decoder = StreamingDecoder.load(new_days / "run", lm=None, adapt="one-step", session=DRIFTED, warm=False)
    adapting = decoder.engine.adaptation
    assert adapting is not None and set(adapting.known) == {FIRST, SECOND}
    assert adapting.adapter.noise == run_recipe(Run(new_days / "run")).augment
    assert decoder.session == DRIFTED and decoder.adaptation.init_session == SECOND
    with pytest.raises(UserError, match="choose none, statistics, one-step"):
        StreamingDecoder.load(new_days / "run", lm=None, adapt="magic", warm=False)


def test_bench_follows_a_new_day(new_days: Path) -> None:
    words = ("--adapt", "one-step", "--set", "lr=0.02", "--session", DRIFTED, "--data", new_days / "store")
    done = arcuate(
        "bench", "live", new_days / "run", "--no-words", "--fast", "--seconds", 4, *words, "--json"
    )
    assert done.returncode == 0, done.stderr
    told = one_object(done.stdout)["adaptation"]
    assert told["session"] == DRIFTED and told["n_sentences"] + told["n_skipped"] >= 2
    assert f"{DRIFTED} is new to the model: read with the layer of {SECOND}, 8 days earlier" in done.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"adapt": "magic"}, r"'magic' is unknown; choose none, .*one-step"),
        ({"adapt": "one-step", "adapting": ("speed=2",)}, "speed.*known settings"),
        ({"adapting": ("lr=0.1",)}, "name a method with --adapt"),
        ({"adapt": "one-step", "source": "redis-logits"}, "learns from bins"),
    ],
)
def test_mistakes_of_live_are_one_sentence(new_days: Path, asked: dict, said: str) -> None:
    pytest.importorskip("uvicorn", reason="the extra live is not installed")
    with pytest.raises(UserError, match=said):
        check(Asked(new_days / "run", **asked))
