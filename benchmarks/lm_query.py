"""Load time, query time and size of a language model.

    python benchmarks/lm_query.py MODEL TEXT

TEXT has one sentence per line. Queries are those of a search: several words after each state of the text.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
from numba import njit

from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import NGramArrays, advance


@njit(cache=True)
def run_queries(arrays: NGramArrays, start: int, text: np.ndarray, bos: int, others: np.ndarray) -> float:
    """Score the text; at every state also query words that do not follow."""
    total, state, k = 0.0, start, 0
    for word in text:
        if word == bos:
            state = start
            continue
        for _ in range(9):
            total += advance(arrays, state, others[k])[0]
            k = (k + 1) % others.shape[0]
        log_prob, state = advance(arrays, state, word)
        total += log_prob
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    args = parser.parse_args()

    begin = time.process_time()
    model = LanguageModel.open(args.model)
    load_s = time.process_time() - begin
    n_ngrams, n_bytes = sum(model.counts), os.path.getsize(args.model)
    print(f"{model.order}-gram, {n_ngrams:,} n-grams {model.counts}, {n_bytes / 1e6:.1f} MB")
    print(f"{n_bytes / n_ngrams:.1f} bytes per n-gram, so 100 M n-grams take {n_bytes / n_ngrams / 10:.2f} GB")
    print(f"opened in {1000 * load_s:.1f} ms")

    lines = args.text.read_text("utf-8").splitlines()
    words = [word for line in lines for word in (model.words[model.bos], *line.split(), "</s>")]
    text = model.find_all(words)
    text[text < 0] = model.unk
    unigrams = np.exp(model.unigrams.astype(float))
    unigrams[model.bos] = 0
    draw = np.random.default_rng(0).choice(len(unigrams), 100_003, p=unigrams / unigrams.sum())
    run_queries(model.arrays, model.start, text[:10], model.bos, draw)
    for label, others in (
        ("words drawn by frequency", draw),
        ("random words", np.random.default_rng(1).permutation(len(unigrams))),
    ):
        times = []
        for _ in range(5):
            begin = time.process_time()
            run_queries(model.arrays, model.start, text, model.bos, others)
            times.append(time.process_time() - begin)
        n = 10 * int((text != model.bos).sum())
        print(f"{label}: {1e9 * min(times) / n:.0f} ns per query ({n:,} queries, best of 5)")


if __name__ == "__main__":
    main()
