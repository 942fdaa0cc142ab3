# ruff: noqa: E402 - dependencies of the server may be missing
"""The server from a client's side: routes, WebSockets, tokens, origins, limits, replay, reconnects, many viewers."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra live is not installed (fastapi)")
pytest.importorskip("uvicorn", reason="the extra live is not installed (uvicorn)")
websockets = pytest.importorskip("websockets", reason="the extra live is not installed (websockets)")

from arcuate.data.store import Store
from arcuate.live.access import Access, TokenBucket
from arcuate.live.sources.socket import pack_bins
from support.live_parts import SEARCH, Served, bins, next_event, rejection_status, replaying, serving, small_decoder


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def replayed(cohort_store: Path) -> Iterator[Served]:
    with replaying(cohort_store, speed=32.0) as served:
        yield served


@contextlib.asynccontextmanager
async def events_and_frames(served: Served):
    async with websockets.connect(served.url("/events")) as events, websockets.connect(served.url("/frames")) as frames:
        yield events, frames


# --- routes -------------------------------------------------------------------------------------------------


def test_page_health_and_description(plain: Served) -> None:
    status, page = plain.get("/")
    assert status == 200 and "Arcuate" in page and "http" not in page.replace("http-equiv", "")
    for asset in ("live.js", "scroll.js", "live.css", "icon.svg"):
        assert plain.get(f"/page/{asset}")[0] == 200
    assert page.count("<dt>bin to text, ") == 2 and "slowest 1 %" not in page and "median ·" not in page
    theme, style = (plain.get(f"/page/{name}.css")[1] for name in ("theme", "live"))
    assert all(f"{name}:" in theme + style for name in re.findall(r"var\((--[a-z-]+)\)", style))
    health = json.loads(plain.get("/healthz")[1])
    assert health["status"] == "ok" and health["missed_deadlines"] == 0
    info = json.loads(plain.get("/info")[1])
    assert (
        info["unit"] == "phoneme"
        and info["n_channels"] == 6
        and info["delay_ms"]["total"] == 140.0
        and info["replay"] is None
    )
    assert plain.get("/page/../server.py")[0] in (404, 400) and plain.get("/openapi.json")[0] == 404


def test_the_page_loads_nothing_from_other_hosts() -> None:
    folder = Path(__import__("arcuate.live", fromlist=["live"]).__file__).parent / "page"
    for path in folder.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, path


def test_answers_forbid_framing_foreign_content_and_storing(plain: Served) -> None:
    for path in ("/", "/page/live.js", "/info", "/healthz", "/nothing"):
        _, _, headers = plain.answer(path)
        assert headers["Content-Security-Policy"].startswith("default-src 'self';"), path
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert headers["Cache-Control"] == "no-store"


# --- access ------------------------------------------------------------------------------------------------


def test_other_origins_and_host_names_are_rejected(plain: Served) -> None:
    for path in ("/events", "/frames"):
        assert rejection_status(plain, path, origin="http://evil.example") == 403
        assert rejection_status(plain, path, origin="http://[") == 403
        assert rejection_status(plain, path, origin=f"http://127.0.0.1:{plain.port}") == 0
    assert plain.get("/", Host="rebound.example")[0] == 403


def test_other_addresses_need_a_token() -> None:
    with serving(access=Access("0.0.0.0", "secret")) as served:
        assert served.get("/")[0] == 401 and served.get("/info?token=wrong")[0] == 401
        status, _, headers = served.answer("/?token=secret")
        assert status == 200 and {"HttpOnly", "SameSite=strict"} <= set(headers["Set-Cookie"].split("; "))
        assert served.get("/info", Authorization="Bearer secret")[0] == 200
        assert served.get("/healthz")[0] == 200  # contains no text
        assert rejection_status(served, "/events") == 403
        assert rejection_status(served, "/events?token=secret") == 0


# --- bins in, events out ------------------------------------------------------------------------------------


def test_bins_over_a_websocket_are_decoded_as_offline(plain: Served) -> None:
    sent = bins(100, seed=4)

    async def go() -> dict:
        async with events_and_frames(plain) as (events, frames):
            mark = {"type": "mark", "trial": "mine", "session": "day1", "reference": "hello"}
            await frames.send(json.dumps(mark))
            for k in range(0, 100, 2):
                await frames.send(pack_bins(sent[k : k + 2], first=k))
            await frames.send('{"type": "end"}')
            return await next_event(events, "final")

    final = asyncio.run(go())
    offline = small_decoder(SEARCH)
    offline.reset("day1")
    offline.push(sent)
    assert final["text"] == offline.finish().text and final["trial"] == "mine" and final["n_bins"] == 100


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "16 to"),
        (b"x" * 1_000_001, "16 to 1000000 bytes"),
        (b"\x06\x00\x00\x00" + b"\x00" * 13, "not complete bins"),
        (pack_bins(np.zeros((300, 6), np.float32)), "too many"),
        ("not json", "JSON object"),
        ('{"type": "mark", "session": "day9"}', "unknown to this model"),
        ('{"type": "mark", "trial": 3}', "must be"),
    ],
)
def test_malformed_messages_are_rejected(plain: Served, message, reason: str) -> None:
    async def go() -> str:
        async with websockets.connect(plain.url("/frames")) as frames:
            await frames.send(message)
            return (await next_event(frames, "rejected"))["message"]

    assert reason in asyncio.run(go())
    assert json.loads(plain.get("/healthz")[1])["status"] == "ok"


def test_wrong_channels_and_gaps_are_published(plain: Served) -> None:
    async def go() -> list[str]:
        async with events_and_frames(plain) as (events, frames):
            await frames.send('{"type": "mark"}')
            await frames.send(pack_bins(bins(2, 5)))
            first = await next_event(events, "fault")
            await frames.send(pack_bins(bins(2), first=0))
            await frames.send(pack_bins(bins(2), first=100))
            return [first["kind"], (await next_event(events, "fault"))["kind"]]

    assert asyncio.run(go()) == ["channels", "gap"]


def test_one_client_sends_at_a_time_and_may_reconnect(plain: Served) -> None:
    async def go() -> int:
        async with websockets.connect(plain.url("/frames")) as first:
            await first.send(pack_bins(bins(1)))
            async with websockets.connect(plain.url("/frames")) as second:
                with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                    await asyncio.wait_for(second.recv(), 120)
                code = closed.value.rcvd.code
        for _ in range(100):  # until the server notices that the first has disconnected
            async with websockets.connect(plain.url("/frames")) as third:
                try:
                    await third.send(pack_bins(bins(1, 5)))
                    await asyncio.wait_for(third.recv(), 0.05)
                except TimeoutError:
                    return code
                except websockets.exceptions.ConnectionClosed:
                    await asyncio.sleep(0.05)
        return 0

    assert asyncio.run(go()) == 1013


def test_a_token_bucket_allows_bursts_up_to_its_capacity() -> None:
    now = [0.0]
    bucket = TokenBucket(4.0, lambda: now[0])
    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]
    now[0] = 0.5
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    now[0] = 100.0
    assert sum(bucket.take() for _ in range(9)) == 4


def test_too_many_messages_per_second_are_rejected() -> None:
    with serving(messages_per_s=0.001, commands_per_s=0.001) as served:  # the second message exceeds it

        async def go() -> list[str]:
            async with events_and_frames(served) as (events, frames):
                for _ in range(2):
                    await frames.send(pack_bins(bins(1)))
                    await events.send('{"type": "end"}')
                return [(await next_event(ws, "rejected"))["message"] for ws in (frames, events)]

        assert all("too many" in message for message in asyncio.run(go()))


def test_bins_that_arrived_while_the_server_was_held_up_are_accepted() -> None:
    """Six seconds of a rig that sends bin by bin, read at once."""
    with serving(messages_per_s=60.0) as served:

        async def go() -> dict:
            async with events_and_frames(served) as (events, frames):
                await frames.send('{"type": "mark", "trial": "mine"}')
                for k, row in enumerate(bins(300)):
                    await frames.send(pack_bins(row[None], first=k))
                await frames.send('{"type": "end"}')
                return await next_event(events, "final")

        assert asyncio.run(go())["n_bins"] == 300


def test_viewers_beyond_the_limit_are_rejected() -> None:
    with serving(max_viewers=2) as served:

        async def go() -> int:
            url = served.url("/events")
            async with websockets.connect(url) as a, websockets.connect(url) as b:
                await asyncio.gather(a.recv(), b.recv())
                async with websockets.connect(url) as c:
                    with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
                        await asyncio.wait_for(c.recv(), 120)
                    return closed.value.rcvd.code

        assert asyncio.run(go()) == 1013


# --- replay -------------------------------------------------------------------------------------------------


def test_eight_viewers_see_the_same_sentences(replayed: Served) -> None:
    async def view() -> dict[int, str]:
        async with websockets.connect(replayed.url("/events"), max_size=None) as ws:
            seen: dict[int, str] = {}
            while not {1, 2, 3} <= seen.keys():  # as a page does: a viewer that falls behind receives a snapshot
                event = await next_event(ws, "final", "snapshot")
                finals = event["finals"] if event["type"] == "snapshot" else [event]
                seen |= {final["number"]: final["text"] for final in finals}
            return {number: seen[number] for number in (1, 2, 3)}

    async def go() -> list[dict[int, str]]:
        return await asyncio.gather(*(view() for _ in range(8)))

    texts = asyncio.run(go())
    assert all(t == texts[0] for t in texts)


def test_replayed_simulated_data_are_called_so(replayed: Served, plain: Served) -> None:
    assert json.loads(replayed.get("/info")[1])["simulated"] is True
    assert json.loads(plain.get("/info")[1])["simulated"] is False  # live bins
    assert 'id="simulated"' in replayed.get("/")[1]


def test_select_pause_speed_and_skip(replayed: Served) -> None:
    trials = json.loads(replayed.get("/info")[1])["replay"]
    wanted = trials[-1]

    async def go() -> None:
        async with websockets.connect(replayed.url("/events"), max_size=None) as ws:
            await next_event(ws, "snapshot")
            await ws.send(json.dumps({"type": "select", "trial": wanted["id"]}))
            while (await next_event(ws, "trial"))["trial"] != wanted["id"]:
                pass
            final = await next_event(ws, "final")
            assert final["trial"] == wanted["id"] and final["reference"] == wanted["text"]
            await ws.send('{"type": "pause", "paused": true}')
            while not (await next_event(ws, "replay"))["paused"]:
                pass
            await ws.send('{"type": "speed", "speed": 16}')
            while (await next_event(ws, "replay"))["speed"] != 16:
                pass
            await ws.send('{"type": "speed", "speed": 1e9}')
            assert "out of range" in (await next_event(ws, "rejected"))["message"]
            await ws.send('{"type": "select", "trial": "nowhere"}')
            assert "not among the replayed trials" in (await next_event(ws, "rejected"))["message"]
            await ws.send('{"type": "format disk"}')
            assert "unknown command" in (await next_event(ws, "rejected"))["message"]
            await ws.send('{"type": "skip", "n": 1}')
            await next_event(ws, "trial")

    asyncio.run(go())


def test_a_viewer_that_joins_late_receives_the_current_state(replayed: Served) -> None:
    while json.loads(replayed.get("/healthz")[1])["sentences"] < 2:
        time.sleep(0.05)

    async def go() -> dict:
        async with websockets.connect(replayed.url("/events"), max_size=None) as ws:
            return json.loads(await ws.recv())

    snapshot = asyncio.run(go())
    assert snapshot["type"] == "snapshot" and len(snapshot["finals"]) >= 2
    assert snapshot["now"]["trial"]["trial"] and "replay" in snapshot["now"]
    texts = [final["text"] for final in snapshot["finals"] if final["text"]]
    health = replayed.get("/healthz")[1]
    assert texts and not any(text in health for text in texts)  # health is readable without a token


def test_a_restarted_server_shows_earlier_sentences(tmp_path: Path) -> None:
    async def send_one(served: Served) -> str:
        async with events_and_frames(served) as (events, frames):
            await frames.send('{"type": "mark"}')
            await frames.send(pack_bins(bins(90)))
            await frames.send('{"type": "end"}')
            return (await next_event(events, "final"))["text"]

    async def read_history(served: Served) -> list[str]:
        async with websockets.connect(served.url("/events")) as events:
            return [f["text"] for f in json.loads(await events.recv())["finals"]]

    with serving(record=tmp_path / "rec") as served:
        text = asyncio.run(send_one(served))
    with serving(record=tmp_path / "rec") as served:
        assert asyncio.run(read_history(served)) == [text]
    assert Store.open(tmp_path / "rec" / "store").trials[0].n_bins == 90
