"""Bins over a WebSocket: `/frames`.

A binary message is a header of 16 bytes and float32 values, little-endian, bin after bin:

    uint32 channels    uint32 number of the first bin (4294967295: unknown)    float64 time in s (NaN: unknown)

A text message is {"type": "mark", "trial", "session", "reference"} or {"type": "end"}.
"""

import asyncio
import json
import math
import struct
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fastapi import WebSocket, WebSocketDisconnect

from arcuate.data.trial import BIN_SECONDS
from arcuate.errors import UserError
from arcuate.files import to_json_line
from arcuate.live.access import TokenBucket
from arcuate.live.input import Chunk, End, Item, Mark
from arcuate.live.session import LiveSession

_HEADER = struct.Struct("<IId")
_UNKNOWN = 0xFFFFFFFF
MAX_MESSAGE_BYTES = 1_000_000
_MAX_CHUNK_S = 5.0  # of bins in one message
_MAX_TEXT = 2000  # characters of a text sent by a client
MESSAGES_PER_S = 200.0
_BURST_S = 10.0  # a server that was held up this long still accepts everything that arrived in the meantime


def pack_bins(bins: np.ndarray, first: int | None = None, time_s: float | None = None) -> bytes:
    """Encode bins (t, C) as a message to `/frames`."""
    header = _HEADER.pack(bins.shape[1], _UNKNOWN if first is None else first, math.nan if time_s is None else time_s)
    return header + np.ascontiguousarray(bins, "<f4").tobytes()


def parse_bins(message: bytes) -> Chunk:
    if not _HEADER.size <= len(message) <= MAX_MESSAGE_BYTES:
        raise UserError(f"a message of bins must have {_HEADER.size} to {MAX_MESSAGE_BYTES} bytes, got {len(message)}")
    n_channels, first, time_s = _HEADER.unpack_from(message)
    n_bytes = len(message) - _HEADER.size
    if not 1 <= n_channels <= 65536 or n_bytes % (4 * n_channels):
        raise UserError(f"{n_bytes} bytes are not complete bins of {n_channels} float32 channels")
    bins = np.frombuffer(message, "<f4", offset=_HEADER.size).reshape(-1, n_channels)
    if len(bins) * BIN_SECONDS > _MAX_CHUNK_S:
        raise UserError(f"{len(bins)} bins in one message are too many; send at most {_MAX_CHUNK_S:g} s at once")
    return Chunk(bins, time_s if math.isfinite(time_s) else None, None if first == _UNKNOWN else first)


def parse_mark(text: str, check_session: Callable[[str], None]) -> Item:
    message = parse_command(text[:10_000])
    if message["type"] == "end":
        return End()
    keys = ("trial", "session", "reference")
    values = [message.get(key) for key in keys]
    if message["type"] != "mark" or not all(v is None or isinstance(v, str) for v in values):
        raise UserError('a text message must be {"type": "mark", …} or {"type": "end"}')
    trial, session, reference = (None if v is None else _check_text(v, k) for k, v in zip(keys, values, strict=True))
    if session is not None:
        check_session(session)
    return Mark(trial, session, reference)


def parse_command(text: str) -> dict[str, Any]:
    """Parse a client's command, which is untrusted."""
    try:
        command = json.loads(text)
    except (ValueError, RecursionError):
        command = None
    if not isinstance(command, dict) or not isinstance(command.get("type"), str):
        raise UserError("a command must be a JSON object with a type")
    return command


def _check_text(text: str, name: str) -> str:
    """Reject characters that cannot be stored: lone surrogates (files, WebSockets) and NUL (HDF5)."""
    if len(text) > _MAX_TEXT:
        raise UserError(f"{name} has {len(text)} characters; at most {_MAX_TEXT} are accepted")
    invalid = next((c for c in text if unicodedata.category(c) in ("Cc", "Cs")), None)
    if invalid is not None:
        raise UserError(f"{name} contains {invalid!a}, which cannot be stored as text")
    return text


async def send(socket: WebSocket, message: str | bytes) -> None:
    """Send a message, then let the event loop notice a lost connection before the next one is written."""
    await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message))
    await asyncio.sleep(0)


class BinReceiver:
    """Receives bins from one client at a time, at a limited rate."""

    def __init__(self, messages_per_s: float = MESSAGES_PER_S) -> None:
        self._in_use = False
        self._bucket = TokenBucket(messages_per_s, burst_s=_BURST_S)

    async def serve(self, session: LiveSession, socket: WebSocket) -> None:
        if self._in_use:
            await socket.close(1013, "another client is already sending bins")
            return
        self._in_use = True
        try:
            while True:
                await self._receive(session, socket, await socket.receive())
        except (WebSocketDisconnect, RuntimeError):  # disconnected; what it sent is kept
            pass
        finally:
            self._in_use = False

    async def _receive(self, session: LiveSession, socket: WebSocket, message: Mapping[str, Any]) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        data, text = message.get("bytes"), message.get("text")
        try:
            if not self._bucket.take():
                rate = self._bucket.rate
                raise UserError(f"too many messages: send several bins at once, at most {rate:g} messages per second")
            known = session.decoder.check_session
            item: Item = parse_bins(data) if isinstance(data, bytes) else parse_mark(str(text), known)
            if not session.put(item, wait=False):
                raise UserError("these bins were dropped because decoding lags behind; send them more slowly")
        except UserError as error:
            await send(socket, to_json_line({"type": "rejected", "message": str(error)}))
