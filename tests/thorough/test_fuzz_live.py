# ruff: noqa: E402 - dependencies of the server may be missing
"""Hostile input of the live server: WebSocket messages, raw connections, Redis entries, LSL samples, recordings.

Every input is refused, repaired or decoded; after all of them the server decodes a sentence as before.
"""

import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")
websockets = pytest.importorskip("websockets", reason="the extra live is not installed (websockets)")


from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.files import to_json_line
from arcuate.live.endpointing import Event
from arcuate.live.input import Chunk, End, Mark
from arcuate.live.recorder import Recorder, make_store
from arcuate.live.session import LiveSession
from arcuate.live.sources import socket as sender
from support.cases import cases
from support.fuzzing import damaged, fuzz, mutate
from support.live_parts import OPTIONS, SEARCH, Served, SessionRunner, bins, serving, small_decoder, wait_for

MARK = {"type": "mark", "trial": "t15/val/0001", "session": "day1", "reference": "the sea – naïve"}
MESSAGES = [
    b"B" + sender.pack_bins(bins(3)),
    b"B" + sender.pack_bins(bins(2), first=4, time_s=1.5),
    b"T" + json.dumps(MARK, ensure_ascii=False).encode(),
    b"T" + json.dumps({**MARK, "trial": "\ud800\x00"}).encode(),
    b'T{"type": "end"}',
]


def send_to_viewers(event: Event | bytes) -> None:
    """What the server does for each viewer; fails for a text that cannot be sent."""
    (event if isinstance(event, bytes) else to_json_line(event).encode("utf-8")).strip()


def test_messages_of_senders(tmp_path: Path) -> None:
    """A message, then a sentence: recorded and decoded."""
    session: LiveSession | None = None

    def read(content: bytes, folder: Path) -> None:
        nonlocal session
        if session is None:
            folder = folder / f"rec-{os.getpid()}"
            session = LiveSession(small_decoder(SEARCH), OPTIONS, send_to_viewers, Recorder(folder, 6))
        assert session.recorder is not None
        if content[:1] == b"B":
            item = sender.parse_bins(content[1:])
        else:
            item = sender.parse_mark(content[1:].decode("utf-8", "replace"), session.decoder.check_session)
        n_sentences = session.n_sentences
        for each in (item, Mark(), Chunk(bins(4)), End()):
            session._process(0.0, each)
        assert session.n_sentences > n_sentences and session.recorder.error is None, "the sentence is missing"
        if session.n_sentences % 50 == 0:
            store = make_store(session.recorder.folder)
            assert store is not None and len(Store.open(store).trials) == session.n_sentences

    outcomes = fuzz(read, damaged(MESSAGES, 5), tmp_path / "messages")
    outcomes.check(minimum_refused=0.2)


texts = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(["day1", "day9", "\ud800", "a\x00b"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["type", "trial", "session", "reference", "other"])
marks = st.dictionaries(keys, values, max_size=4) | st.builds(
    lambda rest: {**rest, "type": "mark"}, st.dictionaries(keys, texts | st.none(), max_size=4)
)


@settings(max_examples=cases(10))
@given(marks | values)
def test_generated_marks_are_storable_texts(message: object) -> None:
    try:
        item = sender.parse_mark(json.dumps(message), small_check_session)
    except UserError:
        return
    for text in (getattr(item, key, None) for key in ("trial", "session", "reference")):
        assert text is None or (text.encode("utf-8").decode() == text and "\x00" not in text)


def small_check_session(session: str) -> None:
    if session != "day1":
        raise UserError(f"session {session!r:.60} is unknown to this model")


# --- a real server ----------------------------------------------------------------------------------------


def frame(payload: bytes, opcode: int) -> bytes:
    """A masked WebSocket frame of a client."""
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack(">H", len(payload))
    key = b"\x01\x02\x03\x04"
    return bytes([0x80 | opcode]) + length + key + bytes(b ^ key[i % 4] for i, b in enumerate(payload))


def request(path: str) -> bytes:
    key = base64.b64encode(b"0123456789abcdef").decode()
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade"]
    return "\r\n".join([*lines, f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]).encode()


CONNECTIONS = [
    request("/frames") + frame(MESSAGES[2][1:], 1) + frame(MESSAGES[0][1:], 2) + frame(b"", 9) + frame(b"\x03\xe8", 8),
    request("/events") + frame(b'{"type": "end"}', 1) + frame(b'{"type": "speed", "speed": 2}', 1),
    b"GET /info?token=abc HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: arcuate_token=abc\r\nOrigin: http://[\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
]


def check_decodes(served: Served) -> None:
    """The server answers, its threads live, and a rig's sentence becomes text."""
    assert served.get("/healthz")[0] == 200
    offline = small_decoder(SEARCH)
    offline.reset("day1")
    offline.push(bins(60, seed=9))

    async def go() -> dict:
        async with (
            asyncio.timeout(120),
            websockets.connect(served.url("/events"), max_size=None, max_queue=None) as events,
        ):
            while True:  # until the server has noticed that the last sender is gone
                async with websockets.connect(served.url("/frames")) as frames:
                    with contextlib.suppress(websockets.exceptions.ConnectionClosed):
                        await frames.send(json.dumps({"type": "mark", "trial": "last", "session": "day1"}))
                        await frames.send(sender.pack_bins(bins(60, seed=9)))
                        await frames.send('{"type": "end"}')
                        while True:
                            message = await asyncio.wait_for(events.recv(), 20)
                            event = json.loads(message) if isinstance(message, str) else {"type": ""}
                            if event["type"] == "final" and event["trial"] == "last":
                                return event
                await asyncio.sleep(0.05)

    assert asyncio.run(go())["text"] == offline.finish().text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_raw_connections(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(messages_per_s=1e5, commands_per_s=1e4) as served:
        for content in damaged(CONNECTIONS, 2):
            with (
                socket.create_connection(("127.0.0.1", served.port), timeout=20) as client,
                contextlib.suppress(OSError),
            ):
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
                client.recv(200)
        check_decodes(served)
        wait_for(lambda: len(served.live.broadcaster.viewers) == 0)
    assert "Traceback" not in capfd.readouterr().err


def test_commands_of_viewers(capfd: pytest.CaptureFixture[str]) -> None:
    names = ("open", "close", "end", "reset_adaptation", "pause", "speed", "select", "skip", "mark")
    seeds = [json.dumps({"type": n, "paused": True, "speed": 2, "trial": "a", "n": 1}).encode() for n in names]

    async def go(served: Served) -> None:
        async with websockets.connect(served.url("/events"), max_size=None, max_queue=None) as events:
            for content in damaged(seeds, 2):
                await events.send(content.decode("utf-8", "replace"))
            await events.send('{"type": "open"}')
            await events.send('{"type": "the last one"}')
            rejected = 0
            while True:
                message = await asyncio.wait_for(events.recv(), 60)
                if isinstance(message, str) and json.loads(message)["type"] == "rejected":
                    rejected += 1
                    if "the last one" in message:
                        assert rejected > 10
                        return

    with serving(messages_per_s=1e5, commands_per_s=1e4) as served:
        asyncio.run(go(served))
        check_decodes(served)
    assert "Traceback" not in capfd.readouterr().err


# --- rigs -------------------------------------------------------------------------------------------------


def test_redis_entries(redis_url: str) -> None:
    """Fields with damaged, missing and extra values in both kinds of streams."""
    import redis

    from arcuate.live.sources.redis import INPUT, RedisBins, RedisLogits

    client, runner, rng = redis.Redis.from_url(redis_url), SessionRunner().start(), random.Random(3)
    client.flushall()
    sources = [
        RedisBins(redis_url, 6, runner.session.put, runner.session.publish),
        RedisLogits(redis_url, runner.session.put, runner.session.publish),
    ]
    failures: list[str] = []
    for source in sources:
        source.on_error = failures.append
        source.start()
    logits = np.random.default_rng(0).normal(size=(2, 41)).astype(np.float32).tobytes()
    seeds = {b"bins": bins(3).tobytes(), b"logits": logits, b"first": b"12", b"time_s": b"0.25", b"end": b"1"}
    for _ in range(cases(10)):
        fields = {key: mutate(value, rng) for key, value in seeds.items() if rng.random() < 0.6}
        name = rng.choice(["neural_bins", INPUT, "remote_lm_reset", "remote_lm_finalize", "remote_lm_update_params"])
        client.xadd(name, fields or {b"nothing": b""}, maxlen=20_000)
    client.xadd("neural_bins", {"end": 1})
    n_final = lambda: len(runner.events_of("final"))
    wait_for(lambda: runner.session._queue.empty() and n_final() > 0)
    before = n_final()
    runner.session.put(Mark())
    client.xadd("neural_bins", {"bins": bins(60).tobytes()})
    client.xadd("neural_bins", {"end": 1})
    wait_for(lambda: n_final() > before)
    for source in sources:
        source.stop()
    runner.session.stop()
    assert failures == [] and runner.session.error is None
    assert runner.events_of("fault")


@pytest.mark.parametrize("kind", ["cf_double64", "cf_float32", "cf_int32"])
def test_lsl_samples(lsl, kind: str) -> None:
    """Values and timestamps that no amplifier sends."""
    from arcuate.live.sources.lsl import LslBins

    runner, rng = SessionRunner().start(), random.Random(5)
    name, failures = f"arcuate-fuzz-{kind}-{os.getpid()}", []
    outlet = lsl.StreamOutlet(lsl.StreamInfo(name, "bins", 6, 50, getattr(lsl, kind), name))
    source = LslBins(name, 6, runner.session.put)
    source.on_error = failures.append
    source.start()
    assert outlet.wait_for_consumers(120)
    strange = [0, 1, -1, 2**31 - 1] if kind == "cf_int32" else [0.0, -1.5, 1e38, float("nan"), float("inf"), 5e-324]
    clocks = [0.0, -1.0, 1e9, 1e300, 1e-300, float("inf"), float("nan"), lsl.local_clock()]
    for _ in range(cases(5)):
        outlet.push_sample([rng.choice(strange) for _ in range(6)], rng.choice(clocks))
    wait_for(lambda: runner.events_of("fault"))
    wait_for(lambda: runner.session._queue.empty())
    for item in (End(), Mark(), Chunk(bins(60)), End()):
        runner.session.put(item)
    wait_for(lambda: runner.events_of("final"))
    source.stop()
    runner.session.stop()
    assert failures == [] and runner.session.error is None


# --- recordings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["journal.jsonl", "bins.f32"])
def test_recordings_of_live_sessions(tmp_path: Path, part: str) -> None:
    """A damaged recording is resumed with what is complete, or refused."""
    session = LiveSession(small_decoder(SEARCH), OPTIONS, send_to_viewers, Recorder(tmp_path / "rec", 6))
    session.start()
    for k in range(2):
        for item in (sender.parse_mark(json.dumps(MARK), small_check_session), Chunk(bins(60, seed=k)), End()):
            session.put(item)
    session.stop()
    seed = (tmp_path / "rec" / part).read_bytes()
    intact = {name: (tmp_path / "rec" / name).read_bytes() for name in ("journal.jsonl", "bins.f32")}

    def read(content: bytes, folder: Path) -> None:
        for name, kept in intact.items():
            (tmp_path / "rec" / name).write_bytes(kept)
        (tmp_path / "rec" / part).write_bytes(content)
        recorder = Recorder(tmp_path / "rec", 6)
        send_to_viewers({"type": "snapshot", "finals": recorder.finals})
        recorder.close()
        if recorder.finals:
            Store.open(tmp_path / "rec" / "store").check_unchanged([])

    fuzz(read, damaged([seed], 2), tmp_path / part.partition(".")[0]).check()
