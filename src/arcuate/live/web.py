"""Code shared by the servers of live decoding and of the board: limits on connections, tokens, stop signals."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from starlette.requests import HTTPConnection
from uvicorn.protocols.http.h11_impl import H11Protocol

from arcuate.files import to_json_line
from arcuate.live.access import TOKEN_COOKIE

_REQUEST_S = 10.0  # time limit for a client to send a request
_MORE_CONNECTIONS = 64  # in addition to viewers: the acquisition system, health checks, reloaded pages
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _BoundedHttp(H11Protocol):
    """HTTP protocol with a time limit on requests and a limit on the number of connections.

    uvicorn waits for the rest of a request without a limit, so a client could hold all connections open.
    """

    max_connections = _MORE_CONNECTIONS
    request_s = _REQUEST_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer if a request is expected or incomplete, stop it if one is being answered."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.get_protocol() not in (self, None):  # else it has become a WebSocket
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.request_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_config(
    app: FastAPI,
    viewers: int = 0,
    request_s: float = _REQUEST_S,
    more_connections: int = _MORE_CONNECTIONS,
    **options: Any,
) -> uvicorn.Config:
    """Configuration of a web server with limits on connections and on the time to send a request."""
    limits = {"max_connections": viewers + more_connections, "request_s": request_s}
    http = type("BoundedHttp", (_BoundedHttp,), limits)
    return uvicorn.Config(app, http=http, log_level="warning", timeout_graceful_shutdown=2, **options)


def given_tokens(client: HTTPConnection) -> tuple[str | None, ...]:
    """Tokens in the address, the cookie and the header of a request or WebSocket."""
    bearer = client.headers.get("authorization", "").removeprefix("Bearer ")
    return client.query_params.get("token"), client.cookies.get(TOKEN_COOKIE), bearer


def json_response(value: Any, status: int = 200) -> Response:
    """JSON response that escapes what UTF-8 cannot represent: parts of paths, or text of damaged files."""
    return Response(to_json_line(value), status, media_type="application/json")


def run_until_signal(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serve until interrupted or terminated; both end normally, after everything has been stopped."""
    server = uvicorn.Server(config)

    @contextmanager
    def capture_signals() -> Iterator[None]:
        before = {which: signal.signal(which, server.handle_exit) for which in _STOP_SIGNALS}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    server.capture_signals = capture_signals  # type: ignore[method-assign]
    server.run([listener])
