"""Who may connect to a server of this machine: addresses, host names, tokens, rates."""

import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from arcuate.errors import UserError

TOKEN_COOKIE = "arcuate_token"
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_MIN_TOKEN = 8
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{_MIN_TOKEN},200}}")


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
