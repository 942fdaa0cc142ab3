"""Distribution of events from the decoding thread to viewers; slow viewers miss images and never delay others."""

import asyncio
import json
from collections import deque
from typing import Any

from arcuate.errors import UserError
from arcuate.files import to_json_line

_MAX_FINALS = 50  # sent to a viewer on joining
_Message = str | bytes


class Viewer:
    """Queue of messages to one viewer; used in the event loop only."""

    def __init__(self, capacity: int) -> None:
        self.queue: deque[_Message] = deque()
        self.capacity = capacity
        self.n_dropped = 0
        self.ready = asyncio.Event()

    def offer(self, message: _Message) -> bool:
        """Queue a message; return False if the queue is full."""
        if len(self.queue) >= self.capacity:
            self.n_dropped += 1
            return False
        self.queue.append(message)
        self.ready.set()
        return True

    async def get(self) -> _Message:
        while not self.queue:
            self.ready.clear()
            await self.ready.wait()
        return self.queue.popleft()


class Broadcaster:
    """Sends published messages to all viewers; keeps the current state for viewers that join or fall behind."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, max_viewers: int, capacity: int) -> None:
        self.loop = loop  # None before the server has started
        self.max_viewers = max_viewers
        self.capacity = capacity
        self.viewers: set[Viewer] = set()
        self._latest: dict[str, dict[str, Any]] = {}
        self._finals: deque[dict[str, Any]] = deque(maxlen=_MAX_FINALS)

    def publish(self, message: dict[str, Any] | bytes) -> None:
        """Send a message from any thread; never blocks."""
        if self.loop is None:
            self._send_to_all(message)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._send_to_all, message)

    def join(self) -> Viewer:
        if len(self.viewers) >= self.max_viewers:
            raise UserError(f"there are {self.max_viewers} viewers already; close another page first")
        viewer = Viewer(self.capacity)
        viewer.offer(self.snapshot())
        self.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    def snapshot(self) -> str:
        """The current state in one message."""
        return to_json_line({"type": "snapshot", "finals": list(self._finals), "now": self._latest})

    def restore(self, finals: list[dict[str, Any]]) -> None:
        self._finals.extend(finals)

    def _send_to_all(self, message: dict[str, Any] | bytes) -> None:
        if isinstance(message, dict):
            self._update_state(message)
        encoded = message if isinstance(message, bytes) else to_json_line(message)
        for viewer in self.viewers:
            if not viewer.offer(encoded) and isinstance(encoded, str):
                viewer.queue.clear()  # text must not be lost: a snapshot replaces what was queued
                viewer.offer(self.snapshot())

    def _update_state(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "final":
            self._finals.append(event)
            self._latest.pop("partial", None)
        elif kind != "fault":
            self._latest[kind] = event
        if kind == "trial":
            self._latest.pop("partial", None)


def parse_command(text: str) -> dict[str, Any]:
    """Parse a client's command, which is untrusted."""
    try:
        command = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("a command must be a JSON object with a type") from None
    if not isinstance(command, dict) or not isinstance(command.get("type"), str):
        raise UserError("a command must be a JSON object with a type")
    return command
