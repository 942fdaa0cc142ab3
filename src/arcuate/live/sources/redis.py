"""Redis streams (extra: redis): bins of a rig, or logits for which only words are to be found.

Logits speak the field names of the official decoder, so that a rig which talks to its language model process can
talk to this one instead:

    in   remote_lm_input {logits: float32 bytes, rows of 41: BLANK, SIL, AA … ZH}
         remote_lm_reset, remote_lm_finalize, remote_lm_update_params
    out  remote_lm_output_partial {lm_response_partial}
         remote_lm_output_final {lm_response_final, scoring, context_str}
         remote_lm_done_resetting, remote_lm_done_finalizing, remote_lm_done_updating_params
"""

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from arcuate.data.alphabet import BLANK_NAME, CLASSES, PHONEMES, SILENCE_NAME
from arcuate.errors import UserError
from arcuate.live.endpointing import Event
from arcuate.live.messages import Chunk, End, Item, Mark, Scores

LM_ORDER = (BLANK_NAME, SILENCE_NAME, *PHONEMES)
BLOCK_MS = 100
COUNT = 512  # entries of a stream read at a time
MAX_ROWS = 100_000
RETRY_S = 0.2
MAX_LENGTH = 10_000  # entries that are kept in a stream that is written to
BINS = "neural_bins"
INPUT, RESET, FINALIZE, UPDATE = (
    "remote_lm_input",
    "remote_lm_reset",
    "remote_lm_finalize",
    "remote_lm_update_params",
)
RANK = {RESET: 0, UPDATE: 0, INPUT: 1, FINALIZE: 2}  # within one millisecond
PARTIAL, FINAL = "remote_lm_output_partial", "remote_lm_output_final"
DONE = {
    RESET: "remote_lm_done_resetting",
    FINALIZE: "remote_lm_done_finalizing",
    UPDATE: "remote_lm_done_updating_params",
}

NOTHING = {"lm_response_final": "", "scoring": "", "context_str": ""}

Fields = Mapping[bytes, bytes]
Put = Callable[[Item], object]
Tell = Callable[[Event], None]


def connect(url: str) -> Any:
    try:
        import redis
    except ImportError:
        raise UserError("Redis is not there; install its client with: pip install 'arcuate[redis]'") from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=10)
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise UserError(f"no Redis server answers at {url} ({error}); start one or name another") from None
    return client


class _Reader(ABC):
    """Reads streams from now on, on a thread of its own; a lost connection is taken up again."""

    def __init__(self, url: str, streams: tuple[str, ...], put: Put, tell: Tell) -> None:
        self.client = connect(url)
        self.put = put
        self.tell = tell
        self._last = {name: self._end_of(name) for name in streams}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis", daemon=True)

    def _end_of(self, name: str) -> str:
        newest = self.client.xrevrange(name, count=1)
        return newest[0][0].decode() if newest else "0-0"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        from redis import RedisError

        lost = False
        while not self._stopped.is_set():
            try:
                found = self.client.xread(self._last, count=COUNT, block=BLOCK_MS)
            except RedisError as error:
                if not lost:
                    self.tell(
                        {"type": "fault", "kind": "source", "what": f"Redis: {error}", "action": "hold"}
                    )
                lost = True
                self._stopped.wait(0.5)
                continue
            lost = False
            for number, name, fields in in_order(found):
                self._last[name] = number.decode()
                self._take_safely(name, fields)

    def _take_safely(self, name: str, fields: Fields) -> None:
        try:
            self.take(name, fields)
        except UserError as error:
            self.tell({"type": "fault", "kind": "source", "what": str(error), "action": "dropped"})

    @abstractmethod
    def take(self, name: str, fields: Fields) -> None:
        """One entry of a stream."""


class RedisBins(_Reader):
    """A stream of bins: fields `bins` (float32 bytes), and where known `time_s`, `first`; `end` ends a sentence."""

    def __init__(self, url: str, n_channels: int, put: Put, tell: Tell, stream: str = BINS) -> None:
        super().__init__(url, (stream,), put, tell)
        self.n_channels = n_channels

    def take(self, name: str, fields: Fields) -> None:
        if b"bins" in fields:
            bins = as_rows(fields[b"bins"], self.n_channels, "bins")
            self.put(Chunk(bins, number(fields, b"time_s"), whole(number(fields, b"first"))))
        if b"end" in fields:
            self.put(End())


class RedisLogits(_Reader):
    """What the official language model process does: logits in, text out, under the same names."""

    def __init__(self, url: str, put: Put, tell: Tell) -> None:
        super().__init__(url, (INPUT, RESET, FINALIZE, UPDATE), put, tell)
        self._order = [LM_ORDER.index(name) for name in CLASSES]
        self._outlet = _Outlet(connect(url), tell)
        self._final: dict[str, str] | None = None  # what the next finalize is answered with

    def start(self) -> None:
        self._outlet.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._outlet.stop()

    def take(self, name: str, fields: Fields) -> None:
        if name == INPUT:
            logits = as_rows(fields.get(b"logits", b""), len(CLASSES), "logits")[:, self._order]
            self.put(Scores(log_softmax(logits)))
        elif name == RESET:
            self.put(Mark())
            self._outlet.add(DONE[RESET], {"done": 1})
        elif name == FINALIZE:
            self.put(End(then=self._finalized))
        else:
            self.tell(
                {"type": "fault", "kind": "source", "what": "parameters are set at start", "action": "hold"}
            )
            self._outlet.add(DONE[UPDATE], {"done": 1})

    def hear(self, event: Event | bytes) -> None:
        """Events of the session, from the decoding thread; never waits."""
        if isinstance(event, bytes):
            return
        if event["type"] == "partial":
            self._outlet.add(PARTIAL, {"lm_response_partial": " ".join(event["words"])})
        elif event["type"] == "final" and not event["cut"]:  # what a reset drops is nobody's answer
            self._final = final_fields(event)

    def _finalized(self) -> None:
        """Every finalize has its answer, an empty one where nothing was said or all is closed: a rig waits for it."""
        self._outlet.add(FINAL, self._final or NOTHING)
        self._outlet.add(DONE[FINALIZE], {"done": 1})
        self._final = None


class _Outlet:
    """Writes to Redis on a thread of its own: a slow server must not delay decoding."""

    waiting = 10_000  # answers at most, while the server is away

    def __init__(self, client: Any, tell: Tell) -> None:
        self.client = client
        self.tell = tell
        self._full = False
        self._waiting: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(self.waiting)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis outlet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._leaving.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=10)

    def add(self, stream: str, fields: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait((stream, fields))
        except queue.Full:  # the server has been away for long; the page and the recording have it all
            if not self._full:
                what = "the Redis server is away, and no more answers can wait for it"
                self.tell({"type": "fault", "kind": "source", "what": what, "action": "dropped"})
            self._full = True
            return
        self._full = False

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            while not self._written(*item) and not self._leaving.wait(RETRY_S):
                pass

    def _written(self, stream: str, fields: dict[str, Any]) -> bool:
        """Whether it is in the stream; a server that is away is asked again until it is back."""
        from redis import RedisError

        try:
            self.client.xadd(stream, fields, maxlen=MAX_LENGTH, approximate=True)
        except RedisError:
            return False
        return True


def in_order(found: list[tuple[bytes, list[tuple[bytes, Fields]]]]) -> list[tuple[bytes, str, Fields]]:
    """Entries of several streams as they were meant to follow each other.

    Numbers within one millisecond are counted stream by stream, so there a stream's rank decides: the end of a
    sentence comes after its logits. What follows the last entry of a stream that was not read to its end waits.
    """
    entries = [(number, name.decode(), fields) for name, rows in found for number, fields in rows]
    cut = [(sort_key(rows[-1][0])[0], name.decode()) for name, rows in found if len(rows) >= COUNT]
    for horizon, whole_name in cut:
        entries = [e for e in entries if sort_key(e[0])[0] < horizon or e[1] == whole_name]
    return sorted(entries, key=lambda e: (sort_key(e[0])[0], RANK.get(e[1], RANK[INPUT]), sort_key(e[0])[1]))


def sort_key(number: bytes) -> tuple[int, int]:
    left, _, right = number.decode().partition("-")
    return int(left), int(right or 0)


def as_rows(data: bytes, n_columns: int, what: str) -> np.ndarray:
    if not data or len(data) % (4 * n_columns) or len(data) > 4 * n_columns * MAX_ROWS:
        raise UserError(f"{what} of {len(data)} bytes are not whole rows of {n_columns} float32 values")
    return np.frombuffer(data, "<f4").reshape(-1, n_columns)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    if not np.isfinite(logits).all():
        raise UserError("logits contain NaN or infinity; these rows were dropped")
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)


def number(fields: Fields, key: bytes) -> float | None:
    try:
        value = float(fields[key])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def whole(value: float | None) -> int | None:
    return None if value is None or not 0 <= value < 2**53 else int(value)


def final_fields(event: Event) -> dict[str, str]:
    """The best text, and every reading as `sentence;acoustic;n-gram;llm;total`, all joined by semicolons."""
    scoring = [
        ";".join([r["text"], *(f"{float(r.get(k) or 0.0):.6f}" for k in ("acoustic", "lm", "llm", "score"))])
        for r in event["readings"]
    ]
    return {"lm_response_final": event["text"], "scoring": ";".join(scoring), "context_str": ""}
