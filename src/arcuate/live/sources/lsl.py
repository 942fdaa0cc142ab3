"""Bins from Lab Streaming Layer: one sample per bin, one channel per feature."""

from collections.abc import Callable
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.live.input import Chunk, Item, Source

_TIMEOUT_S = 10.0
_BUFFER_S = 60  # kept by the inlet if this process is late; older bins are lost


class LslBins(Source):
    """An LSL inlet. Timestamps are passed on, so gaps and clock jumps are detected."""

    def __init__(
        self, name: str, n_channels: int, put: Callable[[Item], object], timeout_s: float = _TIMEOUT_S
    ) -> None:
        super().__init__(f"the LSL stream {name!r:.60}")
        self.put = put
        self.inlet = _open_inlet(name, n_channels, timeout_s)

    def stop(self) -> None:
        super().stop()
        self.inlet.close_stream()

    def _run(self) -> None:
        import pylsl

        while not self._stopped.is_set():
            try:
                samples, times = self.inlet.pull_chunk(timeout=0.02, max_samples=256)
            except pylsl.util.LostError:  # the outlet has disappeared; retry until it is back
                self._stopped.wait(0.2)
                continue
            if times:
                self.put(Chunk(np.array(samples, np.float32), float(times[-1])))


def _open_inlet(name: str, n_channels: int, timeout_s: float) -> Any:
    try:
        import pylsl
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"Lab Streaming Layer is not available ({error}); install it with: pip install 'arcuate[live]'"
        ) from None
    found = pylsl.resolve_byprop("name", name, timeout=timeout_s)
    if not found:
        raise UserError(f"no LSL stream named {name!r} was found within {timeout_s:g} s; start it and try again")
    if found[0].channel_count() != n_channels:
        raise UserError(
            f"the LSL stream {name!r} has {found[0].channel_count()} channels, but the model expects {n_channels}"
        )
    if found[0].channel_format() == pylsl.cf_string:
        raise UserError(f"the LSL stream {name!r} contains text, but bins are numbers; choose another: lsl:NAME")
    inlet = pylsl.StreamInlet(found[0], max_buflen=_BUFFER_S, recover=True, processing_flags=pylsl.proc_clocksync)
    inlet.open_stream(timeout=_TIMEOUT_S)  # buffers from now on, while the clocks are synchronised
    return inlet
