"""Fitting the new layer: the ordinary training loop, on a recipe derived from the parent's and a mix of trials."""

from collections.abc import Sequence
from pathlib import Path

import torch

from arcuate.adaptation.calibration import MixedBatches
from arcuate.adaptation.config import Calibration
from arcuate.data.batching import PlannedBatches, training_batches
from arcuate.data.sessions import nearest_session
from arcuate.data.store import Store, TrialInfo
from arcuate.experiments.recipe import Recipe
from arcuate.losses.config import CTCSettings, DenoiseSettings, LossSettings, ModeLossSettings, RNNTSettings
from arcuate.models.config import ModelConfig
from arcuate.models.model import Model, add_session, parameter_groups
from arcuate.run import create_run
from arcuate.training.callbacks import Callback
from arcuate.training.config import Ema, Optimizer, Precision, Swa, Train
from arcuate.training.interrupts import Stop
from arcuate.training.loop import train
from arcuate.training.schedule import Constant, Linear
from arcuate.training.state import TrainingState


def derive_recipe(parent: Recipe, config: ModelConfig, session: str, settings: Calibration) -> Recipe:
    """The parent's recipe with the new day among its sessions, and with calibration's own way of learning."""
    data = parent.data.model_copy(
        update={"sessions": (*config.sessions, session), "max_sessions": None, "n_sessions": None}
    )
    layer = parent.front_end.session_layer.model_copy(update={"enabled": True})
    rest = settings.other_lr_factor * settings.lr
    changes = {
        "name": f"{parent.name}-calibrated"[:100],
        "extends": None,
        "summary": f"{parent.name}, calibrated to {session}",
        "data": data,
        "front_end": parent.front_end.model_copy(update={"session_layer": layer}),
        "loss": LossSettings(
            ctc=CTCSettings(reduction="mean_per_token", zero_infinity=True, weight=parent.loss.ctc.weight),
            rnnt=RNNTSettings(reduction="mean_per_token", weight=parent.loss.rnnt.weight),
            mode=ModeLossSettings(weight=0.0),  # what tells modes and cleans frames has been learned
            denoise=DenoiseSettings(weight=0.0),
        ),
        "stages": (),
        "optimizer": Optimizer(),
        "schedule": Linear(peak_lr=rest, min_lr=0.0) if rest else Constant(lr=0.0),
        "session_schedule": Linear(peak_lr=settings.lr, min_lr=0.0),
        "ema": Ema(),
        "swa": Swa(),
        "train": Train(
            steps=settings.steps,
            seed=settings.seed,
            clip_norm=1.0,
            precision=Precision(),
            log_every=min(10, settings.steps),
            validate_every=settings.steps,
            checkpoint_every=settings.steps,
            keep_checkpoints=1,
        ),
    }
    return Recipe.model_validate(parent.model_copy(update=changes).model_dump(by_alias=True))


def begin_with(model: Model, session: str, settings: Calibration) -> str:
    """The known session whose layer a new one begins as, or "mean"."""
    return "mean" if settings.init == "mean" else nearest_session(session, model.config.sessions)


def fit_layer(
    parent: Model,
    recipe: Recipe,
    store: Store,
    session: str,
    new: Sequence[TrialInfo],
    old: Sequence[TrialInfo],
    settings: Calibration,
    folder: Path,
    environment: dict[str, object],
    callback: Callback,
    stop: Stop,
) -> Model:
    """A model that knows the day, trained in a new run folder; the parent is left as it was."""
    model = add_session(parent, session, begin_with(parent, session, settings))
    free(model, settings)
    run = create_run(folder, recipe, environment)
    training = TrainingState(model, recipe, run, "fp32")
    mixing = bool(settings.other_lr_factor) and bool(old)
    plan = MixedBatches(
        len(new),
        len(old) if mixing else 0,
        settings.batch_size,
        settings.replay_fraction if mixing else 0.0,
        settings.seed,
    )
    trials = (*new, *old) if mixing else tuple(new)
    planned = PlannedBatches(store, trials, plan, model.config.sessions, recipe.front_end.statistics_spec)
    train(training, training_batches(planned, 0, None, 0), None, device_of(model), callback, stop)
    return model.eval()


def free(model: Model, settings: Calibration) -> None:
    """Only what may move has gradients: the new layer, and all that is no session layer unless it is frozen."""
    layer = model.front_end.session_layer
    own = {id(layer.weights[-1]), id(layer.biases[-1])}
    for name, parameters in parameter_groups(model).items():
        for parameter in parameters:
            moves = id(parameter) in own if name == "session" else settings.other_lr_factor > 0
            parameter.requires_grad_(moves)


def device_of(model: Model) -> torch.device:
    return model.head.weight.device
