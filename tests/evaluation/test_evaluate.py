"""`evaluate`: kept frames, names of results, and checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arcuate import evaluate
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.trials import decode_trials
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import find_checkpoint
from support.devices import DeviceTensor


def test_kept_frames_do_not_stay_on_the_device(
    short_run: Path, cohort_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Model.forward

    def on_device(self: Model, *arguments: Any) -> Outputs:
        outputs = forward(self, *arguments)
        return replace(outputs, frames=outputs.frames.as_subclass(DeviceTensor))

    monkeypatch.setattr(Model, "forward", on_device)
    store, model = Store.open(cohort_store), load_model(find_checkpoint(short_run, "best"))
    trials = [t for t in store.trials if t.split == "val"][:4]
    for result in decode_trials(model, store, trials, batch_size=4, keep_log_probs=True, keep_frames=True):
        assert result.encoded is not None and result.encoded.base is None  # not a view of the batch
        assert result.log_probs is not None and len(result.encoded) == len(result.log_probs)


def test_names_of_results_fit_into_a_file_name(short_run: Path) -> None:
    with pytest.raises(UserError, match="give a shorter one"):
        evaluate(short_run, label="x" * 300)


def test_a_checkpoint_is_one_of_the_run(short_run: Path, tmp_path: Path) -> None:
    """Not a path to another one, nor a name that a single model ignores."""
    model = find_checkpoint(short_run, "best")
    with pytest.raises(UserError, match="checkpoint"):
        find_checkpoint(tmp_path, str(model))
    with pytest.raises(UserError, match="is a single model and has no checkpoint 'last'"):
        find_checkpoint(model, "last")
