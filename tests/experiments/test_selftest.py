"""`arcuate selftest`: all checks pass here, an error is a failed check, and the exit code follows."""

from collections.abc import Iterator

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments import selftest as module
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.selftest import Check, PlainModel, selftest
from arcuate.models.config import ModelConfig
from support.cli import one_object
from support.command import arcuate


def only(monkeypatch: pytest.MonkeyPatch, *groups: module.Group) -> None:
    monkeypatch.setattr(module, "GROUPS", tuple((f"group {i}", group) for i, group in enumerate(groups)))


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


def test_a_model_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size it may need more than a smaller GPU has, which is no fault of the machine."""

    def optimizer(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    (speed,) = [group for name, group in module.GROUPS if name == "official models"]
    only(monkeypatch, speed)
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    checks = selftest("cpu").checks
    assert [c.status for c in checks] == ["skipped"] * 2
    assert "2 trials of 120 bins" in (checks[0].remedy or "")


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
    done = arcuate("selftest", "--device", "cpu", "--json")
    assert done.returncode == code
    values = one_object(done.stdout)
    assert {"device", "versions", "checks"} <= set(values)
    assert values["device"]["type"] == "cpu"
    assert set(values["checks"][0]) == {"name", "status", "value", "bound", "remedy"}
    table = arcuate("selftest", "--device", "cpu")
    assert table.returncode == code
    assert ("fail" in table.stdout) == bool(code)


@pytest.mark.parametrize("name", ["b2t25-gru", "b2t25-transformer"])
def test_plain_formulations_have_the_shape_of_the_model(name: str) -> None:
    recipe = load_recipe(name, ["encoder.width=24", "encoder.depth=1"])
    config = ModelConfig(settings=recipe.model, n_channels=4, sessions=("a", "b"), classes=CLASSES)
    log_probs = PlainModel(config)(torch.randn(2, 40, 4), [0, 1])
    assert log_probs.shape == (2, recipe.front_end.patch.count_frames(40), len(CLASSES))
    assert torch.isfinite(log_probs).all()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # read by torch's own tracing
def test_all_checks_pass_on_this_cpu() -> None:
    """Ratios of speed depend on what else the machine does, so only their presence is checked."""
    done = arcuate("selftest", "--device", "cpu", "--json")
    values = one_object(done.stdout)
    failed = [c for c in values["checks"] if c["status"] == "fail" and "speed" not in c["name"]]
    assert failed == []
    numbers = [c["name"] for c in values["checks"] if c["name"].startswith(("logits", "gradients"))]
    assert len(numbers) == 2 * 3 * 6, numbers  # precisions, encoders
    names = " ".join(c["name"] for c in values["checks"])
    for part in ("bf16", "overflow", "two processes", "b2t25-gru", "streaming", "word search", "memory"):
        assert part in names
