"""Bins over a WebSocket: `/frames`.

A binary message is a header of 16 bytes and float32 values, little-endian, bin after bin:

    uint32 channels    uint32 number of the first bin (4294967295: unknown)    float64 time in s (NaN: unknown)

A text message is {"type": "mark", "trial", "session", "reference"} or {"type": "end"}.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fastapi import WebSocket, WebSocketDisconnect

from arcuate.data.trial import BIN_SECONDS
from arcuate.errors import UserError
from arcuate.files import to_json_line
from arcuate.live.clients import TokenBucket, check_text, parse_command
from arcuate.live.config import Limits
from arcuate.live.input import Chunk, End, Item, Mark
from arcuate.live.session import LiveSession

_HEADER = struct.Struct("<IId")
_UNKNOWN = 0xFFFFFFFF
_BURST_S = 10.0  # a server that was held up this long still accepts everything that arrived in the meantime


def pack_bins(bins: np.ndarray, first: int | None = None, time_s: float | None = None) -> bytes:
    """Encode bins (t, C) as a message to `/frames`."""
    header = _HEADER.pack(bins.shape[1], _UNKNOWN if first is None else first, math.nan if time_s is None else time_s)
    return header + np.ascontiguousarray(bins, "<f4").tobytes()


def _parse_bins(message: bytes, limits: Limits) -> Chunk:
    if not _HEADER.size <= len(message) <= limits.message_bytes:
        raise UserError(
            f"a message of bins must have {_HEADER.size} to {limits.message_bytes} bytes, got {len(message)}"
        )
    n_channels, first, time_s = _HEADER.unpack_from(message)
    n_bytes = len(message) - _HEADER.size
    if not 1 <= n_channels <= 65536 or n_bytes % (4 * n_channels):
        raise UserError(f"{n_bytes} bytes are not complete bins of {n_channels} float32 channels")
    bins = np.frombuffer(message, "<f4", offset=_HEADER.size).reshape(-1, n_channels)
    if len(bins) * BIN_SECONDS > limits.chunk_s:
        raise UserError(f"{len(bins)} bins in one message are too many; send at most {limits.chunk_s:g} s at once")
    return Chunk(bins, time_s if math.isfinite(time_s) else None, None if first == _UNKNOWN else first)


def _parse_mark(text: str, check_session: Callable[[str], None]) -> Item:
    message = parse_command(text[:10_000])
    if message["type"] == "end":
        return End()
    keys = ("trial", "session", "reference")
    values = [message.get(key) for key in keys]
    if message["type"] != "mark" or not all(v is None or isinstance(v, str) for v in values):
        raise UserError('a text message must be {"type": "mark", …} or {"type": "end"}')
    trial, session, reference = (None if v is None else check_text(v, k) for k, v in zip(keys, values, strict=True))
    if session is not None:
        check_session(session)
    return Mark(trial, session, reference)


class BinReceiver:
    """Receives bins from one client at a time, at a limited rate."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._in_use = False
        self._bucket = TokenBucket(limits.messages_per_s, burst_s=_BURST_S)

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
                rate = self.limits.messages_per_s
                raise UserError(f"too many messages: send several bins at once, at most {rate:g} messages per second")
            item: Item
            if isinstance(data, bytes):
                item = _parse_bins(data, self.limits)
            else:
                item = _parse_mark(str(text), session.decoder.check_session)
            if not session.put(item, wait=False):
                raise UserError("these bins were dropped because decoding lags behind; send them more slowly")
        except UserError as error:
            await socket.send_text(to_json_line({"type": "rejected", "message": str(error)}))
