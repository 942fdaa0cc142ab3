"""What every source offers to the server."""

from typing import Protocol


class Source(Protocol):
    """Begins to hand bins over when started, on a thread of its own; leaves when stopped."""

    def start(self) -> None: ...

    def stop(self) -> None: ...
