"""How long frames take, measured as they would come: bin by bin, in real time."""

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.trial import BIN_SECONDS
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.sources.replay import Prepared
from arcuate.progress import Progress

Sentence = tuple[np.ndarray, Callable[[], None]]  # bins (T, C), and what to do before them


@dataclass(eq=False)
class Timings:
    """Seconds of every frame from its last bin to the partial text, and of everything between frames."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # what happened in the longest frame
    stolen: list[float] = field(default_factory=list)  # of every frame, what a hypervisor took, of all cores
    n_late: int = 0  # bins that were taken later than the next one was due
    seconds: float = 0.0

    def summary(self, deadline_ms: float) -> dict[str, Any]:
        wall, cpu = 1000 * np.array(self.wall), 1000 * np.array(self.cpu)
        known = len(wall) > 0
        quantile = lambda values, q: float(np.percentile(values, q)) if known else None
        return {
            "frame_ms_p50": quantile(wall, 50),
            "frame_ms_p99": quantile(wall, 99),
            "frame_ms_max": quantile(wall, 100),
            "missed_deadlines": int((wall > deadline_ms).sum()),
            "missed_while_stolen": int(((wall > deadline_ms) & (np.array(self.stolen) > 0)).sum()),
            "frame_cpu_ms_p50": quantile(cpu, 50),
            "frame_cpu_ms_p99": quantile(cpu, 99),
            "frame_cpu_ms_max": quantile(cpu, 100),
            "worst_frame": self.worst or None,
            "finish_ms_max": 1000 * max(self.finish) if self.finish else None,
            "n_frames": len(wall),
            "n_sentences": len(self.finish),
            "late_bins": self.n_late,
            "deadline_ms": deadline_ms,
            "seconds": self.seconds,
        }


def time_stream(
    decoder: StreamingDecoder,
    sentences: Iterator[Sentence],
    seconds: float,
    real_time: bool = True,
    progress: Progress | None = None,
) -> Timings:
    """Push bin after bin for so many seconds of recording; between bins the decoder works ahead."""
    found, n_bins, due = Timings(), 0, time.perf_counter()
    begun = due
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not walk through it while frames are due
    while n_bins * BIN_SECONDS < seconds:
        bins, before = next(sentences)
        before()
        for row in bins:
            due += BIN_SECONDS
            if real_time:
                found.n_late += wait_until(due)
            one_bin(decoder, row, found)
            n_bins += 1
            if progress and n_bins % 50 == 0:
                progress(min(round(n_bins * BIN_SECONDS), round(seconds)), round(seconds), "replaying")
            if n_bins * BIN_SECONDS >= seconds:
                break
        clock = time.perf_counter()
        decoder.finish()
        found.finish.append(time.perf_counter() - clock)
    gc.unfreeze()
    found.seconds = time.perf_counter() - begun
    return found


def one_bin(decoder: StreamingDecoder, row: np.ndarray, found: Timings) -> None:
    before = usage()
    clock, used = time.perf_counter(), time.thread_time()
    partial = decoder.push(row)
    if len(partial.log_probs):
        wall, cpu = time.perf_counter() - clock, time.thread_time() - used
        spent = {k: v - before[k] for k, v in usage().items()}
        if wall > found.worst.get("s", 0.0):
            found.worst = {"s": wall, "frame": len(found.wall), **spent}
        found.wall.append(wall)
        found.cpu.append(cpu)
        found.stolen.append(spent["stolen_s"])
    decoder.ahead()


def usage() -> dict[str, float]:
    """Page faults, switches and collections so far: what a late frame may have waited for."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "page_faults": spent.ru_minflt,
        "page_faults_from_disk": spent.ru_majflt,
        "system_s": spent.ru_stime,
        "user_s": spent.ru_utime,
        "switched_out": spent.ru_nivcsw,
        "collections": sum(generation["collections"] for generation in gc.get_stats()),
        "stolen_s": stolen_s(),
    }


def stolen_s() -> float:
    """Seconds that a hypervisor has so far kept the cores of a virtual machine for others; 0 where nothing tells."""
    try:
        words = Path("/proc/stat").read_bytes().split(maxsplit=9)
    except OSError:
        return 0.0
    return int(words[8]) / os.sysconf("SC_CLK_TCK")


def wait_until(due: float) -> bool:
    """Sleep; whether it was already later than the next bin."""
    left = due - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return left < -BIN_SECONDS


def replayed(decoder: StreamingDecoder, prepared: Prepared) -> Iterator[Sentence]:
    """The trials of a store, again and again."""
    while True:
        for info in prepared.trials:
            statistics = prepared.statistics(info)
            begin = lambda s=info.session, known=statistics: decoder.reset(s, known)
            yield prepared.store.read_bins(info), begin
