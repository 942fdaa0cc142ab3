"""`train`: wire store, model, optimizer, validation and callbacks into one run.

`arcuate train` and `arcuate.train` are this function. It prints nothing: messages go to the logger, and terminal output
is a callback. It works in any thread of a notebook and under torchrun.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, overload

import torch

from arcuate.config import Overrides
from arcuate.data.alphabet import error_rate_name
from arcuate.data.batching import BatchPlan, PlannedBatches, make_plan, padding_waste, training_batches
from arcuate.data.config import BucketedBatching, SessionBatching
from arcuate.data.selection import Selection, select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, lineage, load_recipe, official_ancestor
from arcuate.experiments.seeds import SeedRun, SeedsResult, plan_seeds, train_seeds
from arcuate.experiments.targets import TargetOutcome, judge_target
from arcuate.experiments.validation import make_validator, open_word_search
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model
from arcuate.models.runtime import RuntimeChoice, configure_runtime, count_cores
from arcuate.progress import Progress, counted, logger, percent
from arcuate.run import Run, RunLike, absolute_parent, check_run_folder, lock_run
from arcuate.training.callbacks import Callback, CallbackList, StepProgress, Stop, handle_signals
from arcuate.training.config import TrainingConfig, find_ineffective_settings
from arcuate.training.curriculum import describe_stages, resolve_epochs
from arcuate.training.environment import (
    Distributed,
    PrecisionChoice,
    choose_precision,
    describe_environment,
    init_distributed,
    own_device,
    shut_down_distributed,
)
from arcuate.training.loop import train as train_loop
from arcuate.training.modes import describe_modes, infer_modes, read_modes, write_modes
from arcuate.training.start import (
    Start,
    check_not_calibrated,
    check_same_recipe,
    find_parent,
    start_run,
)
from arcuate.training.state import TrainingState
from arcuate.training.step import make_encode
from arcuate.training.step_size import coupling_warnings, expected
from arcuate.training.tracking import check_trackers, make_trackers

if TYPE_CHECKING:
    from arcuate.decoding.word_search.search import WordSearch

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")  # whose errors are those of runtime.compile


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one training run. It is accepted wherever a run folder is: `arcuate.evaluate(result)`."""

    run: Run
    recipe: Recipe
    n_parameters: int
    n_train: int
    n_validation: int
    steps: int  # completed, or planned by a dry run
    selected_on: str  # split that checkpoints are selected on
    best_per: float | None = None
    best_wer: float | None = None  # at the same step, with validate.lm
    best_step: int | None = None
    rewinds: int = 0
    target: TargetOutcome | None = None  # None: the recipe states none
    seconds: float = 0.0
    dry_run: bool = False
    interrupted: bool = False  # stopped by request; resume to continue
    signal: Signals | None = None  # signal that interrupted it
    is_main: bool = True  # False in all processes but one under torchrun

    def __repr__(self) -> str:
        best = "" if self.best_per is None else f", best error rate {percent(self.best_per)} at step {self.best_step:,}"
        return f"TrainResult('{self.path}': {self.recipe.name}, {counted(self.steps, 'step')}{best})"

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 0

    def __fspath__(self) -> str:
        return os.fspath(self.run)

    def to_dict(self) -> dict[str, Any]:
        values = {"run": str(self.path), "recipe": self.recipe.name, "n_parameters": self.n_parameters}
        if not self.dry_run:
            keys = ("steps", "best_per", "best_wer", "best_step", "selected_on", "rewinds", "seconds")
            target = None if self.target is None else self.target.to_dict()
            return values | {key: getattr(self, key) for key in keys} | {"target": target}
        values |= {"dry_run": True, "n_train": self.n_train, "n_validation": self.n_validation, "steps": self.steps}
        return values | {"stages": {stage.name: stage.steps for stage in self.recipe.stages}}


@overload
def train(
    recipe: Recipe | str | Path,
    data: Store | str | Path,
    run: RunLike,
    overrides: Overrides = (),
    from_: RunLike | None = None,
    resume: bool = False,
    seeds: None = None,
    dry_run: bool = False,
    *,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> TrainResult: ...


@overload
def train(
    recipe: Recipe | str | Path,
    data: Store | str | Path,
    run: RunLike,
    overrides: Overrides = (),
    from_: RunLike | None = None,
    resume: bool = False,
    *,
    seeds: int | None,
    dry_run: bool = False,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> TrainResult | SeedsResult: ...


def train(
    recipe: Recipe | str | Path,
    data: Store | str | Path,
    run: RunLike,
    overrides: Overrides = (),
    from_: RunLike | None = None,
    resume: bool = False,
    seeds: int | None = None,
    dry_run: bool = False,
    *,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> TrainResult | SeedsResult:
    """Train a model from a recipe on prepared data.

    SIGINT, SIGTERM, SIGHUP or `stop.request()`, from a callback or another thread, end training within one step, with
    a checkpoint; the result is then `interrupted`. Signals are handled only when called from the main thread.

    Args:
        recipe: Packaged recipe by name, YAML file or run folder; in Python also a `Recipe`.
        data: Store prepared by `arcuate prepare`.
        run: Run folder to write; must not exist unless resumed.
        overrides: Settings `key=value`; in Python also a mapping `{"train.steps": 600}`.
        from_: Start from the weights of RUN, RUN@best or RUN@last.
        resume: Continue the run where it stopped, bit for bit on a CPU; start it if it does not exist.
        seeds: Train N seeds, each into RUN/seed-K, and report the spread.
        dry_run: Check recipe and data, print the plan, write nothing.
    """
    if seeds is not None:
        jobs = plan_seeds(recipe, data, run, seeds, overrides, from_)
        if not dry_run:
            return train_seeds(jobs, Path(run), resume, stop, progress)
        first = next(iter(jobs.values()))
        plan = train(recipe, first.data, first.run, first.overrides, from_, resume, dry_run=True)
        return SeedsResult(Path(run), plan.recipe, tuple(SeedRun(k, job.run) for k, job in jobs.items()), plan)
    run = Run(Path(run))
    official, ancestors = official_ancestor(recipe), lineage(recipe)
    recipe = load_recipe(recipe, overrides)
    check_trackers(recipe.track)
    if not dry_run:
        check_run_folder(run.path, resume)
    store = data if isinstance(data, Store) else Store.open(Path(data))
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    store.check_unchanged(list({t.session: t for t in selection.train}.values()))  # one trial per file
    per_epoch = make_plan(selection.train, recipe.data.batching, recipe.data.seed).batches_per_epoch
    recipe = resolve_epochs(recipe, per_epoch / recipe.train.accumulate)
    previous: dict[str, Any] = {}
    if resume and run.recipe_file.is_file():
        if not dry_run:
            check_not_calibrated(run)
            check_same_recipe(run, recipe)
        if run.environment_file.is_file():  # missing in a run that was killed early
            previous = run.environment()
    parent = None if from_ is None else os.fspath(from_)
    start = Start(resume, find_parent(parent, run if resume else None))
    with _end_processes():
        setup = _set_up(run, recipe, store, selection, previous)
        if setup.distributed.is_main:
            _announce(setup, official, previous)
        if dry_run:
            return setup.result(dry_run=True, steps=recipe.train.steps)
        return _train(setup, start, parent, ancestors, callbacks, stop or Stop(), progress)


@contextmanager
def _end_processes() -> Iterator[None]:
    """Leave the process group at the end; errors of the device and of the compiler come with their remedy."""
    failed = True
    try:
        yield
        failed = False
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device has too little memory for this model and batch ({str(error).splitlines()[0]}); divide the"
            " batch size (data.batching) and multiply train.accumulate by the same number, choose a smaller model,"
            " or end other programs that use the device"
        ) from None
    except RuntimeError as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"the blocks of the Transformer cannot be compiled ({reason:.200}); install a C compiler (gcc), which"
            " torch.compile needs, or set runtime.compile=false"
        ) from error
    finally:
        shut_down_distributed(failed)


def build_model(recipe: TrainingConfig, store: Store, selection: Selection) -> Model:
    """The untrained model of a recipe, initialised from `train.seed`."""
    torch.manual_seed(recipe.train.seed)
    config = ModelConfig(
        settings=recipe.model, n_channels=store.n_channels, sessions=selection.sessions, classes=store.classes
    )
    return Model(config)


def describe_store(store: Store, sessions: Sequence[str]) -> dict[str, Any]:
    """Entry `data` of environment.json: path, channels, sessions and content hashes of the training data."""
    return {
        "path": str(store.path.resolve()),
        "layout": store.layout,
        "features": store.features,
        "n_channels": store.n_channels,
        "classes": list(store.classes),
        "simulated": store.simulated,
        "sessions": list(sessions),
        "hashes": store.hashes,
    }


def worker_count(recipe: TrainingConfig) -> int:
    """Number of loader processes, at most one per core. It does not affect results."""
    return min(recipe.data.workers, count_cores())


@dataclass(frozen=True, eq=False)
class _Setup:
    """Everything that is fixed before the run folder is written."""

    run: Run
    recipe: Recipe
    store: Store
    selection: Selection
    machine: RuntimeChoice
    precision: PrecisionChoice
    model: Model
    distributed: Distributed
    words: "WordSearch | None"  # of validations

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def plan(self) -> BatchPlan:
        return make_plan(self.selection.train, self.recipe.data.batching, self.recipe.data.seed)

    def result(self, **outcome: Any) -> TrainResult:
        return TrainResult(
            run=self.run,
            recipe=self.recipe,
            n_parameters=self.n_parameters,
            n_train=len(self.selection.train),
            n_validation=len(self.selection.validation),
            selected_on=self.selection.selected_on,
            is_main=self.distributed.is_main,
            **outcome,
        )

    def outcome(self, training: TrainingState, seconds: float, stop: Stop) -> TrainResult:
        return self.result(
            steps=training.progress.step,
            best_per=training.progress.best.per,
            best_wer=training.progress.best.wer,
            best_step=training.progress.best.step,
            rewinds=training.guard.memory.n_rewinds,
            target=_judge(self.recipe, self.run, training.is_finished),
            seconds=seconds,
            interrupted=stop.requested and not training.is_finished,
            signal=stop.signal,
        )


def _set_up(run: Run, recipe: Recipe, store: Store, selection: Selection, previous: Mapping[str, Any]) -> _Setup:
    """Choose device, threads, precision and processes, and build the model. A resumed run keeps what rounding needs."""
    runtime, threads = recipe.runtime, previous.get("threads")
    is_set = runtime.threads is not None or "OMP_NUM_THREADS" in os.environ
    if not is_set and isinstance(threads, int) and 1 <= threads <= 1024:
        runtime = runtime.model_copy(update={"threads": threads})
    machine = configure_runtime(runtime, recipe.encoder.width, recipe.data.batching.batch_size, announce=False)
    machine = replace(machine, device=own_device(machine.device))
    words = open_word_search(recipe, selection.validation, store.classes)
    precision = choose_precision(recipe.train.precision, machine.device, previous.get("precision"))
    model = build_model(recipe, store, selection).to(machine.device)
    distributed = init_distributed(machine.device)
    if distributed.size > 1 and recipe.runtime.compile and list(model.encoder.blocks_to_compile()):
        raise UserError(
            "runtime.compile=true cannot be combined with several processes: compiled blocks of a Transformer are not"
            " tested inside DistributedDataParallel; set runtime.compile=false"
        )
    for kind in ("fp32", "fp16"):  # the lowest precision of any process is used by all
        if distributed.any(precision.kind == kind) and precision.kind not in ("fp32", kind):
            precision = PrecisionChoice(kind, f"training in {kind} because another process does")
    return _Setup(run, recipe, store, selection, machine, precision, model, distributed, words)


def _announce(setup: _Setup, official: str | None, previous: Mapping[str, Any]) -> None:
    """Log what will be trained, on which data, and every deviation from the recipe."""
    recipe, selection, machine = setup.recipe, setup.selection, setup.machine
    sessions = counted(len(selection.sessions), "session")
    logger.info(
        f"{recipe.name}: {setup.n_parameters:,} parameters, {counted(setup.store.n_channels, 'channel')}, {sessions}"
    )
    selecting = counted(len(selection.validation), f"{selection.selected_on} trial")
    logger.info(f"{counted(len(selection.train), 'training trial')}; checkpoints are selected on {selecting}")
    logger.info(str(machine))
    if (workers := worker_count(recipe)) < recipe.data.workers:
        logger.info(
            f"data.workers={recipe.data.workers} exceeds the number of cores; using {counted(workers, 'worker')}"
        )
    if recipe.stages:
        logger.info(describe_stages(recipe.stages))
    if setup.distributed.size > 1:
        logger.info(f"{setup.distributed.size} processes share every batch")
    if selection.unaligned:
        patch = recipe.front_end.patch
        logger.info(
            f"{counted(len(selection.unaligned), 'training trial')} left out: the labels need more frames than"
            f" patches of {patch.bins}/{patch.stride} bins give"
        )
    if not selection.validation:
        logger.info("no validation trials: the last checkpoint counts as the best")
    batching = recipe.data.batching
    if isinstance(batching, SessionBatching) and batching.n_sessions > len(selection.sessions):
        logger.info(f"a batch holds trials of {sessions}, which are all available")
    if isinstance(batching, BucketedBatching):
        plan = make_plan(selection.train, batching, recipe.data.seed)
        epoch = [plan.draw(i) for i in range(plan.batches_per_epoch)]
        logger.info(f"padding waste {percent(padding_waste(epoch, plan.n_bins))}")
    if setup.precision.note:
        logger.info(setup.precision.note)
    if recipe.purpose:
        logger.info(f"purpose: {recipe.purpose}")
    if recipe.target.rates:
        text = recipe.target.text(error_rate_name(setup.store.classes))
        logger.info(f"target: {text}")
        if recipe.target.wer is not None and recipe.validate_.lm == "none":
            logger.warning(f"the target {text} needs validations that decode words; set validate.lm=default")
    for warning in find_ineffective_settings(recipe, bool(selection.validation), machine.device.type):
        logger.warning(warning)
    if (steps := expected(recipe, setup.n_parameters)).reason:
        logger.warning(steps.reason)
    if official is not None:
        for warning in coupling_warnings(recipe, load_recipe(official), official):
            logger.warning(warning)
    processes = previous.get("processes", setup.distributed.size)
    if processes != setup.distributed.size:
        logger.warning(
            f"this run was started with {processes} processes and now has {setup.distributed.size}:"
            " dropout and rounding differ"
        )


def _train(
    setup: _Setup,
    start: Start,
    parent: str | None,
    ancestors: Sequence[str],
    callbacks: Sequence[Callback],
    stop: Stop,
    progress: Progress | None,
) -> TrainResult:
    """Create or resume the run folder under its lock, and train."""
    distributed = setup.distributed
    training = TrainingState(setup.model, setup.recipe, setup.run, setup.precision.kind)
    environment = describe_environment(
        device=str(setup.machine.device),
        threads=setup.machine.threads,
        threads_reason=setup.machine.reason,
        processes=distributed.size,
        data=describe_store(setup.store, setup.selection.sessions),
        n_parameters=setup.n_parameters,
        selected_on=setup.selection.selected_on,
        precision=setup.precision.kind,
        precision_reason=setup.precision.note,
        parent=None if parent is None else absolute_parent(parent),
        lineage=list(ancestors),
    )
    with ExitStack() as stack:
        with distributed.raise_together():
            check_run_folder(setup.run.path, start.resume)
            if distributed.is_main:
                stack.enter_context(lock_run(setup.run))
        start_run(training, start, environment, distributed)
        if training.is_finished:
            if distributed.is_main:
                logger.info(f"{setup.run.path} is complete: {training.progress.step} steps")
            return setup.outcome(training, 0.0, stop)
        _find_modes(setup, training, progress)
        return _run_loop(setup, training, callbacks, stop, progress)


def _planned_batches(setup: _Setup) -> PlannedBatches:
    """The training sequence, or this process's part of it."""
    recipe, selection, distributed = setup.recipe, setup.selection, setup.distributed
    return PlannedBatches(
        *(setup.store, selection.train, setup.plan),
        *(selection.sessions, recipe.front_end.statistics_spec, (distributed.rank, distributed.size)),
    )


def _find_modes(setup: _Setup, training: TrainingState, progress: Progress | None) -> None:
    """Estimate the speaking mode of every training trial once, and store it in the run folder."""
    file = setup.run.modes_file
    if training.model.mode is None:
        return
    if training.progress.position > 0 and file.is_file():
        training.modes = read_modes(file)
        return
    report = progress if setup.distributed.is_main else None
    training.modes = infer_modes(training.model, setup.store, setup.selection.train, report)
    if training.progress.position == 0:
        training.average.start(training.model)  # the mode head was initialised
    if setup.distributed.is_main:
        write_modes(file, training.modes)
        logger.info(describe_modes(setup.selection.train, training.modes, setup.recipe.mode))


def _run_loop(
    setup: _Setup, training: TrainingState, callbacks: Sequence[Callback], stop: Stop, progress: Progress | None
) -> TrainResult:
    """Run the remaining steps from the restored or initial state."""
    recipe, selection, distributed, device = setup.recipe, setup.selection, setup.distributed, setup.machine.device
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # without the peak of an earlier training in this process
    planned = _planned_batches(setup)
    batches = training_batches(
        planned, training.progress.position, None, worker_count(recipe), pin_memory=device.type == "cuda"
    )
    combined = CallbackList()  # only rank 0 has callbacks
    if distributed.is_main:
        shown = [] if progress is None else [StepProgress(progress, recipe.train.steps, "training")]
        combined = CallbackList(*make_trackers(recipe, setup.run, training.progress.step), *callbacks, *shown)
    training.batches_per_epoch = setup.plan.batches_per_epoch
    validate = None
    if selection.validation:
        words, show = setup.words, combined.on_sample
        validate = make_validator(training, setup.store, selection, words, show, distributed)
    encode = partial(make_encode, training.model, recipe, device, distributed)
    with closing(batches), handle_signals(stop, ignore_second_sigint=distributed.size > 1), combined as callback:
        callback.on_start(setup.store.classes)
        train_loop(training, batches, validate, device, callback, stop, encode, distributed)
    result = setup.outcome(training, time.perf_counter() - started, stop)
    if distributed.is_main:
        _log_outcome(setup, result)
    return result


def _log_outcome(setup: _Setup, result: TrainResult) -> None:
    run = result.run
    if result.interrupted:
        cause = f"by {result.signal.name} " if result.signal else ""
        logger.info(f"stopped {cause}after step {result.steps}; resume with:")
        logger.info(f"arcuate train {run.recipe_file} --data {setup.store.path} --run {run.path} --resume")
        return
    name = error_rate_name(setup.store.classes)
    if result.best_per is not None:
        wer = "" if result.best_wer is None else f", WER {percent(result.best_wer)}"
        logger.info(
            f"best {result.selected_on} {name} {percent(result.best_per)}{wer} at step {result.best_step};"
            f" {result.seconds:.0f} s in total"
        )
    if result.target is not None:
        logger.info(f"target {result.target.status}: {result.recipe.target.text(name)}; {result.target.text}")
    logger.info(f"{run.path} is complete; next: arcuate evaluate {run.path}")


def _judge(recipe: Recipe, run: Run, ended: bool) -> TargetOutcome | None:
    if not recipe.target.rates:
        return None
    rows = [row for row in run.metrics() if row.get("split") != "train"]
    return judge_target(recipe.target, rows, ended, run_rate_name(run))
