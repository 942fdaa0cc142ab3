"""`arcuate calibrate`: a new day for a trained model, as a new run folder that names its parent."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from arcuate.adaptation.calibration import (
    CalibrationSplit,
    CurvePoint,
    curve_point,
    curve_sizes,
    split_session,
)
from arcuate.adaptation.config import Calibration
from arcuate.adaptation.drift import warn_about_recording
from arcuate.cli.console import counted, emit_json, out, percent, progress, say
from arcuate.cli.set_option import read_set
from arcuate.data.selection import select
from arcuate.data.sessions import days_between, nearest_session
from arcuate.data.store import Store, TrialInfo
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import ModelSource, find_source
from arcuate.evaluation.trials import TrialResult, decode_trials
from arcuate.experiments.calibrate import begin_with, derive_recipe, fit_layer
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.experiments.train import describe_store
from arcuate.files import write_json
from arcuate.insight.report.calibration import CALIBRATION_FILE as FILE
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.models.model import (
    Model,
    copy_session_layer,
    count_parameters,
    enable_session_layers,
    single_session_model,
)
from arcuate.models.runtime import configure_runtime
from arcuate.progress import Progress
from arcuate.run import Run, lock_run, open_run, refuse_taken
from arcuate.training.callbacks import Callback
from arcuate.training.environment import describe_environment
from arcuate.training.interrupts import Stop, handle_signals


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    parent: Path
    data: Path
    session: str
    run: Path | None = None
    sentences: int = 20
    curve: str | None = None  # sentences, a comma between them; "none" for no curve
    settings: tuple[str, ...] = ()
    checkpoint: str = "best"
    dry_run: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that is known before anything is trained."""

    asked: Asked
    run: Run
    source: ModelSource
    store: Store
    model: Model
    recipe: Recipe
    settings: Calibration
    day: CalibrationSplit
    old: tuple[TrialInfo, ...]
    points: tuple[int, ...]


def calibrate_command(asked: Asked, as_json: bool) -> int:
    plan = prepare_plan(asked)
    announce(plan)
    if asked.dry_run:
        say("dry run: nothing was written")
        if as_json:
            emit_json({**facts(plan), "dry_run": True})
        return 0
    with handle_signals() as stop:
        summary = calibrate(plan, stop)
    if summary is None:
        say(f"stopped by {stop.signal.name if stop.signal else 'a signal'}: nothing was written")
        return stop.exit_code
    emit_json(summary) if as_json else show(plan, summary)
    return 0


def prepare_plan(asked: Asked) -> Plan:
    """Checks everything that can be wrong before the first step."""
    settings = read_set(Calibration, asked.settings, "other_lr_factor=0")
    source = find_source(open_run(asked.parent), asked.checkpoint)
    run = Run(asked.run or asked.parent.resolve().with_name(f"{source.run.name}-{asked.session}"))
    refuse_inside(run, source.run)
    if not asked.dry_run:
        refuse_taken(run.path, resumes=False)
    store = Store.open(asked.data)
    model = load_model(source.checkpoint)
    refuse_misfits(model, store, asked)
    day = split_session(store, asked.session, asked.sentences, source.config.front_end.patch)
    store.check_unchanged((*day.calibration, *day.held_out))
    old = old_trials(source, store, model) if settings.other_lr_factor else ()
    recipe = derive_recipe(_recipe_of(source), model.config, asked.session, settings)
    return Plan(
        asked, run, source, store, model, recipe, settings, day, old, points(asked, len(day.calibration))
    )


def refuse_inside(run: Run, parent: Run) -> None:
    """The parent is left as it was, so nothing is written into it either."""
    if (
        run.path.resolve().is_relative_to(parent.path.resolve())
        and run.path.resolve() != parent.path.resolve()
    ):
        raise UserError(
            f"{run.path} lies in the run it starts from, which stays as it is; choose another --run"
        )


def refuse_misfits(model: Model, store: Store, asked: Asked) -> None:
    if asked.session in model.config.sessions:
        raise UserError(
            f"{asked.parent} knows session {asked.session} already; calibrate a new day, or train on with:"
            f" arcuate train RECIPE --from {asked.parent}"
        )
    if model.config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {model.config.n_channels} channels, {store.path.name} has {store.n_channels}; prepare the"
            " same channels as for training"
        )


def points(asked: Asked, n_sentences: int) -> tuple[int, ...]:
    """Where the curve is measured; with and without calibration in any case."""
    if asked.curve is None:
        return curve_sizes(n_sentences)
    try:
        named = [int(p) for p in asked.curve.split(",")] if asked.curve != "none" else []
    except ValueError:
        raise UserError(f"--curve {asked.curve!r} should be numbers of sentences, such as 5,10,20") from None
    if any(not 0 <= n <= n_sentences for n in named):
        raise UserError(
            f"--curve {asked.curve!r} must lie between 0 and the {n_sentences} sentences there are"
        )
    return tuple(sorted({0, *named, n_sentences}))


def _recipe_of(source: ModelSource) -> Recipe:
    """The recipe of a run, or one with the settings of an imported model."""
    if source.trained_on is not None:
        return run_recipe(source.run)
    settings = {name: getattr(source.config, name) for name in type(source.config.model).model_fields}
    return Recipe(name=source.run.name, **settings)


def old_trials(source: ModelSource, store: Store, model: Model) -> tuple[TrialInfo, ...]:
    """Training trials of the known sessions, as far as this store has them."""
    known = tuple(s for s in store.sessions if s in model.config.sessions)
    if not known:
        return ()
    limits = {"sessions": known, "max_sessions": None, "n_sessions": None}
    data = source.config.data.model_copy(update=limits)
    return select(store, data, source.config.front_end.patch.count_frames).train


def announce(plan: Plan) -> None:
    session, model, settings = plan.asked.session, plan.model, plan.settings
    like = begin_with(model, session, settings)
    gap = days_between(session, like) if like != "mean" else None
    when = "" if gap is None else f", {counted(abs(gap), 'day')} {'before' if gap > 0 else 'after'} it"
    if not model.config.settings.front_end.session_layer.enabled:
        say(
            "the model has no session layers: all known days get one that changes nothing, the new day its own"
        )
    source = "the mean of all layers" if like == "mean" else f"the layer of {like}{when}"
    say(f"{session}: {counted(len(plan.day.calibration), 'sentence')}, beginning with {source}")
    if len(plan.day.calibration) < plan.asked.sentences:
        say(f"note: {plan.asked.sentences} sentences were asked for, the day has {len(plan.day.calibration)}")
    warn_about_recording(plan.store, session, nearest_session(session, model.config.sessions))
    if settings.other_lr_factor and not plan.old:
        say(
            "note: this store has no trials of the known days, so none are mixed in; other weights move all the same"
        )
    if not plan.day.held_out:
        say("note: no labelled sentence is left after these, so there is no curve")


def facts(plan: Plan) -> dict[str, Any]:
    like = begin_with(plan.model, plan.asked.session, plan.settings)
    return {
        "run": str(plan.run.path),
        "parent": str(plan.asked.parent),
        "session": plan.asked.session,
        "began_as": like,
        "days_later": days_between(
            plan.asked.session, nearest_session(plan.asked.session, plan.model.config.sessions)
        ),
        "sentences": len(plan.day.calibration),
        "held_back": len(plan.day.held_out),
        "old_trials": len(plan.old),
        "settings": plan.settings.model_dump(mode="json"),
        "points": list(plan.points),
    }


def calibrate(plan: Plan, stop: Stop) -> dict[str, Any] | None:
    """The curve, then the run folder, whole or not at all; None where a signal said stop."""
    with lock_run(plan.run):
        refuse_taken(
            plan.run.path, resumes=False
        )  # another one may have come to its end since the plan was made
        return calibrate_alone(plan, stop)


def calibrate_alone(plan: Plan, stop: Stop) -> dict[str, Any] | None:
    aside = plan.run.path.with_name(f".{plan.run.path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    device = configure_runtime(
        plan.source.config.runtime, plan.recipe.encoder.width, plan.settings.batch_size
    ).device
    plan.model.to(device)
    try:
        with progress("calibrating") as report:
            found = measure_points(plan, aside, stop, report)
        if found is None:
            return None
        summary = {**facts(plan), "curve": [p.to_dict() for p in found]}
        write_json(aside / "last" / FILE, summary)
        take_place(aside / "last", plan.run)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return summary


def take_place(finished: Path, run: Run) -> None:
    """A finished folder under its name, where so far there is nothing but the lock; that is held on to."""
    run.lock_file.rename(finished / run.lock_file.name)
    finished.rename(run.path)


def measure_points(plan: Plan, aside: Path, stop: Stop, report: Progress) -> list[CurvePoint] | None:
    found: list[CurvePoint] = []
    without: list[TrialResult] | None = None
    for i, n in enumerate(plan.points):
        last = n == len(plan.day.calibration)
        if n and not last and not plan.day.held_out:
            continue  # nothing to measure it on
        name = "last" if last else f"sentences-{n}"
        model = (
            uncalibrated(plan)
            if n == 0
            else fit_point(plan, n, aside / name, stop, steps_of(plan, i, report))
        )
        if stop.signal is not None:
            return None
        results = decode_trials(model, plan.store, plan.day.held_out) if plan.day.held_out else []
        found.append(curve_point(n, results, without if n else None))
        without = without if n else results
    return found


def uncalibrated(plan: Plan) -> Model:
    """The model as it reads the day without calibration: with the nearest day's layer, or the mean."""
    like = begin_with(plan.model, plan.asked.session, plan.settings)
    return single_session_model(plan.model, plan.asked.session, *copy_session_layer(plan.model, like)).eval()


def fit_point(plan: Plan, n: int, folder: Path, stop: Stop, step: Callable[[int], None]) -> Model:
    environment = describe_environment(
        parent=f"{plan.asked.parent.resolve()}@{plan.source.checkpoint.name}",
        calibration=facts(plan),
        data=describe_store(plan.store, (*plan.model.config.sessions, plan.asked.session)),
        n_parameters=count_parameters(new_config(plan)),
        selected_on=None,
        device=str(plan.model.head.weight.device),
    )
    return fit_layer(
        plan.model,
        plan.recipe,
        plan.store,
        plan.asked.session,
        plan.day.calibration[:n],
        plan.old,
        plan.settings,
        folder,
        environment,
        Steps(step),
        stop,
    )


def new_config(plan: Plan) -> ModelConfig:
    """The model that comes out, described."""
    config = plan.model.config
    return ModelConfig(
        settings=enable_session_layers(config.settings),
        n_channels=config.n_channels,
        sessions=(*config.sessions, plan.asked.session),
        classes=config.classes,
    )


def steps_of(plan: Plan, i: int, report: Progress) -> Callable[[int], None]:
    """Progress over all points together."""
    n_fitted = sum(n > 0 for n in plan.points)
    before = sum(n > 0 for n in plan.points[:i]) * plan.settings.steps
    what = f"calibrating with {counted(plan.points[i], 'sentence')}"
    return lambda step: report(before + step, n_fitted * plan.settings.steps, what)


class Steps(Callback):
    """Callback that reports steps to a progress function and prints incidents."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def on_step(self, step: int) -> None:
        self.report(step)

    def on_incident(self, row: dict[str, Any]) -> None:
        say(f"step {row['step']:>6}  {row['action']}: {row['reason']}")


def show(plan: Plan, summary: dict[str, Any]) -> None:
    table = Table(
        box=None,
        header_style="bold",
        title=f"PER of the {counted(len(plan.day.held_out), 'sentence')} after them",
        title_justify="left",
    )
    for name in ("sentences", "PER", "95 % interval"):
        table.add_column(name, justify="right")
    for point in summary["curve"]:
        spread = "–" if point["low"] is None else f"{percent(point['low'])} to {percent(point['high'])}"
        table.add_row(str(point["sentences"]), percent(point["per"]), spread)
    if plan.day.held_out:
        out.print(table)
    say(f"{plan.run.path} knows {plan.asked.session}; its parent {plan.asked.parent} is as it was")
    say(f"next: arcuate report {plan.run.path}, arcuate evaluate {plan.run.path}")
