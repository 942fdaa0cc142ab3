"""Bins over a WebSocket: `/frames`.

A binary message is a header of 16 bytes and float32 values, little-endian, bin after bin:

    uint32 channels    uint32 number of the first bin (4294967295: not known)    float64 time in s (NaN: not known)

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
from arcuate.live.access import Bucket
from arcuate.live.broadcast import parse_command
from arcuate.live.config import Limits
from arcuate.live.messages import Chunk, End, Item, Mark
from arcuate.live.session import LiveSession

HEADER = struct.Struct("<IId")
UNKNOWN = 0xFFFFFFFF


def pack_frames(bins: np.ndarray, first: int | None = None, time_s: float | None = None) -> bytes:
    """Bins (t, C) as a message for `/frames`."""
    head = HEADER.pack(
        bins.shape[1], UNKNOWN if first is None else first, math.nan if time_s is None else time_s
    )
    return head + np.ascontiguousarray(bins, "<f4").tobytes()


def parse_frames(message: bytes, limits: Limits) -> Chunk:
    if len(message) < HEADER.size or len(message) > limits.frame_bytes:
        raise UserError(
            f"a message of {len(message)} bytes is no bins; at most {limits.frame_bytes} are taken"
        )
    n_channels, first, time_s = HEADER.unpack_from(message)
    n_bytes = len(message) - HEADER.size
    if not 1 <= n_channels <= 65536 or n_bytes % (4 * n_channels):
        raise UserError(f"{n_bytes} bytes are not whole bins of {n_channels} channels")
    bins = np.frombuffer(message, "<f4", offset=HEADER.size).reshape(-1, n_channels)
    if len(bins) * BIN_SECONDS > limits.chunk_s:
        raise UserError(
            f"{len(bins)} bins in one message are too many; send at most {limits.chunk_s:g} s at once"
        )
    return Chunk(bins, time_s if math.isfinite(time_s) else None, None if first == UNKNOWN else first)


def parse_mark(text: str, check_session: Callable[[str], None]) -> Item:
    told = parse_command(text[:10_000])
    if told["type"] == "end":
        return End()
    values = [told.get(key) for key in ("trial", "session", "reference")]
    if told["type"] != "mark" or not all(v is None or (isinstance(v, str) and len(v) < 2000) for v in values):
        raise UserError('a text message must be {"type": "mark", …} or {"type": "end"}')
    trial, session, reference = values
    if session is not None:
        check_session(session)
    return Mark(trial, session, reference)


class Sender:
    """One client at a time sends bins, no faster than allowed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._taken = False
        self._bucket = Bucket(limits.frames_per_s)

    async def serve(self, session: LiveSession, socket: WebSocket) -> None:
        if self._taken:
            await socket.close(1013, "another client is sending bins already")
            return
        self._taken = True
        try:
            while True:
                await self._take(session, socket, await socket.receive())
        except (WebSocketDisconnect, RuntimeError):  # gone; what it said so far is kept
            pass
        finally:
            self._taken = False

    async def _take(self, session: LiveSession, socket: WebSocket, message: Mapping[str, Any]) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        data, text = message.get("bytes"), message.get("text")
        try:
            if not self._bucket.spend():
                rate = self.limits.frames_per_s
                raise UserError(
                    f"more than {rate:g} messages a second are too many; send several bins in one"
                )
            item: Item
            if isinstance(data, bytes):
                item = parse_frames(data, self.limits)
            else:
                item = parse_mark(str(text), session.decoder.check_session)
            if not session.put(item, wait=False):
                raise UserError("decoding is behind; these bins were dropped")
        except UserError as error:
            await socket.send_text(to_json_line({"type": "refused", "what": str(error)}))
