"""Frame scores of small models on simulated cohorts: known sessions, and later days that the model has not seen.

python benchmarks/simulated_days.py --out runs/simulated-days --seeds 20

Per seed: four sessions of 300 trials and four later days. A small `tiny` is trained for 450 steps on two of three
training blocks of the known sessions. Writes known-SEED.npz/.jsonl (all other labelled trials of the known sessions),
later-SEED.npz/.jsonl (all labelled trials of the later days, decoded with the layer of the last known session), and
drift-SEED.json (every session compared with the last known one). `confidence.py simulated` and `error_estimate.py` read
them. Seeds whose files exist are not computed again, so the command can be stopped and repeated.
"""

import argparse
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from arcuate.adaptation.drift import SessionDrift, compare_sessions, measure_sessions
from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.electrodes import list_arrays
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_since_first
from arcuate.decoding.decoder import Decoder
from arcuate.decoding.frame_files import FrameLogProbs, write_frames
from arcuate.decoding.load import load
from arcuate.experiments.train import train
from arcuate.files import write_json, write_jsonl

SESSIONS, TRIALS, ELECTRODES, STEPS = 4, 300, 32, 450
LATER = (2, 6, 14, 30)


class HeldOut(Store):
    """A store in which every third training block is part of the val split."""

    def __init__(self, store: Store) -> None:
        vars(self).update(vars(store))
        blocks = sorted({(t.session, t.block) for t in store.trials if t.split == "train"})
        held_out = set(blocks[2::3])
        self.trials = tuple(replace(t, split="val") if (t.session, t.block) in held_out else t for t in store.trials)


def make_seed(out: Path, seed: int) -> None:
    """Simulate, train and score one cohort."""
    work = out / f"work-{seed}"
    if work.exists():
        shutil.rmtree(work)
    simulate(
        work / "source",
        n_sessions=SESSIONS,
        n_trials=TRIALS,
        n_electrodes=ELECTRODES,
        difficulty="real" if seed % 2 else "easy",
        seed=seed,
        later=LATER,
    )
    prepare(work / "source", work / "store")
    changes = [f"data.max_sessions={SESSIONS}", f"train.seed={seed}", f"train.steps={STEPS}", "encoder.width=96"]
    changes += ["train.validate_every=450", "train.checkpoint_every=450", "schedule.peak_lr=0.005"]
    train("tiny", HeldOut(Store.open(work / "store")), work / "run", overrides=changes)
    store, decoder = HeldOut(Store.open(work / "store")), load(work / "run")
    known = set(decoder.sessions)
    write(out / f"later-{seed}", decoder, store, (t for t in store.trials if t.session not in known))
    arrays = list_arrays(store.layout, store.n_channels)
    sessions = measure_sessions(store)
    last = next(s for s in sessions if s.session == decoder.sessions[-1])
    days = days_since_first([s.session for s in sessions])
    rows = {
        row.session: {
            "known": row.session in known,
            "day": day,
            "profile_similarity": row.profile_similarity,
            **{name: mean_over(row, name) for name in ("mean_shift", "sd_ratio")},
        }
        for row, day in zip(compare_sessions(sessions, arrays, last), days, strict=True)
    }
    write_json(out / f"drift-{seed}.json", rows)
    held_out = (t for t in store.trials if t.session in known and t.split != "train")
    write(out / f"known-{seed}", decoder, store, held_out)
    shutil.rmtree(work)


def mean_over(row: SessionDrift, name: str) -> float:
    """Mean of a drift measure over the arrays."""
    return float(np.mean([value for array in row.arrays.values() if (value := getattr(array, name)) is not None]))


def write(stem: Path, decoder: Decoder, store: Store, trials: Iterable[TrialInfo]) -> None:
    """Frame scores and references of labelled trials."""
    chosen = [t for t in trials if t.tokens is not None and t.text]
    last = decoder.sessions[-1]
    frames = tuple(
        decoder.log_probs(
            store.read_bins(t), t.session if t.session in decoder.sessions else last, store.block_statistics(t)
        )
        for t in chosen
    )
    write_jsonl(
        stem.with_suffix(".jsonl"),
        ({"id": t.id, "session": t.session, "text": t.text, "phonemes": token_names(t.tokens or ())} for t in chosen),
    )
    write_frames(stem.with_suffix(".npz"), FrameLogProbs(CLASSES, frames, tuple(t.id for t in chosen), stem.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        if not (args.out / f"known-{seed}.npz").exists():
            make_seed(args.out, seed)
            print(f"seed {seed} done", flush=True)


if __name__ == "__main__":
    main()
