"""`selftest`: check that this machine computes correct results at a reasonable speed in every precision.

It is meant to be run once on a new machine; the result can be attached to a bug report. Every check has a
value, a bound and a remedy. The same code runs on a CPU and on CUDA; `full` adds the official model sizes.
"""

import copy
import logging
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import PlannedBatches, make_plan
from arcuate.data.prepare import prepare
from arcuate.data.selection import Selection, select
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.data.trial import BIN_MS
from arcuate.decoding.load import load
from arcuate.errors import UserError
from arcuate.evaluation.decode import decode
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.train import TrainResult, build_model, train
from arcuate.files import Result, read_jsonl
from arcuate.live.bench import replay_sentences, time_stream
from arcuate.live.sources.replay import open_replay
from arcuate.models.config import (
    AnyEncoderSettings,
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    RuntimeSettings,
    SmoothingSettings,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.model import Model
from arcuate.models.runtime import choose_device, configure_cuda, count_cores
from arcuate.progress import Progress, logger
from arcuate.run import create_run
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.environment import Distributed, autocast, installed_version, own_device
from arcuate.training.loop import train as train_loop
from arcuate.training.state import TrainingState, memory_mb
from arcuate.training.step import compile_blocks, compute_gradients, encode_for_training

Status = Literal["pass", "fail", "skipped"]
_PRECISIONS = ("fp32", "bf16", "fp16")

# Largest error relative to float64 on the CPU: logits relative to the largest logit, gradients by norm.
_LOGIT_BOUNDS = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
_GRADIENT_BOUNDS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}
_MIN_RELATIVE_SPEED = 0.8  # relative to plain torch.nn
_OFFICIAL = ("b2t25-gru", "b2t25-transformer")
_MAX_SYNCHRONISATIONS = 1  # of a step, beyond those inside torch's CTC loss
_MAX_RANK_DIFFERENCE = 1e-3  # relative difference of the loss between one and two processes
_FAILURES = (RuntimeError, UserError, OSError, ValueError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Check:
    """One line of the result."""

    name: str
    status: Status
    value: float | str | None = None
    bound: float | str | None = None
    remedy: str | None = None  # what to do about a failure, or why a check was skipped


@dataclass(frozen=True)
class SelfTest(Result):
    """Result of `selftest`."""

    device: dict[str, Any]
    versions: dict[str, str | None]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def n_failed(self) -> int:
        return sum(check.status == "fail" for check in self.checks)

    @property
    def exit_code(self) -> int:
        return int(self.n_failed > 0)


def selftest(device: str = "auto", full: bool = False, *, progress: Progress | None = None) -> SelfTest:
    """Check that this machine computes correct results at a reasonable speed; takes about a minute of CPU time.

    Args:
        device: Device to test: auto, cpu or cuda.
        full: Also test the official models at their full size.
    """
    started = time.perf_counter()
    chosen = own_device(choose_device(device, "device"))
    checks: list[Check] = []
    described = _describe_device(chosen)
    configure_cuda(RuntimeSettings(), chosen)
    with tempfile.TemporaryDirectory(prefix="arcuate-selftest-") as folder, _only_warnings():
        machine = _Machine(chosen, full, Path(folder))
        for n, (name, group) in enumerate(GROUPS):
            if progress:
                progress(n, len(GROUPS), name)
            checks += _run_checks(name, group, machine)
        if progress:
            progress(len(GROUPS), len(GROUPS), "done")
    versions = {name: installed_version(name) for name in ("arcuate", "torch", "numpy", "numba", "h5py")}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda, "platform": platform.platform()}
    return SelfTest(described, versions, tuple(checks), time.perf_counter() - started)


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Suppress the log messages of the small runs."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_checks(name: str, group: "Group", machine: "_Machine") -> list[Check]:
    """Run the checks of a group; an error fails the group, and the other groups still run."""
    done: list[Check] = []
    try:
        done.extend(group(machine))
    except _FAILURES as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        done.append(Check(name, "fail", first[:200], "no error", "please report this result"))
    return done


def _judge(name: str, value: float, bound: float, remedy: str, at_least: bool = False) -> Check:
    """A check whose value must not exceed its bound, or not fall below it."""
    passed = math.isfinite(value) and (value >= bound if at_least else value <= bound)
    limit = f">= {bound:g}" if at_least else f"<= {bound:g}"
    return Check(name, "pass" if passed else "fail", float(f"{value:.3g}"), limit, None if passed else remedy)


class _Machine:
    """The device under test, and small data and runs that several checks share; created when first needed."""

    def __init__(self, device: torch.device, full: bool, folder: Path) -> None:
        self.device, self.full, self.folder = device, full, folder

    @cached_property
    def store(self) -> Store:
        """Two simulated sessions of 16 channels."""
        simulate(self.folder / "source", n_sessions=2, n_trials=24, n_electrodes=8, difficulty="easy", seed=1)
        prepare(self.folder / "source", self.folder / "store")
        return Store.open(self.folder / "store")

    @cached_property
    def trained(self) -> TrainResult:
        """A small run, trained in one process."""
        overrides = [*_SMALL_RUN, f"runtime.device={self.device}"]
        return train("tiny", self.store, self.folder / "run", overrides)

    @cached_property
    def selection(self) -> Selection:
        recipe = self.recipe()
        return select(self.store, recipe.data, recipe.front_end.patch.count_frames)

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe("tiny", ["encoder.width=32", "data.batching.batch_size=8", *overrides])

    def batches(self, recipe: Recipe) -> PlannedBatches:
        trials, sessions = self.selection.train, self.selection.sessions
        plan = make_plan(trials, recipe.data.batching, recipe.data.seed)
        return PlannedBatches(self.store, trials, plan, sessions, recipe.front_end.statistics_spec)

    def state(self, recipe: Recipe, precision: str, name: str) -> TrainingState:
        model = build_model(recipe, self.store, self.selection).to(self.device)
        return TrainingState(model, recipe, create_run(self.folder / name, recipe, {}), precision)

    def training_step(self, name: str) -> tuple[Callable[[], object], PlannedBatches]:
        """Gradients of the first batch, with one transfer of the metrics; and the batches."""
        recipe = self.recipe()
        state, planned = self.state(recipe, "fp32", name), self.batches(recipe)
        batch, encode = planned[0].to(self.device), partial(encode_for_training, state.model)
        state.model.train()
        return lambda: compute_gradients(state, encode, [batch], self.device, Distributed()).read(), planned

    def seconds(self, work: Callable[[], object]) -> float:
        """Time some work in seconds: CPU time on a CPU, so that other processes do not count, else wall-clock time."""
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        self.synchronise()
        start = clock()
        work()
        self.synchronise()
        return clock() - start

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Group = Callable[[_Machine], Iterator[Check]]
_SMALL_RUN = (
    *("encoder.width=32", "encoder.dropout=0", "front_end.session_layer.dropout=0", "data.batching.batch_size=7"),
    *("train.steps=4", "train.log_every=1", "train.validate_every=4", "ema.decay=0", "data.workers=0"),
)


# --- Numerics: every encoder in every precision against float64 on the CPU -----------------------------------


def _encoders() -> dict[str, AnyEncoderSettings]:
    """All kinds of encoders, causal and bidirectional."""
    found: dict[str, AnyEncoderSettings] = {}
    for bidirectional in (False, True):
        suffix = " bidirectional" if bidirectional else ""
        common = {"width": 32, "depth": 2, "dropout": 0.0, "bidirectional": bidirectional}
        found[f"gru{suffix}"] = GRUSettings(**common)
        found[f"ssm{suffix}"] = SSMSettings(n_heads=4, state_dim=8, **common)
        no_dropout = {"attention_dropout": 0.0, "input_dropout": 0.0}
        found[f"transformer{suffix}"] = TransformerSettings(n_heads=4, context=20, **common, **no_dropout)
    return found


def _check_numerics(machine: _Machine) -> Iterator[Check]:
    for name, encoder in _encoders().items():
        model = _small_model(encoder)
        reference = _logits_and_gradients(copy.deepcopy(model).double(), torch.device("cpu"), "fp32", torch.float64)
        for precision in _PRECISIONS:
            where = f"{name}, {precision}"
            if problem := _unsupported(precision, machine.device):
                yield Check(f"logits and gradients: {where}", "skipped", remedy=problem)
                continue
            own = copy.deepcopy(model).to(machine.device)
            logits, gradients = _logits_and_gradients(own, machine.device, precision, torch.float32)
            error = ((logits - reference[0]).abs().max() / reference[0].abs().max()).item()
            remedy = "update the driver and torch; train in fp32 until then (train.precision.kind=fp32)"
            yield _judge(f"logits: {where}", error, _LOGIT_BOUNDS[precision], remedy)
            error = _relative_error(gradients, reference[1])
            yield _judge(f"gradients: {where}", error, _GRADIENT_BOUNDS[precision], remedy)


def _small_model(encoder: AnyEncoderSettings) -> Model:
    """A model without dropout."""
    settings = ModelSettings(front_end=FrontEndSettings(patch=Patch(bins=6, stride=3)), encoder=encoder)
    torch.manual_seed(0)
    model = Model(ModelConfig(settings=settings, n_channels=16, sessions=("a", "b"), classes=CLASSES))
    model.front_end.session_layer.settings = settings.front_end.session_layer.model_copy(update={"dropout": 0.0})
    return model


def _relative_error(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Norm of the difference / norm of the reference."""
    difference = torch.stack([(g - r).square().sum() for g, r in zip(gradients, reference, strict=True)])
    size = torch.stack([r.square().sum() for r in reference])
    return (difference.sum() / size.sum()).sqrt().item()


def _logits_and_gradients(
    model: Model, device: torch.device, precision: str, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """CTC logits and gradients of a batch with padding, as float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    bins = torch.randn(3, 60, 16, generator=generator).to(device, dtype)
    tokens = torch.randint(1, len(CLASSES), (3, 6), generator=generator)
    n_bins, session = torch.tensor([60, 41, 33]), torch.tensor([0, 1, 0])
    with autocast(precision, device):
        outputs = model(bins, n_bins.to(device), session)
    log_probs = outputs.log_probs["ctc"]
    scored = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    n_frames = model.config.settings.front_end.patch.count_frames(n_bins)
    loss = F.ctc_loss(scored.transpose(0, 1), tokens.to(device), n_frames, torch.full((3,), 6), reduction="sum")
    scale = 64.0 if precision == "fp16" else 1.0  # small gradients are subnormal in fp16 without a scale
    gradients = torch.autograd.grad(scale * loss, list(model.parameters()), allow_unused=True)
    valid = torch.arange(log_probs.shape[1]) < n_frames[:, None]
    kept = [torch.zeros_like(p) if g is None else g / scale for p, g in zip(model.parameters(), gradients, strict=True)]
    return log_probs.detach().cpu().double()[valid], [g.cpu().double() for g in kept]


def _unsupported(precision: str, device: torch.device) -> str | None:
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU does not support bf16; training falls back to fp16"
    return None


# --- Training: steps in every precision, overflow, compile, two processes, synchronisation ---------------------


def _check_training(machine: _Machine) -> Iterator[Check]:
    """Check that the mean loss of the last steps is below that of the first steps."""
    for precision in _PRECISIONS:
        name = f"training steps: {precision}"
        if problem := _unsupported(precision, machine.device):
            yield Check(name, "skipped", remedy=problem)
            continue
        rows, _ = _train_steps(machine, precision, f"train-{precision}")
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        ratio = sum(losses[-4:]) / sum(losses[:4]) if len(losses) >= 8 else math.inf
        remedy = "train in fp32 (train.precision.kind=fp32), and report this result"
        yield _judge(f"{name} (last / first loss)", ratio, 0.95, remedy)


def _check_overflow(machine: _Machine) -> Iterator[Check]:
    scaler = torch.amp.GradScaler(machine.device.type, init_scale=2.0**40, backoff_factor=2.0**-12)
    rows, state = _train_steps(machine, "fp16", "overflow", scaler)
    n_overflows = sum(row["skipped"].get("overflow", 0) for row in rows)
    incidents = len(read_jsonl(state.run.incidents_file))
    finite = all(bool(torch.isfinite(p).all()) for p in state.model.parameters())
    passed = 0 < n_overflows < len(rows) and not incidents and finite
    value = f"{n_overflows} steps skipped, {incidents} incidents, weights {'finite' if finite else 'not finite'}"
    remedy = None if passed else "train in bf16 or fp32 (train.precision.kind)"
    yield Check("overflow in fp16", "pass" if passed else "fail", value, "skipped, no incident", remedy)


def _train_steps(
    machine: _Machine, precision: str, name: str, scaler: torch.amp.GradScaler | None = None
) -> tuple[list[dict[str, Any]], TrainingState]:
    """Train a small model for a few steps; return the rows of metrics.jsonl and the state."""
    recipe = machine.recipe("train.steps=12", "train.log_every=1", "train.validate_every=12")
    state = machine.state(recipe, precision, name)
    if scaler is not None:
        state.set_scaler(scaler)
    batches = machine.batches(recipe)
    train_loop(state, (batches[p] for p in count()), None, machine.device, Callback(), Stop())
    return read_jsonl(state.run.metrics_file), state


def _check_compile(machine: _Machine) -> Iterator[Check]:
    """Logits and gradients with compiled blocks; on a CPU they are traced, but no code is generated."""
    backend = "inductor" if machine.device.type == "cuda" else "aot_eager"
    for name, encoder in _encoders().items():
        model = _small_model(encoder).to(machine.device)
        where = f"compiled blocks (runtime.compile): {name}"
        if not list(model.encoder.blocks_to_compile()):
            yield Check(where, "skipped", remedy="runtime.compile has no effect on this encoder")
            continue
        plain = _logits_and_gradients(model, machine.device, "fp32", torch.float32)
        compile_blocks(model, backend)
        logits, gradients = _logits_and_gradients(model, machine.device, "fp32", torch.float32)
        of_logits = ((logits - plain[0]).abs().max() / plain[0].abs().max()).item()
        error = max(of_logits, _relative_error(gradients, plain[1]))
        yield _judge(f"{where}, relative error", error, _GRADIENT_BOUNDS["fp32"], "set runtime.compile=false")


def _check_two_processes(machine: _Machine) -> Iterator[Check]:
    """Check that two processes under torchrun give the loss of one process."""
    name = "two processes (relative difference of the loss)"
    if machine.device.type == "cuda" and torch.cuda.device_count() < 2:
        yield Check(name, "skipped", remedy="this machine has one GPU")
        return
    alone, run = machine.trained, machine.folder / "two"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    command = ["arcuate", "train", "tiny", "--data", str(machine.folder / "store"), "--run", str(run), *_SMALL_RUN]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    full = [*launcher, *command, f"runtime.device={machine.device.type}"]
    done = subprocess.run(full, capture_output=True, text=True, timeout=600, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = "run torchrun with the same recipe to see the messages of every process"
        yield Check(name, "fail", last[:200], "exit code 0", remedy)
        return
    one, two = (
        [row["loss"] for row in read_jsonl(file) if row["split"] == "train"]
        for file in (alone.run.metrics_file, run / "metrics.jsonl")
    )
    error = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    yield _judge(name, error, _MAX_RANK_DIFFERENCE, "train in one process, and report this result")


def _check_synchronisations(machine: _Machine) -> Iterator[Check]:
    """Count the synchronisations of one step, except those of torch's CTC loss, which copies lengths to the device."""
    name = "synchronisations per step"
    if machine.device.type != "cuda":
        yield Check(name, "skipped", remedy="only applies to a GPU")
        return
    step, _ = machine.training_step("reads")

    def ctc() -> None:
        log_probs = torch.zeros(20, 2, 5, device=machine.device, requires_grad=True).log_softmax(-1)
        tokens = torch.ones(2, 4, dtype=torch.int64, device=machine.device)
        lengths = torch.full((2,), 20), torch.full((2,), 4)
        F.ctc_loss(log_probs, tokens, *lengths, reduction="none").sum().backward()

    counts = []
    for work in (step, ctc):
        work()  # constants are copied to the device once
        counts.append(_count_synchronisations(work))
    remedy = "report this result; training works, but the GPU waits for the CPU"
    yield _judge(name, float(counts[0] - counts[1]), float(_MAX_SYNCHRONISATIONS), remedy)


def _count_synchronisations(work: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch also warns, once, that the mode does not detect all synchronizing operations.
    return sum("called a synchronizing" in str(w.message) for w in caught)


# --- Speed: data loading, official models against plain torch.nn, memory, streaming, word search ---------


def _check_loading(machine: _Machine) -> Iterator[Check]:
    """Compare the time to read a batch in one process with the time of a training step."""
    step, planned = machine.training_step("loading")
    step()
    computing = median(machine.seconds(step) for _ in range(5))
    loading = median(machine.seconds(lambda p=p: planned[p]) for p in range(1, 6))  # type: ignore[misc]
    n_workers = max(1, count_cores())
    remedy = "set data.workers to the number of cores, and keep the store on a local disk"
    yield _judge("time to read a batch / time of a step, with all cores", loading / computing / n_workers, 1.0, remedy)


def _check_speed(machine: _Machine) -> Iterator[Check]:
    """Time training steps of the official models; without `full`, on two short trials."""
    for name in _OFFICIAL:
        recipe = load_recipe(name)
        n_trials, n_bins, n_sessions = 2, 120, 2
        if machine.full:
            n_trials, n_bins, n_sessions = recipe.data.batching.batch_size, 800, recipe.data.size.n_sessions
        config = ModelConfig(
            settings=_without_extras(recipe),
            n_channels=recipe.data.size.n_channels,
            sessions=tuple(f"session-{i}" for i in range(n_sessions)),
            classes=CLASSES,
        )
        if machine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(machine.device)
        size = f"{n_trials} trials of {n_bins} bins"
        try:
            own, plain = _time_both(machine, config, n_trials, n_bins)
        except torch.OutOfMemoryError:
            problem = f"the model does not fit into the memory of this device with {size}"
            yield Check(f"{name}: speed relative to plain torch.nn", "skipped", remedy=problem)
            continue
        yield Check(f"{name}: steps per second ({size})", "pass", float(f"{1 / own:.3g}"))
        remedy = "set runtime.threads, and close other programs; report the result if the speed stays low"
        yield _judge(f"{name}: speed relative to plain torch.nn", plain / own, _MIN_RELATIVE_SPEED, remedy, True)
        yield Check(f"{name}: peak memory, MB", "pass", round(memory_mb(machine.device)))


class PlainModel(nn.Module):
    """The model of a config in torch.nn: session layer and patches in their most direct form, without dropout.

    The attention of a Transformer covers the complete trial, with a mask.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        front_end, encoder = config.settings.front_end, config.settings.encoder
        self.patch, n_channels, n_heads = front_end.patch, config.n_channels, 0
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(n_channels)) for _ in config.sessions)
        n_inputs = width = n_channels * front_end.patch.sampled.bins
        if isinstance(encoder, GRUSettings):
            width = encoder.width * (2 if encoder.bidirectional else 1)
            options = {"batch_first": True, "bidirectional": encoder.bidirectional}
            self.encoder: nn.Module = nn.GRU(n_inputs, encoder.width, encoder.depth, **options)
        elif isinstance(encoder, TransformerSettings):
            width, n_heads = encoder.width, encoder.n_heads
            layer = nn.TransformerEncoderLayer(
                width, n_heads, encoder.ffn_expansion * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.input = nn.Linear(n_inputs, width)
            self.encoder = nn.TransformerEncoder(layer, encoder.depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.settings, self.head = encoder, nn.Linear(width, len(config.classes))

    def forward(self, bins: Tensor, session: list[int]) -> Tensor:
        """(B, T, C) -> log-probabilities (B, F, V)"""
        bins = F.softsign(torch.einsum("btc,bcd->btd", bins, torch.stack([self.weights[s] for s in session])))
        patch = self.patch.sampled
        patches = bins[:, :: self.patch.dilation].unfold(1, patch.bins, patch.stride).transpose(2, 3).flatten(2)
        if isinstance(self.settings, TransformerSettings):
            index = torch.arange(patches.shape[1], device=patches.device)
            distance = index[:, None] - index
            hidden = (distance >= self.settings.context) | ((distance < 0) & self.settings.causal)
            frames = self.encoder(self.input(patches), mask=hidden)
        else:
            frames = self.encoder(patches)[0]
        return F.log_softmax(self.head(frames), dim=-1)


def _without_extras(recipe: Recipe) -> ModelSettings:
    """Encoder and patches of a recipe, without the parts that the plain torch.nn model lacks, such as dropout."""
    encoder, smoothing = recipe.model.encoder, SmoothingSettings(sd=0.0)
    front_end = FrontEndSettings(patch=recipe.front_end.patch, smoothing=smoothing, normalise="none")
    dropouts = {name: 0.0 for name in type(encoder).model_fields if name.endswith("dropout")}
    return ModelSettings(front_end=front_end, encoder=encoder.model_copy(update=dropouts))


def _time_both(machine: _Machine, config: ModelConfig, n_trials: int, n_bins: int) -> tuple[float, float]:
    """Median seconds of a training step of the model and of its plain torch.nn form, measured alternately."""
    generator = torch.Generator().manual_seed(0)
    bins = torch.randn(n_trials, n_bins, config.n_channels, generator=generator).to(machine.device)
    lengths = torch.full((n_trials,), n_bins)
    session = torch.arange(n_trials) % len(config.sessions)
    tokens = torch.randint(1, len(CLASSES), (n_trials, 10), generator=generator).to(machine.device)
    n_frames = config.settings.front_end.patch.count_frames(lengths)
    own, plain = Model(config).to(machine.device), PlainModel(config).to(machine.device)
    forward: dict[str, Callable[[], Tensor]] = {
        "own": lambda: own(bins, lengths.to(machine.device), session).log_probs["ctc"],
        "plain": lambda: plain(bins, session.tolist()),
    }
    models: dict[str, torch.nn.Module] = {"own": own, "plain": plain}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for name, m in models.items()}

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        log_probs = forward[name]().float().transpose(0, 1)
        F.ctc_loss(log_probs, tokens, n_frames, torch.full((n_trials,), 10), reduction="none").mean().backward()
        optimizers[name].step()

    times: dict[str, list[float]] = {"own": [], "plain": []}
    for repetition in range(3):
        for name, taken in times.items():
            seconds = machine.seconds(partial(step, name))
            if repetition:  # the first step allocates
                taken.append(seconds)
    return median(times["own"]), median(times["plain"])


def _check_streaming(machine: _Machine) -> Iterator[Check]:
    """Time per frame of a small model without a word search."""
    decoder = load(machine.trained.path, device=str(machine.device))
    sentences = replay_sentences(decoder, open_replay(machine.trained.path, decoder, None, "val", None))
    deadline_ms = float(BIN_MS * decoder.layout.stride)
    values = time_stream(decoder, sentences, seconds=2.0, real_time=False).summary(deadline_ms)
    remedy = "close other programs; stream on the CPU (--device cpu) if the GPU is busy with training"
    yield _judge("streaming: time per frame, ms (median)", values["frame_ms_p50"], deadline_ms, remedy)


def _check_word_search(machine: _Machine) -> Iterator[Check]:
    """The English lexicon and language model on the frames of a few trials."""
    decode(machine.trained, split="val")  # compiles or loads the compiled functions
    start = time.process_time()
    found = decode(machine.trained, split="val")
    seconds = time.process_time() - start
    remedy = "reduce --beam; the first command after an installation also compiles functions"
    yield _judge("word search: CPU seconds per trial, including loading", seconds / max(1, len(found)), 10.0, remedy)


GROUPS: tuple[tuple[str, Group], ...] = (
    ("logits and gradients", _check_numerics),
    ("training steps", _check_training),
    ("overflow in fp16", _check_overflow),
    ("compiled blocks", _check_compile),
    ("two processes", _check_two_processes),
    ("synchronisations per step", _check_synchronisations),
    ("data loading", _check_loading),
    ("official models", _check_speed),
    ("streaming", _check_streaming),
    ("word search (functions are compiled on first use)", _check_word_search),
)


# --- The machine -----------------------------------------------------------------------------------------------


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return {"type": "cpu", "name": name, "cores": count_cores(), "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(device)
    size = {"memory_mb": round(found.total_memory / 1e6), "count": torch.cuda.device_count()}
    return {"type": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}", **size}
