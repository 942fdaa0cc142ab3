"""Sources: a real Redis server, a real LSL stream, replay at its pace."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.live.messages import Chunk, End, Mark
from arcuate.live.sources.replay import ReplayTrials, Replay, select_trials
from support.live_parts import bins, small_decoder
from support.live_sources import SEARCH, Hearing, wait_for


@pytest.fixture
def hearing() -> Iterator[Hearing]:
    found = Hearing()
    yield found
    found.session.stop()


def offline(heard: np.ndarray) -> str | None:
    decoder = small_decoder(SEARCH)
    decoder.push(heard)
    return decoder.finish().text


# --- Redis --------------------------------------------------------------------------------------------------


@pytest.fixture
def client(redis_url: str):
    import redis

    client = redis.Redis.from_url(redis_url)
    client.flushall()
    return client


def official_order(log_probs: np.ndarray) -> bytes:
    names = ("BLANK", "SIL", *CLASSES[1:-1])
    return np.ascontiguousarray(log_probs[:, [CLASSES.index(n) for n in names]], "<f4").tobytes()


def test_the_end_of_a_sentence_never_overtakes_its_logits() -> None:
    """Redis counts entries of one millisecond stream by stream, and long streams are read in parts."""
    from arcuate.live.sources.redis import FINALIZE, INPUT, READ_COUNT, RESET, sort_entries

    logits = [(f"7-{i}".encode(), {}) for i in range(3)]
    mixed = [(FINALIZE.encode(), [(b"7-0", {})]), (INPUT.encode(), logits), (RESET.encode(), [(b"7-0", {})])]
    assert [name for _, name, _ in sort_entries(mixed)] == [RESET, INPUT, INPUT, INPUT, FINALIZE]
    many = [(f"{i}-0".encode(), {}) for i in range(READ_COUNT)]
    parts = [(INPUT.encode(), many), (FINALIZE.encode(), [(f"{READ_COUNT + 9}-0".encode(), {})])]
    assert {name for _, name, _ in sort_entries(parts)} == {INPUT}


def test_logits_under_the_official_names_become_text(redis_url: str, client, hearing: Hearing) -> None:
    """What a rig does per trial: reset, logits as they come, finalize; both answers under their own names."""
    from arcuate.live.sources.redis import RedisLogits

    source = RedisLogits(redis_url, hearing.session.put, hearing.session.publish)
    hearing.session.listeners.append(source.hear)
    source.start()
    logits = np.random.default_rng(2).normal(scale=3.0, size=(40, len(CLASSES))).astype(np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    client.xadd("remote_lm_reset", {"done": 0})
    wait_for(lambda: client.xlen("remote_lm_done_resetting"))
    for row in logits:
        client.xadd("remote_lm_input", {"logits": official_order(row[None])})
    client.xadd("remote_lm_finalize", {"done": 0})
    wait_for(lambda: client.xlen("remote_lm_done_finalizing"))
    _, final = client.xrevrange("remote_lm_output_final", count=1)[0]
    readings = SEARCH.search(log_probs, 5)
    assert final[b"lm_response_final"].decode() == readings[0].text
    scoring = final[b"scoring"].decode().split(";")
    assert len(scoring) == 5 * len(readings) and scoring[0] == readings[0].text
    assert float(scoring[4]) == pytest.approx(readings[0].total, abs=1e-2)
    _, partial = client.xrevrange("remote_lm_output_partial", count=1)[0]
    assert partial[b"lm_response_partial"]
    client.xadd("remote_lm_update_params", {"acoustic_scale": 0.3})
    wait_for(lambda: client.xlen("remote_lm_done_updating_params"))
    source.stop()


def test_every_finalize_is_answered_and_nothing_else_is(redis_url: str, client, hearing: Hearing) -> None:
    """A rig waits for its answer, and takes the next entry for it: what a reset drops must not be one."""
    from arcuate.live.sources.redis import RedisLogits

    source = RedisLogits(redis_url, hearing.session.put, hearing.session.publish)
    hearing.session.listeners.append(source.hear)
    source.start()
    logits = np.random.default_rng(2).normal(scale=3.0, size=(20, len(CLASSES))).astype(np.float32)
    n_finals, n_done = (client.xlen(f"remote_lm_{name}") for name in ("output_final", "done_finalizing"))
    client.xadd("remote_lm_input", {"logits": official_order(logits)})
    wait_for(lambda: hearing.told("partial"))
    client.xadd("remote_lm_reset", {"done": 0})
    wait_for(lambda: hearing.told("final"))  # on the page it was cut off
    client.xadd("remote_lm_finalize", {"done": 0})
    wait_for(lambda: client.xlen("remote_lm_done_finalizing") == n_done + 1)
    assert client.xlen("remote_lm_output_final") == n_finals + 1
    _, final = client.xrevrange("remote_lm_output_final", count=1)[0]
    assert final[b"lm_response_final"] == b"" == final[b"scoring"]
    source.stop()


def test_answers_wait_for_a_redis_server_that_is_away() -> None:
    redis = pytest.importorskip("redis", reason="the extra redis is not installed")
    from arcuate.live.sources.redis import _StreamWriter

    written, back = [], threading.Event()

    class Away:
        def xadd(self, stream: str, fields: dict, **_: object) -> None:
            if len(tried) < 5:
                tried.append(stream)
                raise redis.ConnectionError("gone")
            written.append((stream, fields))
            back.set()

    tried: list[str] = []
    told: list[dict] = []
    outlet = _StreamWriter(Away(), told.append)
    outlet.start()
    outlet.add("remote_lm_output_final", {"lm_response_final": "kept"})
    assert back.wait(60)
    outlet.stop()
    assert written == [("remote_lm_output_final", {"lm_response_final": "kept"})]
    assert not told


def test_answers_that_can_wait_no_longer_are_told_once() -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    from arcuate.live.sources.redis import _StreamWriter

    told: list[dict] = []
    outlet = _StreamWriter(None, told.append)  # not started: nothing is taken out
    for _ in range(outlet.waiting):
        outlet.add("remote_lm_output_final", {})
    assert not told
    for _ in range(3):
        outlet.add("remote_lm_output_final", {})
    assert [fault["action"] for fault in told] == ["dropped"]


def test_bins_from_a_redis_stream(redis_url: str, client, hearing: Hearing) -> None:
    from arcuate.live.sources.redis import RedisBins

    client.xadd("neural_bins", {"bins": bins(9, seed=7).tobytes()})  # before we listen: not ours
    source = RedisBins(redis_url, 6, hearing.session.put, hearing.session.publish)
    source.start()
    heard = bins(80, seed=3)
    client.xadd("neural_bins", {"bins": b"odd"})
    for k, row in enumerate(heard):
        client.xadd("neural_bins", {"bins": row.tobytes(), "first": k, "time_s": 0.02 * k})
    client.xadd("neural_bins", {"end": 1})
    final = wait_for(lambda: hearing.told("final"))[0]
    source.stop()
    assert final["text"] == offline(heard) and final["n_bins"] == 80
    assert [f["action"] for f in hearing.told("fault")] == ["dropped"]


def test_no_redis_server_is_one_sentence(redis_url: str) -> None:
    from arcuate.live.sources.redis import connect

    with pytest.raises(UserError, match="no Redis server answers"):
        connect("redis://127.0.0.1:1")


# --- Lab Streaming Layer ------------------------------------------------------------------------------------


def test_bins_from_an_lsl_stream(lsl, hearing: Hearing) -> None:
    from arcuate.live.sources.lsl import LslBins

    name = f"arcuate-test-{os.getpid()}"
    outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", 6, 50, lsl.cf_float32, name))
    source = LslBins(name, 6, hearing.session.put)
    source.start()
    assert outlet.wait_for_consumers(120)
    heard, now = bins(80, seed=5), lsl.local_clock()
    for k, row in enumerate(heard):
        outlet.push_sample(row.tolist(), now + 0.02 * k)
    wait_for(lambda: hearing.session.decoder.n_bins == 80)
    hearing.session.put(End())
    final = wait_for(lambda: hearing.told("final"))[0]
    source.stop()
    assert final["text"] == offline(heard) and not hearing.told("fault")


def test_an_lsl_stream_that_is_not_there_or_has_other_channels(lsl, monkeypatch: pytest.MonkeyPatch) -> None:
    from arcuate.live.sources import lsl as source

    monkeypatch.setattr(source, "FIND_S", 1.0)
    with pytest.raises(UserError, match="no LSL stream named"):
        source.open_inlet("nobody", 6)
    name = f"arcuate-narrow-{os.getpid()}"
    outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", 4, 50, lsl.cf_float32, name))
    monkeypatch.setattr(source, "FIND_S", 10.0)
    with pytest.raises(UserError, match="has 4 channels where the model reads 6"):
        source.open_inlet(name, 6)
    del outlet


# --- replay -------------------------------------------------------------------------------------------------


def test_replay_hands_over_every_bin_of_every_trial_once(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    prepared = select_trials(store, store.sessions, "block", False, session=store.sessions[1])
    items: list = []
    replay = Replay(prepared, items.append, speed=64.0, pause_s=0.0, loop=False)
    replay.start()
    assert replay.done.wait(120)
    marks = [i for i in items if isinstance(i, Mark)]
    assert [m.trial for m in marks] == [t.id for t in prepared.trials]
    assert all(m.statistics is not None and m.session == store.sessions[1] for m in marks)
    heard = np.concatenate([i.bins for i in items if isinstance(i, Chunk)])
    np.testing.assert_array_equal(heard, np.concatenate([store.read_bins(t) for t in prepared.trials]))
    assert sum(isinstance(i, End) for i in items) == len(prepared.trials) + 1


def one_day(store: Store) -> ReplayTrials:
    return select_trials(store, store.sessions, "none", False, session=store.sessions[0])


def test_a_pause_between_trials_keeps_the_text_on_screen(cohort_store: Path) -> None:
    """Whoever pauses to look at a sentence must not see the next one begin."""
    ended, later, begun_in_pause = threading.Event(), threading.Event(), []

    def put(item: object) -> None:
        if isinstance(item, End) and not ended.is_set():
            replay.pause(True)
            ended.set()
        elif isinstance(item, Mark) and ended.is_set():
            begun_in_pause.append(replay.paused)
            later.set()

    replay = Replay(one_day(Store.open(cohort_store)), put, speed=64.0, pause_s=0.0)
    replay.start()
    assert ended.wait(120)
    assert not later.wait(0.3)
    replay.pause(False)
    assert later.wait(120)
    replay.stop()
    assert begun_in_pause[0] is False


def test_a_replay_that_is_stopped_does_not_end_the_sentence(cohort_store: Path) -> None:
    """What is half said when the server leaves is cut off, not whole."""
    prepared, items, heard = one_day(Store.open(cohort_store)), [], threading.Event()

    def put(item: object) -> None:
        items.append(item)
        if isinstance(item, Chunk):
            replay.pause(True)
            heard.set()

    replay = Replay(prepared, put, speed=1.0)
    replay.start()
    assert heard.wait(120)
    replay.stop()
    assert replay.done.is_set() and not any(isinstance(item, End) for item in items)


def test_replay_of_nothing_is_one_sentence(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    with pytest.raises(UserError, match="no val trials of session nowhere"):
        select_trials(store, store.sessions, "none", False, session="nowhere")
