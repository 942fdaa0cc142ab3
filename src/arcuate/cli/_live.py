"""`arcuate live` and `arcuate bench live`."""

import gc
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from arcuate.adaptation.config import METHODS
from arcuate.cli.console import emit_json, out, progress, say
from arcuate.data.sessions import nearest_session
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.transcribe import read_weights
from arcuate.live.access import is_local, make_access
from arcuate.live.config import LiveSettings
from arcuate.run import Run, open_run

if TYPE_CHECKING:
    import uvicorn

    from arcuate.adaptation.config import Adaptation
    from arcuate.live.decoder import StreamingDecoder
    from arcuate.live.messages import Source
    from arcuate.live.recorder import Recorder
    from arcuate.live.session import LiveSession
    from arcuate.live.sources.replay import Prepared

ENDING = (signal.SIGINT, signal.SIGTERM)
SOURCES = ("replay", "socket", "lsl", "redis", "redis-logits")


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    run: Path
    source: str = "replay"
    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    lm: str | None = "default"
    lexicon: str = "default"
    weights: Path | None = None
    llm: Path | None = None
    beam: int | None = None
    data: Path | None = None
    split: str = "val"
    session: str | None = None
    speed: float = 1.0
    continuous: bool = False
    record: Path | None = None
    settings: Path | None = None
    silence: float | None = None
    closed: bool = False
    phrase: str | None = None
    stream: str | None = None
    redis: str = "redis://127.0.0.1:6379"
    adapt: str | None = None
    adapting: tuple[str, ...] = ()  # key=value, of Adaptation
    day: str | None = None


def live_command(asked: Asked) -> None:
    check(asked)
    settings = live_settings(asked)
    refuse_taken_port(asked.host, asked.port)
    import torch
    import uvicorn

    from arcuate.live.server import Live, make_app

    torch.set_num_threads(1)  # one stream is bound by memory; the other cores are for the server
    prepared = None
    with progress("loading the model, the lexicon and the language model"):
        decoder = load_decoder(asked)
        if asked.source == "replay":
            prepared = open_replay(asked, decoder)
        else:
            seed_statistics(asked, decoder)
    tell_unmeasured(decoder)
    sys.setswitchinterval(0.001)  # the decoding thread waits at most so long for the others
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not walk through it while frames are due
    access = make_access(asked.host, asked.token)
    recorder = make_recorder(asked, decoder)
    live = Live(decoder, settings, access, lambda session: make_source(asked, session, prepared), recorder)
    shown = f"http://{'localhost' if is_local(asked.host) else asked.host}:{asked.port}/"
    say(f"open {shown}{f'?token={access.token}' if access.token else ''}  (Ctrl-C to stop)")
    config = uvicorn.Config(
        make_app(live),
        host=asked.host,
        port=asked.port,
        log_level="warning",
        ws_max_size=settings.limits.frame_bytes + 64,
        ws_max_queue=64,
        timeout_graceful_shutdown=2,
    )
    run_until_told(uvicorn.Server(config))
    if live.session.error:
        raise UserError(live.session.error)
    if recorder is not None:
        tell_recording(recorder)


def make_recorder(asked: Asked, decoder: "StreamingDecoder") -> "Recorder | None":
    """A new day is heard through the layer of the nearest known one, unless another is named."""
    from arcuate.live.recorder import Recorder

    if asked.record is None:
        return None
    if asked.day is not None and asked.session is None:
        decoder.reset(nearest_session(asked.day, decoder.sessions))
    return Recorder(asked.record, decoder.n_channels, asked.day)


def tell_recording(recorder: "Recorder") -> None:
    from arcuate.live.recorder import STORE

    store = recorder.folder / STORE
    made = (
        f"its sentences are trials of {store}" if store.exists() else "nothing was said, so it has no trials"
    )
    if recorder.error is not None:
        raise UserError(f"{recorder.error}; {made}")
    say(f"recorded in {recorder.folder}; {made}")


def run_until_told(server: "uvicorn.Server") -> None:
    """Serve until interrupted or terminated; both are a normal end, after which everything is written down."""

    @contextmanager
    def leave_quietly() -> Iterator[None]:
        before = {which: signal.signal(which, server.handle_exit) for which in ENDING}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    server.capture_signals = leave_quietly  # type: ignore[method-assign]
    server.run()


def check(asked: Asked) -> None:
    """Mistakes are told before anything is loaded."""
    if asked.source not in SOURCES:
        raise UserError(f"there is no source {asked.source!r}; choose {', '.join(SOURCES)}")
    if lacking := [name for name in ("fastapi", "uvicorn", "websockets") if find_spec(name) is None]:
        raise UserError(
            f"the server needs {', '.join(lacking)}; install it with: pip install 'arcuate[live]'"
        )
    check_adapting(asked)
    if asked.source == "redis-logits" and asked.lm is None:
        raise UserError("logits become words with a language model: leave --no-words out")
    check_recording(asked)
    open_run(asked.run)


def check_adapting(asked: Asked) -> None:
    if asked.adapt is not None and asked.adapt not in METHODS:
        raise UserError(f"--adapt {asked.adapt!r} is unknown; choose {', '.join(METHODS)}")
    if asked.adapt is not None and asked.source == "redis-logits":
        raise UserError(
            "--adapt learns from bins, of which logits know nothing: run the model here to follow a day"
        )
    if asked.adapting and asked.adapt is None:
        raise UserError("--set changes how a day is followed: name a method with --adapt, such as one-step")
    adaptation_of(asked)


def tell_unmeasured(decoder: "StreamingDecoder") -> None:
    """Without recordings of known days nobody can say how sure the model usually is."""
    from arcuate.adaptation.config import GRADIENT_METHODS

    adapting = decoder.engine.adapting
    if adapting and not adapting.known and adapting.adapter.settings.method in LEARNING:
        say(
            "note: there are no recordings of days that the model knows, so how much this one has drifted cannot be"
            " measured and every step is a whole one; name a store that has them with --data"
        )


def check_recording(asked: Asked) -> None:
    from arcuate.data.readers.source import safe_name
    from arcuate.live.recorder import refuse_foreign

    if asked.day is not None and asked.record is None:
        raise UserError("--day names the day that is recorded: name a folder with --record too")
    if asked.day is not None and not safe_name(asked.day):
        raise UserError(f"{asked.day!r:.60} is no name of a day; choose one such as t15.2023.09.12")
    if asked.record is not None:
        refuse_foreign(asked.record)


def live_settings(asked: Asked) -> LiveSettings:
    """A file of settings, with what the command line says put over it."""
    tree: Any = {}
    if asked.settings:
        try:
            tree = yaml.safe_load(asked.settings.read_text("utf-8")) or {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"{asked.settings} cannot be read: {str(error).splitlines()[0]}") from None
    try:
        settings = LiveSettings.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise UserError(f"{asked.settings}: {place}: {problem['msg']}; see docs/live.md") from None
    endpoints, start = settings.endpoints, settings.start
    marked = (asked.source == "replay" and not asked.continuous) or asked.source == "redis-logits"
    if marked:
        endpoints = endpoints.model_copy(update={"enabled": False})
    if asked.silence is not None:
        endpoints = endpoints.model_copy(update={"silence_s": asked.silence})
    if asked.closed or asked.phrase is not None:
        start = start.model_copy(update={"closed": True, "phrase": asked.phrase})
    return settings.model_copy(update={"endpoints": endpoints, "start": start})


def refuse_taken_port(host: str, port: int) -> None:
    """Loading takes a while; a port that is taken is told before."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {host} port {port} ({error.strerror}); choose another --port"
            ) from None


def load_decoder(asked: Asked) -> "StreamingDecoder":
    from arcuate.decoding.config import Decoding
    from arcuate.live.decoder import StreamingDecoder

    decoding = read_weights(asked.weights)[0] if asked.weights else Decoding()
    if asked.beam is not None:
        decoding = decoding.model_copy(update={"beam": asked.beam})
    with progress("loading") if asked.adapt else nullcontext() as report:
        return StreamingDecoder.load(
            asked.run,
            lm=asked.lm,
            lexicon=asked.lexicon,
            decoding=decoding,
            session=asked.session,
            llm=asked.llm,
            adapt=adaptation_of(asked),
            data=asked.data if asked.adapt else None,
            progress=report,
        )


def adaptation_of(asked: Asked) -> "Adaptation | None":
    if asked.adapt is None:
        return None
    from arcuate.cli._follow import Following, adaptation

    return adaptation(Following(asked.adapt, settings=asked.adapting))


def open_store(asked: Asked) -> Store:
    if asked.data is not None:
        return Store.open(asked.data)
    if not Run(asked.run).environment_file.is_file():
        raise UserError(f"{asked.run} does not say what it was trained on; name a store with --data")
    return Store.open(Path(str(Run(asked.run).data().get("path", ""))))


def open_replay(asked: Asked, decoder: "StreamingDecoder") -> "Prepared":
    from arcuate.live.sources.replay import prepare_replay

    store = open_store(asked)
    if store.n_channels != decoder.n_channels:
        raise UserError(
            f"{store.path} has {store.n_channels} channels where the model reads {decoder.n_channels}"
        )
    front_end = decoder.engine.model.card.settings.front_end
    split = None if asked.split == "all" else asked.split
    sessions = decoder.sessions if asked.adapt is None else store.sessions
    found = prepare_replay(store, sessions, front_end.normalise, front_end.log, split, asked.session)
    return found if asked.adapt is None else in_recorded_order(found, decoder)


def in_recorded_order(prepared: "Prepared", decoder: "StreamingDecoder") -> "Prepared":
    """Days are followed as they were recorded; how new ones are read is told."""
    from arcuate.adaptation.evaluate import recording_order
    from arcuate.cli._follow import tell_days

    trials = recording_order(prepared.trials, prepared.store.sessions)
    tell_days(prepared.store, decoder.engine.model, trials)
    return replace(prepared, trials=tuple(trials))


def seed_statistics(asked: Asked, decoder: "StreamingDecoder") -> None:
    """A model that normalises begins with the statistics of its last session, where a store has them."""
    front_end = decoder.engine.model.card.settings.front_end
    if front_end.normalise == "none" or asked.data is None:
        return
    store = open_store(asked)
    session = decoder.day.init_session if decoder.day else decoder.session  # of a new day the nearest known one
    last = [t for t in store.trials if t.session == session]
    if last:
        decoder.seed(store.block_statistics(last[-1], front_end.log))


def make_source(asked: Asked, session: "LiveSession", prepared: "Prepared | None") -> "Source | None":
    n_channels = session.decoder.n_channels
    if prepared is not None:
        from arcuate.live.sources.replay import Replay

        return Replay(prepared, session.put, asked.speed)
    if asked.source == "lsl":
        from arcuate.live.sources.lsl import LslBins

        return LslBins(asked.stream or "arcuate", n_channels, session.put)
    if asked.source == "redis":
        from arcuate.live.sources.redis import BINS, RedisBins

        return RedisBins(asked.redis, n_channels, session.put, session.publish, asked.stream or BINS)
    if asked.source == "redis-logits":
        from arcuate.live.sources.redis import RedisLogits

        logits = RedisLogits(asked.redis, session.put, session.publish)
        session.listeners.append(logits.hear)
        return logits
    return None


def bench_command(asked: Asked, seconds: float, real_time: bool, as_json: bool) -> None:
    import torch

    from arcuate.live.bench import replayed, time_stream

    check_adapting(asked)
    open_run(asked.run)
    torch.set_num_threads(1)
    with progress("loading the model, the lexicon and the language model"):
        decoder = load_decoder(asked)
        prepared = open_replay(asked, decoder)
    patch = decoder.engine.model.card.settings.front_end.patch
    with progress("replaying") as report:
        found = time_stream(decoder, replayed(decoder, prepared), seconds, real_time, report)
    decoder.settle()
    standing = decoder.adaptation
    summary = {
        **found.summary(20.0 * patch.stride),
        "delay_ms": decoder.delay.total_ms,
        "real_time": real_time,
        "n_lexicon_words": len(decoder.engine.search.words) if decoder.engine.search else 0,
        "beam": decoder.engine.search.settings.beam if decoder.engine.search else None,
        "adaptation": None if standing is None else vars(standing),
    }
    if as_json:
        emit_json(summary)
        return
    stolen = summary["missed_while_stolen"]
    out.print(
        f"per frame of {20 * patch.stride} ms: p50 {summary['frame_ms_p50']:.2f} ms,"
        f" p99 {summary['frame_ms_p99']:.2f} ms, max {summary['frame_ms_max']:.2f} ms;"
        f" {summary['missed_deadlines']} of {summary['n_frames']:,} missed"
        + (f" ({stolen} while a hypervisor held the cores);" if stolen else ";")
        + f" the model itself waits {decoder.delay.total_ms:g} ms",
        soft_wrap=True,
    )
    if standing is not None:
        out.print(
            f"{standing.state} {standing.session}: {standing.n_steps} of {standing.n_sentences} sentences learned"
            f" from, {standing.n_falls} fall-backs, {standing.n_skipped} came too fast",
            soft_wrap=True,
        )
