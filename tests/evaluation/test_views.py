"""Pseudo-ensemble: averaged views of a trial."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.trials import TrialResult, decode_trials
from arcuate.experiments.train import train
from arcuate.live.decoder import StreamingDecoder
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.run import find_checkpoint
from support.cli import assert_refused
from support.command import arcuate
from support.devices import DeviceTensor


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "run"
    train("tiny", cohort_store, path, overrides=["train.steps=2", "train.validate_every=2", "encoder.width=16"])
    return path


def decoded(run: Path, store: Path, batch_size: int, **options: float) -> list[TrialResult]:
    opened, model = Store.open(store), load_model(find_checkpoint(run, "best"))
    trials = [t for t in opened.trials if t.split == "val"][:4]
    return decode_trials(model, opened, trials, batch_size=batch_size, keep_log_probs=True, **options)  # type: ignore[arg-type]


def test_views_do_not_depend_on_the_batch_and_stay_probabilities(run: Path, cohort_store: Path) -> None:
    alone = decoded(run, cohort_store, 1, views=3, view_noise=0.5)
    together = decoded(run, cohort_store, 4, views=3, view_noise=0.5)
    plain = decoded(run, cohort_store, 4)
    for a, b, c in zip(alone, together, plain, strict=True):
        assert a.log_probs is not None and b.log_probs is not None and c.log_probs is not None
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
        np.testing.assert_allclose(np.exp(a.log_probs).sum(axis=1), 1.0, atol=1e-5)
        assert not np.allclose(a.log_probs, c.log_probs, atol=1e-4)


def test_views_without_noise_are_the_trial_itself(run: Path, cohort_store: Path) -> None:
    same, plain = decoded(run, cohort_store, 4, views=2, view_noise=0.0), decoded(run, cohort_store, 4)
    for a, b in zip(same, plain, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_streamed_views_are_those_of_complete_trials(run: Path, cohort_store: Path, chunk: int) -> None:
    stream = StreamingDecoder.load(run, lm=None, views=3, view_noise=0.5, warm=False)
    store = Store.open(cohort_store)
    for whole in decoded(run, cohort_store, 4, views=3, view_noise=0.5)[:2]:
        stream.reset(whole.trial.session, store.block_statistics(whole.trial))
        bins, frames = store.read_bins(whole.trial), []
        for first in range(0, len(bins), chunk):
            frames.append(stream.push(bins[first : first + chunk]).log_probs)
            stream.precompute()
        n_before_end = sum(map(len, frames))
        assert tuple(stream.finish().tokens) == whole.tokens
        assert whole.log_probs is not None and 0 < n_before_end <= len(whole.log_probs)
        np.testing.assert_allclose(np.concatenate(frames), whole.log_probs[:n_before_end], atol=1e-4)


def test_views_exclude_adaptation(run: Path) -> None:
    with pytest.raises(UserError, match="--views and --adapt are mutually exclusive"):
        StreamingDecoder.load(run, lm=None, views=2, adapt="statistics")


def test_views_need_the_ctc_head(run: Path) -> None:
    with pytest.raises(UserError, match="only with --head ctc; got 2 and both"):
        evaluate(run, views=2, head="both")


def test_kept_frames_do_not_stay_on_the_device(run: Path, cohort_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Model.forward

    def on_device(self: Model, *arguments: Any) -> Outputs:
        outputs = forward(self, *arguments)
        return replace(outputs, frames=outputs.frames.as_subclass(DeviceTensor))

    monkeypatch.setattr(Model, "forward", on_device)
    for result in decoded(run, cohort_store, 4, keep_frames=True):
        assert type(result.frames) is torch.Tensor
        assert result.log_probs is not None and len(result.frames) == len(result.log_probs)
        assert result.frames.untyped_storage().nbytes() == result.frames.nbytes  # not a view of the batch


def test_results_say_that_views_were_averaged(run: Path) -> None:
    """Otherwise a comparison takes the gain of views for that of a model."""
    found = evaluate(run, views=2, view_noise=0.3, label="views")
    assert found.to_dict()["views"] == 2 and found.to_dict()["view_noise"] == 0.3
    assert "averaged over 2 views" in found.summary()
    assert "views" not in evaluate(run, label="plain").to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--confidence", "--floor"], "--confidence accepts only"),
        (["--floor", "--views", "2"], "--floor accepts only"),
        (["--floor-steps", "5"], "requires --floor"),
    ],
)
def test_options_without_effect_are_refused(run: Path, options: list[str], message: str) -> None:
    assert_refused(arcuate("evaluate", run, *options), message)


def test_names_of_results_fit_into_a_file_name(run: Path) -> None:
    with pytest.raises(UserError, match="give a shorter one"):
        evaluate(run, label="x" * 300)


def test_a_checkpoint_is_one_of_the_run(run: Path, tmp_path: Path) -> None:
    """Not a path to another one, nor a name that a single model ignores."""
    model = find_checkpoint(run, "best")
    with pytest.raises(UserError, match="checkpoint"):
        find_checkpoint(tmp_path, str(model))
    with pytest.raises(UserError, match="is a single model and has no checkpoint 'last'"):
        find_checkpoint(model, "last")
