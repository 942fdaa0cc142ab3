"""`arcuate train`: wires store, model, loop and validation together."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arcuate.cli.console import counted, emit_json, percent, progress, say
from arcuate.cli.watch import TerminalWatcher
from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.batching import PlannedBatches, make_plan, padding_waste, training_batches
from arcuate.data.config import Bucketed, Days
from arcuate.data.selection import Selection, select
from arcuate.data.store import Store
from arcuate.evaluation.evaluate import decode_trials, phoneme_search, session_sums, summarise_sums
from arcuate.experiments.recipe import Recipe, load_recipe, official_ancestor
from arcuate.models.config import ModelConfig, Runtime
from arcuate.models.model import Model
from arcuate.models.runtime import Machine, count_cores, set_up
from arcuate.run import Run, refuse_taken
from arcuate.training.checks import cautions, coupling_warnings
from arcuate.training.config import TrainingConfig
from arcuate.training.curriculum import describe_stages, resolve_epochs
from arcuate.training.distributed import World, join_world, leave_world, parallel_encode
from arcuate.training.environment import describe
from arcuate.training.loop import train
from arcuate.training.modes import describe_modes, learn_modes, read_modes, write_modes
from arcuate.training.precision import Choice, choose_precision
from arcuate.training.signals import listening, sole_writer
from arcuate.training.start import Start, begin, check_parent, refuse_calibrated, refuse_other_recipe
from arcuate.training.state import Training
from arcuate.training.tracking.callbacks import Watchers, check_trackers, trackers


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    recipe: str
    overrides: Sequence[str]
    data: Path
    run: Path
    resume: bool = False
    parent: str | None = None
    keep_optimizer: bool = False
    dry_run: bool = False


def train_command(asked: Asked, as_json: bool) -> int:
    summary = train_run(asked)
    told = {k: v for k, v in summary.items() if k != "exit_code"}
    if as_json and told:
        emit_json(told)
    return int(summary.get("exit_code", 0))


def train_run(asked: Asked) -> dict[str, Any]:
    """Everything `arcuate train` does; returns what it prints as JSON, and of other processes only the exit code."""
    recipe = load_recipe(asked.recipe, asked.overrides)
    check_trackers(recipe.track)
    if not asked.dry_run:
        refuse_taken(asked.run, asked.resume)
    store = Store.open(asked.data)
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    store.refuse_changed(list({t.session: t for t in selection.train}.values()))  # a look into every file
    per_epoch = make_plan(selection.train, recipe.data.batching, recipe.data.seed).batches_per_epoch
    recipe = resolve_epochs(recipe, per_epoch / recipe.train.accumulate)
    refuse_early(asked, recipe)
    store.close()  # loading processes start from here, and must not inherit open files
    before = began_with(Run(asked.run)) if asked.resume else {}
    machine = set_up(same_threads(recipe, before), recipe.encoder.width, recipe.data.batching.batch_size)
    precision = choose_precision(recipe.train.precision, machine.device, before.get("precision"))
    parent = check_parent(asked.parent, asked.resume, asked.keep_optimizer)
    model = build(recipe, store, selection).to(machine.device)
    world = join_world(machine.device)
    try:
        if world.any(precision.kind == "fp32") and precision.kind != "fp32":
            precision = Choice("fp32", "training in fp32, for another process does")
        had = before.get("processes", world.size)
        if world.writes and had != world.size:
            say(
                f"warning: this run had {had} processes and now has {world.size}: dropout and rounding differ"
            )
        summary = run_training(asked, recipe, store, selection, machine, precision, parent, model, world)
        return summary if world.writes else {"exit_code": summary.get("exit_code", 0)}
    finally:
        leave_world()


def refuse_early(asked: Asked, recipe: Recipe) -> None:
    """A run folder that cannot be used is told before anything is announced; it is looked at again when written."""
    if asked.dry_run:
        return
    run = Run(asked.run)
    refuse_taken(asked.run, asked.resume)
    if asked.resume and run.recipe_file.is_file():
        refuse_calibrated(run)
        refuse_other_recipe(run, recipe)


def run_training(
    asked: Asked,
    recipe: Recipe,
    store: Store,
    selection: Selection,
    machine: Machine,
    precision: Choice,
    parent: Path | None,
    model: Model,
    world: World,
) -> dict[str, Any]:
    n_parameters = sum(p.numel() for p in model.parameters())
    facts = {"run": str(asked.run), "recipe": recipe.name, "n_parameters": n_parameters}
    if world.writes:
        for line in announce(recipe, store, selection, n_parameters, machine, precision, world):
            say(line)
        if ancestor := official_ancestor(asked.recipe):
            for warning in coupling_warnings(recipe, load_recipe(ancestor), ancestor):
                say(f"warning: {warning}")
    if asked.dry_run:
        if world.writes:
            say("dry run: nothing was written")
        return {
            **facts,
            "dry_run": True,
            "n_train": len(selection.train),
            "n_validation": len(selection.validation),
            "steps": recipe.train.steps,
            "stages": {stage.name: stage.steps for stage in recipe.stages},
        }
    environment = describe(
        device=str(machine.device),
        threads=machine.threads,
        threads_reason=machine.reason,
        processes=world.size,
        data=store_facts(store, selection),
        n_parameters=n_parameters,
        selected_on=selection.selected_on,
        precision=precision.kind,
        parent=asked.parent,
    )
    training = Training(model, recipe, Run(asked.run), precision.kind)
    start = Start(asked.resume, parent, asked.keep_optimizer)
    with ExitStack() as held:
        with world.agreeing():
            refuse_taken(asked.run, asked.resume)
            if world.writes:
                held.enter_context(sole_writer(training.run, say))
        begin(training, start, environment, world, say)
        if training.finished:
            if world.writes:
                say(f"{asked.run} is finished: {training.step} steps")
            return {**facts, **result(training, selection, 0.0)}
        find_modes(training, store, selection, world)
        return {**facts, **train_in(training, store, selection, machine, world)}


def find_modes(training: Training, store: Store, selection: Selection, world: World) -> None:
    """Speaking modes of the training trials: found once, and remembered in the run folder."""
    file, head = training.run.modes_file, training.model.mode
    if head is None:
        return
    if training.position > 0 and file.is_file():
        training.modes = read_modes(file)
        return
    with progress("looking for speaking modes") if world.writes else nullcontext() as report:
        training.modes = learn_modes(training.model, store, selection.train, report)
    store.close()  # loading processes must not inherit open files
    if world.writes:
        write_modes(file, training.modes)
        say(describe_modes(selection.train, training.modes, training.recipe.mode))


def began_with(run: Run) -> dict[str, Any]:
    """The environment a run began in, where it has begun."""
    return run.environment() if run.recipe_file.is_file() and run.environment_file.is_file() else {}


def same_threads(recipe: Recipe, before: dict[str, Any]) -> Runtime:
    """Another number of threads rounds differently: a resumed run keeps the one it had, unless told otherwise."""
    told = recipe.runtime.threads is not None or "OMP_NUM_THREADS" in os.environ
    had = before.get("threads")
    if told or not isinstance(had, int) or not 1 <= had <= 1024:
        return recipe.runtime
    return recipe.runtime.model_copy(update={"threads": had})


def build(recipe: Recipe, store: Store, selection: Selection) -> Model:
    torch.manual_seed(recipe.train.seed)
    config = ModelConfig(
        settings=recipe.model, n_channels=store.n_channels, sessions=selection.sessions, classes=CLASSES
    )
    return Model(config)


def train_in(
    training: Training, store: Store, selection: Selection, machine: Machine, world: World
) -> dict[str, Any]:
    """Train what is left to train; the run folder is there and the state is the one to start from."""
    recipe, started = training.recipe, time.perf_counter()
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(
        store, selection.train, plan, selection.sessions, recipe.front_end.wanted, (world.rank, world.size)
    )
    batches = training_batches(
        planned, training.position, None, worker_count(recipe), pin_memory=machine.device.type == "cuda"
    )
    shown = Watchers()  # only the process that writes has anyone watching
    if world.writes:
        tracked = trackers(recipe, training.run, training.step, say)
        shown = Watchers(*tracked, TerminalWatcher(recipe.train.steps))
    validate = validator(training, store, selection, world, shown.sample) if selection.validation else None
    with closing(batches), listening(patient=world.size > 1) as stop, shown as watcher:
        train(
            *(training, batches, validate, machine.device, watcher, stop),
            lambda: parallel_encode(training.model, recipe, machine.device, world),
            world,
        )
    seconds = time.perf_counter() - started
    if world.writes:
        if stop.signal is not None:
            say(f"stopped by {stop.signal.name} after step {training.step}; go on with:")
            run = training.run
            say(f"arcuate train {run.recipe_file} --data {store.path} --run {run.path} --resume")
        elif training.best.per is not None:
            best = training.best
            say(
                f"best {selection.selected_on} PER {percent(best.per)} at step {best.step}; {seconds:.0f} s in all"
            )
        if stop.signal is None:
            say(f"{training.run.path} is done; next: arcuate evaluate {training.run.path}")
    return {**result(training, selection, seconds), "exit_code": stop.exit_code}


def worker_count(recipe: TrainingConfig) -> int:
    """Loading processes, no more than there are cores; their number changes no result."""
    return min(recipe.data.workers, count_cores())


def result(training: Training, selection: Selection, seconds: float) -> dict[str, Any]:
    return {
        "steps": training.step,
        "best_per": training.best.per,
        "best_step": training.best.step,
        "selected_on": selection.selected_on,
        "rewinds": training.guard.n_rewinds,
        "seconds": seconds,
    }


def validator(
    training: Training,
    store: Store,
    selection: Selection,
    world: World,
    show: Callable[[Sequence[str], Sequence[str]], None],
) -> Callable[[Model], dict[str, Any]]:
    """Scores this process's share of the validation trials; sums are added over all processes."""
    mine, recipe = selection.validation[world.rank :: world.size], training.recipe
    settings, search = recipe.validate_, phoneme_search(recipe.validate_)

    def validate(model: Model) -> dict[str, Any]:
        started = time.perf_counter()
        results = decode_trials(
            model, store, mine, batch_size=settings.batch_size, loss=training.loss, search=search
        )
        if results and results[0].trial.tokens is not None:
            show(token_names(results[0].trial.tokens), token_names(results[0].tokens))
        sums = world.sum(session_sums(results, selection.sessions))
        cost = {"seconds": time.perf_counter() - started}
        return {"split": selection.selected_on, **summarise_sums(sums, selection.sessions), "cost": cost}

    return validate


def announce(
    recipe: Recipe,
    store: Store,
    selection: Selection,
    n_parameters: int,
    machine: Machine,
    precision: Choice,
    world: World,
) -> list[str]:
    """What is about to be trained, on what, and where it departs from what the recipe asked for."""
    channels, sessions = counted(store.n_channels, "channel"), counted(len(selection.sessions), "session")
    selecting = counted(len(selection.validation), f"{selection.selected_on} trial")
    lines = [
        f"{recipe.name}: {n_parameters:,} parameters, {channels}, {sessions}",
        f"{counted(len(selection.train), 'training trial')}; checkpoints are selected on {selecting}",
        f"{machine.device}, {counted(machine.threads, 'thread')}: {machine.reason}",
    ]
    if (workers := worker_count(recipe)) < recipe.data.workers:
        lines.append(f"data.workers={recipe.data.workers} is more than there are cores; using {workers}")
    if recipe.stages:
        lines.append(describe_stages(recipe.stages))
    batching, patch = recipe.data.batching, recipe.front_end.patch
    if world.size > 1:
        lines.append(f"{world.size} processes share every batch")
    if selection.unaligned:
        lines.append(
            f"{counted(len(selection.unaligned), 'training trial')} left out: labels that need more frames than"
            f" patches of {patch.bins}/{patch.stride} bins give"
        )
    if not selection.validation:
        lines.append("no validation trials: the last checkpoint will count as the best")
    if isinstance(batching, Days) and batching.n_sessions > len(selection.sessions):
        lines.append(f"a batch holds {sessions}, for the data have no more")
    if isinstance(batching, Bucketed):
        plan = make_plan(selection.train, batching, recipe.data.seed)
        epoch = [plan.draw(i) for i in range(plan.batches_per_epoch)]
        lines.append(f"padding waste {percent(padding_waste(epoch, plan.n_bins))}")
    notes = [precision.note] if precision.note else []
    cautious = cautions(recipe, bool(selection.validation), machine.device.type)
    return lines + notes + [f"warning: {line}" for line in cautious]


def store_facts(store: Store, selection: Selection) -> dict[str, Any]:
    return {
        "path": str(store.path.resolve()),
        "layout": store.layout,
        "n_channels": store.n_channels,
        "sessions": list(selection.sessions),
        "hashes": store.manifest.get("hashes"),
    }
