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
from arcuate.live.input import Chunk, End, Mark, SessionChange
from arcuate.live.sources.replay import Replay, ReplayTrials, select_trials
from arcuate.models.layout import Frames
from support.live_parts import SEARCH, SessionRunner, bins, small_decoder, wait_for


@pytest.fixture
def runner() -> Iterator[SessionRunner]:
    found = SessionRunner().start()
    yield found
    found.session.stop()


def offline(sent: np.ndarray) -> str | None:
    decoder = small_decoder(SEARCH)
    decoder.push(sent)
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
    """Redis numbers entries within a millisecond per stream, and long streams are read in parts."""
    from arcuate.live.sources.redis import FINALIZE, INPUT, READ_COUNT, RESET, sort_entries

    logits = [(f"7-{i}".encode(), {}) for i in range(3)]
    mixed = [(FINALIZE.encode(), [(b"7-0", {})]), (INPUT.encode(), logits), (RESET.encode(), [(b"7-0", {})])]
    assert [name for _, name, _ in sort_entries(mixed)] == [RESET, INPUT, INPUT, INPUT, FINALIZE]
    many = [(f"{i}-0".encode(), {}) for i in range(READ_COUNT)]
    parts = [(INPUT.encode(), many), (FINALIZE.encode(), [(f"{READ_COUNT + 9}-0".encode(), {})])]
    assert {name for _, name, _ in sort_entries(parts)} == {INPUT}


def test_logits_under_the_official_names_become_text(redis_url: str, client, runner: SessionRunner) -> None:
    """As a rig does for each trial: reset, logits as they arrive, finalize."""
    from arcuate.live.sources.redis import RedisLogits

    source = RedisLogits(redis_url, runner.session.put, runner.session.publish)
    runner.session.subscribers.append(source.on_event)
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
    nbest = SEARCH.search(Frames(log_probs), 5)
    assert final[b"lm_response_final"].decode() == nbest[0].text
    scoring = final[b"scoring"].decode().split(";")
    assert len(scoring) == 5 * len(nbest) and scoring[0] == nbest[0].text
    assert float(scoring[4]) == pytest.approx(nbest[0].total, abs=1e-2)
    _, partial = client.xrevrange("remote_lm_output_partial", count=1)[0]
    assert partial[b"lm_response_partial"]
    client.xadd("remote_lm_update_params", {"acoustic_scale": 0.3})
    wait_for(lambda: client.xlen("remote_lm_done_updating_params"))
    source.stop()


def test_every_finalize_is_answered_and_nothing_else_is(redis_url: str, client, runner: SessionRunner) -> None:
    """A rig takes the next entry as its answer, so a sentence dropped by a reset must not be one."""
    from arcuate.live.sources.redis import RedisLogits

    source = RedisLogits(redis_url, runner.session.put, runner.session.publish)
    runner.session.subscribers.append(source.on_event)
    source.start()
    logits = np.random.default_rng(2).normal(scale=3.0, size=(20, len(CLASSES))).astype(np.float32)
    n_finals, n_done = (client.xlen(f"remote_lm_{name}") for name in ("output_final", "done_finalizing"))
    client.xadd("remote_lm_input", {"logits": official_order(logits)})
    wait_for(lambda: runner.events_of("partial"))
    client.xadd("remote_lm_reset", {"done": 0})
    wait_for(lambda: runner.events_of("final"))  # on the page it was cut off
    client.xadd("remote_lm_finalize", {"done": 0})
    wait_for(lambda: client.xlen("remote_lm_done_finalizing") == n_done + 1)
    assert client.xlen("remote_lm_output_final") == n_finals + 1
    _, final = client.xrevrange("remote_lm_output_final", count=1)[0]
    assert final[b"lm_response_final"] == b"" == final[b"scoring"]
    source.stop()


def test_answers_are_queued_while_the_redis_server_is_unavailable() -> None:
    redis = pytest.importorskip("redis", reason="the extra redis is not installed")
    from arcuate.live.sources.redis import StreamWriter

    written, back = [], threading.Event()

    class Away:
        def xadd(self, stream: str, fields: dict, **_: object) -> None:
            if len(tried) < 5:
                tried.append(stream)
                raise redis.ConnectionError("gone")
            written.append((stream, fields))
            back.set()

    tried: list[str] = []
    published: list[dict] = []
    writer = StreamWriter(Away(), published.append)
    writer.add("remote_lm_output_final", {"lm_response_final": "kept"})
    assert back.wait(60)
    writer.stop()
    assert written == [("remote_lm_output_final", {"lm_response_final": "kept"})]
    assert not published


def test_a_full_queue_of_answers_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    from arcuate.live.sources.redis import StreamWriter

    published: list[dict] = []
    release = threading.Event()
    client = type("Slow", (), {"xadd": lambda *_, **__: release.wait(60)})()
    monkeypatch.setattr(StreamWriter, "max_queued", 20)
    writer = StreamWriter(client, published.append)
    for _ in range(20):
        writer.add("remote_lm_output_final", {})
    assert not published
    for _ in range(3):
        writer.add("remote_lm_output_final", {})
    assert [fault["action"] for fault in published] == ["dropped"]
    release.set()
    writer.stop()


def test_bins_from_a_redis_stream(redis_url: str, client, runner: SessionRunner) -> None:
    from arcuate.live.sources.redis import RedisBins

    client.xadd("neural_bins", {"bins": bins(9, seed=7).tobytes()})  # before the source was created
    source = RedisBins(redis_url, 6, runner.session.put, runner.session.publish)
    source.start()
    runner.session.put(Mark())
    sent = bins(80, seed=3)
    client.xadd("neural_bins", {"bins": b"odd"})
    for k, row in enumerate(sent):
        client.xadd("neural_bins", {"bins": row.tobytes(), "first": k, "time_s": 0.02 * k})
    client.xadd("neural_bins", {"end": 1})
    final = wait_for(lambda: runner.events_of("final"))[0]
    source.stop()
    assert final["text"] == offline(sent) and final["n_bins"] == 80
    assert [f["action"] for f in runner.events_of("fault")] == ["dropped"]


def test_a_missing_redis_server_is_reported(redis_url: str) -> None:
    from arcuate.live.sources.redis import connect

    with pytest.raises(UserError, match="no Redis server responds"):
        connect("redis://127.0.0.1:1")


def test_a_redis_key_of_another_type_is_reported(redis_url: str, client) -> None:
    from arcuate.live.sources.redis import RedisBins

    client.set("neural_bins", "not a stream")
    with pytest.raises(UserError, match="'neural_bins' cannot be read as a stream"):
        RedisBins(redis_url, 6, print, print)


def test_a_redis_key_that_changes_its_type_is_a_fault(redis_url: str, client, runner: SessionRunner) -> None:
    """Reading continues when the key is a stream again."""
    from arcuate.live.sources.redis import RedisBins

    source = RedisBins(redis_url, 6, runner.session.put, runner.session.publish)
    client.set("neural_bins", "not a stream")
    runner.session.put(Mark())
    source.start()
    wait_for(lambda: runner.events_of("fault"))
    client.delete("neural_bins")
    client.xadd("neural_bins", {"bins": bins(80).tobytes()})
    client.xadd("neural_bins", {"end": 1})
    final = wait_for(lambda: runner.events_of("final"))[0]
    source.stop()
    assert final["n_bins"] == 80 and "Redis" in runner.events_of("fault")[0]["message"]


def test_an_answer_that_redis_refuses_does_not_block_later_ones(redis_url: str, client, runner: SessionRunner) -> None:
    from arcuate.live.sources.redis import RedisLogits

    client.set("remote_lm_done_resetting", "not a stream")
    source = RedisLogits(redis_url, runner.session.put, runner.session.publish)
    source.start()
    client.xadd("remote_lm_reset", {"done": 0})
    client.xadd("remote_lm_finalize", {"done": 0})
    wait_for(lambda: client.xlen("remote_lm_done_finalizing"))
    source.stop()
    assert "Redis refused an answer to remote_lm_done_resetting" in runner.events_of("fault")[0]["message"]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@127.0.0.1:1",
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://127.0.0.1:1?password=hunter2",
        "redis://:hun/hunter2@127.0.0.1",
        "redis://:x@hunter2@127.0.0.1:1",
        "http://:hunter2@127.0.0.1",
        "redis://:hunter2@[::1",
    ],
)
def test_the_redis_password_is_never_printed(redis_url: str, url: str) -> None:
    from arcuate.live.sources.redis import connect

    with pytest.raises(UserError) as found:
        connect(url)
    assert "hun" not in str(found.value) and "redis" in str(found.value).lower()


def test_a_burst_of_rows_is_decoded_in_pieces(redis_url: str, client, runner: SessionRunner) -> None:
    """One item of 100,000 rows would keep the decoding thread, and the signals of the process, waiting for minutes."""
    from arcuate.live.sources.redis import RedisBins

    items: list = []
    source = RedisBins(redis_url, 6, items.append, runner.session.publish)
    source.start()
    sent = bins(100_000)
    client.xadd("neural_bins", {"bins": sent.tobytes(), "first": 7, "time_s": 5000.0})
    client.xadd("neural_bins", {"end": 1})
    wait_for(lambda: items and isinstance(items[-1], End))
    source.stop()
    chunks = items[:-1]
    assert max(len(c.bins) for c in chunks) <= 50
    np.testing.assert_array_equal(np.concatenate([c.bins for c in chunks]), sent)
    assert chunks[0].first == 7 and chunks[-1].first + len(chunks[-1].bins) == 100_007
    assert chunks[-1].time_s == 5000.0 and chunks[0].time_s == pytest.approx(5000.0 - 99_950 * 0.02)


def test_a_source_stops_in_the_middle_of_a_burst(redis_url: str, client, runner: SessionRunner) -> None:
    from arcuate.live.sources.redis import RedisBins

    items: list = []

    def put(item: object) -> None:
        items.append(item)
        source._stopped.set()

    source = RedisBins(redis_url, 6, put, runner.session.publish)
    source.start()
    for _ in range(3):
        client.xadd("neural_bins", {"bins": bins(10_000).tobytes()})
    wait_for(lambda: items)
    source.stop()
    assert not source._thread.is_alive() and len(items) == 1


# --- Lab Streaming Layer ------------------------------------------------------------------------------------


def test_bins_from_an_lsl_stream(lsl, runner: SessionRunner) -> None:
    from arcuate.live.sources.lsl import LslBins

    name = f"arcuate-test-{os.getpid()}"
    outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", 6, 50, lsl.cf_float32, name))
    source = LslBins(name, 6, runner.session.put)
    source.start()
    runner.session.put(Mark())
    assert outlet.wait_for_consumers(120)
    sent, now = bins(80, seed=5), lsl.local_clock()
    for k, row in enumerate(sent):
        outlet.push_sample(row.tolist(), now + 0.02 * k)
    wait_for(lambda: runner.session.decoder.n_bins == 80)
    runner.session.put(End())
    final = wait_for(lambda: runner.events_of("final"))[0]
    source.stop()
    assert final["text"] == offline(sent) and not runner.events_of("fault")


def test_unsuitable_lsl_streams_are_reported(lsl) -> None:
    """Samples of text ended the reading thread without a message."""
    from arcuate.live.sources.lsl import LslBins

    with pytest.raises(UserError, match="no LSL stream named 'missing'"):
        LslBins("missing", 6, print, timeout_s=1.0)
    for n_channels, kind, words in (
        (4, lsl.cf_float32, "has 4 channels, but the model expects 6"),
        (6, lsl.cf_string, "contains text, but bins are numbers"),
    ):
        name = f"arcuate-{n_channels}-{os.getpid()}"
        outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", n_channels, 50, kind, name))
        with pytest.raises(UserError, match=words):
            LslBins(name, 6, print)
        del outlet


def test_an_lsl_stream_of_integers_is_read(lsl) -> None:
    from arcuate.live.sources.lsl import LslBins

    name, items = f"arcuate-counts-{os.getpid()}", []
    outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", 6, 50, lsl.cf_int16, name))
    source = LslBins(name, 6, items.append)
    source.start()
    assert outlet.wait_for_consumers(120)
    outlet.push_sample([1, -2, 3, 4, 5, 32767])
    wait_for(lambda: items)
    source.stop()
    np.testing.assert_array_equal(items[0].bins, [[1, -2, 3, 4, 5, 32767]])


# --- replay -------------------------------------------------------------------------------------------------


def test_replay_puts_every_bin_of_every_trial_once(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    prepared = select_trials(store, store.sessions, "block", False, session=store.sessions[1])
    items: list = []
    replay = Replay(prepared, items.append, speed=64.0, pause_s=0.0, loop=False)
    replay.start()
    assert replay.done.wait(120)
    marks = [i for i in items if isinstance(i, Mark)]
    assert [(m.trial, m.session) for m in marks] == [(t.id, store.sessions[1]) for t in prepared.trials]
    sent = np.concatenate([i.bins for i in items if isinstance(i, Chunk)])
    np.testing.assert_array_equal(sent, np.concatenate([store.read_bins(t) for t in prepared.trials]))
    assert sum(isinstance(i, End) for i in items) == len(prepared.trials) + 1


def test_a_continuous_replay_marks_no_trials(cohort_store: Path) -> None:
    store, items = Store.open(cohort_store), []
    prepared = select_trials(store, store.sessions, "none", False)
    replay = Replay(prepared, items.append, speed=64.0, pause_s=0.0, loop=False, continuous=True)
    replay.start()
    assert replay.done.wait(120)
    others = [i for i in items if not isinstance(i, Chunk)]
    assert [type(i) for i in others] == [SessionChange] * (len(others) - 1) + [End]
    assert [i.session for i in others[:-1]] == list(store.sessions)


def first_session(store: Store) -> ReplayTrials:
    return select_trials(store, store.sessions, "none", False, session=store.sessions[0])


def test_a_pause_between_trials_keeps_the_text_on_screen(cohort_store: Path) -> None:
    """The next trial must not start while the replay is paused."""
    ended, later, started_paused = threading.Event(), threading.Event(), []

    def put(item: object) -> None:
        if isinstance(item, End) and not ended.is_set():
            replay.pause(True)
            ended.set()
        elif isinstance(item, Mark) and ended.is_set():
            started_paused.append(replay.paused)
            later.set()

    replay = Replay(first_session(Store.open(cohort_store)), put, speed=64.0, pause_s=0.0)
    replay.start()
    assert ended.wait(120)
    assert not later.wait(0.3)
    replay.pause(False)
    assert later.wait(120)
    replay.stop()
    assert started_paused[0] is False


def test_a_stopped_replay_does_not_end_the_sentence(cohort_store: Path) -> None:
    """An incomplete sentence must be marked as cut off when the server stops."""
    prepared, items, started = first_session(Store.open(cohort_store)), [], threading.Event()

    def put(item: object) -> None:
        items.append(item)
        if isinstance(item, Chunk):
            replay.pause(True)
            started.set()

    replay = Replay(prepared, put, speed=1.0)
    replay.start()
    assert started.wait(120)
    replay.stop()
    assert replay.done.is_set() and not any(isinstance(item, End) for item in items)


def test_a_replay_without_trials_is_rejected(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    with pytest.raises(UserError, match="no val trials of session nowhere"):
        select_trials(store, store.sessions, "none", False, session="nowhere")
