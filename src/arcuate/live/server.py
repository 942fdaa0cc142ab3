"""The web server: the page, a WebSocket for bins (/frames) and one for events and commands (/events)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from arcuate.data.alphabet import BLANK, encode, token_groups, token_unit
from arcuate.data.electrodes import list_arrays, list_features
from arcuate.data.store import TrialInfo
from arcuate.data.trial import BIN_MS, BIN_SECONDS, layout_of_session
from arcuate.errors import UserError
from arcuate.evaluation.floor import FloorRates
from arcuate.files import to_json_line
from arcuate.live.access import TOKEN_COOKIE, Access, TokenBucket
from arcuate.live.input import Command, Source
from arcuate.live.session import LiveSession
from arcuate.live.sources.redis import RedisLogits
from arcuate.live.sources.replay import Replay
from arcuate.live.sources.socket import MAX_MESSAGE_BYTES, MESSAGES_PER_S, BinReceiver, parse_command, send
from arcuate.live.viewers import Broadcaster, Viewer
from arcuate.live.web import bounded_config, given_tokens, json_response

_PAGE = Path(__file__).parent / "page"
_FORBIDDEN = 4403  # WebSocket close code: host, origin or token
_POLICY = 1008  # WebSocket close code of the standard: policy violation
_DRAIN_S = 3.0  # time to decode the queued bins at shutdown
_COMMANDS_PER_S = 20.0  # of a viewer
_PING_S = 10.0  # a client that does not answer a ping within this time is disconnected
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class LiveServer:
    """State shared by the routes: session, source and viewers. Threads start with the server."""

    def __init__(
        self,
        session: LiveSession,
        broadcaster: Broadcaster,
        access: Access,
        source: Source | None = None,
        floor: FloorRates | None = None,
        messages_per_s: float = MESSAGES_PER_S,
        commands_per_s: float = _COMMANDS_PER_S,
    ) -> None:
        self.session, self.broadcaster = session, broadcaster
        self.access = access
        self.source = source  # None: bins arrive through the WebSocket /frames
        self.floor = floor
        self.receiver = BinReceiver(messages_per_s)
        self.commands_per_s = commands_per_s
        broadcaster.restore(session.recorder.finals if session.recorder else [])

    def start(self) -> None:
        self.broadcaster.loop = asyncio.get_running_loop()
        self.session.start()
        if self.source is not None:
            self.source.on_error = self.session.fail
            self.source.start()
        self._publish_replay()

    def stop(self) -> None:
        if self.source is not None:
            self.source.stop()
        self.session.stop(_DRAIN_S)

    def handle_command(self, command: dict[str, Any]) -> None:
        """Execute a viewer's command; raises `UserError` for invalid ones."""
        match command:
            case {"type": "open" | "close" | "end" as name}:
                incomplete = name == "end" and isinstance(self.source, Replay)  # the trial continues
                self._queue_command("cut" if incomplete else name)
            case {"type": "reset_adaptation"} if self.session.decoder.adaptation is not None:
                self._queue_command("reset_adaptation")
            case {"type": "pause", "paused": bool(paused)} if isinstance(self.source, Replay):
                self.source.pause(paused)
            case {"type": "speed", "speed": int() | float() as speed} if isinstance(self.source, Replay):
                self.source.set_speed(speed)
            case {"type": "select", "trial": str(trial)} if isinstance(self.source, Replay):
                self.source.select(trial)
            case {"type": "skip", "n": 1 | -1 as n} if isinstance(self.source, Replay):
                self.source.skip(n)
            case _:
                raise UserError(f"unknown command {command['type']!r:.40}")
        self._publish_replay()

    def _queue_command(self, name: str) -> None:
        if not self.session.put(Command(name), wait=False):
            raise UserError(f"{name!r} was not executed because decoding lags behind; try again")

    def _publish_replay(self) -> None:
        if isinstance(self.source, Replay):
            now = {"paused": self.source.paused, "speed": self.source.speed}
            self.broadcaster.publish({"type": "replay", **now})


def make_app(live: LiveServer) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        live.start()
        try:
            yield
        finally:
            await asyncio.to_thread(live.stop)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def authorise(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.query_params.get("token")
        if not live.access.allows_host(request.headers.get("host")):
            return PlainTextResponse("unknown host name", 403)
        accepted = live.access.accepts_viewer(*given_tokens(request))
        if not accepted and request.url.path != "/healthz":
            return PlainTextResponse("a token is required: open the address that the server printed", 401)
        response = await call_next(request)
        response.headers.update(_HEADERS)
        if accepted and given is not None:
            response.set_cookie(TOKEN_COOKIE, given, httponly=True, samesite="strict")
        return response

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html")

    @app.get("/healthz")
    def health() -> Response:
        session = live.session
        status = session.health
        body = {
            "status": status,
            "error": session.error,
            "state": session.state,
            "sentences": session.n_sentences,
            "recording": None if session.recorder is None else session.recorder.error is None,
            "viewers": len(live.broadcaster.viewers),
            **session.latency.summary(),
        }
        return json_response(body, 200 if status == "ok" else 503)

    @app.get("/info")
    def info() -> Response:
        return json_response(page_info(live.session, live.source, live.floor))

    @app.websocket("/events")
    async def events(socket: WebSocket) -> None:
        if await _accept(live.access, socket, live.access.accepts_viewer):
            await _serve_viewer(live, socket)

    @app.websocket("/frames")
    async def frames(socket: WebSocket) -> None:
        if not await _accept(live.access, socket, live.access.accepts_sender):
            return
        if live.source is None:
            await live.receiver.serve(live.session, socket)
        else:
            await socket.close(_POLICY, "this server does not accept bins; start it with --source socket")

    app.mount("/page", StaticFiles(directory=_PAGE))
    return app


def make_config(live: LiveServer, ping_s: float = _PING_S, **limits: Any) -> uvicorn.Config:
    """The web server's configuration; `limits` are those of `bounded_config`."""
    return bounded_config(
        make_app(live),
        live.broadcaster.max_viewers,
        ws_max_size=2 * MAX_MESSAGE_BYTES,  # so that a message slightly above the limit gets an error message
        ws_max_queue=64,
        ws_ping_interval=ping_s,
        ws_ping_timeout=ping_s,
        **limits,
    )


async def _accept(access: Access, socket: WebSocket, accepts: Callable[..., bool]) -> bool:
    """Accept a WebSocket, or close it if host, origin or token are not allowed."""
    host, origin = socket.headers.get("host"), socket.headers.get("origin")
    if access.allows_host(host) and access.allows_origin(origin, host) and accepts(*given_tokens(socket)):
        await socket.accept()
        return True
    await socket.close(_FORBIDDEN)
    return False


async def _serve_viewer(live: LiveServer, socket: WebSocket) -> None:
    try:
        viewer = live.broadcaster.join()
    except UserError as error:
        await socket.close(1013, str(error)[:120])
        return
    tasks = [
        asyncio.create_task(_send_messages(viewer, socket)),
        asyncio.create_task(_receive_commands(live, viewer, socket)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:  # if one direction ends, end both, so that the page notices and reconnects
        live.broadcaster.leave(viewer)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, (WebSocketDisconnect, RuntimeError)):  # disconnected
            raise end


async def _receive_commands(live: LiveServer, viewer: Viewer, socket: WebSocket) -> None:
    bucket = TokenBucket(live.commands_per_s)
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        try:
            if not bucket.take():
                raise UserError(f"too many commands: at most {bucket.rate:g} per second are accepted")
            live.handle_command(parse_command((message.get("text") or "")[:10_000]))
        except UserError as error:  # waits while the viewer has not read earlier answers
            await viewer.queue.put(to_json_line({"type": "rejected", "message": str(error)}))


async def _send_messages(viewer: Viewer, socket: WebSocket) -> None:
    while True:
        await send(socket, await viewer.queue.get())


def page_info(session: LiveSession, source: Source | None, floor: FloorRates | None = None) -> dict[str, Any]:
    """Description of the model and of the trials to replay, fetched once by the page."""
    decoder = session.decoder
    words, delay, sessions = decoder.word_search, decoder.delay, decoder.sessions
    has_bins = not isinstance(source, RedisLogits)
    return {
        "n_channels": decoder.n_channels,
        "features": _channel_layout(decoder.n_channels, sessions[-1]) if has_bins else [],
        "classes": list(decoder.layout.classes),
        "unit": token_unit(decoder.layout.classes),
        "groups": _token_rows(decoder.layout.classes),
        "sessions": list(sessions),
        "session": decoder.session,
        "frame_ms": BIN_MS * decoder.layout.stride,
        "delay_ms": {**{k.removesuffix("_ms"): v for k, v in vars(delay).items()}, "total": delay.total_ms},
        "head": decoder.head,
        "words": decoder.decodes_words,
        "n_words": len(words.words) if words else 0,
        "phrase": session.options.phrase is not None,
        "simulated": isinstance(source, Replay) and source.trials.store.simulated,
        "floor": None if floor is None else vars(floor),
        "replay": [_trial_info(t) for t in source.trials.trials] if isinstance(source, Replay) else None,
    }


def _token_rows(classes: Sequence[str]) -> list[dict[str, Any]]:
    """Class indices from top to bottom in the order of the report: tokens by kind, the blank last."""
    groups = [(name, encode(members, classes)) for name, members in token_groups(classes).items()]
    name, rows = groups[-1]
    if len(rows) == 1:  # one row is not tall enough for a label, so it shares one with the blank
        groups[-1] = (f"{name}, blank", [*rows, BLANK])
    else:
        groups.append(("blank", [BLANK]))
    return [{"name": name, "rows": rows} for name, rows in groups]


def _channel_layout(n_channels: int, session: str) -> list[dict[str, Any]]:
    """Threshold crossings and spike-band power by array, in the order of both releases."""
    layout = []
    for feature in list_features(n_channels):
        arrays = [
            {"name": array.name, "first": feature.channels[array.electrodes.start], "n": len(array.electrodes)}
            for array in list_arrays(layout_of_session(session), n_channels)
        ]
        layout.append({"name": feature.name, "arrays": arrays})
    return layout


def _trial_info(t: TrialInfo) -> dict[str, Any]:
    identity = {"id": t.id, "session": t.session, "number": t.number, "split": t.split}
    return {**identity, "text": t.text, "s": t.n_bins * BIN_SECONDS}
