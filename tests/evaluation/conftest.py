"""A run of a few steps, and the model of the rescoring tests."""

from pathlib import Path

import pytest

from arcuate.experiments.train import train
from support.rescoring import small_model

__all__ = ["small_model"]


@pytest.fixture(scope="session")
def short_run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluated") / "run"
    small = ["encoder.width=16", "train.steps=3", "train.validate_every=3", "data.batching.batch_size=4"]
    train("tiny", cohort_store, path, overrides=small)
    return path
