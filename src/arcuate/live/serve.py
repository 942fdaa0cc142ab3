"""`serve`: decode a source live and serve the page, as `arcuate live` does.

Modules that import torch are imported after the options are checked.
"""

import gc
import inspect
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.data.readers.source import is_safe_name
from arcuate.data.trial import nearest_session
from arcuate.errors import UserError
from arcuate.evaluation.floor import read_floor
from arcuate.evaluation.unlabelled import read_reference
from arcuate.exported.file import is_export
from arcuate.files import Result
from arcuate.live.access import bind, make_access, port_of
from arcuate.live.input import Source
from arcuate.live.load import find_model, load_decoder
from arcuate.live.options import LiveOptions
from arcuate.live.recorder import STORE, Recorder, check_recording_folder
from arcuate.plugins import component_names, has_component, load_component, trust_code
from arcuate.progress import Progress, logger
from arcuate.run import Run

if TYPE_CHECKING:
    from arcuate.live.server import LiveServer
    from arcuate.live.session import LiveSession
    from arcuate.live.viewers import Broadcaster

_SOURCES = ("replay", "socket", "lsl", "redis", "redis-logits")
_NAMED = ("lsl", "redis")  # take the name of a stream, as in lsl:NAME


@dataclass(frozen=True)
class ServeResult(Result):
    """Number of sentences decoded in a live session and, if it was recorded, the paths of the recording."""

    n_sentences: int
    recording: Path | None
    store: Path | None  # store of the recorded sentences, if there are any


@dataclass(frozen=True, eq=False)
class PreparedServer:
    """A server with everything loaded; `run` blocks until it is interrupted."""

    live: "LiveServer"
    listener: socket.socket  # bound before loading

    @property
    def port(self) -> int:
        return port_of(self.listener)

    @property
    def url(self) -> str:
        """Address of the page."""
        return self.live.access.page_url(self.port)

    @property
    def send_url(self) -> str:
        """Address for bins, with `--source socket`."""
        return self.live.access.send_url(self.port)

    def run(self) -> ServeResult:
        from arcuate.live.server import make_config
        from arcuate.live.web import run_until_signal

        sys.setswitchinterval(0.001)  # bounds how long the decoding thread waits for other threads
        gc.collect()
        gc.freeze()  # loaded objects stay, so the collector need not traverse them while frames are due
        if self.live.source is None:
            logger.info(f"send bins to {self.send_url}")
        logger.info(f"open {self.url}  (Ctrl-C to stop)")
        run_until_signal(make_config(self.live), self.listener)
        if self.live.session.error:
            raise UserError(self.live.session.error)
        recorder, n_sentences = self.live.session.recorder, self.live.session.n_sentences
        if recorder is None:
            return ServeResult(n_sentences, None, None)
        store = recorder.folder / STORE
        trials = f"its sentences are stored as trials in {store}" if store.exists() else "it has no sentences"
        if recorder.error is not None:
            raise UserError(f"{recorder.error}; {trials}")
        logger.info(f"recorded in {recorder.folder}; {trials}")
        return ServeResult(n_sentences, recorder.folder, store if store.exists() else None)


def serve(run: str | Path, options: LiveOptions = LiveOptions(), **connections: Any) -> ServeResult:
    """Decode a source live and serve the page until interrupted; `connections` are those of `prepare_server`."""
    return prepare_server(run, options, **connections).run()


def prepare_server(
    run: str | Path,
    options: LiveOptions = LiveOptions(),
    *,
    token: str | None = None,
    send_token: str | None = None,
    redis: str = "redis://127.0.0.1:6379",
    progress: Progress | None = None,
) -> PreparedServer:
    """Check all options, then load model, language model and source.

    A replay is normalised by the running statistics of the stream, like bins from a rig.

    Args:
        run: Run[@checkpoint], model folder, hf:ORG/NAME or .arcx.
        options: Decoder, source, sentences, recording and address.
        token: Token to open the page; default: none on loopback, random otherwise.
        send_token: Token that senders of bins need; default: none on loopback without `token`, else random.
        redis: URL of the Redis server.
        progress: Called while models are loaded.
    """
    kind, name = _parse_source(options.source)
    _check_options(options, kind)
    if kind == "redis-logits":
        options = options.model_copy(update={"head": "ctc"})
    custom = None if kind in _SOURCES else _load_custom_source(kind)
    run = find_model(run)
    access = make_access(options.host, token, send_token)
    listener = bind(options.host, options.port)
    try:
        session, broadcaster = _prepare_session(run, options, kind, progress)
        source = custom(session.decoder.n_channels, session.put) if custom else None
        if kind == "replay":
            source = _make_replay(run, session)
        elif custom is None:
            source = _connect_source(kind, name, session, redis)
    except BaseException:
        listener.close()
        raise
    from arcuate.live.server import LiveServer

    floor = None if is_export(run) else read_floor(Run(run), options.split)
    return PreparedServer(LiveServer(session, broadcaster, access, source, floor), listener)


def _make_replay(run: Path, session: "LiveSession") -> Source:
    from arcuate.live.sources.replay import Replay, open_replay

    options = session.options
    trials = open_replay(run, session.decoder, options.data, options.split, options.session)
    return Replay(trials, session.put, options.speed, continuous=options.continuous)


def _prepare_session(
    run: Path, options: LiveOptions, kind: str, progress: Progress | None
) -> "tuple[LiveSession, Broadcaster]":
    from arcuate.adaptation.known_sessions import log_missing_reference
    from arcuate.live.adaptation import StreamAdapter
    from arcuate.live.session import LiveSession
    from arcuate.live.sources.replay import seed_statistics
    from arcuate.live.viewers import Broadcaster

    decoder = load_decoder(run, options, progress=progress)
    if kind != "redis-logits":
        seed_statistics(run, decoder, options.data)
    if isinstance(adapter := decoder.adapter, StreamAdapter) and not adapter.setup.known:
        log_missing_reference()
    recorder = None
    if options.record is not None:
        new = options.record_session
        if new is not None and options.session is None:  # decode with the nearest known session's layer
            decoder.reset(nearest_session(new, decoder.sessions))
        recorder = Recorder(options.record, decoder.n_channels, new, decoder.layout.classes)
    reference = None if is_export(run) or options.adapt else read_reference(Run(run))
    broadcaster = Broadcaster()
    return LiveSession(decoder, options, broadcaster.publish, recorder, reference), broadcaster


def _parse_source(source: str) -> tuple[str, str | None]:
    """Kind of a source and the name of its stream, as in lsl:NAME."""
    kind, _, name = source.partition(":")
    if kind in _NAMED:
        return kind, name or None
    if source not in _SOURCES and not has_component("live_sources", source):
        known = ", ".join((*_SOURCES, *component_names("live_sources")))
        raise UserError(
            f"--source {source!r} is unknown; choose {known}, lsl:NAME, redis:NAME or an import path such as"
            " mylab.live:Source"
        )
    return source, None


def _check_options(options: LiveOptions, kind: str) -> None:
    """Raise `UserError` for options that do not fit together or need a missing package."""
    if missing := [name for name in ("fastapi", "uvicorn", "websockets") if find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}; install with: pip install 'arcuate[live]'")
    if options.continuous and kind != "replay":
        raise UserError("--continuous applies to stored trials; remove it, or use --source replay")
    if kind == "redis-logits":
        if options.adapt:
            raise UserError("--adapt needs bins, but --source redis-logits receives logits; use another source")
        if options.lm == "none":
            raise UserError("--source redis-logits needs a language model; give one with --lm")
        if options.head not in (None, "ctc"):
            raise UserError(f"--head {options.head} needs bins, but --source redis-logits receives CTC logits")
    session, folder = options.record_session, options.record
    if session is not None and folder is None:
        raise UserError("--record-session requires --record FOLDER")
    if session is not None and not is_safe_name(session):
        raise UserError(f"{session!r:.60} is not a valid session name; choose one such as t15.2023.09.12")
    if folder is not None:
        check_recording_folder(folder)


def _load_custom_source(name: str) -> Callable[..., Source]:
    """Load the class of a user-defined source, and check that it can be constructed, started and stopped."""
    with trust_code():  # named on the command line
        found = load_component("live_sources", name)
    problem = None
    if not callable(found):
        problem = f"is a value of type {type(found).__name__}"
    elif isinstance(found, type) and not all(callable(getattr(found, n, None)) for n in ("start", "stop")):
        problem = "has no start and stop"
    elif inspect.isabstract(found):
        problem = f"does not define {', '.join(sorted(found.__abstractmethods__))}"
    else:
        try:
            inspect.signature(found).bind(1, print)
        except TypeError as error:
            problem = f"cannot be called with (n_channels, put): {error}"
    if problem is not None:
        raise UserError(
            f"--source {name} {problem}; a live source is a class Source(n_channels, put) with start and stop, see"
            " docs/your-encoder.md"
        )
    made: Callable[..., Source] = found
    return made


def _connect_source(kind: str, name: str | None, session: "LiveSession", url: str) -> Source | None:
    """Connect to a stream; None if bins arrive through the WebSocket /frames."""
    n_channels = session.decoder.n_channels
    if kind == "lsl":
        from arcuate.live.sources.lsl import LslBins

        return LslBins(name or "arcuate", n_channels, session.put)
    if kind == "socket":
        return None
    from arcuate.live.sources.redis import BINS_STREAM, RedisBins, RedisLogits

    if kind == "redis":
        return RedisBins(url, n_channels, session.put, session.publish, name or BINS_STREAM)
    logits = RedisLogits(url, session.put, session.publish)
    session.subscribers.append(logits.on_event)
    return logits
