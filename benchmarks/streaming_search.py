"""The word search frame by frame: latency per frame, load time, and stability of partial results.

python benchmarks/streaming_search.py --scores ../shared/real/words/t15/dev.npz

Uses the embedded lexicon (134,860 pronunciations) and the embedded 3-gram unless others are named.
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.transcribe import peak_rss_mb
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.open import open_model
from arcuate.models.layout import Frames


@dataclass(frozen=True)
class Partial:
    """Partial text after a number of frames."""

    n_frames: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Stability:
    """Stability of partial results: sums over one or many trials, divided once at the end."""

    n_words: int = 0  # of the final texts
    n_revisions: int = 0  # displayed words that were removed or changed later
    n_updates: int = 0  # changes of the text
    n_flickers: int = 0  # of those, changes that removed or replaced a word
    frames_to_final: int = 0  # from the end of each final word until it no longer changed

    def __add__(self, other: "Stability") -> "Stability":
        return Stability(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))

    @property
    def revisions_per_word(self) -> float | None:
        return self.n_revisions / self.n_words if self.n_words else None

    @property
    def flicker(self) -> float | None:
        """Fraction of updates that did not only append."""
        return self.n_flickers / self.n_updates if self.n_updates else None

    @property
    def mean_frames_to_final(self) -> float | None:
        return self.frames_to_final / self.n_words if self.n_words else None


def stability(partials: Sequence[Partial], final: Partial, word_ends: Sequence[int]) -> Stability:
    """Stability of the partial texts of one trial; `word_ends` are the last frames of the final words."""
    shown = [Partial(0, ()), *partials, final]
    updates = [(a.words, b.words) for a, b in pairwise(shown) if a.words != b.words]
    n_removed = [len(a) - n_common(a, b) for a, b in updates]
    return Stability(
        n_words=len(final.words),
        n_revisions=sum(n_removed),
        n_updates=len(updates),
        n_flickers=sum(n > 0 for n in n_removed),
        frames_to_final=sum(max(0, final_since(shown, final.words, k) - 1 - end) for k, end in enumerate(word_ends)),
    )


def final_since(shown: Sequence[Partial], final: Sequence[str], k: int) -> int:
    """Number of frames after which words 0 to k no longer changed."""
    since = shown[-1].n_frames
    for partial in reversed(shown):
        if n_common(partial.words, final) <= k:
            break
        since = partial.n_frames
    return since


def n_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the common word prefix of two texts."""
    n = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        n += 1
    return n


def stream(search: WordSearch, frames: np.ndarray) -> tuple[list[float], list[float], bool, Stability]:
    """CPU and wall seconds of every frame, whether the text equals that of the offline search, and its stability."""
    cpu, wall, partials, state = [], [], [], search.start()
    for t in range(len(frames)):
        began, clock = time.process_time(), time.perf_counter()
        state = search.step(state, Frames(frames[t : t + 1]))
        words = search.partial(state).words
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - clock)
        partials.append(Partial(t + 1, words))
    final, offline = search.finish(state)[0], search.search(Frames(frames))[0]
    ends = [when.last for when in final.times]
    measured = stability(partials, Partial(len(frames), final.words), ends)
    return cpu, wall, final.words == offline.words, measured


def quantiles(seconds: list[float]) -> dict[str, float]:
    values = 1000 * np.array(seconds)
    named = {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}
    return named | {"max": float(values.max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--lexicon", default="default")
    parser.add_argument("--lm", default="default")
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scores = read_frames(options.scores)
    (
        open_model(options.lm),
        open_lexicon(options.lexicon, scores.classes),
    )  # fills the file cache and compiles
    start, clock = time.process_time(), time.perf_counter()
    lexicon, model = open_lexicon(options.lexicon, scores.classes), open_model(options.lm)
    search = build_word_search(lexicon, model, DecodingConfig(beam=options.beam), boundary=scores.boundary)
    load = {"cpu_s": time.process_time() - start, "wall_s": time.perf_counter() - clock}
    began = time.perf_counter()
    search.warm_up()
    load["warm_s"] = time.perf_counter() - began
    stream(search, scores.trials[0])
    gc.collect()
    gc.freeze()  # a garbage collection over a lexicon of 126,000 words would delay one frame
    cpu: list[float] = []
    wall: list[float] = []
    same, total = 0, Stability()
    for frames in scores.trials[: options.trials]:
        one_cpu, one_wall, equal, one = stream(search, frames)
        cpu, wall, same, total = cpu + one_cpu, wall + one_wall, same + equal, total + one
    result: dict[str, Any] = {
        "beam": options.beam,
        "lexicon_words": len(lexicon.words),
        "pronunciations": len(lexicon),
        "frames": len(cpu),
        "cpu_ms": quantiles(cpu),
        "wall_ms": quantiles(wall),
        "load": load,
        "same_text_as_whole": f"{same}/{min(options.trials, len(scores.trials))}",
        "flicker": total.flicker,
        "revisions_per_word": total.revisions_per_word,
        "frames_to_final_word": total.mean_frames_to_final,
        "peak_rss_mb": peak_rss_mb(),
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
