"""Sabotage suite: ways to break a healthy recipe, each trained with and without the guard.

python benchmarks/sabotage.py --out runs/sabotage [--jobs 2] [--only rate-10x,eps-0.1] [--arms off,guard]
python benchmarks/sabotage.py --out runs/sabotage --healthy 20        # healthy recipes: number of runs touched

A small GRU (one layer of 64 units, 160 steps, four CPU seconds; with the guard ten) on two simulated cohorts, two
seeds; `--cohorts held-out` is a third cohort on which no rule was chosen. A run is within
10 % if the PER of its last validation is at most 1.1 times the mean of the healthy runs of its cohort; it is lost if it
was stopped or ends above 1.25 times that mean. Finished runs (those with a `sabotage.json`) are not trained again, and
all run folders are kept:

    OUT/<cohort>/<sabotage>/seed-<n>/<arm>/sabotage.json    name, affected factor and settings, cure, outcome
"""

import argparse
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import numpy as np
import torch
from common import percent, table

from arcuate.data.alphabet import SILENCE, min_frames
from arcuate.data.batching import PlannedBatches
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.data.store_writer import create_store
from arcuate.errors import UserError
from arcuate.experiments import train as train_module
from arcuate.files import read_json, read_jsonl, write_json
from arcuate.training import loop

SEEDS = (0, 1)
STEPS = 160
RECIPE: dict[str, Any] = {
    "data.batching": {"kind": "bucketed", "batch_size": 6},
    "encoder": {"kind": "gru", "width": 64, "depth": 1, "dropout": 0.1, "learned_initial_state": True},
    "front_end.patch": {"bins": 12, "stride": 6},
    "augment.white_noise_sd": 0.2,
    "augment.offset_sd": 0.0,
    "schedule": {"kind": "warmup_cosine", "peak_lr": 0.008, "min_lr": 8e-5, "warmup_fraction": 0.06},
    "train.log_every": 10,
    "train.validate_every": 80,
    "train.checkpoint_every": 20,
    "guard.stuck.patience": 50,  # limits in steps are scaled to the length of the run
    "runtime.threads": 1,
}
COHORTS: dict[str, dict[str, Any]] = {
    "demo": {"layout": "b2t25", "n_sessions": 3, "n_trials": 240, "n_electrodes": 24, "difficulty": "easy", "seed": 0},
    "other": {"layout": "b2t24", "n_sessions": 2, "n_trials": 320, "n_electrodes": 32, "difficulty": "easy", "seed": 7},
    # No rule was chosen on this one.
    "held-out": {"layout": "b2t25", "n_sessions": 4, "n_trials": 200, "n_electrodes": 48, "seed": 31},
}
TUNED_ON = ("demo", "other")


@dataclass(frozen=True)
class Sabotage:
    """One way to break the recipe."""

    name: str
    factor: str  # what was broken, in words
    keys: tuple[str, ...] = ()  # settings whose change caused it
    cure: Literal["none", "optimizer", "settings", "data"] = "optimizer"  # what can cure it; none = healthy
    overrides: tuple[tuple[str, Any], ...] = ()
    fault: str = ""  # fault in the store
    patch: str = ""  # fault in the program


def _schedule(name: str, factor: str, **schedule: Any) -> Sabotage:
    return Sabotage(name, factor, ("schedule",), overrides=(("schedule", schedule),))


def _setting(name: str, factor: str, cure: Any = "optimizer", **overrides: Any) -> Sabotage:
    pairs = tuple((key.replace("__", "."), value) for key, value in overrides.items())
    return Sabotage(name, factor, tuple(key for key, _ in pairs), cure, pairs)


def _healthy(name: str, **overrides: Any) -> Sabotage:
    return _setting(name, "none", "none", **overrides)


HEALTHY = _healthy("healthy")
_MASKS = {"n_masks": 20, "max_fraction": 0.2, "fixed_count": True}
_FROZEN = [{"name": "all", "steps": STEPS, "train": ["ctc"], "losses": {"ctc": 1.0}}]
_COSINE = {"kind": "warmup_cosine", "min_lr": 8e-5}
SABOTAGES = (
    _setting("rate-3x", "learning rate", schedule__peak_lr=0.024),
    _setting("rate-10x", "learning rate", schedule__peak_lr=0.08),
    _setting("rate-30x", "learning rate", schedule__peak_lr=0.24),
    _setting("rate-0.03x", "learning rate", schedule__peak_lr=2.4e-4),
    _schedule("no-warmup-10x", "learning rate, warm-up", **_COSINE, peak_lr=0.08),
    _schedule("warmup-whole-run-10x", "learning rate, warm-up", **_COSINE, peak_lr=0.08, warmup_fraction=1.0),
    _schedule("constant-3x", "learning rate, decay", kind="constant", peak_lr=0.024),
    _schedule("one-cycle-mid-10x", "learning rate", kind="one_cycle", peak_lr=0.08, pct_start=0.5, div_factor=10),
    _schedule("one-cycle-mid-30x", "learning rate", kind="one_cycle", peak_lr=0.24, pct_start=0.5, div_factor=30),
    _schedule("one-cycle-late-10x", "learning rate", kind="one_cycle", peak_lr=0.08, pct_start=0.8, div_factor=10),
    _schedule("one-cycle-steep", "learning rate, warm-up", kind="one_cycle", peak_lr=0.24, pct_start=0.05),
    Sabotage("jump-early-30x", "learning rate", patch="jump:16:30"),
    Sabotage("jump-mid-10x", "learning rate", patch="jump:75:10"),
    Sabotage("jump-late-30x", "learning rate", patch="jump:125:30"),
    _setting("eps-1e-4", "eps", optimizer__eps=1e-4),
    _setting("eps-1e-2", "eps", optimizer__eps=1e-2),
    _setting("eps-0.1", "eps", optimizer__eps=0.1),
    _setting("reduction-sum", "loss reduction", loss__ctc__reduction="sum_per_trial"),
    _setting("clip-1e-3-eps-1e-4", "gradient clipping", train__clip_norm=1e-3, optimizer__eps=1e-4),
    _setting("no-clip-10x", "gradient clipping, learning rate", train__clip_norm=None, schedule__peak_lr=0.08),
    _setting("weight-decay-1", "weight decay", optimizer__weight_decay__weights=1.0),
    _setting("beta2-0.5", "optimizer betas", optimizer__betas=[0.9, 0.5]),
    Sabotage("bf16-rounding", "precision", patch="bf16"),
    Sabotage("corrupt-batch", "a corrupted batch", patch="corrupt:60:1"),
    Sabotage("corrupt-30-batches", "corrupted batches", patch="corrupt:60:30"),
    _setting("batch-of-1", "batch size", "settings", data__batching__batch_size=1),
    _setting("masks-too-wide", "time masks", "settings", augment__time_masks=_MASKS),
    _setting("frozen-encoder", "trained components", "settings", stages=_FROZEN),
    _setting("noise-5", "white noise", "settings", augment__white_noise_sd=5.0),
    Sabotage("repeating-order", "data order", cure="data", patch="repeat:4"),
    Sabotage("nan-bins-1%", "non-finite bins", cure="data", fault="nan:0.01"),
    Sabotage("nan-bins-5%", "non-finite bins", cure="data", fault="nan:0.05"),
    Sabotage("mislabelled-30%", "labels", cure="data", fault="labels:0.3"),
    Sabotage("dead-session", "a dead session", cure="data", fault="dead"),
    Sabotage("padded-labels", "label lengths", cure="data", fault="padded"),
)
# Healthy variants of the recipe: schedules, encoders, and the official '25 combination of rate, eps and reduction.
HEALTHY_RECIPES = (
    HEALTHY,
    _healthy("one-cycle", schedule={"kind": "one_cycle", "peak_lr": 0.01}),
    _healthy("constant", schedule={"kind": "constant", "peak_lr": 0.004}),
    _healthy(
        "official-25",
        **{"loss__ctc__reduction": "sum_per_trial", "optimizer__eps": 0.1},
        **{"train__clip_norm": 10.0, "schedule__peak_lr": 0.005},
    ),
    _healthy(
        "transformer",
        encoder={"kind": "transformer", "width": 64, "depth": 2, "n_heads": 4},
        schedule__peak_lr=0.003,
    ),
    _healthy("ssm", encoder={"kind": "ssm", "width": 64, "depth": 2}, schedule__peak_lr=0.004),
)
# In 120 steps updates at eps 0.1 are too small to train anything (65 to 77 % PER), which is not a healthy run.
HEALTHY_STEPS = {"official-25": 480}


@dataclass(frozen=True)
class Job:
    """One run of the suite."""

    sabotage: Sabotage
    cohort: str
    seed: int
    arm: str  # off or guard
    out: Path
    steps: int = STEPS

    @property
    def folder(self) -> Path:
        return self.out / self.cohort / self.sabotage.name / f"seed-{self.seed}" / self.arm


# Faults in the data: edited after preparation, which would have found some of them.


def make_store(out: Path, cohort: str, fault: str = "") -> Path:
    """Return the store of a cohort, simulated once, with a fault written into the training trials."""
    clean = out / "data" / cohort / "store"
    if not clean.exists():
        source = out / "data" / cohort / "source"
        simulate(source, **COHORTS[cohort])
        prepare(source, clean)
    if not fault:
        return clean
    store = out / "data" / cohort / f"store-{fault.replace(':', '-')}"
    if not store.exists():
        _write_fault(clean, store, fault)
    return store


def _write_fault(clean: Path, out: Path, fault: str) -> None:
    """A copy of a store whose training trials have a fault that its quality flags do not show."""
    kind, _, share = fault.partition(":")
    store, rng = Store.open(clean), np.random.default_rng(0)
    training = [t for t in store.trials if t.split == "train"]
    chosen = [t for t in training if rng.random() < float(share or 1)]
    if kind == "dead":
        chosen = [t for t in training if t.session == training[0].session]
    labels = [t.tokens or () for t in chosen]
    with create_store(out, store.n_channels) as writer:
        for info in store.trials:
            trial = replace(store.read(info), bins=store.read_stored(info))
            bins, tokens = trial.bins, list(info.tokens or ())
            if info in chosen and kind == "nan":
                bins[len(bins) // 2, :8] = np.nan
            elif info in chosen and kind == "dead":
                bins[:] = 0.0
            elif info in chosen and kind == "labels":  # the label of another chosen trial that fits
                others = [other for other in labels if len(other) <= len(tokens)]
                trial = replace(trial, tokens=np.array(others[rng.integers(len(others))]))
            elif info in chosen and kind == "padded":  # with as many silences as CTC can align: two frames each
                window = RECIPE["front_end.patch"]
                n_frames = (len(bins) - window["bins"]) // window["stride"] + 1
                n_spare = n_frames - min_frames(tokens)
                trial = replace(trial, tokens=np.array(tokens + [SILENCE] * max(0, min(12, n_spare // 2))))
            writer.add(trial, info.flags)
        writer.finish(store.layout, store.classes, simulated=store.simulated)


# Faults in the program: patched into the loop for one run.


@contextmanager
def patched(fault: str) -> Iterator[None]:
    kind, *numbers = fault.split(":")
    if kind == "repeat":
        original = train_module.training_batches
        n_batches = int(numbers[0])

        def repeating(data: PlannedBatches, *args: Any, **options: Any) -> Any:
            return original(cast(PlannedBatches, _Repeated(data, n_batches)), *args, **options)

        with patch.object(train_module, "training_batches", repeating):
            yield
        return
    wrappers: dict[str, tuple[str, Callable[..., Any]]] = {
        "jump": ("_set_learning_rates", _jump),
        "bf16": ("apply_update", _round_weights),
        "corrupt": ("compute_gradients", _corrupt),
    }
    name, wrap = wrappers[kind]
    with patch.object(loop, name, partial(wrap, getattr(loop, name), *map(int, numbers))):
        yield


class _Repeated:
    """The same few batches in an endless cycle."""

    def __init__(self, data: PlannedBatches, n_batches: int) -> None:
        self._data, self._n_batches = data, n_batches

    def __getitem__(self, position: int) -> Any:
        return self._data[position % self._n_batches]


def _jump(original: Callable[..., dict[str, float]], step: int, factor: int, state: Any) -> dict[str, float]:
    """Multiply the learning rate from a step on."""
    rates = original(state)
    if state.progress.step < step:
        return rates
    for group in state.optimizer.param_groups:
        group["lr"] *= factor
    return {name: lr * factor for name, lr in rates.items()}


def _round_weights(original: Callable[..., Any], state: Any, **options: Any) -> Any:
    """Keep the weights in bfloat16 precision."""
    result = original(state, **options)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return result


def _corrupt(
    original: Callable[..., Any], first: int, n: int, state: Any, encode: Any, batches: Any, *rest: Any
) -> Any:
    """Scale the bins of the batches at n positions by a hundred, and shuffle their labels."""
    if first <= batches[0].position < first + n:
        batches = [
            replace(b, bins=b.bins * 100.0, tokens=b.tokens.flip(0), n_tokens=b.n_tokens.flip(0)) for b in batches
        ]
    return original(state, encode, batches, *rest)


def run(job: Job) -> dict[str, Any]:
    """Train one run, unless it is finished; return the content of its sabotage.json."""
    record_file = job.folder / "sabotage.json"
    if record_file.exists():
        return read_json(record_file)
    shutil.rmtree(job.folder, ignore_errors=True)
    torch.set_num_threads(1)
    overrides = {**RECIPE, "train.seed": job.seed, "data.seed": job.seed, **dict(job.sabotage.overrides)}
    overrides |= {"guard.enabled": job.arm != "off", "train.steps": job.steps}
    store, error, started = make_store(job.out, job.cohort, job.sabotage.fault), None, time.process_time()
    with ExitStack() as stack:
        stack.enter_context(patched(job.sabotage.patch) if job.sabotage.patch else nullcontext())
        try:
            if train_module.train("tiny", store, job.folder, overrides=overrides).interrupted:
                raise KeyboardInterrupt
        except UserError as stopped:
            error = str(stopped)
    rows = read_jsonl(job.folder / "metrics.jsonl")
    validations = [row for row in rows if row.get("per") is not None]
    incidents = read_jsonl(job.folder / "incidents.jsonl")
    record = {
        **asdict(job.sabotage),
        "cohort": job.cohort,
        "seed": job.seed,
        "arm": job.arm,
        "per": validations[-1]["per"] if validations else None,
        "best_per": min((row["per"] for row in validations), default=None),
        "error": error,
        "incidents": [
            f"{i['step']} {i['kind']} {i.get('action', '')} {i.get('lr_scale', '')}".strip() for i in incidents
        ],
        "cpu_seconds": time.process_time() - started,
    }
    write_json(record_file, record)
    return record


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of every run, and the shares by cure and arm."""
    healthy: dict[str, float] = {}
    for cohort in COHORTS:
        pers = [r["per"] for r in records if r["cohort"] == cohort and r["cure"] == "none"]
        if pers:
            healthy[cohort] = sum(pers) / len(pers)
    broken = [r for r in records if r["cure"] != "none" and r["cohort"] in healthy]
    for record in broken:
        record["relative"] = None if record["per"] is None else record["per"] / healthy[record["cohort"]] - 1
        ended = record["error"] is None and record["relative"] is not None
        limits = {"within 10 %": 0.10, "within 25 %": 0.25}
        outcome = next((n for n, limit in limits.items() if ended and record["relative"] <= limit), "lost")
        record["outcome"] = outcome
    groups: dict[str, dict[str, int]] = {}
    for record in broken:
        counts = groups.setdefault(f"{record['cure']}, {record['arm']}", {})
        for name in ("runs", record["outcome"]):
            counts[name] = counts.get(name, 0) + 1
    return {"healthy": healthy, "groups": groups, "runs": broken}


def print_table(summary: dict[str, Any]) -> None:
    print("healthy PER:", ", ".join(f"{name} {percent(per)}" for name, per in summary["healthy"].items()), end="\n\n")
    rows: list[list[Any]] = []
    for name, counts in sorted(summary["groups"].items()):
        near, far, lost = (counts.get(outcome, 0) for outcome in ("within 10 %", "within 25 %", "lost"))
        rows.append([name, counts["runs"], *(percent(k / counts["runs"], 0) for k in (near, near + far, lost))])
    print(table(["cure, arm", "runs", "within 10 %", "within 25 %", "lost"], rows), end="\n\n")
    rows = []
    for sabotage in SABOTAGES:
        named = [r for r in summary["runs"] if r["name"] == sabotage.name]
        cells = [" ".join(_cell(r) for r in named if r["arm"] == arm) for arm in ("off", "guard")]
        rows += [[sabotage.name, sabotage.cure, *cells]] if named else []
    print(table(["sabotage", "cure", "without guard, % PER", "with guard, % PER"], rows))


def _cell(record: dict[str, Any]) -> str:
    if record["error"] is not None or record["per"] is None:
        return "stopped"
    per = f"{100 * record['per']:.0f}"
    return {"within 10 %": f"**{per}**", "within 25 %": per, "lost": f"({per})"}[record["outcome"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of data and runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", help="names of sabotages, separated by commas")
    parser.add_argument("--arms", default="off,guard", help="off, guard or both; any other name is a guard arm too")
    parser.add_argument("--cohorts", default=",".join(TUNED_ON), help=", ".join(COHORTS))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--healthy", type=int, metavar="N", help="train N seeds of every healthy recipe instead")
    args = parser.parse_args()
    cohorts = args.cohorts.split(",")
    if args.healthy:
        jobs = [
            Job(recipe, cohorts[0], seed, "guard", args.out / "healthy", HEALTHY_STEPS.get(recipe.name, 120))
            for seed in range(args.healthy)
            for recipe in HEALTHY_RECIPES
        ]
    else:
        chosen = [s for s in SABOTAGES if args.only is None or s.name in args.only.split(",")]
        jobs = [Job(HEALTHY, cohort, seed, "off", args.out) for cohort in cohorts for seed in range(4)]
        order = product(args.arms.split(","), range(args.seeds), cohorts, chosen)
        jobs += [Job(sabotage, cohort, seed, arm, args.out) for arm, seed, cohort, sabotage in order]
    for cohort in cohorts:
        make_store(jobs[0].out if jobs else args.out, cohort)
    records = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) if args.jobs > 1 else nullcontext() as pool:
        for record in pool.imap(run, jobs) if pool else map(run, jobs):
            records.append(record)
            names = (
                f"{record['cohort']} {record['name']} {record['seed']} {record['arm']}: PER {percent(record['per'])}"
            )
            print(f"{names} {record['incidents'][-4:]} {record['error'] or ''}", flush=True)
    if args.healthy:
        touched = [r for r in records if r["incidents"]]
        print(f"{len(touched)} of {len(records)} healthy runs touched", *(r["name"] for r in touched))
    else:
        print_table(summarise(records))


if __name__ == "__main__":
    main()
