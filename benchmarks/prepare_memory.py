"""Peak memory of preparing and reading a large data set.

Fabricates '25 recordings with the full 512 channels and '24 recordings of full session size in a temporary
folder, prepares each at two sizes in a fresh process, and prints the peak resident memory of that process.
Its growth from the smaller to the larger data set is extrapolated linearly to 45 sessions.

    python benchmarks/prepare_memory.py [--trials 240] [--sessions 1 4]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import scipy.io

FULL_SESSIONS = 45
N_BINS = 900  # 45 × 240 trials of 18 s with 512 channels are 20 GB

_PREPARE = """
import json, sys, time
from pathlib import Path
from arcuate.data.prepare import prepare_store
from arcuate.data.store import Store
import numpy as np

def peak_mb():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

before = peak_mb()
start = time.perf_counter()
report = prepare_store(Path(sys.argv[1]), Path(sys.argv[2]))
seconds = time.perf_counter() - start
prepared = peak_mb()
store = Store.open(sys.argv[2])
order = np.random.default_rng(0).permutation(len(store.trials))
start = time.perf_counter()
n_bytes = sum(store.read_bins(store.trials[i]).nbytes for i in order)
reading = time.perf_counter() - start
print(json.dumps(dict(before=before, prepared=prepared, read=peak_mb(), seconds=seconds, trials=report.trials,
                      mb=n_bytes / 2**20, reading=reading)))
"""


def make_b2t25(root: Path, n_sessions: int, n_trials: int) -> None:
    rng = np.random.default_rng(0)
    for s in range(n_sessions):
        path = root / f"t15.2023.{1 + s // 28:02d}.{1 + s % 28:02d}" / "data_train.hdf5"
        path.parent.mkdir(parents=True)
        with h5py.File(path, "w") as file:
            for i in range(n_trials):
                group = file.create_group(f"trial_{i:04d}")
                group["input_features"] = rng.standard_normal((N_BINS, 512), dtype=np.float32)
                group["seq_class_ids"] = np.pad(np.arange(1, 31, dtype=np.int32), (0, 470))
                group.attrs.update(n_time_steps=N_BINS, seq_len=30, block_num=i // 40, sentence_label="Bring it.")


def make_b2t24(root: Path, n_sessions: int, n_trials: int) -> None:
    """The release has up to about 400 trials of 312 bins in a file."""
    rng = np.random.default_rng(0)
    (root / "train").mkdir(parents=True)
    for s in range(n_sessions):
        cells = {name: np.empty((1, n_trials), dtype=object) for name in ("tx1", "tx2", "spikePow")}
        for i in range(n_trials):
            cells["tx1"][0, i] = rng.poisson(0.5, (312, 256)).astype(np.uint8)
            cells["tx2"][0, i] = cells["tx1"][0, i]
            cells["spikePow"][0, i] = rng.random((312, 256), dtype=np.float32)
        texts = np.array(["Bring it closer.".ljust(80)] * n_trials)
        blocks = np.arange(n_trials)[:, None] // 40
        name = f"t12.2022.{1 + s // 28:02d}.{1 + s % 28:02d}.mat"
        scipy.io.savemat(root / "train" / name, {**cells, "sentenceText": texts, "blockIdx": blocks})


def measure(source: Path, store: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, str(source), str(store)], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=240)
    parser.add_argument("--sessions", type=int, nargs=2, default=(1, 4))
    chosen = parser.parse_args()
    print("layout  sessions  trials     data   start  prepare  read all   prepare      read  (peak RSS; MB/s)")
    for name, make in (("b2t25", make_b2t25), ("b2t24", make_b2t24)):
        peaks = []
        for n_sessions in chosen.sessions:
            with tempfile.TemporaryDirectory() as folder:
                make(Path(folder) / "source", n_sessions, chosen.trials)
                found = measure(Path(folder) / "source", Path(folder) / "store")
            peaks.append(found["prepared"])
            print(
                f"{name:6} {n_sessions:9} {found['trials']:7.0f} {found['mb']:6.0f} MB"
                f" {found['before']:5.0f} MB {found['prepared']:5.0f} MB"
                f"  {found['read']:5.0f} MB {found['mb'] / found['seconds']:9.0f}"
                f" {found['mb'] / found['reading']:9.0f}"
            )
        few, many = chosen.sessions
        per_session = (peaks[1] - peaks[0]) / (many - few)
        worst = peaks[1] + max(0.0, per_session) * (FULL_SESSIONS - many)
        print(
            f"{name:6} grows by {per_session:.1f} MB per session:"
            f" {worst:.0f} MB at {FULL_SESSIONS} sessions (allowed: 4096 MB)"
        )


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
