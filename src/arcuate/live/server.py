"""The server: one stream, its page, a WebSocket for bins, one for events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from arcuate.errors import UserError
from arcuate.files import to_json_line
from arcuate.live.access import COOKIE, Access, Bucket
from arcuate.live.broadcast import Hub, Viewer, parse_command
from arcuate.live.config import LiveSettings
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.messages import Command, Source
from arcuate.live.recorder import Recorder
from arcuate.live.session import LiveSession
from arcuate.live.sources.replay import Replay
from arcuate.live.sources.socket import Sender
from arcuate.live.visualisation import describe

PAGE = Path(__file__).parent / "page"
REFUSED = 4403  # WebSocket close code: host, origin or token
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

MakeSource = Callable[[LiveSession], Source | None]


class Live:
    """Everything behind the routes. What may be refused is refused when it is made; it begins when the server does."""

    def __init__(
        self,
        decoder: StreamingDecoder,
        settings: LiveSettings,
        access: Access,
        make_source: MakeSource,
        record: Recorder | None = None,
    ) -> None:
        self.decoder = decoder
        self.settings = settings
        self.access = access
        limits = settings.limits
        self.sender = Sender(limits)
        self.hub = Hub(None, limits.viewers, limits.queue)
        self.hub.restore(record.finals if record else [])
        self.session = LiveSession(decoder, settings, self.hub.publish, record)
        self.source = make_source(self.session)

    def begin(self) -> None:
        self.hub.loop = asyncio.get_running_loop()
        self.session.start()
        if self.source is not None:
            self.source.start()
        self.tell_source()

    def end(self) -> None:
        if self.source is not None:
            self.source.stop()
        self.session.stop()

    def tell_source(self) -> None:
        if isinstance(self.source, Replay):
            now = {"paused": self.source.paused, "speed": self.source.speed}
            self.hub.publish({"type": "replay", **now})

    def _wish(self, what: str) -> None:
        if not self.session.put(Command(what), wait=False):
            raise UserError(f"decoding is behind and did not take {what!r}; try again")

    def obey(self, command: dict[str, Any]) -> None:
        """A wish of a viewer; what makes no sense is refused in one sentence."""
        match command:
            case {"type": "open" | "close" | "end" as what}:
                half = what == "end" and isinstance(self.source, Replay)  # the trial goes on
                self._wish("cut" if half else what)
            case {"type": "forget"} if self.decoder.adaptation is not None:
                self._wish("forget")
            case {"type": "pause", "paused": bool(paused)} if isinstance(self.source, Replay):
                self.source.pause(paused)
            case {"type": "speed", "speed": int() | float() as speed} if isinstance(self.source, Replay):
                self.source.set_speed(speed)
            case {"type": "pick", "trial": str(trial)} if isinstance(self.source, Replay):
                self.source.pick(trial)
            case {"type": "skip", "n": 1 | -1 as n} if isinstance(self.source, Replay):
                self.source.skip(n)
            case _:
                raise UserError(f"{command['type']!r:.40} is no command that this server knows")
        self.tell_source()


def make_app(live: Live) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        live.begin()
        try:
            yield
        finally:
            await asyncio.to_thread(live.end)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        access, given = live.access, request.query_params.get("token")
        if not access.knows_host(request.headers.get("host")):
            return PlainTextResponse("unknown host name", 403)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        known = access.knows_token(given, request.cookies.get(COOKIE), bearer)
        if not known and request.url.path != "/healthz":
            return PlainTextResponse("a token is needed: open the address that the server printed", 401)
        response = await call_next(request)
        response.headers.update(HEADERS)
        if known and given is not None:
            response.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return response

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/healthz")
    def health() -> JSONResponse:
        session = live.session
        body = {
            "status": "ok" if session.alive else "stopped",
            "error": session.error,
            "state": session.state,
            "sentences": session.n_sentences,
            "recording": None if session.recorder is None else session.recorder.error is None,
            "viewers": len(live.hub.viewers),
            **session.meter.summary(),
        }
        return JSONResponse(body, 200 if session.alive else 503)

    @app.get("/about")
    def about() -> JSONResponse:
        return JSONResponse(describe(live.decoder, live.source, live.settings))

    @app.websocket("/events")
    async def events(socket: WebSocket) -> None:
        if await admitted(live.access, socket):
            await serve_viewer(live, socket)

    @app.websocket("/frames")
    async def frames(socket: WebSocket) -> None:
        if await admitted(live.access, socket):
            await live.sender.serve(live.session, socket)

    app.mount("/page", StaticFiles(directory=PAGE))
    return app


async def admitted(access: Access, socket: WebSocket) -> bool:
    """Accept a WebSocket, or close it before anything is said."""
    headers = socket.headers
    host = headers.get("host")
    bearer = headers.get("authorization", "").removeprefix("Bearer ")
    token = access.knows_token(socket.query_params.get("token"), socket.cookies.get(COOKIE), bearer)
    if access.knows_host(host) and access.knows_origin(headers.get("origin"), host) and token:
        await socket.accept()
        return True
    await socket.close(REFUSED)
    return False


async def serve_viewer(live: Live, socket: WebSocket) -> None:
    try:
        viewer = live.hub.join()
    except UserError as error:
        await socket.close(1013, str(error)[:120])
        return
    sending = asyncio.create_task(send_all(viewer, socket))
    bucket = Bucket(live.settings.limits.commands_per_s)
    try:
        while True:
            obey_one(live, await socket.receive_text(), viewer, bucket)
    except (WebSocketDisconnect, RuntimeError, KeyError):  # gone, or it sent bytes
        pass
    finally:
        live.hub.leave(viewer)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def obey_one(live: Live, text: str, viewer: Viewer, bucket: Bucket) -> None:
    try:
        if not bucket.spend():
            raise UserError(f"more than {bucket.rate:g} wishes a second are too many")
        live.obey(parse_command(text[:10_000]))
    except UserError as error:
        viewer.offer(to_json_line({"type": "refused", "what": str(error)}))


async def send_all(viewer: Viewer, socket: WebSocket) -> None:
    while True:
        message = await viewer.take()
        if isinstance(message, bytes):
            await socket.send_bytes(message)
        else:
            await socket.send_text(message)
