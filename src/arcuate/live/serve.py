"""`serve`: decode a source live and serve the page, as `arcuate live` does.

Modules that import torch are imported after the options are checked.
"""

import dataclasses
import gc
import inspect
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.config import parse_settings, read_yaml
from arcuate.data.readers.source import is_safe_name
from arcuate.data.trial import nearest_session
from arcuate.decoding.options import DecoderOptions
from arcuate.errors import UserError
from arcuate.evaluation.floor import read_floor
from arcuate.evaluation.unlabelled import read_reference
from arcuate.exported.file import is_export
from arcuate.files import to_json_value
from arcuate.live.clients import bind, make_access, port_of
from arcuate.live.config import LiveSettings
from arcuate.live.input import Source
from arcuate.live.load import find_model, load_decoder
from arcuate.live.recorder import STORE, Recorder, check_recording_folder
from arcuate.plugins import component_names, has_component, load_component, trust_code
from arcuate.progress import Progress, logger
from arcuate.run import Run

if TYPE_CHECKING:
    from arcuate.live.server import LiveServer
    from arcuate.live.session import LiveSession
    from arcuate.live.sources.replay import ReplayTrials

_SOURCES = ("replay", "socket", "lsl", "redis", "redis-logits")


@dataclass(frozen=True)
class ServeResult:
    """Number of sentences decoded in a live session and, if it was recorded, the paths of the recording."""

    n_sentences: int
    recording: Path | None
    store: Path | None  # store of the recorded sentences, if there are any

    def to_dict(self) -> dict[str, Any]:
        return {key: to_json_value(value) for key, value in vars(self).items()}


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


def serve(run: str | Path, **options: Any) -> ServeResult:
    """Decode a source live and serve the page until interrupted; takes the options of `prepare_server`."""
    return prepare_server(run, **options).run()


def prepare_server(
    run: str | Path,
    *,
    source: str = "replay",
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    send_token: str | None = None,
    split: str = "val",
    speed: float = 1.0,
    continuous: bool = False,
    stored_statistics: bool = False,
    record: str | Path | None = None,
    record_session: str | None = None,
    settings: LiveSettings | str | Path | None = None,
    silence_s: float | None = None,
    closed: bool = False,
    phrase: str | None = None,
    stream: str | None = None,
    redis: str = "redis://127.0.0.1:6379",
    options: DecoderOptions = DecoderOptions(),
    progress: Progress | None = None,
) -> PreparedServer:
    """Check all options, then load model, language model and source.

    Options are those of `arcuate live`. A replay is normalised by the
    running statistics of the stream, like bins from a rig; with `stored_statistics` by those of offline evaluation.
    """
    folder = None if record is None else Path(record)
    data, session = options.data, options.session
    _check_source(source, options.lm == "none", options.adapt, options.head)
    for option, is_set in (("--stored-statistics", stored_statistics), ("--continuous", continuous)):
        if is_set and source != "replay":
            raise UserError(f"{option} applies to stored trials; remove it, or use --source replay")
    if source == "redis-logits":
        options = options.model_copy(update={"head": "ctc"})
    _check_recording(folder, record_session)
    custom = None if source in _SOURCES else _load_custom_source(source)
    run = find_model(run)
    marks_trials = (source == "replay" and not continuous) or source == "redis-logits"
    settings = _resolve_settings(settings, marks_trials, silence_s, closed, phrase)
    access = make_access(host, token, send_token)
    listener = bind(host, port)
    from arcuate.adaptation.known_sessions import log_missing_reference
    from arcuate.live.adaptation import StreamAdapter
    from arcuate.live.server import LiveServer
    from arcuate.live.sources.replay import open_replay, seed_statistics

    decoder = load_decoder(run, options, progress=progress)
    replay = open_replay(run, decoder, data, split, session) if source == "replay" else None
    if replay is not None:
        replay = dataclasses.replace(replay, stored_statistics=stored_statistics)
    if source != "redis-logits" and not stored_statistics:
        seed_statistics(run, decoder, data)
    if isinstance(adapter := decoder.adapter, StreamAdapter) and not adapter.setup.known:
        log_missing_reference()
    recorder = None
    if folder is not None:
        if record_session is not None and session is None:  # decode with the nearest known session's layer
            decoder.reset(nearest_session(record_session, decoder.sessions))
        recorder = Recorder(folder, decoder.n_channels, record_session, decoder.layout.classes)
    make_source = lambda live: _make_source(source, live, custom, replay, speed, stream, redis)
    reference = None if is_export(run) or options.adapt else read_reference(Run(run))
    floor = None if is_export(run) else read_floor(Run(run), split)
    live = LiveServer(decoder, settings, access, make_source, recorder, reference, floor)
    return PreparedServer(live, listener)


def _check_source(source: str, without_words: bool, adapts: bool, head: str | None) -> None:
    if source not in _SOURCES and not has_component("live_sources", source):
        known = ", ".join((*_SOURCES, *component_names("live_sources")))
        raise UserError(f"--source {source!r} is unknown; choose {known} or an import path such as mylab.live:Source")
    if missing := [name for name in ("fastapi", "uvicorn", "websockets") if find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}; install with: pip install 'arcuate[live]'")
    if adapts and source == "redis-logits":
        raise UserError("--adapt needs bins, but --source redis-logits receives logits; use another source")
    if without_words and source == "redis-logits":
        raise UserError("--source redis-logits needs a language model; give one with --lm")
    if source == "redis-logits" and head not in (None, "ctc"):
        raise UserError(f"--head {head} needs bins, but --source redis-logits receives CTC logits; use --head ctc")


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


def _check_recording(folder: Path | None, session: str | None) -> None:
    if session is not None and folder is None:
        raise UserError("--record-session requires --record FOLDER")
    if session is not None and not is_safe_name(session):
        raise UserError(f"{session!r:.60} is not a valid session name; choose one such as t15.2023.09.12")
    if folder is not None:
        check_recording_folder(folder)


def _resolve_settings(
    settings: LiveSettings | str | Path | None,
    marks_trials: bool,
    silence_s: float | None,
    closed: bool,
    phrase: str | None,
) -> LiveSettings:
    """Read the settings file, which options override; a source that marks trials needs no endpointing."""
    if not isinstance(settings, LiveSettings):
        settings = LiveSettings() if settings is None else _read_settings(Path(settings))
    endpoints, start = settings.endpoints, settings.start
    if marks_trials:
        endpoints = endpoints.model_copy(update={"enabled": False})
    if silence_s is not None:
        endpoints = endpoints.model_copy(update={"silence_s": silence_s})
    if closed or phrase is not None:
        start = start.model_copy(update={"closed": True, "phrase": phrase})
    return settings.model_copy(update={"endpoints": endpoints, "start": start})


def _read_settings(path: Path) -> LiveSettings:
    tree = read_yaml(path) or {}
    return parse_settings(LiveSettings, tree, str(path), noun="live settings")


def _make_source(
    name: str,
    session: "LiveSession",
    custom: Callable[..., Source] | None,
    replay: "ReplayTrials | None",
    speed: float,
    stream: str | None,
    redis: str,
) -> Source | None:
    n_channels = session.decoder.n_channels
    if replay is not None:
        from arcuate.live.sources.replay import Replay

        return Replay(replay, session.put, speed)
    if custom is not None:
        return custom(n_channels, session.put)
    from arcuate.live.sources.streams import BINS_STREAM, LslBins, RedisBins, RedisLogits

    if name == "lsl":
        return LslBins(stream or "arcuate", n_channels, session.put)
    if name == "redis":
        return RedisBins(redis, n_channels, session.put, session.publish, stream or BINS_STREAM)
    if name == "redis-logits":
        logits = RedisLogits(redis, session.put, session.publish)
        session.subscribers.append(logits.on_event)
        return logits
    return None  # bins arrive through the WebSocket /frames
