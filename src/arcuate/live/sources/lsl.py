"""Bins from Lab Streaming Layer (extra: lsl): a stream of one sample per bin, one channel per feature."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.live.messages import Chunk, Item

FIND_S = 10.0
BUFFER_S = 60  # what is kept for a reader that is late; beyond it the oldest bins are lost


class LslBins:
    """An inlet on a thread of its own. Timestamps travel with the bins, so gaps and clock jumps are noticed."""

    def __init__(self, name: str, n_channels: int, put: Callable[[Item], object]) -> None:
        self.inlet = open_inlet(name, n_channels)
        self.put = put
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lsl", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10)
        self.inlet.close_stream()

    def _run(self) -> None:
        import pylsl

        while not self._stopped.is_set():
            try:
                samples, times = self.inlet.pull_chunk(timeout=0.02, max_samples=256)
            except pylsl.util.LostError:  # the outlet is gone; it is looked for until it is back
                self._stopped.wait(0.2)
                continue
            if times:
                self.put(Chunk(np.array(samples, np.float32), float(times[-1])))


def open_inlet(name: str, n_channels: int) -> Any:
    try:
        import pylsl
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"Lab Streaming Layer is not there ({error}); install it with: pip install 'arcuate[lsl]'"
        ) from None
    found = pylsl.resolve_byprop("name", name, timeout=FIND_S)
    if not found:
        raise UserError(
            f"no LSL stream named {name!r} was found within {FIND_S:g} s; start it, then try again"
        )
    if found[0].channel_count() != n_channels:
        raise UserError(
            f"the LSL stream {name!r} has {found[0].channel_count()} channels where the model reads {n_channels}"
        )
    inlet = pylsl.StreamInlet(
        found[0], max_buflen=BUFFER_S, recover=True, processing_flags=pylsl.proc_clocksync
    )
    inlet.open_stream(
        timeout=FIND_S
    )  # from now on nothing is missed, though the first bins wait for the clock
    return inlet
