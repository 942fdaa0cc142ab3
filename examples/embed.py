"""Decode a stream of bins with an exported model: python embed.py model.arcx [recording.npy]

Needs numpy, numba and onnxruntime, not torch. The recording is an array (bins, channels); without one, noise is
decoded. A program that receives bins from an acquisition system calls `push` with each of them instead.
"""

import logging
import sys
import time

import numpy as np

from arcuate.runtime import Decoder


def main(model: str, recording: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the first start compiles, and says so
    started = time.perf_counter()
    decoder = Decoder.load(model)
    print(f"{decoder.n_channels} channels, loaded in {time.perf_counter() - started:.2f} s")
    if recording is None:
        bins = np.random.default_rng(0).normal(0.0, 1.0, (200, decoder.n_channels))
    else:
        bins = np.load(recording)
    shown = ""
    for row in bins:  # one bin of 20 ms at a time
        partial = decoder.push(row)
        if partial.text != shown:
            shown = partial.text
            print(f"  {shown}")
    best = decoder.finish()
    print(best.text or " ".join(best.phonemes))


if __name__ == "__main__":
    main(*sys.argv[1:3])
