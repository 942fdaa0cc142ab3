"""Ingredients of a recipe one at a time and together, at equal CPU seconds: which of them `tiny-best` is made of.

python benchmarks/best_recipe.py --out runs/best --cohort choose --seeds 5 [--arms NAME …]
python benchmarks/best_recipe.py --out runs/best --cohort choose --seeds 1 --budget 300 --arms NAME …
python benchmarks/best_recipe.py --out runs/best --cohort report --seeds 5 --arms tiny tiny-best
python benchmarks/best_recipe.py --out runs/best --table

Simulated cohorts: settings are chosen on two (`choose`, `third`) and reported on another with another seed (`report`),
which also differs from `choose` in difficulty and number of channels. The budget of a training is the CPU time that
`tiny` needs for its own 600 steps, or for `--budget` steps. A step of every arm is timed beforehand, loading included,
in CPU time of one thread and in turn with a step of `tiny`; an arm whose steps cost twice as much trains half as many,
with a schedule of that length. Teachers and pretraining count. Every training is scored once, at its end, on all val
and test trials.

Each finished training adds a line to OUT/results.jsonl and is not repeated, so the command can be stopped at any time.
Seeds are the outer loop. The table gives differences from `tiny` with 95 % intervals from the variances between trials
and between seeds (evaluation/significance.py), and p-values adjusted by Holm within a cohort.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from arcuate.data.batching import PlannedBatches, make_plan
from arcuate.data.prepare import prepare_store
from arcuate.data.selection import select
from arcuate.data.simulation import simulate
from arcuate.data.simulation.layouts import FOLDERS
from arcuate.data.store import Store
from arcuate.evaluation.significance import Arm as Errors
from arcuate.evaluation.significance import contrast, difference, holm
from arcuate.evaluation.trials import decode_trials
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model, train
from arcuate.files import append_jsonl, read_json, read_jsonl, write_json
from arcuate.models.io import load_model
from arcuate.models.layout import Head
from arcuate.run import Run
from arcuate.training.distillation import load_teacher
from arcuate.training.environment import Distributed
from arcuate.training.state import TrainingState
from arcuate.training.step import apply_update, compute_gradients, encode_for_training, finish_step

COHORTS: dict[str, dict[str, Any]] = {
    "choose": {"n_sessions": 5, "n_trials": 200, "n_electrodes": 32, "difficulty": "real", "seed": 1001},
    "report": {"n_sessions": 4, "n_trials": 250, "n_electrodes": 48, "difficulty": "hard", "seed": 2002},
    "third": {"n_sessions": 4, "n_trials": 250, "n_electrodes": 48, "difficulty": "hard", "seed": 3003},
}
N_TIMED = 24


@dataclass(frozen=True)
class Arm:
    """One recipe: a packaged one, and changes to it."""

    changes: tuple[str, ...] = ()
    recipe: str = "tiny"
    teacher: tuple[str, ...] | None = None  # changes of a teacher's recipe, which is trained first
    teacher_share: float = 0.4  # of the budget
    pretrain_share: float = 0.0  # of the budget, on masked bins of all trials, without labels
    further_sessions: int = 0  # of the same participant, without labels: pretraining uses them too
    last_stage: tuple[float, str, str] | None = None  # share of the budget, a further loss, and the weights of all
    head: Head = "ctc"


PATCH = "front_end.patch={bins: %d, stride: %d, dilation: %d}"
CHEAP = ("data.batching.batch_size=8", PATCH % (16, 6, 3), "schedule.peak_lr=0.004")
MASKS = "augment.time_masks={n_masks: %d, fixed_count: true, max_fraction: %g}"
MASKS_OF_BINS = "augment.time_masks={n_masks: %d, fixed_count: true, max_bins: %d}"
CR = "loss.consistency.weight=%g"
PRETRAINING = (
    *("reconstruction.enabled=true", "loss.ctc.weight=0", "data.unlabelled=true"),
    "augment.time_masks={n_masks: 6, max_bins: 40}",
)
TRANSDUCER = ("transducer.enabled=true", "transducer.width=128", "loss.rnnt.weight=0.5")
SSM = (
    *("front_end.channel_gate={enabled: true, ratio: 16}", "front_end.stem={enabled: true, conv_kernel: 7}"),
    "encoder={kind: ssm, width: 128, depth: 3, n_heads: 4, state_dim: 32, conv_kernel: 4, dropout: 0.1}",
)
BEST = (*CHEAP, *SSM, "optimizer.weight_decay.weights=0.1")
NO_GATE = "front_end.channel_gate.enabled=false"
PHASES = (*BEST, NO_GATE, "augment.random_cut=6")  # every phase of the frames, whose stride is 6 bins
LINEAR = "schedule={kind: one_cycle, peak_lr: 0.004, pct_start: 0.06, anneal: linear}"

ARMS: dict[str, Arm] = {
    "tiny": Arm(),
    # The ingredients, one at a time.
    "cr-ctc": Arm((CR % 0.2,)),
    "cr-ctc, masks": Arm((CR % 0.2, MASKS % (10, 0.05))),
    "cr-ctc, masks, batch 8": Arm((CR % 0.2, MASKS % (10, 0.05), "data.batching.batch_size=8")),
    "masks 10 x 5 %": Arm((MASKS % (10, 0.05),)),
    "masks 20 x 7.5 %": Arm((MASKS % (20, 0.075),)),
    "masks 4 x 10 bins": Arm(("augment.time_masks={n_masks: 4, max_bins: 10}",)),
    "intermediate ctc": Arm(("loss.intermediate.layers=[1]",)),
    "ema 0.98": Arm(("ema.decay=0.98",)),
    "ema 0.995": Arm(("ema.decay=0.995",)),
    "speed 10 %": Arm(("augment.speed_change=0.1",)),
    "channel dropout 10 %": Arm(("augment.channel_dropout=0.1",)),
    "transducer, both heads": Arm(TRANSDUCER, head="both"),
    "alignment, last fifth": Arm(last_stage=(0.2, "alignment", "ctc: 0.5, alignment: 0.5")),
    "distilled": Arm((), teacher=("encoder.bidirectional=true",)),
    "distilled, delay 2": Arm(("loss.distillation.delay=2",), teacher=("encoder.bidirectional=true",)),
    "pretrained, a fifth": Arm(pretrain_share=0.2),
    "session rank 8": Arm(("front_end.session_layer.rank=8",)),
    "session rank 8, from previous": Arm(
        ("front_end.session_layer.rank=8", "front_end.session_layer.from_previous=true")
    ),
    # Optimisation and architecture.
    "lr 0.01": Arm(("schedule.peak_lr=0.01",)),
    "batch 8, lr 0.006": Arm(("data.batching.batch_size=8", "schedule.peak_lr=0.006")),
    "batch 8, lr 0.006, weak noise": Arm(
        (
            *("data.batching.batch_size=8", "schedule.peak_lr=0.006", "augment.white_noise_sd=0.2"),
            *("encoder.dropout=0.1", "front_end.session_layer.dropout=0.0"),
        )
    ),
    "lr 0.006": Arm(("schedule.peak_lr=0.006",)),
    "batch 8": Arm(("data.batching.batch_size=8",)),
    "batch 32": Arm(("data.batching.batch_size=32", "schedule.peak_lr=0.006")),
    "dilation 4": Arm((PATCH % (13, 4, 4),)),
    "stride 6, dilation 3": Arm((PATCH % (16, 6, 3),)),
    "stride 6": Arm(("front_end.patch.stride=6",)),
    "patch 20": Arm(("front_end.patch.bins=20",)),
    "gru 192 x 1": Arm(("encoder.width=192", "encoder.depth=1")),
    "gru 96 x 3": Arm(("encoder.width=96", "encoder.depth=3")),
    "dropout 0.1": Arm(("encoder.dropout=0.1", "front_end.session_layer.dropout=0.0")),
    "noise 0.8": Arm(("augment.white_noise_sd=0.8",)),
    "noise 0.2": Arm(("augment.white_noise_sd=0.2",)),
    "layer norm": Arm(("front_end.session_layer.layer_norm=true",)),
    "weight decay 0.1": Arm(("optimizer.weight_decay.weights=0.1",)),
    "ssm": Arm(SSM),
    "tiny-best": Arm(recipe="tiny-best"),
    # Cheap steps, and changes to them.
    "cheap steps": Arm(CHEAP),
    "cheap steps, batch 16": Arm((*CHEAP, "data.batching.batch_size=16")),
    "cheap steps, no dilation": Arm((*CHEAP, PATCH % (16, 6, 1))),
    "cheap steps, stride 4": Arm((*CHEAP, PATCH % (13, 4, 4))),
    "cheap steps, lr 0.006": Arm((*CHEAP, "schedule.peak_lr=0.006")),
    "cheap steps, session rank 8": Arm((*CHEAP, "front_end.session_layer.rank=8")),
    "cheap steps, masks": Arm((*CHEAP, MASKS % (10, 0.05))),
    "cheap steps, noise 1, dropout 0.4": Arm(
        (
            *(*CHEAP, "augment.white_noise_sd=1.0", "encoder.dropout=0.4"),
            "front_end.session_layer.dropout=0.2",
        )
    ),
    # Cheap steps, state-space encoder and weight decay; without each, and with each further ingredient.
    "best": Arm(BEST),
    "best without ssm": Arm((*CHEAP, "optimizer.weight_decay.weights=0.1")),
    "best without cheap steps": Arm((*SSM, "optimizer.weight_decay.weights=0.1")),
    "best without weight decay": Arm((*CHEAP, *SSM)),
    "best, speed 10 %": Arm((*BEST, "augment.speed_change=0.1")),
    "best, channel dropout 10 %": Arm((*BEST, "augment.channel_dropout=0.1")),
    "best, masks": Arm((*BEST, MASKS % (10, 0.05))),
    "best, cr-ctc, masks": Arm((*BEST, CR % 0.2, MASKS % (10, 0.05))),
    "best, intermediate ctc": Arm((*BEST, "loss.intermediate.layers=[1]")),
    "best, ema 0.99": Arm((*BEST, "ema.decay=0.99")),
    "best, session rank 8": Arm((*BEST, "front_end.session_layer.rank=8")),
    "best, speaking mode": Arm((*BEST, "mode.enabled=true")),
    "best, transducer, both heads": Arm((*BEST, *TRANSDUCER), head="both"),
    "best, alignment": Arm(BEST, last_stage=(0.2, "alignment", "ctc: 0.5, alignment: 0.5")),
    "best, distilled": Arm(BEST, teacher=(*BEST, "encoder.bidirectional=true")),
    "best, distilled, delay 2": Arm(
        (*BEST, "loss.distillation.delay=2"), teacher=(*BEST, "encoder.bidirectional=true")
    ),
    "best, pretrained": Arm(BEST, pretrain_share=0.2),
    # Pretraining with further sessions, and time masks by number and by share.
    "best, pretrained, 5 further sessions": Arm(BEST, pretrain_share=0.2, further_sessions=5),
    "best, masks 1 x 10 bins": Arm((*BEST, MASKS_OF_BINS % (1, 10))),
    "best, masks 4 x 10 bins": Arm((*BEST, MASKS_OF_BINS % (4, 10))),
    "best, masks 2 x 2 %": Arm((*BEST, MASKS % (2, 0.02))),
    "best, masks 4 x 5 %": Arm((*BEST, MASKS % (4, 0.05))),
    # Random cuts over a complete stride, without the channel gate; changes to both, and to what remains.
    "best, cut 6": Arm((*BEST, "augment.random_cut=6")),
    "best, cut 12": Arm((*BEST, "augment.random_cut=12")),
    "best without gate": Arm((*BEST, NO_GATE)),
    "phases": Arm(PHASES),
    "phases, cut 12": Arm((*PHASES, "augment.random_cut=12")),
    "phases, cut 12, without stem": Arm((*PHASES, "augment.random_cut=12", "front_end.stem.enabled=false")),
    "phases, speed 10 %": Arm((*PHASES, "augment.speed_change=0.1")),
    "phases, speed 10 %, ema 0.99, linear": Arm((*PHASES, "augment.speed_change=0.1", "ema.decay=0.99", LINEAR)),
    "phases, session dropout 0": Arm((*PHASES, "front_end.session_layer.dropout=0.0")),
    "phases, no softsign": Arm((*PHASES, "front_end.session_layer.activation=none")),
    "phases, 192 x 2": Arm((*PHASES, "encoder.width=192", "encoder.depth=2", "encoder.n_heads=6")),
    "phases, 96 x 4": Arm((*PHASES, "encoder.width=96", "encoder.depth=4")),
    "phases, four layers": Arm((*PHASES, "encoder.depth=4")),
    "phases, noise 0.3": Arm((*PHASES, "augment.white_noise_sd=0.3")),
    "phases, noise 0.8": Arm((*PHASES, "augment.white_noise_sd=0.8")),
    "phases, smoothing of 3 bins": Arm((*PHASES, "front_end.smoothing={sd: 3.0, taps: 13}")),
    "phases, lr 0.0056": Arm((*PHASES, "schedule.peak_lr=0.0056")),
    "phases, beta2 0.99": Arm((*PHASES, "optimizer.betas=[0.9, 0.99]")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cohort", choices=sorted(COHORTS), default="choose")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=600, help="CPU time of a training, in steps of tiny")
    parser.add_argument("--arms", nargs="+", help="default: all that are defined in this file")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        names = args.arms or list(ARMS)
        if unknown := [name for name in names if name not in ARMS]:
            sys.exit(f"unknown arm {unknown[0]!r}; choose from {', '.join(ARMS)}")
        store = make_cohort(args.out, args.cohort)
        for seed in range(args.seeds):
            for name in names:
                further = ARMS[name].further_sessions
                own_store = make_cohort(args.out, args.cohort, further) if further else store
                run_arm(args.out, args.cohort, own_store, name, seed, args.budget)
    rows = read_results(args.out)
    for cohort in COHORTS:
        for budget in sorted({row["budget"] for row in rows}):
            if own := [row for row in rows if (row["cohort"], row["budget"]) == (cohort, budget)]:
                print(table(own, f"{cohort}, CPU time of {budget} steps of tiny"))


def make_cohort(out: Path, name: str, further_sessions: int = 0) -> Path:
    """The store of a cohort, simulated at the first call; its trials do not depend on `further_sessions`."""
    folder = out / (f"{name}-{further_sessions}-further" if further_sessions else name)
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        n_sessions = COHORTS[name]["n_sessions"]
        cohort = simulate(folder / "source", **{**COHORTS[name], "n_sessions": n_sessions + further_sessions})
        for session in cohort.sessions[n_sessions:]:
            remove_labels(folder / "source" / FOLDERS["b2t25"] / session)
        prepare_store(folder / "source", folder / "store")
        (folder / "complete").touch()
    return folder / "store"


def remove_labels(session: Path) -> None:
    """Delete the labels of all trials of a session, as the test files of the release have none."""
    for path in session.glob("*.hdf5"):
        with h5py.File(path, "r+") as file:
            for trial in file.values():
                for name in ("seq_class_ids", "transcription"):
                    trial.pop(name, None)
                for name in ("seq_len", "sentence_label"):
                    trial.attrs.pop(name, None)


def read_results(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    return list(read_jsonl(file)) if file.is_file() else []


def run_arm(out: Path, cohort: str, store: Path, name: str, seed: int, budget: int) -> None:
    """Train and score one arm, unless its line exists."""
    key = {"cohort": cohort, "arm": name, "seed": seed, "budget": budget}
    if any(key.items() <= row.items() for row in read_results(out)):
        return
    arm, work = ARMS[name], out / "work"
    shutil.rmtree(work, ignore_errors=True)
    started = time.process_time()
    steps, changes = plan(out, cohort, store, name, work, seed, budget)
    parent = f"{work / 'pretrained'}@last" if arm.pretrain_share else None
    n_parameters = train_one(arm.recipe, store, work / "run", [*arm.changes, *changes], steps, seed, parent)
    cpu_seconds = time.process_time() - started
    errors, lengths = score(work / "run", store, arm.head)
    append_jsonl(
        out / "results.jsonl",
        {
            **{**key, "steps": steps, "n_parameters": n_parameters},
            **{"cpu_seconds": round(cpu_seconds, 1), "errors": errors, "lengths": lengths},
        },
    )
    rate = sum(errors) / sum(lengths)
    print(f"{cohort}, {name}, seed {seed}: {steps} steps, {cpu_seconds:.0f} CPU s, PER {rate:.2%}", flush=True)


def plan(out: Path, cohort: str, store: Path, name: str, work: Path, seed: int, budget: float) -> tuple[int, list[str]]:
    """Number of steps of an arm, and changes that depend on it; trains its teacher, or pretrains it."""
    arm, changes = ARMS[name], []
    if arm.teacher is not None:
        cost = step_cost(out, cohort, store, f"teacher {arm.teacher}", Arm(arm.teacher))
        n_steps = round(arm.teacher_share * budget / cost)
        train_one("tiny", store, work / "teacher", arm.teacher, n_steps, seed)
        budget *= 1 - arm.teacher_share
        changes.append(f"loss.distillation.teacher={work / 'teacher'}@last")
    if arm.pretrain_share:
        cost = step_cost(out, cohort, store, f"{name}, pretraining", arm, PRETRAINING)
        n_steps = round(arm.pretrain_share * budget / cost)
        train_one(arm.recipe, store, work / "pretrained", [*arm.changes, *PRETRAINING], n_steps, seed)
        budget *= 1 - arm.pretrain_share
    if arm.last_stage is None:
        return round(budget / step_cost(out, cohort, store, name, arm, changes)), changes
    share, loss, weights = arm.last_stage
    without = ("transducer.enabled=false",) if loss == "rnnt" else ()
    cost = step_cost(out, cohort, store, f"{name}, without {loss}", arm, without)
    last_cost = step_cost(out, cohort, store, f"{name}, with {loss}", arm, (f"loss.{loss}.weight=1",))
    first, second = round((1 - share) * budget / cost), round(share * budget / last_cost)
    stages = (
        f"{{name: ctc, steps: {first}, losses: {{ctc: 1}}, schedule: continue}}",
        f"{{name: {loss}, steps: {second}, losses: {{{weights}}}, schedule: continue}}",
    )
    return first + second, [f"stages=[{', '.join(stages)}]"]


def step_cost(out: Path, cohort: str, store: Path, name: str, arm: Arm, more: Sequence[str] = ()) -> float:
    """CPU time of a step relative to a step of `tiny`; measured once and stored, so that all seeds train equally long.

    Both take steps in turn, on the same trials. The result is the median of the ratios of neighbouring steps, which
    depends less on the load of the machine than the ratio of the medians.
    """
    file = out / "costs.json"
    costs = read_json(file) if file.is_file() else {}
    key = f"{cohort}, {name}"
    if key not in costs:
        if arm == ARMS["tiny"]:
            return 1.0
        steppers = [make_stepper(store, "tiny", ()), make_stepper(store, arm.recipe, (*arm.changes, *more))]
        seconds = [[step(i) for step in steppers] for i in range(N_TIMED + 2)][2:]
        own, other = (statistics.median(s[k] for s in seconds) for k in (1, 0))
        ratio = statistics.median(own / other for other, own in seconds)
        write_json(file, {**costs, key: ratio, f"{key}, CPU s per step, and of tiny": [own, other]})
        costs = read_json(file)
    return float(costs[key])


def make_stepper(data: Path, name: str, changes: Sequence[str]) -> Any:
    """A function that takes a training step on batch i and returns its CPU seconds per trial of `tiny`'s batch."""
    store, recipe = Store.open(data), load_recipe(name, list(changes))
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    own = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    batches = PlannedBatches(store, selection.train, own, selection.sessions, recipe.front_end.statistics_spec, (0, 1))
    model = build_model(recipe, store, selection).train()
    state = TrainingState(model, recipe, Run(Path("unused")), "fp32")
    state.teacher = load_teacher(recipe.loss.distillation, model.config, torch.device("cpu"))
    encode = partial(encode_for_training, model)
    mean_bins = statistics.mean(own.n_bins) * recipe.data.batching.batch_size

    def step(i: int) -> float:
        started = time.process_time()
        batch = batches[i]  # loading counts: cheaper steps load more trials in the same time
        compute_gradients(state, encode, [batch], torch.device("cpu"), Distributed())
        apply_update(state)
        finish_step(state)
        # Batches differ in the lengths of their trials: relative to the bins of this one.
        return (time.process_time() - started) * mean_bins / sum(batch.lengths)

    return step


def train_one(
    recipe: str, store: Path, run: Path, changes: Sequence[str], steps: int, seed: int, parent: str | None = None
) -> int:
    settings = [
        *changes,
        f"train.steps={steps}",
        f"train.validate_every={steps}",  # once, at the end: nothing is selected
        f"train.checkpoint_every={steps}",
        f"train.seed={seed}",
        f"data.seed={seed}",
        "runtime.threads=1",
    ]
    result = train(recipe, store, run, overrides=settings, parent=parent)
    if result.interrupted:
        sys.exit("stopped by request; the next call repeats this training")
    return result.n_parameters


def score(run: Path, data: Path, head: Head) -> tuple[list[int], list[int]]:
    """Errors and reference lengths of all val and test trials with labels."""
    store, model = Store.open(data), load_model(run / "checkpoints" / "last")
    trials = [t for t in store.trials if t.split in ("val", "test") and t.tokens]
    scores = [r.score for r in decode_trials(model, store, trials, head=head)]
    return [s.errors for s in scores if s is not None], [s.length for s in scores if s is not None]


def table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """PER of every arm and its difference from `tiny`, over the seeds that both have."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    base = by_arm.pop("tiny", None)
    if base is None:
        return f"\n{title}: no results of tiny yet"
    found = []
    for name, runs in by_arm.items():
        seeds = sorted(base.keys() & runs.keys())
        if not seeds:
            continue
        first, second = (
            Errors(np.array([part[s]["errors"] for s in seeds]), np.array(part[seeds[0]]["lengths"], dtype=float))
            for part in (base, runs)
        )
        found.append((name, len(seeds), runs, first, second, difference(first, second)))
    adjusted = holm([f[-1].p for f in found])
    rate = np.mean([sum(r["errors"]) / sum(r["lengths"]) for r in base.values()])
    lines = [
        f"\n{title}: tiny {100 * rate:.2f} % ({len(base)} seeds, {base[min(base)]['n_parameters']:,} parameters,"
        f" {mean_seconds(base):.0f} CPU s)\n",
        "| arm | steps | CPU s | seeds | PER | ratio to tiny (95 % interval) | difference (95 % interval) | p, Holm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, n_seeds, runs, first, second, found_difference), p in sorted(
        zip(found, adjusted, strict=True), key=lambda f: f[0][4].rate / f[0][3].rate
    ):
        d = found_difference
        interval = f"{100 * d.estimate:+.2f} ({100 * d.low:+.2f} to {100 * d.high:+.2f})"
        low, high = ratio_interval(first, second)
        ratio = f"{second.rate / first.rate:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"| {name} | {runs[min(runs)]['steps']} | {mean_seconds(runs):.0f} | {n_seeds} |"
            f" {100 * second.rate:.2f} % | {ratio} | {interval} | {p:.3f} |"
        )
    return "\n".join(lines)


def ratio_interval(first: Errors, second: Errors) -> tuple[float, float]:
    """Fieller interval of the ratio second / first: the ratios r for which second - r first does not differ from 0."""
    limits = []
    for bound in ("low", "high"):
        below, above = 0.0, 10.0
        for _ in range(20):
            ratio = (below + above) / 2
            is_positive = getattr(contrast((first, second), (-ratio, 1.0), n_resamples=2000), bound) > 0
            below, above = (ratio, above) if is_positive else (below, ratio)
        limits.append(below)
    return limits[0], limits[1]


def mean_seconds(runs: dict[int, dict[str, Any]]) -> float:
    return statistics.mean(run["cpu_seconds"] for run in runs.values())


if __name__ == "__main__":
    main()
