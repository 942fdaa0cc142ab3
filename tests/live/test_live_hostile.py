# ruff: noqa: E402 - dependencies of the server may be missing
"""Hostile or broken clients, sources and disks: refused or reported, and nothing stops silently."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")
websockets = pytest.importorskip("websockets", reason="the extra live is not installed (websockets)")

from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.live.access import Access, make_access
from arcuate.live.input import Chunk, End, Mark, Source
from arcuate.live.recorder import Recorder, make_store
from arcuate.live.session import QUEUE_SIZE
from arcuate.live.sources.socket import pack_bins, parse_command
from arcuate.live.viewers import encode_posteriors
from support.live_parts import (
    SEARCH,
    Served,
    SessionRunner,
    bins,
    marked,
    next_event,
    rejection_status,
    replaying,
    serving,
    small_decoder,
    wait_for,
)

# --- texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\x1b[2J", "x" * 2001])
@pytest.mark.parametrize("key", ["trial", "reference"])
def test_a_mark_with_an_invalid_text_is_rejected_and_decoding_continues(tmp_path: Path, text: str, key: str) -> None:
    with serving(record=tmp_path / "rec") as served:

        async def go() -> tuple[str, dict]:
            url = served.url("/events")
            async with websockets.connect(url) as events, websockets.connect(served.url("/frames")) as frames:
                await frames.send(json.dumps({"type": "mark", key: text}))
                message = (await next_event(frames, "rejected"))["message"]
                await frames.send(json.dumps({"type": "mark", "trial": "fine", "reference": "naïve – ok"}))
                await frames.send(pack_bins(bins(80)))
                await frames.send('{"type": "end"}')
                return message, await next_event(events, "final")

        message, final = asyncio.run(go())
        assert message.startswith(key) and message.isprintable() and final["trial"] == "fine"
        assert served.get("/healthz")[0] == 200
    assert [t.text for t in Store.open(tmp_path / "rec" / "store").trials] == ["naïve – ok"]


def test_a_recording_with_an_invalid_reference_still_becomes_a_store(tmp_path: Path) -> None:
    """A source of one's own may send such texts."""
    items = [*marked("t0", bins(80), "a\x00b \ud800"), *marked("t1", bins(80, seed=1), "Fine.")]
    assert SessionRunner(record=tmp_path / "rec").run(items).session.error is None
    assert [t.text for t in Store.open(tmp_path / "rec" / "store").trials] == ["a\\x00b \\ud800", "Fine."]


# --- senders and viewers ----------------------------------------------------------------------------------


def test_bins_are_refused_unless_the_socket_is_the_source(cohort_store: Path) -> None:
    """Bins of a stranger must not be mixed into a replay or a rig's stream."""
    with replaying(cohort_store, speed=1.0) as served:

        async def go() -> tuple[int, str]:
            async with websockets.connect(served.url("/frames")) as frames:
                with contextlib.suppress(websockets.exceptions.ConnectionClosed):
                    await frames.send(pack_bins(bins(1, 3)))
                with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                    await asyncio.wait_for(frames.recv(), 5)
                return closed.value.rcvd.code, closed.value.rcvd.reason

        assert asyncio.run(go()) == (1008, "this server does not accept bins; start it with --source socket")


def test_viewers_cannot_send_and_senders_cannot_view() -> None:
    with serving(access=Access("0.0.0.0", "to-view-1", "to-send-1")) as served:
        assert rejection_status(served, "/frames?token=to-view-1") == 403
        assert rejection_status(served, "/events?token=to-send-1") == 403
        assert rejection_status(served, "/frames?token=to-send-1") == 0
        assert rejection_status(served, "/events?token=to-view-1") == 0
        assert served.get("/info?token=to-send-1")[0] == 401
    with serving(access=Access("0.0.0.0", "to-view-1")) as served:
        assert rejection_status(served, "/frames?token=to-view-1") == 403 and rejection_status(served, "/frames") == 403


def test_tokens_are_made_where_needed() -> None:
    public = make_access("0.0.0.0", None)
    for local in (make_access("127.0.0.1", None), make_access("::1", None)):
        assert (local.token, local.send_token) == (None, None)
    assert public.token and public.send_token and public.token != public.send_token
    guarded = make_access("127.0.0.1", "a-token-of-mine")
    assert guarded.token == "a-token-of-mine" and guarded.send_token
    sender_only = make_access("127.0.0.1", None, "rig-token-1")
    assert sender_only.accepts_viewer(None) and not sender_only.accepts_sender(None)
    assert sender_only.accepts_sender(None, "rig-token-1")


@pytest.mark.parametrize("token", ["пароль-пароль", "two words", "tök€n-tök€n", "short", "a\nb-token-x", ""])
def test_tokens_that_no_address_can_hold_are_rejected(token: str) -> None:
    """A token that a cookie cannot hold made every page an error 500."""
    for given in ((token, None), (None, token)):
        with pytest.raises(UserError, match="must consist of 8 or more letters, digits"):
            make_access("0.0.0.0", *given)
    with pytest.raises(UserError, match="must differ"):
        make_access("0.0.0.0", "same-token", "same-token")


@pytest.mark.parametrize("given", ["%D0%BF%D0%B0", "%ED%A0%80", "%00", "é"])
def test_strange_tokens_of_clients_are_401(given: str) -> None:
    with serving(access=Access("0.0.0.0", "to-view-1", "to-send-1")) as served:
        for request in (f"/?token={given}", "/"):
            status = raw_status(served, f"GET {request} HTTP/1.1\r\nHost: x\r\nCookie: arcuate_token={given}\r\n\r\n")
            assert status in (400, 401)


def raw_status(served: Served, request: str) -> int:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(request.encode())
        return int(client.recv(100).split()[1])


def test_a_viewer_that_cannot_be_sent_a_message_is_disconnected() -> None:
    """A page that receives nothing more must notice it: it connects again."""
    with serving() as served:

        async def go() -> None:
            async with websockets.connect(served.url("/events")) as events:
                await next_event(events, "snapshot")
                (viewer,) = served.live.broadcaster.viewers
                served.live.broadcaster.loop.call_soon_threadsafe(viewer.offer, "\ud800")  # cannot be encoded
                with pytest.raises(websockets.exceptions.ConnectionClosed):
                    await asyncio.wait_for(events.recv(), 10)

        asyncio.run(go())
        assert served.get("/healthz")[0] == 200


def test_a_viewer_that_sends_bytes_is_answered() -> None:
    with serving() as served:

        async def go() -> str:
            async with websockets.connect(served.url("/events")) as events:
                await events.send(b"\x00\xff")
                return (await next_event(events, "rejected", seconds=10))["message"]

        assert "JSON object" in asyncio.run(go())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"type": 3}', "[" * 5000, "\x00", '"open"'])
def test_malformed_commands_are_rejected(text: str) -> None:
    with pytest.raises(UserError):
        parse_command(text)


def test_an_aborted_viewer_leaves_no_message(caplog: pytest.LogCaptureFixture) -> None:
    """Many messages written to a lost connection printed "socket.send() raised exception."."""
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    asked = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + key + b"\r\n"
    with serving() as served:
        broadcaster, image = served.live.broadcaster, encode_posteriors(np.zeros((1, 41)), 1, 1)
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", served.port), timeout=20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
            client.sendall(asked)
            wait_for(lambda: len(broadcaster.viewers) == 1)
            client.close()
            broadcaster.loop.call_soon_threadsafe(lambda: [broadcaster.publish(image) for _ in range(200)])
            wait_for(lambda: not broadcaster.viewers)
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


# --- connections ------------------------------------------------------------------------------------------


def connected(served: Served, timeout_s: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=timeout_s)


HALF_REQUESTS = {
    "no byte": b"",
    "half a request": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "half a second request": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /",
    "half a body": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nab",
    "half a WebSocket": b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n",
}


@pytest.mark.thorough
@pytest.mark.parametrize("sent", HALF_REQUESTS.values(), ids=HALF_REQUESTS)
def test_half_open_requests_time_out(sent: bytes) -> None:
    with (
        serving(config={"request_s": 0.5}) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as client,
    ):
        client.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(4096):  # raises TimeoutError if the connection is kept
                pass


def test_a_request_that_arrives_byte_by_byte_times_out() -> None:
    """The time limit is of the request, not of the pause between two bytes."""
    with (
        serving(config={"request_s": 0.5}) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=0.1) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|Broken pipe|closed"):  # noqa: PT012 - one byte at a time
            for _ in range(200):
                client.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if not client.recv(100):
                        raise ConnectionError("closed")


def test_connections_in_use_are_kept() -> None:
    with serving(config={"request_s": 0.2}) as served:

        async def go() -> str:
            async with websockets.connect(served.url("/events")) as events:
                await next_event(events, "snapshot")
                await asyncio.sleep(1.0)  # longer than a request may take
                await events.send("no command")
                return (await next_event(events, "rejected"))["message"]

        assert "JSON object" in asyncio.run(go())


def test_a_client_that_answers_no_ping_is_disconnected() -> None:
    key = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    asked = b"GET /frames HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" + key + b"\r\n"
    with (
        serving(config={"ping_s": 0.2}) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as client,
    ):
        client.sendall(asked)
        assert client.recv(4096).startswith(b"HTTP/1.1 101")
        with contextlib.suppress(ConnectionResetError):
            while client.recv(4096):  # raises TimeoutError if the connection is kept
                pass


def test_connections_are_limited() -> None:
    n_allowed = 12 + 4
    with serving(config={"more_connections": 4}) as served, contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))

        kept = [connect() for _ in range(n_allowed)]
        assert connect().recv(1) == b""
        kept[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert kept[0].recv(100).startswith(b"HTTP/1.1 200")


# --- threads ----------------------------------------------------------------------------------------------


class BrokenSource(Source):
    def __init__(self, error: Exception) -> None:
        super().__init__("the broken source")
        self.error = error

    def _run(self) -> None:
        raise self.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [UserError("the rig is on fire"), OSError(5, "lost"), ValueError("a defect")])
def test_a_source_that_dies_makes_health_fail(error: Exception) -> None:
    with serving(make_source=lambda _: BrokenSource(error)) as served:
        wait_for(lambda: served.get("/healthz")[0] == 503)
        health = json.loads(served.get("/healthz")[1])
        expected = "unexpectedly" if isinstance(error, ValueError) else str(error)
        assert health["status"] == "stopped" and "the broken source stopped" in health["error"]
        assert expected in health["error"]

        async def go() -> dict:
            async with websockets.connect(served.url("/events")) as events:
                return (await next_event(events, "snapshot"))["now"]["error"]

        assert asyncio.run(go())["message"] == health["error"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_decoding_thread_that_dies_makes_health_fail() -> None:
    with serving() as served:
        served.live.session.put(End(on_done=lambda: 1 / 0))
        wait_for(lambda: served.get("/healthz")[0] == 503)
        assert "decoding stopped unexpectedly" in json.loads(served.get("/healthz")[1])["error"]


def test_a_decoding_thread_that_is_stuck_makes_health_fail() -> None:
    with serving(stalled_s=0.05) as served:
        release = threading.Event()
        served.live.session.put(End(on_done=lambda: release.wait(60)))
        try:
            wait_for(lambda: served.get("/healthz")[0] == 503, 20)
            assert json.loads(served.get("/healthz")[1])["status"] == "stalled"
        finally:
            release.set()
        wait_for(lambda: served.get("/healthz")[0] == 200)


def test_bins_that_a_stuck_decoder_has_no_room_for_are_rejected() -> None:
    with serving() as served:
        release = threading.Event()
        served.live.session.put(End(on_done=lambda: release.wait(60)))

        async def go() -> str:
            async with websockets.connect(served.url("/frames")) as frames:
                for k in range(QUEUE_SIZE + 8):
                    await frames.send(pack_bins(bins(1), first=k))
                return (await next_event(frames, "rejected"))["message"]

        try:
            assert "decoding lags behind" in asyncio.run(go())
        finally:
            release.set()


def test_a_stopped_server_drops_what_it_has_no_time_to_decode(tmp_path: Path) -> None:
    """The sentence in progress is kept, and the loss is reported."""
    runner = SessionRunner(record=tmp_path / "rec")
    session, started = runner.session, threading.Event()
    release = threading.Event()

    def block() -> None:
        started.set()
        release.wait(60)

    session.start()
    for item in (Mark(), Chunk(bins(80)), End(on_done=block)):
        session.put(item)
    assert started.wait(60)
    for _ in range(100):
        session.put(Chunk(bins(1)))
    threading.Timer(0.3, release.set).start()
    session.stop(drain_s=0.0)
    assert [e["message"] for e in runner.events_of("fault")] == [
        "100 queued messages were not decoded because the server stopped"
    ]
    assert [t.n_bins for t in Store.open(tmp_path / "rec" / "store").trials] == [80]


# --- disks ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """A file that grows beyond the limit fails in the middle of a write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_in_the_middle_of_a_bin_keeps_the_sentences(tmp_path: Path) -> None:
    """After the last complete bin there is a part of one."""
    runner = SessionRunner(small_decoder(SEARCH, n_channels=250), record=tmp_path / "rec")
    session, recorder = runner.session, runner.session.recorder
    for item in marked("a", bins(80, 250), "Hello."):
        session._process(0.0, item)
    with file_size_limit(600_007):
        runner.run(marked("b", bins(600, 250), "Again."))
    assert (tmp_path / "rec" / "bins.f32").stat().st_size % 1000 == 7
    assert session.error is None and "File too large" in (recorder.error or "")
    assert [e["on"] for e in runner.events_of("recording")] == [True, False]
    (info,) = Store.open(tmp_path / "rec" / "store").trials
    assert info.text == "Hello."


def test_a_disk_without_room_for_the_store_keeps_the_sentences(tmp_path: Path) -> None:
    """The message names what to do, and it works."""
    session = SessionRunner(small_decoder(SEARCH, n_channels=250), record=tmp_path / "rec").session
    for item in marked("a", bins(80, 250), "Hello."):
        session._process(0.0, item)
    session.start()
    with file_size_limit(20_000):
        session.stop()
    assert session.error is not None and "the sentences are in" in session.error
    assert f"start and stop arcuate live with --record {tmp_path / 'rec'} again" in session.error
    SessionRunner(small_decoder(SEARCH, n_channels=250), record=tmp_path / "rec").run([])
    assert [t.text for t in Store.open(tmp_path / "rec" / "store").trials] == ["Hello."]


def test_recordings_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        SessionRunner(record=tmp_path / "new" / "rec").run(marked("a", bins(80), "Hello."))
    finally:
        os.umask(before)
    found = {p: stat.S_IMODE(p.stat().st_mode) for p in [tmp_path / "new" / "rec", *(tmp_path / "new").rglob("*")]}
    assert len(found) > 6
    assert {mode for p, mode in found.items() if p.is_dir()} == {0o700}
    assert {mode for p, mode in found.items() if p.is_file() and ".lock" not in p.name} == {0o600}


def test_a_resumed_recording_becomes_private(tmp_path: Path) -> None:
    Recorder(tmp_path / "rec", 6).close()
    (tmp_path / "rec" / "journal.jsonl").chmod(0o644)
    Recorder(tmp_path / "rec", 6).close()
    assert stat.S_IMODE((tmp_path / "rec" / "journal.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "row",
    [
        {"type": "final"},
        {"type": "final", "session": "day1", "words": [3], "text": "", "n_bins": 1, "first_bin": 0, "trial": None},
        {"type": "final", "session": "day1", "words": [], "text": "", "n_bins": -1, "first_bin": 0, "trial": None},
        {"type": "final", "session": "day1", "words": [], "text": "", "n_bins": 9, "first_bin": 0, "trial": None},
        {"type": "final", "session": "../x", "words": [], "text": "", "n_bins": 1, "first_bin": 0, "trial": None},
        {"type": None},
        {},
    ],
)
def test_a_damaged_journal_is_one_sentence(tmp_path: Path, row: dict) -> None:
    recorder = Recorder(tmp_path / "rec", 6)
    recorder.add_bins(np.zeros((2, 6), np.float32))
    recorder.close()
    with (tmp_path / "rec" / "journal.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"line 2 is not a line|ends after them|invalid session"):
        make_store(tmp_path / "rec")
