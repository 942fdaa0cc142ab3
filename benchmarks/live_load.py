"""Live decoding under load: several servers, many viewers, and everything that goes wrong on a network.

python benchmarks/live_load.py --run runs/demo --minutes 60     # 8 streams, 50 viewers, 4 kills: the full size
python benchmarks/live_load.py --run runs/demo --minutes 10     # shorter
python benchmarks/live_load.py --run runs/full --minutes 5 --streams 2 --viewers 12 --kills 1
python benchmarks/live_load.py --run runs/full --model full.arcx --minutes 60    # exported in int8: eight fit two cores

`runs/full` is a model of full size (44 million parameters, 512 channels); its weights need no training:

arcuate simulate data/full/source --sessions 2 --trials 8 --electrodes 256
arcuate prepare data/full/source data/full/store
arcuate train b2t25-gru train.steps=1 train.validate_every=1 --data data/full/store --run runs/full
arcuate export runs/full full.arcx --int8

Every stream is a server of its own (`arcuate live --source socket --record`), fed in real time with the validation
trials of the run's store. Meanwhile

- packets are lost (`--loss`: share of the bins) and bursts of NaN arrive every ten seconds,
- rigs and viewers disconnect and connect again,
- servers are killed (kill -9) in the middle of a sentence and started again on the same recording (`--kills`).

Reported: time per frame and missed deadlines by the servers' own meters (wall time, which includes other programs),
CPU time of the servers, growth of their memory, and lost sentences: those whose end was sent but that no viewer
received (except the one that a kill cut off), and those that a viewer received but that are not in the recording's
store.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import websockets

from arcuate.data.store import Store
from arcuate.data.trial import BIN_SECONDS
from arcuate.live.sources.replay import select_trials
from arcuate.live.sources.socket import pack_bins
from arcuate.models.io import load_model_config
from arcuate.run import Run, find_checkpoint

_NAN_EVERY_S = 10.0
_NAN_BINS = 5
_RECONNECT_EVERY_S = 20.0


@dataclass(eq=False)
class Stream:
    """One server, its rig and what its viewers have received."""

    number: int
    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    ended: dict[str, None] = field(default_factory=dict)  # sentences whose end was sent, in order
    in_progress: str | None = None
    excused: set[str] = field(default_factory=set)  # in progress when the server was killed
    seen: dict[str, str] = field(default_factory=dict)  # text of each final that a viewer received
    meters: list[dict[str, Any]] = field(default_factory=list)  # of servers that have ended
    memory_mb: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # of servers that have ended, without loading
    cpu_at_start: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)  # reasons
    n_sent = n_lost = n_nan = n_reconnects = 0

    def start(self, args: argparse.Namespace) -> None:
        options = ["--source", "socket", "--port", str(self.port), "--record", str(self.folder / "recording")]
        if args.model is not None:
            options += ["--data", str(Run(args.run).data()["path"])]
        command = [sys.executable, "-m", "arcuate", "live", str(args.model or args.run), *options, *args.options]
        log = (self.folder / "server.log").open("ab")
        position = log.tell()
        self.process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
        while True:
            text = (self.folder / "server.log").read_bytes()[position:].decode()
            if "open http://" in text:
                self.port = int(text.split("open http://", 1)[1].split(":", 1)[1].split("/", 1)[0])
                loading = psutil.Process(self.process.pid).cpu_times()
                self.cpu_at_start = loading.user + loading.system
                return
            if self.process.poll() is not None:
                raise SystemExit(f"the server of stream {self.number} did not start: {text}")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def keep_meter(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=10) as answer:
            self.meters.append(json.loads(answer.read()))

    def measure_memory(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.memory_mb.append(psutil.Process(self.process.pid).memory_info().rss / 1e6)

    def keep_cpu_time(self) -> None:
        assert self.process is not None
        used = psutil.Process(self.process.pid).cpu_times()
        self.cpu_s += used.user + used.system - self.cpu_at_start

    def cut_off(self) -> None:
        """Excuse the sentence that a kill cut off: in progress, or ended so recently that no viewer has its text."""
        unseen = [name for name in self.ended if name not in self.seen]
        self.excused |= {self.in_progress} if self.in_progress is not None else set(unseen[-1:])


async def feed(stream: Stream, store: Store, trials: list[Any], args: argparse.Namespace, until: float) -> None:
    """Send trial after trial in real time; a message that a lost connection swallows is sent again, as a rig would."""
    rng = random.Random(stream.number)
    wire: Any = None
    answers: Any = None  # task that reads what the server rejects
    count, bin_number, next_nan, next_reconnect = 0, 0, time.monotonic() + _NAN_EVERY_S, 0.0

    async def read_answers(connection: Any) -> None:
        with contextlib.suppress(OSError, websockets.exceptions.WebSocketException):
            async for message in connection:
                stream.rejected[json.loads(message)["message"].partition(";")[0].partition(":")[0]] += 1

    async def send(message: str | bytes) -> None:
        nonlocal wire, answers
        while True:
            try:
                if wire is None:
                    wire = await websockets.connect(stream.url + "/frames", open_timeout=10)
                    answers = asyncio.create_task(read_answers(wire))
                await wire.send(message)
                return
            except (OSError, websockets.exceptions.WebSocketException):
                wire = None
                stream.n_reconnects += 1
                await asyncio.sleep(0.2)

    next_reconnect = time.monotonic() + rng.uniform(5, _RECONNECT_EVERY_S)
    due = time.monotonic()
    while time.monotonic() < until:
        info = trials[(stream.number + count) % len(trials)]
        name = f"stream{stream.number}/{count}"
        count += 1
        stream.in_progress = name
        mark = {"type": "mark", "trial": name, "session": info.session, "reference": info.text}
        await send(json.dumps(mark))
        for row in store.read_bins(info):
            due = max(due + BIN_SECONDS, time.monotonic() - 0.5)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            stream.n_sent += 1
            bin_number += 1
            if rng.random() < args.loss:
                stream.n_lost += 1
                continue
            if time.monotonic() > next_nan:
                row = np.full_like(row, np.nan)
                stream.n_nan += 1
                if stream.n_nan % _NAN_BINS == 0:
                    next_nan = time.monotonic() + _NAN_EVERY_S
            if time.monotonic() > next_reconnect and wire is not None:
                await wire.close()
                wire = None
                stream.n_reconnects += 1
                next_reconnect = time.monotonic() + rng.uniform(5, _RECONNECT_EVERY_S)
            await send(pack_bins(row[None], first=bin_number))
        await send('{"type": "end"}')
        if name not in stream.excused:
            stream.ended[name] = None
        stream.in_progress = None
        await asyncio.sleep(0.3)
        due = time.monotonic()
    if wire is not None:
        await wire.close()
        await answers


async def view(stream: Stream, number: int, until: float) -> None:
    """A page that is reloaded now and then."""
    rng = random.Random(1000 + number)
    while time.monotonic() < until:
        leave = time.monotonic() + rng.uniform(5, _RECONNECT_EVERY_S)
        try:
            async with websockets.connect(stream.url + "/events", max_size=None, open_timeout=10) as wire:
                while time.monotonic() < min(leave, until):
                    message = await asyncio.wait_for(wire.recv(), max(0.1, min(leave, until) - time.monotonic()))
                    if isinstance(message, str):
                        receive(stream, json.loads(message))
        except (OSError, TimeoutError, websockets.exceptions.WebSocketException):
            await asyncio.sleep(0.2)


def receive(stream: Stream, event: dict[str, Any]) -> None:
    finals = event["finals"] if event["type"] == "snapshot" else [event] if event["type"] == "final" else []
    for final in finals:
        if final["trial"] is not None and not final.get("cut"):
            stream.seen[final["trial"]] = final["text"]


async def kill(stream: Stream, after_s: float, args: argparse.Namespace) -> None:
    """Kill a server without warning, in the middle of a sentence, and start it again."""
    await asyncio.sleep(after_s)
    while stream.in_progress is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(stream.keep_meter)
    assert stream.process is not None
    stream.keep_cpu_time()
    stream.process.send_signal(signal.SIGKILL)
    stream.process.wait()
    stream.cut_off()
    await asyncio.to_thread(stream.start, args)
    stream.memory_mb.clear()


async def every(seconds: float, action: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        action()


async def run(streams: list[Stream], store: Store, trials: list[Any], args: argparse.Namespace) -> None:
    seconds = 60 * args.minutes
    until = time.monotonic() + seconds
    measuring = [asyncio.create_task(every(seconds / 10, stream.measure_memory)) for stream in streams]
    tasks: list[Awaitable[None]] = [feed(stream, store, trials, args, until) for stream in streams]
    tasks += [view(streams[n % len(streams)], n, until + 10) for n in range(args.viewers)]
    tasks += [kill(streams[n % len(streams)], seconds * (n + 1) / (args.kills + 2), args) for n in range(args.kills)]
    await asyncio.gather(*tasks)
    for task in measuring:
        task.cancel()


def summarise(streams: list[Stream]) -> dict[str, Any]:
    lost, unrecorded = [], []
    n_recorded = 0
    for stream in streams:
        lost += [name for name in stream.ended if name not in stream.excused and name not in stream.seen]
        rows = stream.folder / "recording" / "store" / "live.jsonl"
        texts = {r["source_trial"]: r["text"] for r in map(json.loads, rows.read_text().splitlines()) if not r["cut"]}
        n_recorded += len(texts)
        unrecorded += [name for name, text in stream.seen.items() if texts.get(name) != text]
        assert not Store.open(rows.parent).find_changed()
    meters = [meter for stream in streams for meter in stream.meters]
    growth = [s.memory_mb[-1] - s.memory_mb[len(s.memory_mb) // 4] for s in streams if len(s.memory_mb) > 1]
    total = lambda key: sum(meter[key] for meter in meters)
    worst = lambda key: max(meter[key] for meter in meters if meter[key] is not None)
    return {
        "sentences": sum(len(s.ended) for s in streams),
        "sentences_lost": len(lost),
        "sentences_cut_by_kills": sum(len(s.excused) for s in streams),
        "sentences_recorded": n_recorded,
        "sentences_not_recorded": len(unrecorded),
        "bins": sum(s.n_sent for s in streams),
        "bins_lost": sum(s.n_lost for s in streams),
        "bins_nan": sum(s.n_nan for s in streams),
        "reconnects_of_rigs": sum(s.n_reconnects for s in streams),
        "messages_rejected": dict(sum((s.rejected for s in streams), Counter())),
        "frames": total("n_frames"),
        "missed_deadlines": total("missed_deadlines"),
        "frame_ms_p50_worst_stream": worst("frame_ms_p50"),
        "frame_ms_p99_worst_stream": worst("frame_ms_p99"),
        "frame_ms_max": worst("frame_ms_max"),
        "server_cpu_ms_per_frame": round(1000 * sum(s.cpu_s for s in streams) / total("n_frames"), 2),
        "memory_mb_per_stream": round(float(np.mean([s.memory_mb[-1] for s in streams if s.memory_mb])), 1),
        "memory_growth_mb_max": round(max(growth), 1) if growth else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--model", type=Path, help="exported model (.arcx) of the run, decoded in its place")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--loss", type=float, default=0.01, help="share of bins that are never sent")
    parser.add_argument("--kills", type=int, default=4, help="servers killed in the middle of a sentence")
    parser.add_argument("options", nargs="*", help="further options of arcuate live, after --")
    args = parser.parse_args()
    sessions = load_model_config(find_checkpoint(args.run)).sessions
    store = Store.open(Path(str(Run(args.run).data()["path"])))
    trials = list(select_trials(store, sessions, "none", False).trials)
    with tempfile.TemporaryDirectory(prefix="live-load-") as folder:
        streams = [Stream(n, Path(folder) / str(n)) for n in range(args.streams)]
        try:
            for stream in streams:
                stream.folder.mkdir()
                stream.start(args)
            asyncio.run(run(streams, store, trials, args))
            for stream in streams:
                stream.keep_meter()
                stream.keep_cpu_time()
        finally:
            for stream in streams:
                if stream.process is not None and stream.process.poll() is None:
                    stream.process.send_signal(signal.SIGTERM)
            codes = [s.process.wait(120) for s in streams if s.process is not None]
        result = summarise(streams)
        logs = b"".join((stream.folder / "server.log").read_bytes() for stream in streams)
    result |= {"exit_codes": sorted(set(codes)), "tracebacks": logs.count(b"Traceback")}
    result |= {"minutes": args.minutes, "streams": args.streams, "viewers": args.viewers, "kills": args.kills}
    print(json.dumps({**result, "load": os.getloadavg()[2]}))


if __name__ == "__main__":
    main()
