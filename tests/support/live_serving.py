"""A real server for tests, on a free port of this machine, in a thread."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import uvicorn

from arcuate import StreamingDecoder
from arcuate.adaptation.config import Adaptation
from arcuate.data.config import AugmentationConfig
from arcuate.data.store import Store
from arcuate.live.adaptation import StreamAdapter, make_setup
from arcuate.live.clients import Access
from arcuate.live.config import Endpoints, Limits, LiveSettings
from arcuate.live.recorder import Recorder
from arcuate.live.server import LiveServer, make_config
from arcuate.live.sources.replay import Replay, select_trials
from arcuate.models.acoustic import TorchModel
from support.live_parts import small_model, small_search

SEARCH = small_search()
LIMITS = Limits(viewers=12, message_bytes=20_000, messages_per_s=2000.0, chunk_s=5.0)
BY_TRIAL = LiveSettings(endpoints=Endpoints(enabled=False), limits=LIMITS)


class Served:
    def __init__(self, live: LiveServer, port: int) -> None:
        self.live, self.port = live, port

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        status, text, _ = self.answer(path, **headers)
        return status, text

    def answer(self, path: str, **headers: str) -> tuple[int, str, Message]:
        """Status, content and headers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers

    def url(self, path: str) -> str:
        return f"ws://127.0.0.1:{self.port}{path}"


@contextlib.contextmanager
def serving(decoder: StreamingDecoder, settings: LiveSettings = BY_TRIAL, **options) -> Iterator[Served]:
    access = options.pop("access", Access("127.0.0.1"))
    record = Recorder(options["record"], decoder.n_channels) if "record" in options else None
    live = LiveServer(decoder, settings, access, options.get("source", lambda _: None), record)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(make_config(live))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield Served(live, port)
    finally:
        server.should_exit = True
        thread.join(timeout=300)
        assert not thread.is_alive()


def decoder(n_channels: int = 6, sessions: tuple[str, ...] = ("day1", "day2"), adapt: bool = False) -> StreamingDecoder:
    model, adapter = TorchModel(small_model(n_channels, sessions=sessions)), None
    if adapt:
        setup = make_setup(model.model, Adaptation(copies=2), AugmentationConfig(), uses_words=True)
        adapter = StreamAdapter(setup, model)
    return StreamingDecoder(model, SEARCH, adapter=adapter)


@contextlib.contextmanager
def replaying(store_path: Path, speed: float, pause_s: float = 0.2) -> Iterator[Served]:
    """The trials of a store, decoded by a small untrained model."""
    store = Store.open(store_path)
    prepared = select_trials(store, store.sessions, "none", False)
    source = lambda session: Replay(prepared, session.put, speed=speed, pause_s=pause_s)
    with serving(decoder(store.n_channels, store.sessions), source=source) as served:
        yield served
