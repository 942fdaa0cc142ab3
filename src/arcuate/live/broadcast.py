"""From the decoding thread to many viewers: whoever is too slow misses pictures, never delays anyone."""

import asyncio
import json
from collections import deque
from typing import Any

from arcuate.errors import UserError
from arcuate.files import to_json_line

HISTORY = 50  # finals a viewer gets on joining
Message = str | bytes


class Viewer:
    """What waits for one viewer. Lives in the event loop."""

    def __init__(self, room: int) -> None:
        self.waiting: deque[Message] = deque()
        self.room = room
        self.n_dropped = 0
        self.ready = asyncio.Event()

    def offer(self, message: Message) -> bool:
        """Whether there was room."""
        if len(self.waiting) >= self.room:
            self.n_dropped += 1
            return False
        self.waiting.append(message)
        self.ready.set()
        return True

    async def take(self) -> Message:
        while not self.waiting:
            self.ready.clear()
            await self.ready.wait()
        return self.waiting.popleft()


class Hub:
    """Published messages to all viewers; keeps what a viewer needs who joins or falls behind."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, max_viewers: int, room: int) -> None:
        self.loop = loop  # None: the server has not begun, and nobody is there to be told
        self.max_viewers = max_viewers
        self.room = room
        self.viewers: set[Viewer] = set()
        self._latest: dict[str, dict[str, Any]] = {}
        self._finals: deque[dict[str, Any]] = deque(maxlen=HISTORY)

    def publish(self, message: dict[str, Any] | bytes) -> None:
        """From any thread; never waits."""
        if self.loop is None:
            self._fan_out(message)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._fan_out, message)

    def join(self) -> Viewer:
        if len(self.viewers) >= self.max_viewers:
            raise UserError(f"there are {self.max_viewers} viewers already; close another page first")
        viewer = Viewer(self.room)
        viewer.offer(self.snapshot())
        self.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    def snapshot(self) -> str:
        """Everything that is true now, in one message."""
        return to_json_line({"type": "snapshot", "finals": list(self._finals), "now": self._latest})

    def restore(self, finals: list[dict[str, Any]]) -> None:
        self._finals.extend(finals)

    def _fan_out(self, message: dict[str, Any] | bytes) -> None:
        if isinstance(message, dict):
            self._note(message)
        wire = message if isinstance(message, bytes) else to_json_line(message)
        for viewer in self.viewers:
            if not viewer.offer(wire) and isinstance(wire, str):
                viewer.waiting.clear()  # text must not be lost: what was missed comes as one snapshot
                viewer.offer(self.snapshot())

    def _note(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "final":
            self._finals.append(event)
            self._latest.pop("partial", None)
        elif kind != "fault":
            self._latest[kind] = event
        if kind == "trial":
            self._latest.pop("partial", None)


def parse_command(text: str) -> dict[str, Any]:
    """A command of a viewer; hostile until parsed."""
    try:
        command = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("a command must be a JSON object with a type") from None
    if not isinstance(command, dict) or not isinstance(command.get("type"), str):
        raise UserError("a command must be a JSON object with a type")
    return command
