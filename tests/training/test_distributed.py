"""Devices and numbers of several processes, on a stand-in for CUDA and on parts of a batch."""

import dataclasses
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import arcuate
from arcuate import StreamingDecoder
from arcuate.data.batching import Batch, collate, prefetch, training_batches
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import build_model, train
from arcuate.files import read_jsonl
from arcuate.losses import combined
from arcuate.losses.config import CTCSettings, CustomLossSettings, ModeLossSettings
from arcuate.models.config import RuntimeSettings
from arcuate.models.interfaces import Outputs
from arcuate.models.runtime import choose_device, configure_runtime
from arcuate.training import step as step_module
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.environment import Distributed, init_distributed, own_device
from arcuate.training.guard import Guard, Verdict
from arcuate.training.loop import train as train_loop
from arcuate.training.start import Start, start_run
from arcuate.training.state import TrainingState
from arcuate.training.step import DeviceMetrics, compute_gradients, encode_for_training, make_encode, read_metrics
from support.devices import FakeCuda
from support.training import make_recipe, make_state, planned_batches

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch, n_devices=4)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))


def test_every_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    assert choose_device("auto") == CUDA
    as_rank(monkeypatch, rank=6, local=2, size=8)  # the second machine of two
    assert own_device(CUDA) == torch.device("cuda:2")
    assert cuda.calls == [("set_device", torch.device("cuda:2"))]


def test_impossible_placements_are_refused(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    as_rank(monkeypatch, rank=5, local=5, size=8)
    with pytest.raises(UserError, match=r"process 5 of this machine sees 4 GPUs; .*--nproc-per-node.*gpu-bind"):
        own_device(CUDA)
    with pytest.raises(UserError, match=r"runtime\.device=cuda:1 would put all processes"):
        own_device(torch.device("cuda:1"))
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(UserError, match="LOCAL_RANK is 'x'"):
        own_device(CUDA)


@pytest.mark.parametrize(
    ("device", "nccl", "expected"),
    [("cuda:0", True, "cpu:gloo,cuda:nccl"), ("cuda:0", False, "gloo"), ("cpu", True, "gloo")],
)
def test_backend_follows_the_device(monkeypatch: pytest.MonkeyPatch, device: str, nccl: bool, expected: str) -> None:
    joined: list[str] = []
    as_rank(monkeypatch, rank=1, local=1, size=2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", joined.append)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert init_distributed(torch.device(device)) == Distributed(1, 2)
    assert joined == [expected]


def test_gradients_are_averaged_on_the_gpu_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(step_module, "DistributedDataParallel", lambda module, **options: given.update(options))
    recipe = make_recipe()
    state = make_state(Store.open(cohort_store), recipe, tmp_path / "run")
    make_encode(state.model, recipe, torch.device("cuda:3"), Distributed(3, 4))
    assert given == {"device_ids": [3], "find_unused_parameters": True}


def test_compile_is_refused_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("arcuate.experiments.train.init_distributed", lambda device: Distributed(0, 2))
    monkeypatch.setattr(Distributed, "any", lambda self, flag: flag)
    monkeypatch.setattr("arcuate.experiments.train._announce", lambda *arguments: None)
    overrides = ["runtime.compile=true"]
    with pytest.raises(UserError, match=r"set runtime\.compile=false"):
        train("tiny-transformer", cohort_store, tmp_path / "run", overrides=overrides, dry_run=True)
    # A GRU has nothing to compile, so recipes that set it, as b2t25-gru does, train in several processes unchanged.
    assert train("tiny", cohort_store, tmp_path / "run", overrides=overrides, dry_run=True).dry_run


def test_batches_are_pinned_and_copied_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, cohort_store: Path
) -> None:
    recipe = load_recipe("tiny", ["data.batching.batch_size=2", "front_end.normalise=block"])
    planned = planned_batches(Store.open(cohort_store), recipe)
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = planned[0].pin_memory()
    assert len(pinned) == 7  # bins, lengths, tokens, their lengths, and three statistics
    assert batch.session.device == CPU

    steps: list[str] = []

    def to(self: Batch, device: torch.device) -> Batch:
        steps.append(f"copy {self.position} on {cuda.stream}")
        return self

    monkeypatch.setattr(Batch, "to", to)
    for ready in prefetch(iter([planned[i] for i in range(3)]), CUDA):
        steps.append(f"step {ready.position}")
    assert steps == [
        *("copy 0 on side", "copy 1 on side", "step 0"),  # the next copy is queued before the step
        *("copy 2 on side", "step 1", "step 2"),
    ]
    assert [name for name, _ in cuda.calls].count("wait_stream") == 3


def test_the_data_loader_pins_batches(monkeypatch: pytest.MonkeyPatch, cohort_store: Path) -> None:
    """torch pins what it knows, and objects with a method `pin_memory`; others stay pageable without a message."""
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t, *rest: pinned.append(t) or t)  # type: ignore[func-returns-value]
    planned = planned_batches(Store.open(cohort_store), load_recipe("tiny", ["data.batching.batch_size=2"]))
    batch = next(training_batches(planned, 0, 1, workers=0))
    assert isinstance(pin_memory(batch), Batch)
    assert any(t is batch.bins for t in pinned)


def test_full_shared_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, cohort_store: Path) -> None:
    """A container has 64 MB of it by default. torch shares batches in a thread whose errors nobody waits for."""

    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    planned = planned_batches(Store.open(cohort_store), load_recipe("tiny", ["data.batching.batch_size=2"]))
    with closing(training_batches(planned, 0, None, workers=1)) as batches:
        assert next(batches).bins.is_shared()
    monkeypatch.setattr(torch.Tensor, "share_memory_", fail)
    assert next(training_batches(planned, 0, 1, workers=0)).n_trials == 2
    with pytest.raises(UserError, match=r"No space left on device.*--shm-size.*data\.workers=0"):
        next(training_batches(planned, 0, 1, workers=1))


@dataclasses.dataclass(frozen=True)
class Part(Distributed):
    """One of several processes whose sums are added up by the test."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def max(self, value: float) -> float:
        return value


@pytest.mark.parametrize("at_stage_end", [False, True])
def test_every_process_returns_to_the_same_checkpoint(
    at_stage_end: bool, monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    """Rank 0 alone writes checkpoints; the others have to know which of them are rewind targets."""
    stage = "{name: %s, steps: %d, losses: {ctc: 1}}"
    stages = f"stages=[{stage % ('first', 5)}, {stage % ('second', 1)}]"
    recipe = make_recipe("train.checkpoint_every=2", "train.log_every=3", "train.keep_checkpoints=9")
    recipe = load_recipe(recipe, [stages] if at_stage_end else ["train.steps=6"])
    store, states = Store.open(cohort_store), []
    judge, verdicts = Guard.judge, []

    def rewind_once(guard: Guard, *arguments: Any) -> Verdict:
        verdicts.append(judge(guard, *arguments))
        return Verdict("rewind", "spike") if len(verdicts) == 4 and not at_stage_end else verdicts[-1]

    monkeypatch.setattr(Guard, "judge", rewind_once)
    if at_stage_end:
        monkeypatch.setattr(Guard, "is_explosion", lambda guard, before, after: True)
    for rank in (0, 1):
        verdicts.clear()
        if not rank:
            state = make_state(store, recipe, tmp_path / "run")
        else:
            selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
            state = TrainingState(build_model(recipe, store, selection), recipe, states[0].run, "fp32")
        planned = planned_batches(store, recipe)
        train_loop(state, (planned[p] for p in count()), None, CPU, Callback(), Stop(), None, Part(rank, 1))
        states.append(state)
    first, second = states
    assert second.progress.position == first.progress.position
    assert (second.guard.memory.targets, second.guard.memory.rewound_to) == (
        first.guard.memory.targets,
        first.guard.memory.rewound_to,
    )
    assert at_stage_end or first.guard.memory.rewound_to == 2
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    assert any(row["action"] in ("rewind", "restore") for row in read_jsonl(first.run.incidents_file))


TRANSDUCER = ["transducer={enabled: true, predictor: lstm, width: 16, dropout: 0}", "loss.rnnt.weight=0.5"]
BY_FRAMES = [*TRANSDUCER, "loss.rnnt.reduction=half_mean_frames", "augment.random_cut=3"]


@pytest.mark.parametrize(
    ("batch_size", "more"), [(1, []), (5, []), (5, BY_FRAMES)], ids=["one trial", "five", "divided by frames"]
)
def test_parts_of_a_batch_add_up_to_its_metrics(
    batch_size: int, more: list[str], cohort_store: Path, tmp_path: Path
) -> None:
    """With one trial, the second process has none of its own: the trial it repeats must not count.

    A loss that is divided by the mean number of frames is divided by that of the whole batch.
    """
    store, recipe = Store.open(cohort_store), make_recipe(f"data.batching.batch_size={batch_size}", *more)
    state = make_state(store, recipe, tmp_path / "run")

    def metrics(share: tuple[int, int]) -> DeviceMetrics:
        batch = planned_batches(store, recipe, share)[3]
        return compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, Part(*share))

    whole = metrics((0, 1))
    first, second = metrics((0, 2)), metrics((1, 2))
    assert first.n_trials == second.n_trials == whole.n_trials == batch_size
    added = dataclasses.replace(first, values=first.values + second.values)
    expected, found = read_metrics([whole, added])
    for name in ("loss", "blank_share", "length_ratio"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), name
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_all_processes_judge_the_gradient_norm_of_rank_0(cohort_store: Path, tmp_path: Path) -> None:
    """GPUs of different kinds round differently; a guard that judged its own norm could rewind on one of them only."""
    store, recipe = Store.open(cohort_store), make_recipe("data.batching.batch_size=4")
    state = make_state(store, recipe, tmp_path / "run")
    encode = partial(encode_for_training, state.model)
    sent: list[torch.Tensor] = []

    @dataclasses.dataclass(frozen=True)
    class Recorded(Distributed):
        """Sums on rank 1 with what rank 0 sent."""

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            sent.append(values.clone())
            return values + sent[0] if self.rank else values

    state.unread_update_ratio = torch.tensor(0.25)
    main = compute_gradients(state, encode, [planned_batches(store, recipe, (0, 2))[0]], CPU, Recorded(0, 2)).read()
    state.unread_update_ratio = torch.tensor(0.75)
    batch = planned_batches(store, recipe, (1, 2))[0]
    other = compute_gradients(state, encode, [batch], CPU, Recorded(1, 2)).read()
    assert (other.grad_norm, other.update_ratio) == (main.grad_norm, main.update_ratio)
    assert main.grad_norm > 0 and main.update_ratio == 0.25


def test_all_processes_judge_the_updates_of_rank_0(cohort_store: Path, tmp_path: Path) -> None:
    """Before a checkpoint the size of an update is not read with the metrics, and the eps of Adam never is."""

    @dataclasses.dataclass(frozen=True)
    class Beside(Distributed):
        """Rank 1 beside a rank 0 whose value is 0.25."""

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + 0.25

    state = make_state(Store.open(cohort_store), make_recipe(), tmp_path / "run")
    state.distributed = Beside(1, 2)
    state.unread_update_ratio = torch.tensor(0.75)
    state.read_update_ratio()
    assert state.progress.interval.update_ratio == state.guard.memory.update_ratio == 0.25
    assert state.typical_gradient() is None
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    assert state.typical_gradient() == 0.25


class _FrameLoss:
    """A loss that uses the frames alone."""

    def __init__(self, settings: CustomLossSettings) -> None:
        pass

    def __call__(self, outputs: Outputs, tokens: torch.Tensor, n_tokens: torch.Tensor) -> torch.Tensor:
        return outputs.frames.square().mean((1, 2))


@pytest.mark.parametrize("n_counted", [2, 0])
def test_a_custom_loss_trains_the_same_in_several_processes(
    n_counted: int, monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    """DistributedDataParallel needs a gradient of every output that is not detached, and a custom loss may use any."""
    monkeypatch.setattr(combined, "component_class", lambda group, kind: _FrameLoss)
    store, recipe = Store.open(cohort_store), make_recipe("data.batching.batch_size=2", "mode.enabled=true")
    custom = CustomLossSettings.model_construct(kind="frames", weight=1.0)
    losses = recipe.loss.model_copy(
        update={"custom": custom, "ctc": CTCSettings(weight=0.0), "mode": ModeLossSettings(weight=0.0)}
    )
    recipe = recipe.model_copy(update={"loss": losses})
    state = make_state(store, recipe, tmp_path / "run")
    batch = dataclasses.replace(planned_batches(store, recipe)[0], n_counted=n_counted)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        encode = make_encode(state.model, recipe, CPU, Distributed(0, 2))
        for _ in range(2):  # the second step fails if the reducer still waits for gradients of the first
            compute_gradients(state, encode, [batch], CPU, Distributed(0, 2))
    finally:
        dist.destroy_process_group()
    averaged = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
    compute_gradients(state, partial(encode_for_training, state.model), [batch], CPU, Distributed())
    alone = {name: p.grad for name, p in state.model.named_parameters() if p.grad is not None}
    assert alone and alone.keys() <= averaged.keys()
    for name, gradient in averaged.items():  # the mean over two processes of which one has all trials
        torch.testing.assert_close(gradient, 2 * alone[name] if name in alone else torch.zeros_like(gradient))


def test_accumulated_batches_are_averaged_once(cohort_store: Path, tmp_path: Path) -> None:
    """The batches have trials of one session each: its layer gets its gradient before the last pass, or in it."""
    store, recipe = Store.open(cohort_store), make_recipe("data.batching.batch_size=8")
    state, planned = make_state(store, recipe, tmp_path / "run"), planned_batches(store, recipe)
    index = {name: i for i, name in enumerate(state.model.config.sessions)}
    by_session = {s: [t for t in planned.trials if t.session == s][:2] for s in index}
    batches = [collate(store, trials, index, recipe.front_end.statistics_spec) for trials in by_session.values()]
    n_reduced: list[int] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def reduce(counts: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        counts.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    try:
        encode = make_encode(state.model, recipe, CPU, Distributed(0, 2))
        assert isinstance(encode, step_module.DistributedEncode)
        encode.module.register_comm_hook(n_reduced, reduce)
        for drawn in (batches[:1], batches):
            compute_gradients(state, encode, drawn, CPU, Distributed(0, 2))
    finally:
        dist.destroy_process_group()
    assert len(n_reduced) == 2 * (max(n_reduced) + 1)  # all buckets once per step
    averaged = {name: p.grad for name, p in state.model.named_parameters()}
    compute_gradients(state, partial(encode_for_training, state.model), batches, CPU, Distributed())
    for name, parameter in state.model.named_parameters():  # the mean over two processes of which one has all trials
        torch.testing.assert_close(averaged[name], 2 * parameter.grad, rtol=1e-4, atol=1e-6)


def _load_offline() -> None:
    arcuate.load("run", device="cuda")


def _load_stream() -> None:
    StreamingDecoder.load("run", device="cuda")


def _configure() -> None:
    configure_runtime(RuntimeSettings(device="cuda", threads=torch.get_num_threads()))


def _configure_tf32() -> None:
    configure_runtime(RuntimeSettings(device="cuda", tf32=True, threads=torch.get_num_threads()))


@pytest.mark.parametrize("start", [_configure, _configure_tf32, _load_offline, _load_stream])
def test_everything_that_computes_sets_tf32_and_the_kernels_of_attention(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    """torch allows TF32 in cuDNN by default, so an evaluation would round more coarsely than its training."""
    set_to: list[str] = []
    attention: list[bool] = []
    tf32 = start is _configure_tf32
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", attention.append)
    monkeypatch.setattr("arcuate.decoding.load.find_checkpoint", lambda *arguments: Path("run"))
    monkeypatch.setattr("arcuate.models.io.load_model", lambda folder: (_ for _ in ()).throw(UserError("loading")))
    with pytest.raises(UserError, match="loading") if start in (_load_offline, _load_stream) else nullcontext():
        start()
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert set_to == ["high" if tf32 else "highest"]
    assert attention == [False]  # cuDNN's gradients are NaN for padded trials of some lengths


def test_too_little_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")

    monkeypatch.setattr("arcuate.experiments.train.train_loop", fail)
    with pytest.raises(UserError, match=r"Tried to allocate 20.00 GiB.*train.accumulate"):
        train("tiny", cohort_store, tmp_path / "run", overrides=["data.workers=0"])


def test_a_device_too_full_for_the_model_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    def fail(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("arcuate.experiments.train.build_model", lambda *arguments: SimpleNamespace(to=fail))
    with pytest.raises(UserError, match=r"Tried to allocate 20.00 MiB.*end other programs"):
        train("tiny", cohort_store, tmp_path / "run", dry_run=True)


@pytest.mark.parametrize(
    ("backends", "fails", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, []),
        ("cpu:gloo,cuda:nccl", False, ["destroyed"]),
        ("cpu:gloo,cuda:gloo", True, ["destroyed"]),
    ],
)
def test_a_failed_process_does_not_wait_for_collectives_of_the_others(
    backends: str, fails: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    """NCCL finishes collectives before it destroys a group; after an error nothing may call it in this process."""
    calls: list[str] = []

    def announce(*arguments: Any) -> None:
        if fails:
            raise UserError("bad sector")

    monkeypatch.setattr("arcuate.experiments.train._announce", announce)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    with pytest.raises(UserError, match="bad sector") if fails else nullcontext():
        train("tiny", cohort_store, tmp_path / "run", dry_run=True)
    assert calls == expected


@pytest.mark.parametrize("other", [-1, 2, 4])
def test_all_processes_resume_the_same_checkpoint(other: int, cohort_store: Path, tmp_path: Path) -> None:
    """A machine that sees an older state of a shared folder, or none, would silently train on with other weights."""

    @dataclasses.dataclass(frozen=True)
    class Beside(Distributed):
        """A process beside one that found the checkpoint of step `other`."""

        def any(self, flag: bool) -> bool:
            return flag

        def max(self, value: float) -> float:
            return max(value, -other if value < 0 else other)

    state = make_state(Store.open(cohort_store), make_recipe(), tmp_path / "run")
    environment = {"data": {"hashes": "x"}}
    start_run(state, Start(resume=True), environment, Distributed())
    state.progress.step = state.progress.position = 4
    state.save()
    if other == 4:
        start_run(state, Start(resume=True), environment, Beside(1, 2))
        return
    found = "no checkpoint" if other < 0 else "step 2"
    with pytest.raises(UserError, match=rf"different checkpoints .*one {found}, another step 4"):
        start_run(state, Start(resume=True), environment, Beside(1, 2))
