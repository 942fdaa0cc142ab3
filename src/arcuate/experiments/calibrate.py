"""`calibrate`: add a session to a trained model with a few of its labelled sentences, as a new run folder.

The new session layer is fitted by the ordinary training loop, on a recipe derived from the parent's and on batches that
mix in trials of known sessions. The calibration curve is PER against the number of sentences, on the labelled sentences
recorded after those.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.adaptation.calibration import BATCH_SIZE, CalibrationSplit, MixedBatches, curve_sizes, split_session
from arcuate.adaptation.config import Calibration
from arcuate.adaptation.drift import warn_about_recording
from arcuate.config import parse_settings
from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import PlannedBatches, training_batches
from arcuate.data.config import DataConfig
from arcuate.data.selection import select
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_between, nearest_session
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import ModelSource, find_source
from arcuate.evaluation.metrics import total
from arcuate.evaluation.significance import bootstrap_interval, score_difference
from arcuate.evaluation.trials import TrialResult, decode_trials
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.experiments.train import describe_store
from arcuate.files import temporary_folder, to_frame, write_json
from arcuate.losses.config import CTCSettings, DenoiseSettings, LossSettings, ModeLossSettings, RNNTSettings
from arcuate.models.config import ModelConfig, full_session_layers
from arcuate.models.io import load_model
from arcuate.models.model import Model, add_session, copy_session_layer, parameter_groups, single_session_model
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.progress import Progress, counted, logger
from arcuate.run import Run, RunLike, check_run_folder, create_run, lock_run
from arcuate.training.callbacks import Callback, CallbackList, StepProgress, Stop, handle_signals
from arcuate.training.config import Ema, GuardSettings, Optimizer, Precision, Train
from arcuate.training.environment import describe_environment
from arcuate.training.loop import train as train_loop
from arcuate.training.schedule import Linear
from arcuate.training.state import TrainingState


@dataclass(frozen=True)
class CurvePoint:
    """PER on the held-out trials after calibration with a number of sentences, with its 95 % interval."""

    sentences: int
    per: float | None
    low: float | None
    high: float | None
    n_trials: int
    gain: float | None = None  # decrease of PER relative to no calibration, on the same trials
    gain_low: float | None = None
    gain_high: float | None = None


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated run and its calibration curve. It is accepted wherever a run folder is."""

    run: Run
    parent: Path
    session: str
    initial_session: str  # nearest known session, whose layer the new one starts from
    days_later: int | None  # days since then
    n_sentences: int
    n_held_out: int  # labelled sentences after the first `n_sentences`
    n_known_trials: int  # of known sessions, mixed into the batches
    settings: Calibration
    sizes: tuple[int, ...]  # numbers of sentences on the curve
    curve: tuple[CurvePoint, ...] = ()
    interrupted: bool = False  # nothing was written
    signal: Signals | None = None  # signal that interrupted it
    classes: tuple[str, ...] = CLASSES  # alphabet of the model

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else int(self.interrupted)

    def __fspath__(self) -> str:
        return os.fspath(self.run)

    def to_dict(self) -> dict[str, Any]:
        return self._setup() | {"curve": [asdict(point) for point in self.curve]}

    def _setup(self) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "parent": str(self.parent),
            "session": self.session,
            "initialised_from": self.initial_session,
            "days_later": self.days_later,
            "sentences": self.n_sentences,
            "held_out": self.n_held_out,
            "known_trials": self.n_known_trials,
            "settings": self.settings.model_dump(mode="json"),
            "points": list(self.sizes),
        }

    def to_frame(self) -> Any:
        """Pandas data frame with one row per point of the curve."""
        return to_frame(asdict(point) for point in self.curve)


def calibrate(
    run: RunLike,
    data: Store | str | Path,
    session: str,
    *,
    out: RunLike | None = None,
    sentences: int = 20,
    curve: Sequence[int] | None = None,
    settings: Calibration | None = None,
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Add a recording session to a trained model, using a few labelled sentences from it.

    Args:
        run: RUN or RUN@CHECKPOINT to start from; it is not changed.
        data: Store that contains the session.
        session: Session to add.
        out: Run folder to write when complete; default: RUN-SESSION beside the run.
        sentences: Number of labelled sentences of the session to use, from the first.
        curve: Numbers of sentences at which the calibration curve is measured, besides none and all of them; none = no
            more.
        settings: Settings of the calibration.
    """
    store = data if isinstance(data, Store) else Store.open(Path(data))
    plan = _make_plan(find_source(run), store, session, out, sentences, curve, settings or Calibration())
    _announce(plan, sentences)
    with handle_signals(stop) as stop, lock_run(plan.setup.run):
        check_run_folder(plan.setup.path, can_resume=False)  # it may have been written since
        result = _calibrate(plan, stop, progress)
    return result or replace(plan.setup, interrupted=True, signal=stop.signal)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything that is fixed before the first step; `setup` is the result without its curve."""

    setup: CalibrationResult
    source: ModelSource
    store: Store
    model: Model
    recipe: Recipe
    split: CalibrationSplit
    known_trials: tuple[TrialInfo, ...]


def _make_plan(
    source: ModelSource,
    store: Store,
    session: str,
    out: RunLike | None,
    sentences: int,
    curve: Sequence[int] | None,
    settings: Calibration,
) -> _Plan:
    """Check everything that can be wrong before the first step."""
    parent = source.run.path
    name = f"{source.run.name}-{session}"
    run = Run(Path(out) if out is not None else parent.resolve().with_name(name))
    if parent.resolve() in run.path.resolve().parents:
        raise UserError(f"{run.path} is inside the parent run; choose another --run")
    check_run_folder(run.path, can_resume=False)
    store.check_trained_on(source.trained_on)
    model = load_model(source.checkpoint)
    if session in model.config.sessions:
        raise UserError(
            f"{parent} already has session {session}; calibrate a new session, or continue training with:"
            f" arcuate train RECIPE --from {parent}"
        )
    if model.config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {model.config.n_channels} channels, {store.path.name} has {store.n_channels}; prepare the"
            " same channels as for training"
        )
    patch = source.config.front_end.patch
    split = split_session(store, session, sentences, patch)
    store.check_unchanged((*split.calibration, *split.held_out))
    known = _known_trials(source, store, model) if settings.other_lr_factor else ()
    recipe = derive_recipe(_parent_recipe(source), model.config, session, settings)
    nearest = nearest_session(session, model.config.sessions)
    setup = CalibrationResult(
        run=run,
        parent=parent,
        session=session,
        initial_session=nearest,
        days_later=days_between(session, nearest),
        n_sentences=len(split.calibration),
        n_held_out=len(split.held_out),
        n_known_trials=len(known),
        settings=settings,
        sizes=_curve_sizes(curve, len(split.calibration)),
        classes=model.config.classes,
    )
    return _Plan(setup, source, store, model, recipe, split, known)


def _curve_sizes(curve: Sequence[int] | None, n_sentences: int) -> tuple[int, ...]:
    if curve is None:
        return curve_sizes(n_sentences)
    if any(not 0 <= n <= n_sentences for n in curve):
        listed = ",".join(map(str, curve))
        raise UserError(f"--curve {listed} must lie between 0 and the number of sentences, {n_sentences}")
    return tuple(sorted({0, *curve, n_sentences}))


def _parent_recipe(source: ModelSource) -> Recipe:
    """The recipe of a run, or one with the settings of an imported model."""
    if source.trained_on is not None:
        return run_recipe(source.run)
    return Recipe(name=source.run.name, **dict(source.config.model))


def _known_trials(source: ModelSource, store: Store, model: Model) -> tuple[TrialInfo, ...]:
    """Training trials of the known sessions that this store contains."""
    known = tuple(s for s in store.sessions if s in model.config.sessions)
    if not known:
        return ()
    return select(
        store, _restrict_sessions(source.config.data, known), source.config.front_end.patch.count_frames
    ).train


def _announce(plan: _Plan, n_requested: int) -> None:
    session, initial, n_sentences = plan.setup.session, plan.setup.initial_session, plan.setup.n_sentences
    gap = days_between(session, initial)
    when = "" if gap is None else f", {counted(abs(gap), 'day')} {'before' if gap > 0 else 'after'} it"
    if not plan.model.config.settings.front_end.session_layer.enabled:
        logger.info(
            "the model has no session layers: known sessions get identity layers, the new session its own layer"
        )
    logger.info(f"{session}: {counted(n_sentences, 'sentence')}, starting from the layer of {initial}{when}")
    if n_sentences < n_requested:
        logger.info(f"{n_requested} sentences were requested, the session has {n_sentences}")
    warn_about_recording(plan.store, session, initial)
    if plan.setup.settings.other_lr_factor and not plan.known_trials:
        logger.info("this store has no trials of known sessions to mix in; the other weights are trained without them")
    if not plan.split.held_out:
        logger.info("there are no labelled sentences after these, so no curve is computed")


def _calibrate(plan: _Plan, stop: Stop, progress: Progress | None) -> CalibrationResult | None:
    """Measure the curve, then move the run folder to its place; None, and nothing written, if interrupted."""
    path = plan.setup.path
    temporary = path.with_name(f".{path.name}.part")
    runtime, width = available_runtime(plan.source.config.runtime), plan.recipe.encoder.width
    plan.model.to(configure_runtime(runtime, width, BATCH_SIZE).device)
    with temporary_folder(temporary):
        points = _measure_curve(plan, temporary, stop, progress)
        if points is None:
            return None
        result, finished = replace(plan.setup, curve=tuple(points)), Run(temporary / "last")
        write_json(finished.calibration_file, result.to_dict())
        # The run folder contains nothing but the lock, which is held and moves along.
        plan.setup.run.lock_file.rename(finished.lock_file)
        finished.path.rename(path)
    return result


def _measure_curve(plan: _Plan, folder: Path, stop: Stop, progress: Progress | None) -> list[CurvePoint] | None:
    points: list[CurvePoint] = []
    uncalibrated: list[TrialResult] = []
    held_out, n_all = plan.split.held_out, len(plan.split.calibration)
    fitted = [n for n in plan.setup.sizes if n == n_all or (n and held_out)]  # the others cannot be scored
    for n in (0, *fitted):
        if n == 0:
            layer = copy_session_layer(plan.model, plan.setup.initial_session)
            model = single_session_model(plan.model, plan.setup.session, *layer).eval()
        else:
            shown: list[Callback] = [_Incidents()]
            if progress is not None:
                steps, text = plan.setup.settings.steps, f"calibrating with {counted(n, 'sentence')}"
                shown.append(StepProgress(progress, len(fitted) * steps, text, fitted.index(n) * steps))
            report = CallbackList(*shown)
            model = _fit(plan, n, folder / ("last" if n == n_all else f"sentences-{n}"), report, stop)
        if stop.requested:
            return None
        results = decode_trials(model, plan.store, held_out) if held_out else []
        points.append(curve_point(n, results, uncalibrated if n else None))
        uncalibrated = uncalibrated if n else results
    return points


def curve_point(
    n_sentences: int, results: Sequence[TrialResult], uncalibrated: Sequence[TrialResult] | None = None
) -> CurvePoint:
    """Score held-out trials; `uncalibrated` are the same trials decoded without calibration."""
    scores = [r.score for r in results if r.score is not None]
    low, high = bootstrap_interval(scores)
    before = [r.score for r in uncalibrated or () if r.score is not None]
    difference = score_difference(before, scores) if before and scores else None
    gain = (difference.rate, difference.low, difference.high) if difference else (None, None, None)
    return CurvePoint(n_sentences, total(scores).rate, low, high, len(scores), *gain)


def _fit(plan: _Plan, n: int, folder: Path, callback: Callback, stop: Stop) -> Model:
    """Train on the first `n` sentences, in a new run folder."""
    settings, new = plan.setup.settings, plan.split.calibration[:n]
    model = add_session(plan.model, plan.setup.session, plan.setup.initial_session)
    environment = describe_environment(
        parent=f"{plan.setup.parent.resolve()}@{plan.source.checkpoint.name}",
        calibration=plan.setup._setup(),
        data=describe_store(plan.store, model.config.sessions),
        n_parameters=sum(p.numel() for p in model.parameters()),
        selected_on=None,
        device=str(plan.model.head.weight.device),
    )
    _freeze(model, settings)
    training = TrainingState(model, plan.recipe, create_run(folder, plan.recipe, environment), "fp32")
    known = plan.known_trials
    mixed = MixedBatches(len(new), len(known))
    planned = PlannedBatches(
        *(plan.store, (*new, *known), mixed, model.config.sessions, plan.recipe.front_end.statistics_spec)
    )
    batches = training_batches(planned, 0, None, 0)
    train_loop(training, batches, None, model.head.weight.device, callback, stop)
    return model.eval()


def _freeze(model: Model, settings: Calibration) -> None:
    """Train the new session layer and, unless their learning rate is 0, all weights but the other session layers."""
    layer = model.front_end.session_layer
    new = {id(layer.weights[-1]), id(layer.biases[-1])}
    for name, parameters in parameter_groups(model).items():
        for parameter in parameters:
            trains = id(parameter) in new if name == "session" else settings.other_lr_factor > 0
            parameter.requires_grad_(trains)


def _restrict_sessions(data: DataConfig, sessions: Sequence[str]) -> DataConfig:
    return data.model_copy(update={"sessions": tuple(sessions), "max_sessions": None})


def derive_recipe(parent: Recipe, config: ModelConfig, session: str, settings: Calibration) -> Recipe:
    """The parent's recipe with the new session, and with the loss, optimizer and schedule of calibration."""
    peak_lr = (settings.other_lr_factor or 1.0) * settings.lr  # at 0 only the session layer is trained
    changes = {
        "name": f"{parent.name}-calibrated"[:100],
        "extends": None,
        "summary": f"{parent.name}, calibrated to {session}",
        "data": _restrict_sessions(parent.data, (*config.sessions, session)),
        "front_end": full_session_layers(parent.front_end),
        "loss": LossSettings(
            ctc=CTCSettings(reduction="mean_per_token", zero_infinity=True, weight=parent.loss.ctc.weight),
            rnnt=RNNTSettings(reduction="mean_per_token", weight=parent.loss.rnnt.weight),
            mode=ModeLossSettings(weight=0.0),  # mode head and denoiser are already trained
            denoise=DenoiseSettings(weight=0.0),
        ),
        "stages": (),
        "optimizer": Optimizer(session_lr_factor=settings.lr / peak_lr),
        "schedule": Linear(peak_lr=peak_lr, min_lr=0.0),
        "guard": _scale_lower_bound(parent, peak_lr),
        "ema": Ema(),
        "train": Train(
            steps=settings.steps,
            seed=0,
            clip_norm=1.0,
            precision=Precision(),
            log_every=min(10, settings.steps),
            validate_every=settings.steps,
            checkpoint_every=settings.steps,
            keep_checkpoints=1,
        ),
    }
    tree = parent.model_copy(update=changes).model_dump(by_alias=True)
    return parse_settings(Recipe, tree, f"of {parent.name}, changed for calibration")


def _scale_lower_bound(parent: Recipe, lr: float) -> GuardSettings:
    """The parent's guard, with the lower bound of its learning-rate reductions in proportion to the highest rate."""
    adaptive, peak = parent.guard.adaptive, parent.schedule.peak_lr
    lowest = adaptive.min_lr * lr / peak if peak else 0.0
    return parent.guard.model_copy(update={"adaptive": adaptive.model_copy(update={"min_lr": lowest})})


class _Incidents(Callback):
    def on_incident(self, row: dict[str, Any]) -> None:
        logger.info(f"step {row['step']:>6}  {row['action']}: {row['reason']}")
