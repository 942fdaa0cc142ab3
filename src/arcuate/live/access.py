"""Access control of the server: host names, origins, a token, and rate limits."""

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

TOKEN_COOKIE = "arcuate_token"
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Who may connect. A server bound to the loopback interface checks host names instead of a token.

    Pages of other sites cannot reach it: their Origin differs, and a name made to resolve to this machine (DNS
    rebinding) is not among the host names.
    """

    host: str  # address the server is bound to
    token: str | None = None

    def allows_host(self, header: str | None) -> bool:
        name = _host_name(header or "")
        return self.token is not None or name in _LOCAL_HOSTS or name == self.host

    def allows_origin(self, origin: str | None, host: str | None) -> bool:
        """Browsers send the origin of the page; other clients need not."""
        return origin is None or (bool(host) and _origin_host(origin) == host)

    def accepts_token(self, *given: str | None) -> bool:
        if self.token is None:
            return True
        return any(g is not None and hmac.compare_digest(g.encode(), self.token.encode()) for g in given)


def make_access(host: str, token: str | None) -> Access:
    """Require a token on any address but the loopback interface; generate one if none is given."""
    return Access(host, token or (None if is_local(host) else secrets.token_urlsafe(16)))


def is_local(host: str) -> bool:
    if host in _LOCAL_HOSTS:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_name(netloc: str) -> str:
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


class TokenBucket:
    """Token-bucket rate limit: `rate` messages per second, with bursts of up to one second's worth."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._capacity = max(1.0, rate)
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
