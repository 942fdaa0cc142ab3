"""The choice of device, and of threads: by the size of the model, the same at every start."""

import shutil
from pathlib import Path

import pytest
import torch

from arcuate.evaluation.evaluate import find_source, score_split
from arcuate.experiments.train import train
from arcuate.models import runtime
from arcuate.models.config import RuntimeSettings
from arcuate.models.runtime import available_runtime, configure_runtime
from arcuate.run import Run
from arcuate.training.config import read_config
from support.devices import FakeCuda

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runtime, "count_cores", lambda: 4)
    before = torch.get_num_threads()
    yield  # type: ignore[misc]
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("width", "batch_size", "threads", "reason"),
    [(64, 16, 1, "size of the model"), (256, 24, 2, "size of the model"), (768, 64, 4, "all cores")],
)
def test_threads_follow_the_size_of_the_model(
    four_cores: None, messages: list[str], width: int, batch_size: int, threads: int, reason: str
) -> None:
    """The same number every time: it changes rounding, and with it the result of a training."""
    choice = configure_runtime(RuntimeSettings(device="cpu"), width, batch_size)
    assert (choice.threads, choice.reason, torch.get_num_threads()) == (threads, reason, threads)
    assert messages == [f"cpu, {threads} thread{'s' * (threads > 1)}: {reason}"]  # every command that computes says so
    assert configure_runtime(RuntimeSettings(device="cpu", threads=3), width, batch_size).threads == 3


def test_a_resumed_run_keeps_its_threads(four_cores: None, cohort_store: Path, tmp_path: Path) -> None:
    small = {"encoder.width": 16, "train.steps": 2, "data.batching.batch_size": 4, "data.workers": 0}
    run = train("tiny", cohort_store, tmp_path / "run", overrides={**small, "runtime.threads": 2}).run
    assert run.environment()["threads"] == 2
    train("tiny", cohort_store, run, overrides=small, resume=True)
    assert torch.get_num_threads() == 2


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
