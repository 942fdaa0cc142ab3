"""Who may look and who may send, and how often: host names, origins, a token, a bucket."""

import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
COOKIE = "arcuate_token"


@dataclass(frozen=True)
class Access:
    """A server bound to this machine alone needs no token; its host names are checked instead.

    A page of some other site cannot reach it: its Origin differs, and a name that was made to point here (DNS
    rebinding) is not among the hosts.
    """

    host: str  # that the server is bound to
    token: str | None = None

    def knows_host(self, header: str | None) -> bool:
        name = host_name(header or "")
        return self.token is not None or name in LOCAL or name == self.host

    def knows_origin(self, origin: str | None, host: str | None) -> bool:
        """Browsers name the page that asks; programs need not."""
        return origin is None or (bool(host) and origin_host(origin) == host)

    def knows_token(self, *given: str | None) -> bool:
        if self.token is None:
            return True
        return any(g is not None and hmac.compare_digest(g.encode(), self.token.encode()) for g in given)


def origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def host_name(netloc: str) -> str:
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    if host in LOCAL:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def make_access(host: str, token: str | None) -> Access:
    """Any address but this machine's own needs a token; one is made where none is given."""
    return Access(host, token or (None if is_local(host) else secrets.token_urlsafe(16)))


class Bucket:
    """So many messages a second; what was saved up, one second's worth, may be spent at once."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._room = max(1.0, rate)
        self._credit, self._counted = self._room, clock()

    def spend(self) -> bool:
        """Whether one more may come."""
        now = self._clock()
        self._credit = min(self._room, self._credit + (now - self._counted) * self.rate)
        self._counted = now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True
