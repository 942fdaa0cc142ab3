"""Clients of the server: access control, rate limits, and message queues.

A slow viewer misses images and does not delay others.
"""

import asyncio
import hmac
import json
import re
import secrets
import socket
import time
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from arcuate.errors import UserError
from arcuate.files import to_json_line
from arcuate.live.images import ImageHistory

TOKEN_COOKIE = "arcuate_token"
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_MIN_TOKEN = 8
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{_MIN_TOKEN},200}}")
_MAX_TEXT = 2000  # characters of a text sent by a client
_MAX_FINALS = 200  # sentences sent to a viewer when it connects
_Message = str | bytes


@dataclass(frozen=True)
class Access:
    """Who may connect. A server bound to the loopback interface checks host names instead of a token.

    Pages of other sites cannot reach it: their Origin differs, and a host name that resolves to this machine by DNS
    rebinding is not accepted.
    """

    host: str  # address the server is bound to
    token: str | None = None  # required to view and control the page
    send_token: str | None = None  # required to send bins; without it, a server with a token accepts no bins

    def allows_host(self, header: str | None) -> bool:
        name = (_split_url(f"//{header or ''}").hostname or "").lower()
        return self.token is not None or name in _LOCAL_HOSTS or name == self.host

    def allows_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether the Origin header is acceptable: browsers always send it, other clients may omit it."""
        return origin is None or (bool(host) and _split_url(origin).netloc == host)

    def accepts_viewer(self, *given: str | None) -> bool:
        return self.token is None or _contains_token(given, self.token)

    def accepts_sender(self, *given: str | None) -> bool:
        if self.send_token is None:
            return self.token is None
        return _contains_token(given, self.send_token)

    def page_url(self, port: int) -> str:
        return self._url("http", port, "", self.token)

    def send_url(self, port: int) -> str:
        return self._url("ws", port, "frames", self.send_token)

    def _url(self, scheme: str, port: int, path: str, token: str | None) -> str:
        name = "localhost" if is_local(self.host) else f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{name}:{port}/{path}" + (f"?token={token}" if token else "")


def _contains_token(given: tuple[str | None, ...], token: str) -> bool:
    return any(g is not None and hmac.compare_digest(g.encode(), token.encode()) for g in given)


def make_access(host: str, token: str | None, send_token: str | None = None) -> Access:
    """Require tokens on any address but the loopback interface; generate those that are not given.

    On the loopback interface a token is required only if it is given; with a viewer token, senders need one too.
    """
    for option, given in (("--token", token), ("--send-token", send_token)):
        if given is not None and not _TOKEN.fullmatch(given):
            raise UserError(f"{option} must consist of {_MIN_TOKEN} or more letters, digits, '-', '_', '.' and '~'")
    if token is not None and token == send_token:
        raise UserError("--token and --send-token must differ, because viewers know the first")
    if token is None and not is_local(host):
        token = secrets.token_urlsafe(16)
    if send_token is None and token is not None:
        send_token = secrets.token_urlsafe(16)
    return Access(host, token, send_token)


def is_local(host: str) -> bool:
    if host in _LOCAL_HOSTS:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before loading, which may take a while; port 0 binds any free port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # otherwise another server could take the port in the meantime
    except OSError as error:
        listener.close()
        option = "--host" if isinstance(error, socket.gaierror) else "--port"
        raise UserError(f"cannot listen on {host} port {port} ({error.strerror}); choose another {option}") from None
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _split_url(url: str) -> SplitResult:
    """The parts of a URL; all are empty if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class TokenBucket:
    """Token-bucket rate limit: `rate` messages per second, with bursts of up to the messages of `burst_s`."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic, burst_s: float = 1.0) -> None:
        self.rate, self._clock = rate, clock
        self._capacity = max(1.0, burst_s * rate)
        self._tokens, self._updated = self._capacity, clock()

    def take(self) -> bool:
        """Take a token; return False if there is none."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._updated) * self.rate)
        self._updated = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


# --- viewers ----------------------------------------------------------------------------------------------


class Viewer:
    """Queue of messages to one viewer; used in the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.queue: deque[_Message] = deque()
        self.capacity = capacity
        self.n_dropped = 0
        self.ready = asyncio.Event()

    def offer(self, message: _Message) -> bool:
        """Queue a message; return False if the queue is full."""
        if len(self.queue) >= self.capacity:
            self.n_dropped += 1
            return False
        self.queue.append(message)
        self.ready.set()
        return True

    async def get(self) -> _Message:
        while not self.queue:
            self.ready.clear()
            await self.ready.wait()
        return self.queue.popleft()


class Broadcaster:
    """Sends messages to all viewers; keeps the current state for viewers that connect late or fall behind."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, max_viewers: int, capacity: int) -> None:
        self.loop = loop  # None before the server has started
        self.max_viewers = max_viewers
        self.capacity = capacity
        self.viewers: set[Viewer] = set()
        self._latest: dict[str, dict[str, Any]] = {}
        self._finals: deque[dict[str, Any]] = deque(maxlen=_MAX_FINALS)
        self._images = ImageHistory()

    def publish(self, message: dict[str, Any] | bytes) -> None:
        """Send a message from any thread; never blocks."""
        if self.loop is None:
            self._send_to_all(message)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._send_to_all, message)

    def join(self) -> Viewer:
        if len(self.viewers) >= self.max_viewers:
            raise UserError(f"the maximum of {self.max_viewers} viewers is reached; close another page first")
        viewer = Viewer(self.capacity)
        viewer.offer(self.snapshot())
        for image in self._images.merged():
            viewer.offer(image)
        self.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    def snapshot(self) -> str:
        """The current state in one message."""
        return to_json_line({"type": "snapshot", "finals": list(self._finals), "now": self._latest})

    def restore(self, finals: list[dict[str, Any]]) -> None:
        self._finals.extend(finals)

    def _send_to_all(self, message: dict[str, Any] | bytes) -> None:
        if isinstance(message, dict):
            self._update_state(message)
        else:
            self._images.add(message)
        encoded = message if isinstance(message, bytes) else to_json_line(message)
        for viewer in self.viewers:
            if not viewer.offer(encoded) and isinstance(encoded, str):
                viewer.queue.clear()  # text must not be lost: a snapshot replaces what was queued
                viewer.offer(self.snapshot())

    def _update_state(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "final":
            self._finals.append(event)
            self._latest.pop("partial", None)
        elif kind != "fault":
            self._latest[kind] = event
        if kind == "trial":
            self._latest.pop("partial", None)


def parse_command(text: str) -> dict[str, Any]:
    """Parse a client's command, which is untrusted."""
    try:
        command = json.loads(text)
    except (ValueError, RecursionError):
        command = None
    if not isinstance(command, dict) or not isinstance(command.get("type"), str):
        raise UserError("a command must be a JSON object with a type")
    return command


def check_text(text: str, name: str) -> str:
    """Reject characters that cannot be stored: lone surrogates (files, WebSockets) and NUL (HDF5)."""
    if len(text) > _MAX_TEXT:
        raise UserError(f"{name} has {len(text)} characters; at most {_MAX_TEXT} are accepted")
    invalid = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs")), None)
    if invalid is not None:
        raise UserError(f"{name} contains {invalid!a}, which cannot be stored as text")
    return text
