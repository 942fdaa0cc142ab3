"""`bench_live`: time per frame, measured bin by bin in real time."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.data.trial import BIN_MS, BIN_SECONDS
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.options import DecoderOptions
from arcuate.evaluation.metrics import Score, score_text, total, words_per_minute
from arcuate.live.load import find_model, load_decoder
from arcuate.live.sources.replay import ReplayTrials, open_replay
from arcuate.progress import Progress

if TYPE_CHECKING:
    from arcuate.live.adaptation import AdaptationStatus


@dataclass(frozen=True, eq=False)
class Sentence:
    """A trial to replay."""

    bins: np.ndarray  # (T, C)
    start: Callable[[], None]  # called before the first bin
    text: str | None = None  # reference


@dataclass(eq=False)
class FrameTimings:
    """Seconds of every frame from its last bin to the partial text, and of the end of every sentence."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    n_late: int = 0  # bins processed after the next one was due
    seconds: float = 0.0
    n_words: int = 0  # decoded
    recorded_s: float = 0.0  # length of the replayed recording
    first_word_s: list[float] = field(default_factory=list)  # from the first bin of a sentence to its first word
    scores: list[tuple[float, Score]] = field(default_factory=list)  # length and word errors of complete sentences

    def correct_words_per_minute(self) -> float | None:
        """Reference words per minute times (1 - WER); None without references."""
        counts = total(score for _, score in self.scores)
        pace = words_per_minute(counts.length, sum(seconds for seconds, _ in self.scores))
        return None if pace is None else pace * max(0.0, 1 - (counts.rate or 0.0))

    def summary(self, deadline_ms: float) -> dict[str, Any]:
        wall = 1000 * np.array(self.wall)
        return {
            **_quantiles("frame_ms", wall),
            "missed_deadlines": int((wall > deadline_ms).sum()),
            **_quantiles("frame_cpu_ms", 1000 * np.array(self.cpu)),
            "finish_ms_max": 1000 * max(self.finish) if self.finish else None,
            "first_word_s_p50": float(np.median(self.first_word_s)) if self.first_word_s else None,
            "n_frames": len(wall),
            "n_sentences": len(self.finish),
            "late_bins": self.n_late,
            "deadline_ms": deadline_ms,
            "seconds": self.seconds,
            "words_per_minute": 60 * self.n_words / self.recorded_s if self.n_words and self.recorded_s else None,
            "correct_words_per_minute": self.correct_words_per_minute(),
        }


def _quantiles(name: str, values: np.ndarray) -> dict[str, float | None]:
    return {
        f"{name}_{key}": float(np.percentile(values, q)) if len(values) else None
        for key, q in (("p50", 50), ("p99", 99), ("max", 100))
    }


@dataclass(frozen=True, eq=False)
class LiveBenchmark:
    """Result of `bench_live`."""

    timings: FrameTimings
    deadline_ms: float
    delay_ms: float
    real_time: bool
    n_lexicon_words: int
    beam: int | None
    adaptation: "AdaptationStatus | None"

    def summary(self) -> str:
        """Quantiles of the time per frame and, if the stream adapts, its updates: one line each."""
        values, status = self.to_dict(), self.adaptation
        text = (
            f"from the last bin of a frame ({self.deadline_ms:g} ms) to its text: p50 {values['frame_ms_p50']:.2f} ms,"
            f" p99 {values['frame_ms_p99']:.2f} ms, max {values['frame_ms_max']:.2f} ms;"
            f" {values['missed_deadlines']} of {values['n_frames']:,} deadlines missed;"
            f" model delay {self.delay_ms:g} ms"
        )
        if (first := values["first_word_s_p50"]) is not None:
            text += f"; first word {first:.2f} s after the first bin (median)"
        if (pace := values["words_per_minute"]) is not None:
            text += f"; {pace:.1f} decoded words per minute"
        if (correct := values["correct_words_per_minute"]) is not None:
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
    """Measure the time from the last bin of each frame to its text, on one thread.

    Args:
        run: Run folder, exported model (.arcx), model folder, or hf:ORG/NAME.
        seconds: Length of the replayed recording.
        real_time: Replay in real time, not as fast as possible.
        split: Split to replay: val, test, train or all.
        options: Search, session layer and store.
    """
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
    )


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
        sentence, n_before, spoke = next(sentences), n_bins, False
        sentence.start()
        for row in sentence.bins:
            due += BIN_SECONDS
            if real_time:
                timings.n_late += wait_until(due)
            n_words = push_bin(decoder, row, timings)
            n_bins += 1
            if n_words and not spoke and decoder.decodes_words:
                spoke = True
                timings.first_word_s.append((n_bins - n_before) * BIN_SECONDS + timings.wall[-1])
            if progress and n_bins % 50 == 0:
                progress(min(round(n_bins * BIN_SECONDS), round(seconds)), round(seconds), "replaying")
            if n_bins * BIN_SECONDS >= seconds:
                break
        clock = time.perf_counter()
        best = decoder.finish()
        timings.finish.append(time.perf_counter() - clock)
        timings.n_words += len(best.words)
        if n_bins - n_before == len(sentence.bins) and sentence.text is not None:
            errors = score_text(sentence.text, best.text or "").words
            timings.scores.append((len(sentence.bins) * BIN_SECONDS, errors))
    gc.unfreeze()
    timings.seconds, timings.recorded_s = time.perf_counter() - started, n_bins * BIN_SECONDS
    return timings


def push_bin(decoder: Decoder, row: np.ndarray, timings: FrameTimings) -> int:
    """Push one bin and record the time if it completes a frame; return the number of words so far."""
    clock, cpu_clock = time.perf_counter(), time.thread_time()
    partial = decoder.push(row)
    if len(partial.log_probs):
        timings.wall.append(time.perf_counter() - clock)
        timings.cpu.append(time.thread_time() - cpu_clock)
    decoder.precompute()
    return len(partial.words)


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
