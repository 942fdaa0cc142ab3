"""`bench_live`: time per frame, measured bin by bin in real time."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.data.trial import BIN_MS, BIN_SECONDS
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.options import DecoderOptions
from arcuate.evaluation.metrics import Score, score_text, total, words_per_minute
from arcuate.live.load import find_model, load_decoder
from arcuate.live.sources.replay import ReplayTrials, open_replay
from arcuate.progress import Progress, resource_usage

if TYPE_CHECKING:
    from arcuate.live.adaptation import AdaptationStatus


@dataclass(frozen=True, eq=False)
class Sentence:
    """A trial to replay."""

    bins: np.ndarray  # (T, C)
    start: Callable[[], None]  # called before the first bin
    text: str | None = None  # reference


@dataclass(frozen=True, eq=False)
class ReplayedSentence:
    """Result of a trial that was replayed to its end."""

    seconds: float
    text: str | None  # reference
    best: Hypothesis

    @property
    def word_errors(self) -> Score | None:
        return None if self.text is None else score_text(self.text, self.best.text or "").words


@dataclass(frozen=True, eq=False)
class LiveBenchmark:
    """Result of `bench_live`."""

    timings: "FrameTimings"
    deadline_ms: float
    delay_ms: float
    real_time: bool
    n_lexicon_words: int
    beam: int | None
    adaptation: "AdaptationStatus | None"
    correct_words_per_minute: float | None = None  # of the sentences replayed to their end; None without references

    def summary(self) -> str:
        """Quantiles of the time per frame and, if the stream adapts, its updates: one line each."""
        values, status = self.to_dict(), self.adaptation
        stolen = values["missed_while_stolen"]
        text = (
            f"per frame of {self.deadline_ms:g} ms: p50 {values['frame_ms_p50']:.2f} ms,"
            f" p99 {values['frame_ms_p99']:.2f} ms, max {values['frame_ms_max']:.2f} ms;"
            f" {values['missed_deadlines']} of {values['n_frames']:,} deadlines missed"
            + (f" ({stolen} during steal time of the hypervisor);" if stolen else ";")
            + f" model delay {self.delay_ms:g} ms"
            + ("" if (pace := values["words_per_minute"]) is None else f"; {pace:.1f} decoded words per minute")
        )
        if (correct := self.correct_words_per_minute) is not None:
            text += f", {correct:.1f} correct words per minute"
        if status is None:
            return text
        return (
            f"{text}\nadaptation of {status.session} ({status.state}): {status.n_steps} updates after"
            f" {status.n_sentences} sentences, {status.n_fallbacks} fall-backs, {status.n_skipped} sentences skipped"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.timings.summary(self.deadline_ms),
            "delay_ms": self.delay_ms,
            "real_time": self.real_time,
            "n_lexicon_words": self.n_lexicon_words,
            "beam": self.beam,
            "adaptation": None if self.adaptation is None else vars(self.adaptation),
            "correct_words_per_minute": self.correct_words_per_minute,
        }


def bench_live(
    run: str | Path,
    *,
    seconds: float = 60.0,
    real_time: bool = True,
    split: str = "val",
    options: DecoderOptions = DecoderOptions(),
    progress: Progress | None = None,
) -> LiveBenchmark:
    """Measure the time from the last bin of each frame to its text, on one thread, over `seconds` of recording."""
    run = find_model(run)
    decoder = load_decoder(run, options, progress=progress)
    trials = open_replay(run, decoder, options.data, split, options.session)
    timings = time_stream(decoder, replay_sentences(decoder, trials), seconds, real_time, progress)
    decoder.wait_for_adaptation()
    search = decoder.word_search
    return LiveBenchmark(
        timings,
        deadline_ms=float(BIN_MS * decoder.layout.stride),
        delay_ms=decoder.delay.total_ms,
        real_time=real_time,
        n_lexicon_words=len(search.words) if search else 0,
        beam=search.settings.beam if search else None,
        adaptation=decoder.adaptation,
        correct_words_per_minute=timings.correct_words_per_minute(),
    )


@dataclass(eq=False)
class FrameTimings:
    """Seconds of every frame from its last bin to the partial text, and of the end of every sentence."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # resources used during the longest frame
    stolen: list[float] = field(default_factory=list)  # steal time per frame, over all cores
    n_late: int = 0  # bins processed after the next one was due
    seconds: float = 0.0
    n_words: int = 0  # decoded
    recorded_s: float = 0.0  # length of the replayed recording
    decoded: list[ReplayedSentence] = field(default_factory=list)

    def correct_words_per_minute(self) -> float | None:
        """Reference words per minute times (1 - WER); None without references."""
        scored = [(d.seconds, errors) for d in self.decoded if (errors := d.word_errors) is not None]
        counts = total(errors for _, errors in scored)
        pace = words_per_minute(counts.length, sum(seconds for seconds, _ in scored))
        return None if pace is None else pace * max(0.0, 1 - (counts.rate or 0.0))

    def summary(self, deadline_ms: float) -> dict[str, Any]:
        wall, cpu = 1000 * np.array(self.wall), 1000 * np.array(self.cpu)
        quantile = lambda values, q: float(np.percentile(values, q)) if len(values) else None
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
            "words_per_minute": 60 * self.n_words / self.recorded_s if self.n_words and self.recorded_s else None,
        }


def time_stream(
    decoder: Decoder,
    sentences: Iterator[Sentence],
    seconds: float,
    real_time: bool = True,
    progress: Progress | None = None,
) -> FrameTimings:
    """Push bin after bin for `seconds` of recording; between bins the decoder precomputes."""
    timings, n_bins, due = FrameTimings(), 0, time.perf_counter()
    started = due
    gc.collect()
    gc.freeze()  # loaded objects stay, so the collector need not traverse them while frames are due
    while n_bins * BIN_SECONDS < seconds:
        sentence, n_before = next(sentences), n_bins
        sentence.start()
        for row in sentence.bins:
            due += BIN_SECONDS
            if real_time:
                timings.n_late += wait_until(due)
            push_bin(decoder, row, timings)
            n_bins += 1
            if progress and n_bins % 50 == 0:
                progress(min(round(n_bins * BIN_SECONDS), round(seconds)), round(seconds), "replaying")
            if n_bins * BIN_SECONDS >= seconds:
                break
        clock = time.perf_counter()
        best = decoder.finish()
        timings.finish.append(time.perf_counter() - clock)
        timings.n_words += len(best.words)
        if n_bins - n_before == len(sentence.bins):
            seconds_read = len(sentence.bins) * BIN_SECONDS
            timings.decoded.append(ReplayedSentence(seconds_read, sentence.text, best))
    gc.unfreeze()
    timings.seconds, timings.recorded_s = time.perf_counter() - started, n_bins * BIN_SECONDS
    return timings


def push_bin(decoder: Decoder, row: np.ndarray, timings: FrameTimings) -> None:
    """Push one bin and record the time if it completes a frame."""
    before = _resource_usage()
    clock, cpu_clock = time.perf_counter(), time.thread_time()
    partial = decoder.push(row)
    if len(partial.log_probs):
        wall, cpu = time.perf_counter() - clock, time.thread_time() - cpu_clock
        used = {k: v - before[k] for k, v in _resource_usage().items()}
        if wall > timings.worst.get("s", 0.0):
            timings.worst = {"s": wall, "frame": len(timings.wall), **used}
        timings.wall.append(wall)
        timings.cpu.append(cpu)
        timings.stolen.append(used["stolen_s"])
    decoder.precompute()


def _resource_usage() -> dict[str, float]:
    """Page faults, context switches, collections and steal time so far: possible causes of a late frame."""
    usage = resource_usage()
    names = {
        "page_faults": "ru_minflt",
        "page_faults_from_disk": "ru_majflt",
        "system_s": "ru_stime",
        "user_s": "ru_utime",
        "switched_out": "ru_nivcsw",
    }
    return {
        **{name: getattr(usage, key, 0.0) for name, key in names.items()},
        "collections": sum(generation["collections"] for generation in gc.get_stats()),
        "stolen_s": _steal_time_s(),
    }


def _steal_time_s() -> float:
    """Seconds that a hypervisor has withheld from the virtual cores; 0 if the system does not report it."""
    try:
        words = Path("/proc/stat").read_bytes().split(maxsplit=9)
    except OSError:
        return 0.0
    return int(words[8]) / os.sysconf("SC_CLK_TCK")


def wait_until(due: float) -> bool:
    """Sleep until `due`; return whether the next bin was due already."""
    left = due - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return left < -BIN_SECONDS


def replay_sentences(decoder: Decoder, replay: ReplayTrials) -> Iterator[Sentence]:
    """Trials of a store in an endless loop."""
    while True:
        for info in replay.trials:
            statistics = replay.statistics(info)
            start = lambda s=info.session, known=statistics: decoder.reset(s, known)
            yield Sentence(replay.store.read_bins(info), start, info.text)
