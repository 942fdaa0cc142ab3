"""The word search frame by frame: latency per frame, load time, and how steady the text is while it grows.

python benchmarks/streaming_search.py --scores ../shared/real/words/t15/dev.npz

Uses the embedded lexicon (134,860 pronunciations) and the embedded 3-gram unless others are named.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.log_probs import read_log_probs
from arcuate.decoding.stability import Partial, Stability, stability
from arcuate.decoding.word_search.search import WordSearch, build_word_search
from arcuate.evaluation.transcribe import peak_rss_mb
from arcuate.language.lexicon import open_lexicon
from arcuate.language.ngram.io import open_model


def stream(search: WordSearch, frames: np.ndarray) -> tuple[list[float], list[float], bool, Stability]:
    """CPU and wall seconds of every frame, whether the text equals the whole search's, and its stability."""
    cpu, wall, partials, state = [], [], [], search.start()
    for t in range(len(frames)):
        began, clock = time.process_time(), time.perf_counter()
        state = search.step(state, frames[t : t + 1])
        words = search.partial(state)
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - clock)
        partials.append(Partial(t + 1, tuple(words)))
    final, whole = search.finish(state)[0], search.search(frames)[0]
    ends = [when.last for when in final.times]
    steadiness = stability(partials, Partial(len(frames), final.words), ends)
    return cpu, wall, final.words == whole.words, steadiness


def quantiles(seconds: list[float]) -> dict[str, float]:
    values = 1000 * np.array(seconds)
    named = {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}
    return named | {"max": float(values.max())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--lexicon", default="default")
    parser.add_argument("--lm", default="default")
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    scores = read_log_probs(asked.scores)
    (
        open_model(asked.lm),
        open_lexicon(asked.lexicon, scores.classes),
    )  # warm: files in the cache, code compiled
    start, clock = time.process_time(), time.perf_counter()
    lexicon, model = open_lexicon(asked.lexicon, scores.classes), open_model(asked.lm)
    search = build_word_search(lexicon, model, DecodingConfig(beam=asked.beam), boundary=scores.boundary)
    load = {"cpu_s": time.process_time() - start, "wall_s": time.perf_counter() - clock}
    began = time.perf_counter()
    search.warm_up()
    load["warm_s"] = time.perf_counter() - began
    stream(search, scores.trials[0])
    gc.collect()
    gc.freeze()  # the garbage collector walking a lexicon of 126,000 words is a frame of its own
    cpu: list[float] = []
    wall: list[float] = []
    same, steady = 0, Stability()
    for frames in scores.trials[: asked.trials]:
        one_cpu, one_wall, equal, one = stream(search, frames)
        cpu, wall, same, steady = cpu + one_cpu, wall + one_wall, same + equal, steady + one
    result: dict[str, Any] = {
        "beam": asked.beam,
        "lexicon_words": len(lexicon.words),
        "pronunciations": len(lexicon),
        "frames": len(cpu),
        "cpu_ms": quantiles(cpu),
        "wall_ms": quantiles(wall),
        "load": load,
        "same_text_as_whole": f"{same}/{min(asked.trials, len(scores.trials))}",
        "flicker": steady.flicker,
        "revisions_per_word": steady.revisions_per_word,
        "frames_to_final_word": steady.mean_frames_to_final,
        "peak_rss_mb": peak_rss_mb(),
    }
    if asked.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
