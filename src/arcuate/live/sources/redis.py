"""Streams of a Redis server: bins, or logits for which only the word search runs here.

Logits use the stream and field names of the official decoder, so that a rig that talks to its language model process
can use this one instead:

    in   remote_lm_input {logits: float32 bytes, rows of 41: BLANK, SIL, AA … ZH}
         remote_lm_reset, remote_lm_finalize, remote_lm_update_params
    out  remote_lm_output_partial {lm_response_partial}
         remote_lm_output_final {lm_response_final, scoring, context_str}
         remote_lm_done_resetting, remote_lm_done_finalizing, remote_lm_done_updating_params
"""

import math
import re
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from arcuate.data.alphabet import BLANK_NAME, CLASSES, PHONEMES, SILENCE_NAME
from arcuate.data.trial import BIN_SECONDS
from arcuate.errors import UserError
from arcuate.live.endpointing import Event
from arcuate.live.input import Chunk, End, Item, LogProbs, Mark, Source

BINS_STREAM = "neural_bins"
INPUT, RESET, FINALIZE, UPDATE = ("remote_lm_input", "remote_lm_reset", "remote_lm_finalize", "remote_lm_update_params")
PARTIAL, FINAL = "remote_lm_output_partial", "remote_lm_output_final"
READ_COUNT = 512  # entries of a stream read at once

_OFFICIAL_ORDER = (BLANK_NAME, SILENCE_NAME, *PHONEMES)
_BLOCK_MS = 100
_MAX_ROWS = 100_000
_PIECE_ROWS = 50
_RETRY_S = 0.2
_MAX_LENGTH = 10_000  # entries kept in an output stream
_RANK = {RESET: 0, UPDATE: 0, INPUT: 1, FINALIZE: 2}  # order within one millisecond
_DONE = {
    RESET: "remote_lm_done_resetting",
    FINALIZE: "remote_lm_done_finalizing",
    UPDATE: "remote_lm_done_updating_params",
}
_EMPTY_FINAL = {"lm_response_final": "", "scoring": "", "context_str": ""}

_Fields = Mapping[bytes, bytes]
Put = Callable[[Item], object]
Publish = Callable[[Event], None]


def connect(url: str) -> Any:
    try:
        import redis
    except ImportError:
        raise UserError("the Redis client is missing; install it with: pip install 'arcuate[live]'") from None
    try:
        client = redis.Redis.from_url(url, socket_timeout=10)
    except ValueError:  # its text may contain a part of the password
        raise UserError(
            f"--redis {redact_url(url)!r} is not a valid URL; give one such as redis://127.0.0.1:6379"
        ) from None
    try:
        client.ping()
    except redis.RedisError as error:
        raise UserError(
            f"no Redis server responds at {redact_url(url)} ({error}); start one or change --redis"
        ) from None
    return client


def redact_url(url: str) -> str:
    """A URL without user name, password and query, to be shown in messages."""
    return re.sub(r"//.*@", "//***@", url.partition("?")[0], count=1, flags=re.DOTALL)


def _fault(message: str, action: str) -> Event:
    return {"type": "fault", "kind": "source", "message": message, "action": action}


class _StreamReader(Source):
    """Reads new entries of streams; reconnects if the connection is lost."""

    def __init__(self, url: str, streams: tuple[str, ...], put: Put, publish: Publish) -> None:
        super().__init__(f"the reader of {', '.join(streams)}")
        self.put = put
        self.client = connect(url)
        self.publish = publish
        self._last = {name: self._last_entry(name) for name in streams}

    def _last_entry(self, name: str) -> str:
        from redis import RedisError

        try:
            newest = self.client.xrevrange(name, count=1)
        except RedisError as error:
            raise UserError(f"the Redis key {name!r:.60} cannot be read as a stream ({error})") from None
        return newest[0][0].decode() if newest else "0-0"

    def put_pieces(self, rows: np.ndarray, make_item: Callable[[np.ndarray, int], Item]) -> None:
        """Queue rows in pieces, so that the decoding thread is never busy with one item for long."""
        for first in range(0, len(rows), _PIECE_ROWS):
            if self._stopped.is_set():
                return
            self.put(make_item(rows[first : first + _PIECE_ROWS], first))

    def _run(self) -> None:
        from redis import RedisError

        lost = False
        while not self._stopped.is_set():
            try:
                found = self.client.xread(self._last, count=READ_COUNT, block=_BLOCK_MS)
            except RedisError as error:
                if not lost:
                    self.publish(_fault(f"Redis: {error}", "hold"))
                lost = True
                self._stopped.wait(0.5)
                continue
            lost = False
            for entry_id, name, fields in sort_entries(found):
                if self._stopped.is_set():
                    return
                self._last[name] = entry_id.decode()
                try:
                    self.handle(name, fields)
                except UserError as error:
                    self.publish(_fault(str(error), "dropped"))

    @abstractmethod
    def handle(self, name: str, fields: _Fields) -> None:
        """Process one entry of a stream."""


class RedisBins(_StreamReader):
    """A stream of bins: fields `bins` (float32 bytes), optionally `time_s` and `first`; `end` ends a sentence."""

    def __init__(self, url: str, n_channels: int, put: Put, publish: Publish, stream: str = BINS_STREAM) -> None:
        super().__init__(url, (stream,), put, publish)
        self.n_channels = n_channels

    def handle(self, name: str, fields: _Fields) -> None:
        if b"bins" in fields:
            bins = _parse_rows(fields[b"bins"], self.n_channels, "bins")
            number, end_s = _parse_count(fields, b"first"), _parse_float(fields, b"time_s")

            def make_chunk(piece: np.ndarray, first: int) -> Chunk:
                later = len(bins) - first - len(piece)
                time_s = None if end_s is None else end_s - later * BIN_SECONDS
                return Chunk(piece, time_s, None if number is None else number + first)

            self.put_pieces(bins, make_chunk)
        if b"end" in fields:
            self.put(End())


class RedisLogits(_StreamReader):
    """Replacement of the official language model process: logits in, text out, under the same names."""

    def __init__(self, url: str, put: Put, publish: Publish) -> None:
        super().__init__(url, (INPUT, RESET, FINALIZE, UPDATE), put, publish)
        self._columns = [_OFFICIAL_ORDER.index(name) for name in CLASSES]
        self._writer = StreamWriter(connect(url), publish)
        self._final: dict[str, str] | None = None  # answer to the next finalize

    def stop(self) -> None:
        super().stop()
        self._writer.stop()

    def handle(self, name: str, fields: _Fields) -> None:
        if name == INPUT:
            logits = _parse_rows(fields.get(b"logits", b""), len(CLASSES), "logits")[:, self._columns]
            self.put_pieces(_log_softmax(logits), lambda piece, _: LogProbs(piece))
        elif name == RESET:
            self.put(Mark())
            self._writer.add(_DONE[RESET], {"done": 1})
        elif name == FINALIZE:
            self.put(End(on_done=self._answer_finalize))
        else:
            self.publish(_fault("parameters can only be set at start", "hold"))
            self._writer.add(_DONE[UPDATE], {"done": 1})

    def on_event(self, event: Event | bytes) -> None:
        """Receive events of the session on the decoding thread; never blocks."""
        if isinstance(event, bytes):
            return
        if event["type"] == "partial":
            self._writer.add(PARTIAL, {"lm_response_partial": " ".join(event["words"])})
        elif event["type"] == "final" and not event["cut"]:  # a sentence dropped by a reset is not an answer
            self._final = _final_fields(event)

    def _answer_finalize(self) -> None:
        """Answer every finalize, because a rig waits for it: empty if there was nothing to decode or it is closed."""
        self._writer.add(FINAL, self._final or _EMPTY_FINAL)
        self._writer.add(_DONE[FINALIZE], {"done": 1})
        self._final = None


class StreamWriter:
    """Writes to Redis on its own thread, in order, so that a slow server does not delay decoding."""

    max_queued = 10_000  # answers, while the server is unavailable

    def __init__(self, client: Any, publish: Publish) -> None:
        self.client, self.publish = client, publish
        self._pool = ThreadPoolExecutor(1, "the writer of answers to Redis")
        self._stopped = threading.Event()
        self._queued: deque[Future[None]] = deque()
        self._full = False

    def stop(self) -> None:
        """Write what is queued, unless the server is unavailable."""
        self._stopped.set()
        self._pool.shutdown()

    def add(self, stream: str, fields: dict[str, Any]) -> None:
        while self._queued and self._queued[0].done():
            self._queued.popleft().result()
        was_full, self._full = self._full, len(self._queued) >= self.max_queued
        if not self._full:
            self._queued.append(self._pool.submit(self._write, stream, fields))
        elif not was_full:  # the page and the recording still receive everything
            self.publish(_fault("the Redis server is unavailable and the queue of answers is full", "dropped"))

    def _write(self, stream: str, fields: dict[str, Any]) -> None:
        """Add an entry, once the server is available. An entry that it refuses is dropped."""
        from redis import RedisError, ResponseError

        while True:
            try:
                self.client.xadd(stream, fields, maxlen=_MAX_LENGTH, approximate=True)
                return
            except ResponseError as error:  # such as a key of another type: trying again would block other answers
                self.publish(_fault(f"Redis refused an answer to {stream}: {error}", "dropped"))
                return
            except RedisError:
                if self._stopped.wait(_RETRY_S):
                    return


def sort_entries(found: list[tuple[bytes, list[tuple[bytes, _Fields]]]]) -> list[tuple[bytes, str, _Fields]]:
    """Merge entries of several streams in the order in which they were written.

    Sequence numbers within one millisecond are counted per stream, so there the rank of the stream decides: the end of
    a sentence comes after its logits. Entries later than the last one of a stream that was not read completely wait
    for the next read.
    """
    entries = [(entry_id, name.decode(), fields) for name, rows in found for entry_id, fields in rows]
    incomplete = [(_parse_id(rows[-1][0])[0], name.decode()) for name, rows in found if len(rows) >= READ_COUNT]
    for horizon, incomplete_name in incomplete:
        entries = [e for e in entries if _parse_id(e[0])[0] < horizon or e[1] == incomplete_name]
    return sorted(entries, key=lambda e: (_parse_id(e[0])[0], _RANK.get(e[1], _RANK[INPUT]), _parse_id(e[0])[1]))


def _parse_id(entry_id: bytes) -> tuple[int, int]:
    """Milliseconds and sequence number of an entry."""
    milliseconds, _, sequence = entry_id.decode().partition("-")
    return int(milliseconds), int(sequence or 0)


def _parse_rows(data: bytes, n_columns: int, name: str) -> np.ndarray:
    if not data or len(data) % (4 * n_columns) or len(data) > 4 * n_columns * _MAX_ROWS:
        raise UserError(f"{name} of {len(data)} bytes are not complete rows of {n_columns} float32 values")
    return np.frombuffer(data, "<f4").reshape(-1, n_columns)


def _parse_float(fields: _Fields, key: bytes) -> float | None:
    try:
        value = float(fields[key])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _parse_count(fields: _Fields, key: bytes) -> int | None:
    value = _parse_float(fields, key)
    return None if value is None or not 0 <= value < 2**53 else int(value)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    if not np.isfinite(logits).all():
        raise UserError("logits contain NaN or infinity; these rows were dropped")
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)


def _final_fields(event: Event) -> dict[str, str]:
    """The best text, and every hypothesis as `sentence;acoustic;n-gram;llm;total`, joined by semicolons."""
    scoring = [
        ";".join([h["text"], *(f"{float(h.get(k) or 0.0):.6f}" for k in ("acoustic", "lm", "llm", "score"))])
        for h in event["nbest"]
    ]
    return {"lm_response_final": event["text"], "scoring": ";".join(scoring), "context_str": ""}
