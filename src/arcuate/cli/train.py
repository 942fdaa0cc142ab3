"""`arcuate train`: wires store, model, loop and validation together."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from arcuate.batches.batch import PlannedBatches, training_batches
from arcuate.batches.plan import make_plan, padding_waste
from arcuate.batches.select import Selection, select
from arcuate.batches.settings import Bucketed, Days
from arcuate.cli.console import bar, emit_json, err, percent, say
from arcuate.environment import describe
from arcuate.evaluate import decode_trials, summarise
from arcuate.models.model import Model
from arcuate.models.settings import ModelCard
from arcuate.recipe import Recipe, load_recipe
from arcuate.run import Run, create_run
from arcuate.runtime import Machine, set_up
from arcuate.store import Store
from arcuate.tokens import CLASSES
from arcuate.training.loop import Best, train


class TerminalWatcher:
    """A progress bar with time left, and a line per validation (or, without a terminal, per log row)."""

    def __init__(self, n_steps: int) -> None:
        self.bar = bar()
        self.task = self.bar.add_task("training", total=n_steps)
        self.loss = ""

    def __enter__(self) -> "TerminalWatcher":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        loss = "–" if row.get("loss") is None else f"{row['loss']:.3f}"
        if row["split"] == "train":
            self.bar.update(self.task, description=f"training, loss {loss}")
            if not err.is_terminal:
                say(
                    f"step {row['step']:>6}  loss {loss}  grad norm {row['grad_norm']:.2f}  lr {row['lr']:.2e}"
                )
        else:
            say(f"step {row['step']:>6}  {row['split']} PER {percent(row['per'])}  loss {loss}")


def train_command(
    name: str, overrides: Sequence[str], data: Path, run_path: Path, dry_run: bool, as_json: bool
) -> None:
    summary = train_run(name, overrides, data, run_path, dry_run)
    if as_json:
        emit_json(summary)


def train_run(
    name: str, overrides: Sequence[str], data: Path, run_path: Path, dry_run: bool = False
) -> dict[str, Any]:
    """Everything `arcuate train` does; returns what it would print as JSON."""
    recipe = load_recipe(name, overrides)
    store = Store.open(data)
    selection = select(store, recipe.data, recipe.front_end.patch)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    machine = set_up(recipe.runtime, recipe.encoder.width, recipe.data.batching.batch_size)
    model = build(recipe, store, selection).to(machine.device)
    for line in announce(recipe, store, selection, model, machine, plan.n_trials):
        say(line)
    environment = describe(
        device=str(machine.device),
        threads=machine.threads,
        threads_reason=machine.reason,
        data=store_facts(store, selection),
        n_parameters=sum(p.numel() for p in model.parameters()),
        selected_on=selection.selected_on,
    )
    facts = {"run": str(run_path), "recipe": recipe.name, "n_parameters": environment["n_parameters"]}
    if dry_run:
        say("dry run: nothing was written")
        return {
            **facts,
            "dry_run": True,
            "n_train": len(selection.train),
            "n_validation": len(selection.validation),
        }
    run = create_run(run_path, recipe, environment)
    started = time.perf_counter()
    best = train_in(run, recipe, store, selection, model, machine)
    seconds = time.perf_counter() - started
    if best.per is not None:
        say(
            f"best {selection.selected_on} PER {percent(best.per)} at step {best.step}; {seconds:.0f} s in all"
        )
    return {
        **facts,
        "steps": recipe.train.steps,
        "best_per": best.per,
        "best_step": best.step,
        "selected_on": selection.selected_on,
        "seconds": seconds,
    }


def build(recipe: Recipe, store: Store, selection: Selection) -> Model:
    torch.manual_seed(recipe.train.seed)
    card = ModelCard(
        settings=recipe.model, n_channels=store.n_channels, sessions=selection.sessions, classes=CLASSES
    )
    return Model(card)


def train_in(
    run: Run, recipe: Recipe, store: Store, selection: Selection, model: Model, machine: Machine
) -> Best:
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    planned = PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.normalise)
    batches = training_batches(planned, 0, recipe.train.steps, recipe.data.workers)

    def validate(model: Model) -> dict[str, Any]:
        started = time.perf_counter()
        results = decode_trials(
            model, store, selection.validation, batch_size=recipe.validate_.batch_size, loss=recipe.loss
        )
        summary = summarise(results, n_resamples=0)
        kept = ("loss", "per", "substitutions", "insertions", "deletions", "n_tokens", "per_by_session")
        cost = {"seconds": time.perf_counter() - started}
        return {"split": selection.selected_on, **{k: summary[k] for k in kept}, "cost": cost}

    with TerminalWatcher(recipe.train.steps) as watcher:
        return train(
            model, batches, validate if selection.validation else None, recipe, run, machine.device, watcher
        )


def announce(
    recipe: Recipe, store: Store, selection: Selection, model: Model, machine: Machine, n_trials: int
) -> list[str]:
    """What is about to be trained, on what, and where it departs from what the recipe asked for."""
    n_parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"{recipe.name}: {n_parameters:,} parameters, {store.n_channels} channels, {len(selection.sessions)} sessions",
        f"{n_trials} training trials; checkpoints are selected on {len(selection.validation)}"
        f" {selection.selected_on} trials",
        f"{machine.device}, {machine.threads} thread{'s' if machine.threads > 1 else ''}: {machine.reason}",
    ]
    batching = recipe.data.batching
    if selection.unaligned:
        lines.append(
            f"{len(selection.unaligned)} training trials are left out: their labels need more frames than"
            f" patches of {recipe.front_end.patch.bins}/{recipe.front_end.patch.stride} bins give"
        )
    if not selection.validation:
        lines.append("no validation trials: the last checkpoint will count as the best")
    if isinstance(batching, Days) and batching.n_sessions > len(selection.sessions):
        lines.append(f"a batch holds {len(selection.sessions)} sessions, for the data have no more")
    if isinstance(batching, Bucketed):
        plan = make_plan(selection.train, batching, recipe.data.seed)
        epoch = [plan.draw(i) for i in range(plan.batches_per_epoch)]
        lines.append(f"padding waste {percent(padding_waste(epoch, plan.n_bins))}")
    if recipe.train.precision == "bf16" and machine.device.type != "cuda":
        lines.append("bf16 is many times slower than fp32 on a CPU: training in fp32")
    return lines


def store_facts(store: Store, selection: Selection) -> dict[str, Any]:
    return {
        "path": str(store.path.resolve()),
        "layout": store.layout,
        "n_channels": store.n_channels,
        "sessions": list(selection.sessions),
        "hashes": store.manifest.get("hashes"),
    }
