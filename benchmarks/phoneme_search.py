"""Prefix beam search over phonemes: compiled against plain Python, CPU time of one thread.

python benchmarks/phoneme_search.py
"""

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from arcuate.data.alphabet import BLANK, N_CLASSES
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.prefix_beam import PrefixBeamSearch


def log_add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))


def plain(log_probs: np.ndarray, width: int) -> list[int]:
    """Textbook implementation: a dictionary of prefixes, every class tried after every prefix."""
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row in log_probs.tolist():
        new: dict[tuple[int, ...], tuple[float, float]] = defaultdict(lambda: (-math.inf, -math.inf))
        for prefix, (blank, token) in beam.items():
            total = log_add(blank, token)
            for c, logp in enumerate(row):
                if c == BLANK:
                    b, t = new[prefix]
                    new[prefix] = (log_add(b, total + logp), t)
                elif prefix and prefix[-1] == c:
                    b, t = new[prefix]
                    new[prefix] = (b, log_add(t, token + logp))
                    b, t = new[(*prefix, c)]
                    new[(*prefix, c)] = (b, log_add(t, blank + logp))
                else:
                    b, t = new[(*prefix, c)]
                    new[(*prefix, c)] = (b, log_add(t, total + logp))
        kept = sorted(new.items(), key=lambda item: log_add(*item[1]), reverse=True)[:width]
        beam = dict(kept)
    return list(next(iter(beam)))


def trials(n: int, n_frames: int, seed: int = 0) -> list[np.ndarray]:
    """Synthetic frames: mostly blank, tokens of a few frames, consistent confusions."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        logits = rng.normal(size=(n_frames, N_CLASSES))
        at = 0
        while at < n_frames:
            gap, held = int(rng.integers(1, 6)), int(rng.integers(1, 3))
            logits[at : at + gap, BLANK] += 6.0
            tokens = rng.integers(1, N_CLASSES, size=3)
            logits[at + gap : at + gap + held, tokens] += np.array([5.0, 3.5, 2.5])
            at += gap + held
        made.append((logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32))
    return made


def seconds(decode: Callable[[np.ndarray], object], frames: list[np.ndarray]) -> float:
    spent = []
    for trial in frames:
        start = time.process_time()
        decode(trial)
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=250)
    parser.add_argument("--beam", type=int, default=20)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--plain-trials", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    frames, search = trials(options.trials, options.frames), PrefixBeamSearch(options.beam)
    search.tokens(frames[0])  # compiles, or loads from the cache
    few = frames[: options.plain_trials]
    same = sum(plain(f, options.beam) == search.tokens(f) for f in few)
    compiled_s, plain_s = (
        seconds(search.tokens, frames),
        seconds(lambda f: plain(f, options.beam), few),
    )
    result = {
        "beam": options.beam,
        "frames": options.frames,
        "classes": N_CLASSES,
        "compiled_ms": 1000 * compiled_s,
        "plain_ms": 1000 * plain_s,
        "ratio": plain_s / compiled_s,
        "greedy_ms": 1000 * seconds(greedy, frames),
        "same_text": f"{same}/{len(few)}",
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"beam {options.beam}, {options.frames} frames of {N_CLASSES} classes, median of {options.trials} sentences:")
    print(f"compiled {result['compiled_ms']:.2f} ms, plain Python {result['plain_ms']:.0f} ms: {result['ratio']:.0f}x")
    print(f"greedy {result['greedy_ms']:.2f} ms; compiled and plain agree on {result['same_text']} sentences")


if __name__ == "__main__":
    main()
