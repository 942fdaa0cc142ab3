"""Shared fixtures: one small simulated cohort per layout, prepared once for the whole test run."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its handlers abort children that are forked in other tests

import pytest
from hypothesis import HealthCheck, settings

from support.cases import USUAL, cases, set_cases

THOROUGH = Path(__file__).with_name("thorough")  # all tests in this folder are marked so
SHARED = Path(__file__).parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=USUAL, help=f"random examples per test (default: {USUAL})")


def pytest_configure(config: pytest.Config) -> None:
    set_cases(config.getoption("--cases"))
    settings.register_profile(
        "suite", max_examples=cases(), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    settings.load_profile("suite")
    # nohup ignores SIGHUP, a shell without job control SIGINT in background commands; children inherit both.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if THOROUGH in item.path.parents:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and collected tests are never garbage: collections need not look at them


@pytest.fixture(autouse=True)
def _logger_as_imported() -> None:
    """A command called in this process makes the library's messages visible, also to later tests."""
    logger = logging.getLogger("arcuate")
    logger.handlers[:] = [handler for handler in logger.handlers if isinstance(handler, logging.NullHandler)]
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Messages that library code logs during a test, with the prefix the command line gives to warnings."""
    from arcuate.progress import logger

    collected: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(record.levelno, "")
            collected.append(prefix + record.getMessage())

    handler, level = Collector(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield collected
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def forked_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps and ablations inside a test start their trainings without importing everything again."""
    from support.forking import PROGRAM, forking_environment

    for name, value in forking_environment({}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("arcuate.experiments.train_many.PROGRAM", PROGRAM)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The real material beside the checkout."""
    if not (SHARED / "real").is_dir():
        pytest.skip("the real trials and logs are not beside this checkout (../shared/real)")
    return SHARED


@pytest.fixture(scope="session")
def cohort_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sessions of simulated '25 recordings, 16 electrodes, prepared."""
    from arcuate.data.prepare import prepare
    from arcuate.data.simulation import simulate

    folder = tmp_path_factory.mktemp("cohort")
    simulate(
        folder / "source",
        layout="b2t25",
        n_sessions=3,
        n_trials=40,
        n_electrodes=16,
        difficulty="easy",
        seed=5,
    )
    prepare(folder / "source", folder / "store")
    return folder / "store"


@pytest.fixture(scope="session")
def new_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `store` of days that drift in known ways, and a `run` that has learned the first two."""
    from arcuate.experiments.train import train
    from support.days import TRAINING, make_days

    folder = tmp_path_factory.mktemp("days")
    make_days(folder)
    train("tiny", folder / "store", folder / "run", overrides=[*TRAINING, "data.max_sessions=2"])
    return folder
