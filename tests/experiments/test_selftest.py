"""`arcuate selftest`: all checks pass here, an error is a failed check, and the exit code follows."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from arcuate.cli import app
from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments import selftest as module
from arcuate.experiments.plain_models import PlainModel
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.selftest import Check, selftest
from arcuate.models.config import ModelConfig
from support.cli import one_object
from support.command import arcuate


def only(monkeypatch: pytest.MonkeyPatch, *groups: module.Group) -> None:
    monkeypatch.setattr(module, "_NUMERICS", tuple((f"group {i}", group) for i, group in enumerate(groups)))
    monkeypatch.setattr(module, "_TRAINING", ())
    monkeypatch.setattr(module, "_SPEED", ())


def good(machine: object) -> Iterator[Check]:
    yield Check("good", "pass", 1.0, "<= 2")


def broken(machine: object) -> Iterator[Check]:
    yield Check("before", "skipped", remedy="a reason")
    raise RuntimeError("CUDA error: out of memory\nmore lines")


def test_an_error_is_a_failed_check_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, broken, good)
    seen: list[tuple[int, int, str]] = []
    result = selftest("cpu", progress=lambda *report: seen.append(report))
    assert [(c.name, c.status) for c in result.checks] == [("before", "skipped"), ("group 0", "fail"), ("good", "pass")]
    assert result.checks[1].value == "CUDA error: out of memory"
    assert result.n_failed == 1
    assert seen[-1][:2] == (2, 2)
    with pytest.raises(UserError, match="device=tpu is not a device"):
        selftest("tpu")


def test_a_plain_model_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At full size the plain form of `mode-ssm` keeps 20 GB of states, which is no fault of a smaller GPU."""

    def time_both(machine: object, config: ModelConfig, n_trials: int, n_bins: int) -> dict[str, float]:
        if config.settings.encoder.kind != "gru":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"own": 1.0, "plain": 1.0}

    monkeypatch.setattr(module, "_time_both", time_both)
    monkeypatch.setattr(module, "_available_memory", lambda: 64e9)
    checks = module._run_checks("speed", module._check_speed, module._Machine(torch.device("cpu"), True, tmp_path))
    skipped = [c for c in checks if c.status == "skipped"]
    assert [c.name.split(":")[0] for c in skipped] == ["b2t25-transformer", "mode-ssm"]
    assert "32 trials of 800 bins" in (skipped[1].remedy or "")
    assert not any(c.status == "fail" for c in checks) and len(checks) == 6


def test_a_machine_with_little_memory_skips_what_would_make_it_swap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_time_both", lambda *arguments: {"own": 1.0, "plain": 1.0})
    monkeypatch.setattr(module, "_available_memory", lambda: 16e9)
    checks = module._run_checks("speed", module._check_speed, module._Machine(torch.device("cpu"), True, tmp_path))
    skipped = [c for c in checks if c.status == "skipped"]
    assert [c.name for c in skipped] == ["mode-ssm: speed relative to plain torch.nn"]
    assert "take 22 GB in plain torch.nn and 16 GB of memory are available" in (skipped[0].remedy or "")


def test_the_named_gpu_is_tested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the first one: `--device cuda:1`."""
    given: list[str] = []
    monkeypatch.setattr(module, "prepare", lambda *arguments: None)
    monkeypatch.setattr(module, "simulate", lambda *arguments, **options: None)
    monkeypatch.setattr(module.Store, "open", lambda path: None)
    monkeypatch.setattr(module, "train", lambda *arguments, overrides: given.extend(overrides) or "run")
    machine = module._Machine(torch.device("cuda:1"), False, tmp_path)
    assert machine.trained == "run" and "runtime.device=cuda:1" in given


def test_the_notice_of_the_debug_mode_is_not_a_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives it when the mode is set for the first time, which is when the training step is counted."""
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(notice, stacklevel=1))

    def work() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert module._count_synchronisations(work) == 3


def test_the_named_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch judges bf16 by the current GPU, which may be of another kind."""
    current: list[torch.device] = []
    monkeypatch.setattr(module, "choose_device", lambda *arguments: torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(module, "_describe_device", lambda device: {})
    monkeypatch.setattr(module, "configure_cuda", lambda *arguments: None)
    only(monkeypatch)
    selftest("cuda:1")
    assert current == [torch.device("cuda:1")]


@pytest.mark.parametrize(("group", "code"), [(good, 0), (broken, 1)])
def test_exit_code_and_json(monkeypatch: pytest.MonkeyPatch, group: module.Group, code: int) -> None:
    only(monkeypatch, group)
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--json"])
    assert done.exit_code == code
    values = one_object(done.stdout)
    assert {"device", "versions", "checks"} <= set(values)
    assert values["device"]["type"] == "cpu"
    assert set(values["checks"][0]) == {"name", "status", "value", "bound", "remedy"}
    table = CliRunner().invoke(app, ["selftest", "--device", "cpu"])
    assert table.exit_code == code
    assert ("fail" in table.stdout) == bool(code)


@pytest.mark.parametrize("name", module._OFFICIAL)
def test_plain_formulations_have_the_shape_of_the_model(name: str) -> None:
    recipe = load_recipe(name, ["encoder.width=24", "encoder.depth=1"])
    settings = module._without_extras(recipe)
    config = ModelConfig(settings=settings, n_channels=4, sessions=("a", "b"), classes=CLASSES)
    dropouts = [value for name, value in dict(settings.encoder).items() if name.endswith("dropout")]
    assert dropouts and not any(dropouts) and settings.front_end.session_layer.dropout == 0  # as in the plain model
    log_probs = PlainModel(config)(torch.randn(2, 40, 4), [0, 1])
    assert log_probs.shape == (2, settings.front_end.patch.count_frames(40), len(CLASSES))
    assert torch.isfinite(log_probs).all()


@pytest.mark.thorough
def test_all_checks_pass_on_this_cpu() -> None:
    """Ratios of speed depend on what else the machine does, so only their presence is checked."""
    done = arcuate("selftest", "--device", "cpu", "--json")
    values = one_object(done.stdout)
    failed = [c for c in values["checks"] if c["status"] == "fail" and "speed" not in c["name"]]
    assert failed == []
    numbers = [c["name"] for c in values["checks"] if c["name"].startswith(("logits", "gradients"))]
    assert len(numbers) == 2 * 3 * 6, numbers  # precisions, encoders
    names = " ".join(c["name"] for c in values["checks"])
    for part in ("bf16", "overflow", "two processes", "b2t25-gru", "mode-ssm", "streaming", "word search", "memory"):
        assert part in names
