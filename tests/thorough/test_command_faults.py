"""Every command that writes, under faults: killed at a file operation, no disk space, no permission, company.

After a fault the files are as before or complete, the message is one sentence, and the same command then succeeds.
"""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.cases import cases
from support.faults import Fault
from support.workspace import COMMANDS, Bench, make_workspace

EXTRAS = {"export": "onnxruntime", "live": "uvicorn", "sweep": "optuna"}  # packages that a command needs
TRIED = [name for name in COMMANDS if name not in EXTRAS or find_spec(EXTRAS[name]) is not None]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("faults") / "workspace")


benches: dict[str, Bench] = {}


@pytest.fixture
def bench(workspace: Path, request: pytest.FixtureRequest) -> Bench:
    name = request.param
    if name not in benches:
        benches[name] = Bench(workspace, name, workspace.parent / "copies")
    return benches[name]


def points(bench: Bench) -> list[int]:
    """File operations to fail at: a share of `--cases`, fewer if each takes several trainings."""
    n = min(cases(0.005 if bench.command.slow else 0.02), bench.n_operations)
    return sorted(random.Random(bench.name).sample(range(1, bench.n_operations + 1), n))


@pytest.mark.parametrize("bench", TRIED, indirect=True)
def test_killed_at_a_file_operation(bench: Bench) -> None:
    for at in points(bench):
        done = bench.check(Fault("kill", at))
        assert done.code == -9


@pytest.mark.parametrize("bench", TRIED, indirect=True)
def test_a_full_disk(bench: Bench) -> None:
    assert bench.check(Fault("full", 1)).code == 2
    for at in points(bench):
        bench.check(Fault("full", at))


@pytest.mark.parametrize("bench", TRIED, indirect=True)
def test_a_limit_on_the_size_of_files(bench: Bench) -> None:
    """The write fails in the middle of a file, in whatever library writes it."""
    for fraction in [0.5] if bench.command.slow else [0.0, 0.1, 0.99]:
        done = bench.check(Fault("size", int(fraction * bench.largest)))
        assert done.code in bench.command.codes[1:] and ("disk" in done.stderr or "large" in done.stderr), done.stderr


@pytest.mark.parametrize("bench", TRIED, indirect=True)
def test_no_permission_to_write(bench: Bench) -> None:
    done = bench.check(Fault("readonly"))
    assert done.code == 2 and "ermission" in done.stderr, done.stderr


@pytest.mark.parametrize("bench", TRIED, indirect=True)
def test_several_at_once(bench: Bench) -> None:
    bench.check_together(3)
