"""Peak memory of each command at the size of the '25 release: 45 sessions × 240 trials × 18 s × 512 channels, 20 GB.

    python benchmarks/memory.py [--sessions 45] [--trials 240]

Fabricates the recordings, runs `arcuate prepare` and `arcuate train b2t25-gru` (official batch of 64) on them in fresh
processes, and prints the peak resident memory and the seconds of each. Needs 40 GB in TMPDIR; removes what it wrote.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
from common import arcuate

N_BINS = 900  # of 20 ms


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


def run(*words: object) -> None:
    """Run one command; print its peak memory and time."""
    used = arcuate(*words)
    print(f"{words[0]:8} peak {used.peak_mb:6.0f} MB   {used.seconds:5.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=45)
    parser.add_argument("--trials", type=int, default=240)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, store = Path(name) / "source", Path(name) / "store"
        make_b2t25(source, chosen.sessions, chosen.trials)
        run("prepare", source, store)
        shutil.rmtree(source)
        size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        print(f"store    {size / 1e9:.1f} GB", flush=True)
        run("train", "b2t25-gru", "--data", store, "--run", Path(name) / "run", "train.steps=2")


if __name__ == "__main__":
    main()
