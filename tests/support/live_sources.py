"""Helpers of the tests of live sources."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from arcuate import StreamingDecoder
from arcuate.live.config import Endpoints, LiveSettings
from arcuate.live.session import LiveSession
from support.live_parts import small_decoder, small_search

SEARCH = small_search()


BY_TRIAL = LiveSettings(endpoints=Endpoints(enabled=False))


def wait_for(what: Callable[[], object], seconds: float = 180.0) -> object:
    due = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < due, "timed out"
        time.sleep(0.02)
    return found


class SessionRunner:
    """A running session and its events."""

    def __init__(self, decoder: StreamingDecoder | None = None) -> None:
        self.events: list = []
        self.session = LiveSession(decoder or small_decoder(SEARCH), BY_TRIAL, self.events.append)
        self.session.start()

    def events_of(self, kind: str) -> list[dict]:
        return [e for e in list(self.events) if isinstance(e, dict) and e["type"] == kind]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    place = tmp_path_factory.mktemp("redis") / "socket"
    options = ["--port", "0", "--unixsocket", str(place), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, cwd=place.parent)
    wait_for(place.exists)
    yield f"unix://{place}"
    process.terminate()
    process.wait(10)


MACHINE_ONLY = "[ports]\nIPv6 = disable\n[multicast]\nResolveScope = machine\n"


@pytest.fixture(scope="module")
def lsl(tmp_path_factory: pytest.TempPathFactory):
    config = tmp_path_factory.mktemp("lsl") / "lsl_api.cfg"
    config.write_text(MACHINE_ONLY)
    os.environ["LSLAPICFG"] = str(config)  # read once, when the library is loaded
    try:
        import pylsl
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"Lab Streaming Layer is not installed: {error}")
    return pylsl
