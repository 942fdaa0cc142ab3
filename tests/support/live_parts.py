"""Shared by the tests of live decoding: a small lexicon and n-gram, small models, sessions, servers, rigs."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arcuate.config import to_yaml
from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.data.store import Store
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.joint import joint_search
from arcuate.decoding.options import DecoderOptions
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.language.lexicon import make_lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables
from arcuate.live.access import Access
from arcuate.live.input import Chunk, End, Item, Mark
from arcuate.live.options import LiveOptions
from arcuate.live.recorder import Recorder
from arcuate.live.session import LiveSession
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import FrontEndSettings, GRUSettings, ModelConfig, ModelSettings, TransducerSettings
from arcuate.models.layout import Head
from arcuate.models.model import Model

# every phoneme is a word, and so are some pairs, so that any output of a random model has words
PHONES = CLASSES[1:-1]
ENTRIES = [(p.lower(), (p,)) for p in PHONES] + [
    (f"{a}{b}".lower() + "2", (a, b)) for a, b in itertools.pairwise(PHONES)
]


def small_ngram() -> LanguageModel:
    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(word for word, _ in ENTRIES)]
    rng = np.random.default_rng(3)
    n = len(words)
    pairs = np.array([p for p in itertools.product(range(n), repeat=2) if p[0] != 2 and p[1] != 1], np.int32)
    pairs = pairs[rng.random(len(pairs)) < 0.1]
    tables = [
        NGramTable(np.arange(n, dtype=np.int32)[:, None], score(rng, n), score(rng, n)),
        NGramTable(pairs, score(rng, len(pairs)), np.zeros(len(pairs), np.float32)),
    ]
    return model_from_tables(NGramTables(words, tuple(tables)))


def score(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(-3.0, 1.0, n).clip(max=-0.05).astype(np.float32)


def write_words(folder: Path) -> tuple[Path, Path]:
    """The lexicon and an n-gram with uniform unigrams, as files."""
    lexicon, arpa = folder / "lexicon.txt", folder / "lm.arpa"
    lexicon.write_text("".join(f"{word}\t{' '.join(phones)}\n" for word, phones in ENTRIES))
    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(word for word, _ in ENTRIES)]
    lines = "".join(f"-2.0\t{word}\t0.0\n" for word in words)
    arpa.write_text(f"\\data\\\nngram 1={len(words)}\n\n\\1-grams:\n{lines}\n\\end\\\n")
    return lexicon, arpa


SEARCH_SETTINGS = DecodingConfig(beam=25, missing_silence_bonus=-1.0, silence_bonus=0.0, word_bonus=0.5)


def options_of(parts: dict[str, Path], **options: object) -> DecoderOptions:
    """Options that select lexicon, n-gram and weights of `write_words` in the folder of `parts`."""
    weights = parts["lm"].with_name("weights.yaml")
    weights.write_text(to_yaml(SEARCH_SETTINGS))
    return DecoderOptions(lm=parts["lm"], lexicon=parts["lexicon"], config=weights, **options)


def small_search() -> WordSearch:
    return build_word_search(make_lexicon(ENTRIES, CLASSES, "small"), small_ngram(), SEARCH_SETTINGS)


def small_model(
    n_channels: int = 6,
    normalise: str = "none",
    seed: int = 0,
    sessions: tuple[str, ...] = ("day1", "day2"),
    transducer: TransducerSettings | None = None,
) -> Model:
    torch.manual_seed(seed)
    front_end = FrontEndSettings(normalise=normalise)
    config = ModelConfig(
        settings=ModelSettings(
            front_end=front_end,
            encoder=GRUSettings(width=12, depth=2),
            transducer=transducer or TransducerSettings(),
        ),
        n_channels=n_channels,
        sessions=sessions,
        classes=CLASSES,
    )
    model = Model(config).eval()
    with torch.no_grad():
        model.head.weight.mul_(6.0)
        if model.transducer is not None:  # sharper than at the start, so that hypotheses differ
            for parameter in model.transducer.parameters():
                parameter.mul_(3.0)
    return model


def decoder_of(
    model: Model,
    search: WordSearch | None = None,
    session: str | None = None,
    statistics: Statistics | None = None,
    head: Head = "ctc",
) -> Decoder:
    """A stream over a model; it must be causal."""
    acoustic = TorchModel(model)
    found = search if head == "ctc" else joint_search(acoustic.transducer, head, search, model.config.classes)
    decoder = Decoder(acoustic, found, session, statistics)
    decoder.check_causal()
    return decoder


def small_decoder(search: WordSearch, **options: object) -> Decoder:
    return decoder_of(small_model(**options), search)  # type: ignore[arg-type]


def adapting_decoder() -> Decoder:
    from arcuate.adaptation.config import Adaptation
    from arcuate.data.config import AugmentationConfig
    from arcuate.live.adaptation import StreamAdapter, make_setup

    model = TorchModel(small_model())
    setup = make_setup(model.model, Adaptation(copies=2), AugmentationConfig(), uses_words=True)
    return Decoder(model, small_search(), adapter=StreamAdapter(setup, model))


def bins(n: int, n_channels: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, (n, n_channels)).astype(np.float32)


# --- sessions -------------------------------------------------------------------------------------------------------

SEARCH = small_search()
OPTIONS = LiveOptions()


def wait_for(what: Callable[[], Any], seconds: float = 180.0) -> Any:
    due = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < due, "timed out"
        time.sleep(0.02)
    return found


def marked(name: str, values: np.ndarray, reference: str | None = None, session: str = "day1") -> list[Item]:
    """A marked trial, bin by bin."""
    return [Mark(name, session, reference), *(Chunk(row[None]) for row in values), End()]


class SessionRunner:
    """A session and its events; `run` starts it, queues items and stops it."""

    def __init__(
        self,
        decoder: Decoder | None = None,
        options: LiveOptions = OPTIONS,
        record: Path | None = None,
        record_session: str | None = None,
        **more: Any,
    ) -> None:
        decoder = decoder or small_decoder(SEARCH)
        recorder = None if record is None else Recorder(record, decoder.n_channels, record_session)
        self.received: list[Any] = []
        self.session = LiveSession(decoder, options, self.received.append, recorder, **more)

    def start(self) -> "SessionRunner":
        self.session.start()
        return self

    def run(self, items: list[Item]) -> "SessionRunner":
        self.start()
        for item in items:
            self.session.put(item)
        self.session.stop()
        return self

    def events_of(self, kind: str) -> list[dict]:
        return [e for e in list(self.received) if isinstance(e, dict) and e["type"] == kind]

    @property
    def images(self) -> list[bytes]:
        return [e for e in self.received if isinstance(e, bytes)]

    @property
    def texts(self) -> list[str]:
        return [e["text"] for e in self.events_of("final")]


# --- servers --------------------------------------------------------------------------------------------------------


class Served:
    def __init__(self, live: Any, port: int) -> None:
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


async def next_event(ws: Any, *kinds: str, seconds: float = 180.0) -> dict:
    async with asyncio.timeout(seconds):
        while True:
            message = await ws.recv()
            if isinstance(message, str) and (event := json.loads(message))["type"] in kinds:
                return event


def rejection_status(served: Served, path: str, **options: Any) -> int:
    """Status with which a WebSocket is refused; 0 if it is accepted."""
    import websockets

    async def go() -> int:
        try:
            async with websockets.connect(served.url(path), **options):
                return 0
        except websockets.exceptions.InvalidStatus as error:
            return error.response.status_code

    return asyncio.run(go())


@contextlib.contextmanager
def serving(
    decoder: Decoder | None = None,
    make_source: Callable[[LiveSession], Any] = lambda _: None,
    record: Path | None = None,
    access: Access = Access("127.0.0.1"),
    max_viewers: int = 12,
    config: dict[str, Any] | None = None,
    stalled_s: float = 60.0,
    **more: Any,
) -> Iterator[Served]:
    """A real server on a free port of this machine, in a thread."""
    import uvicorn

    from arcuate.live.server import LiveServer, make_config
    from arcuate.live.viewers import Broadcaster

    decoder, broadcaster = decoder or small_decoder(SEARCH), Broadcaster(max_viewers)
    recorder = None if record is None else Recorder(record, decoder.n_channels)
    session = LiveSession(decoder, OPTIONS, broadcaster.publish, recorder, stalled_s=stalled_s)
    limits = {"messages_per_s": 2000.0, "commands_per_s": 20.0} | more
    live = LiveServer(session, broadcaster, access, make_source(session), **limits)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(make_config(live, **(config or {})))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive())
    assert thread.is_alive(), "the server did not start"
    try:
        yield Served(live, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=300)
        assert not thread.is_alive()


@contextlib.contextmanager
def replaying(store_path: Path, speed: float, pause_s: float = 0.2) -> Iterator[Served]:
    """The trials of a store, decoded by a small untrained model."""
    from arcuate.live.sources.replay import Replay, select_trials

    store = Store.open(store_path)
    prepared = select_trials(store, store.sessions, "none", False)
    source = lambda session: Replay(prepared, session.put, speed=speed, pause_s=pause_s)
    with serving(small_decoder(SEARCH, n_channels=store.n_channels, sessions=store.sessions), source) as served:
        yield served


# --- rigs -----------------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def lsl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Lab Streaming Layer confined to this machine."""
    config = tmp_path_factory.mktemp("lsl") / "lsl_api.cfg"
    config.write_text("[ports]\nIPv6 = disable\n[multicast]\nResolveScope = machine\n")
    os.environ["LSLAPICFG"] = str(config)  # read once, when the library is loaded
    try:
        import pylsl
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"Lab Streaming Layer is not installed: {error}")
    return pylsl
