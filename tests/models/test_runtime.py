"""The choice of device, and of threads: by CPU time, robust against other processes, corrected once on a real step."""

import shutil
from pathlib import Path

import pytest
import torch

from arcuate.evaluation.evaluate import find_source, score_split
from arcuate.experiments import train as train_module
from arcuate.experiments.train import train
from arcuate.models import runtime
from arcuate.models.config import RuntimeSettings
from arcuate.models.runtime import RuntimeChoice, available_runtime, configure_runtime, fewest_threads, time_threads
from arcuate.run import Run
from arcuate.training.config import read_config
from support.devices import FakeCuda

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"


class Machine:
    """A clock of CPU time; every run costs what the number of threads costs, and sometimes a disturbance on top."""

    def __init__(self, cost: dict[int, float], disturbed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.now, self.n_runs, self.cost, self.disturbed = 0.0, 0, cost, disturbed

    def process_time(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += self.cost[torch.get_num_threads()] + (0.5 if self.n_runs in self.disturbed else 0.0)
        self.n_runs += 1


@pytest.mark.parametrize(
    ("cost", "chosen"),
    [
        ({1: 0.010, 2: 0.011}, 2),  # twice the cores, the same work
        ({1: 0.010, 2: 0.020}, 1),  # the second thread only waits
        ({1: 0.010, 2: 0.0185}, 1),  # a gain of 7 % is not worth a core
        ({1: 0.010, 2: 0.012, 4: 0.1}, 2),
        ({1: 0.040, 2: 0.042, 4: 0.046}, 4),
    ],
)
def test_threads_by_cpu_time(cost: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    machine = Machine(cost, disturbed={0, 3, 6, 7})  # the warm-up, and a few runs of each
    monkeypatch.setattr(runtime.time, "process_time", machine.process_time)
    seconds = time_threads(machine.run, sorted(cost), n_runs=7)
    assert seconds == pytest.approx({n: s / n for n, s in cost.items()})
    assert fewest_threads(seconds) == chosen
    assert torch.get_num_threads() == before


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runtime, "count_cores", lambda: 2)
    before = torch.get_num_threads()
    yield  # type: ignore[misc]
    torch.set_num_threads(before)


def test_small_models_use_one_thread(two_cores: None, messages: list[str]) -> None:
    choice = configure_runtime(RuntimeSettings(device="cpu"), width=64, batch_size=16)
    assert (choice.threads, choice.reason, choice.measured) == (1, "small model", False)
    assert messages == ["cpu, 1 thread: small model"]  # every command that computes says so


def test_the_first_step_corrects_a_wrong_probe(
    two_cores: None, monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path, messages: list[str]
) -> None:
    small = {"encoder.width": 16, "train.steps": 2, "train.log_every": 1, "data.batching.batch_size": 4}
    expected = train("tiny", cohort_store, tmp_path / "one", overrides={**small, "runtime.threads": 1})
    monkeypatch.setattr(
        train_module, "configure_runtime", lambda *_, **__: RuntimeChoice(CPU, 2, "probe", measured=True)
    )
    steps: list[tuple[int, ...]] = []

    def time_threads(run, candidates, n_runs):  # type: ignore[no-untyped-def]
        run()
        steps.append(candidates)
        return {1: 0.1, 2: 0.3}

    monkeypatch.setattr(train_module, "time_threads", time_threads)
    corrected = train("tiny", cohort_store, tmp_path / "run", overrides=small)
    assert steps == [(1, 2)]
    assert corrected.run.environment()["threads"] == 1
    assert any(m.startswith("using 1 thread after timing the first step") for m in messages)
    files = [r.run.checkpoints / "last/model.safetensors" for r in (expected, corrected)]
    assert files[0].read_bytes() == files[1].read_bytes()  # the timed step does not count
    train("tiny", cohort_store, tmp_path / "run", overrides=small, resume=True)
    assert len(steps) == 1  # a resumed run keeps its threads


def test_a_run_is_evaluated_where_its_gpu_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run of `runtime.device=cuda` on a laptop: `evaluate` has no option for the device."""
    run = Run(shutil.copytree(GOLDEN / "run", tmp_path / "run", symlinks=True))
    recipe = run.recipe_file.read_text()
    run.recipe_file.write_text(recipe.replace("device: auto", "device: cuda:7").replace("tf32: false", "tf32: true"))
    trained = read_config(run).runtime
    assert (trained.device, trained.tf32) == ("cuda:7", True)
    assert score_split(find_source(run), "val", GOLDEN / "store").results
    FakeCuda(monkeypatch, n_devices=4)
    assert available_runtime(trained) == trained.model_copy(update={"device": "auto"})
    assert available_runtime(RuntimeSettings(device="cuda:3")).device == "cuda:3"
