"""Cost of reading source files in a child process: `prepare` with and without it, alternating on the same recordings.

python benchmarks/reader_process.py [--sessions 4] [--trials 60] [--repeats 5]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

import arcuate.data.prepare as preparation
from arcuate.data.readers.process import ReaderProcess
from arcuate.data.readers.release import read_trials, summarise_file
from arcuate.data.readers.source import FileSummary, ReadResult, Source, SourceFile

N_BINS, N_CHANNELS = 300, 512


class DirectReader:
    """The interface of `ReaderProcess` without a process."""

    def __init__(self, source: Source, features: str) -> None:
        self._source, self._features = source, features

    def summarise(self, file: SourceFile) -> FileSummary:
        return summarise_file(self._source, file)

    def read(self, file: SourceFile) -> Iterator[ReadResult]:
        return read_trials(self._source, file, self._features)

    def __enter__(self) -> "DirectReader":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def write_recordings(folder: Path, n_sessions: int, n_trials: int) -> None:
    rng = np.random.default_rng(0)
    for session in range(n_sessions):
        path = folder / f"t15.2023.08.{11 + session}" / "data_train.hdf5"
        path.parent.mkdir(parents=True)
        with h5py.File(path, "w") as file:
            for trial in range(n_trials):
                group = file.create_group(f"trial_{trial:04d}")
                group["input_features"] = rng.normal(size=(N_BINS, N_CHANNELS)).astype(np.float32)
                group["seq_class_ids"] = np.array([7, 28, 17, 24, 40], np.int32)
                group.attrs.update({"n_time_steps": N_BINS, "seq_len": 5, "sentence_label": "Bring.", "block_num": 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"direct": [], "process": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recordings(folder / "source", options.sessions, options.trials)
        for _ in range(options.repeats):
            for kind, reader in (("direct", DirectReader), ("process", ReaderProcess)):
                preparation.ReaderProcess = reader  # type: ignore[misc,assignment]
                start = time.perf_counter()
                preparation.prepare_store(folder / "source", folder / "store", force=True)
                seconds[kind].append(time.perf_counter() - start)
    for kind, values in seconds.items():
        print(f"{kind:8} {min(values):6.2f} s at best, {statistics.median(values):6.2f} s median")
    ratios = [p / d for p, d in zip(seconds["process"], seconds["direct"], strict=True)]
    print(f"process / direct: {min(seconds['process']) / min(seconds['direct']):.3f} at best,", end=" ")
    print(f"{statistics.median(ratios):.3f} median of pairs")


if __name__ == "__main__":
    main()
