"""The stages of a curriculum as training meets them: lengths, weights, who learns, when one ends."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from pydantic import Field
from torch import nn

from arcuate.config import parse_settings, to_tree
from arcuate.errors import UserError
from arcuate.losses.config import LossSettings
from arcuate.training.config import Stage, TrainingConfig

PREFIXES = {
    "front_end": "front_end.",
    "encoder": "encoder.",
    "ctc": "head.",
    "transducer": "transducer.",
    "mode": "mode.",
    "denoiser": "denoiser.",
}
Count = Annotated[int, Field(ge=0, lt=2**53)]


C = TypeVar("C", bound=TrainingConfig)


@dataclass(frozen=True)
class StageProgress:
    """Where in the curriculum a run stands; `index` is the number of stages that are over."""

    index: Count = 0
    began: Count = 0  # the step after which this stage began
    best: float | None = None  # lowest PER in this stage
    n_bad: Count = 0  # validations since then

    def after_validation(self, stage: Stage, per: float | None) -> "StageProgress":
        """Only gains that count begin the patience anew."""
        if per is None:
            return self
        if self.best is None or per < self.best * (1 - stage.gain):
            return replace(self, best=per, n_bad=0)
        return replace(self, n_bad=self.n_bad + 1)

    def is_tired(self, stage: Stage) -> bool:
        """Whether it has waited long enough for another gain."""
        return stage.plateau is not None and self.n_bad >= stage.plateau

    def is_over(self, stage: Stage, step: int) -> bool:
        assert stage.steps is not None
        return self.is_tired(stage) or step - self.began >= stage.steps


def settle(recipe: C, steps_per_epoch: float) -> C:
    """The recipe with every stage's length in steps, and the length of the run they make."""
    if all(stage.epochs is None for stage in recipe.stages):
        return recipe
    tree = to_tree(recipe)
    for stage in tree["stages"]:
        if stage["epochs"] is not None:
            stage["steps"], stage["epochs"] = max(1, round(stage["epochs"] * steps_per_epoch)), None
    return parse_settings(type(recipe), tree, str(tree.get("name", "")))


def outline(recipe: TrainingConfig) -> str:
    """The stages and their lengths in one line."""
    parts = [
        f"{stage.name} {stage.steps}" + (" or less" if stage.plateau is not None else "")
        for stage in recipe.stages
    ]
    return f"stages, in steps: {', '.join(parts)}"


def stage_at(recipe: TrainingConfig, index: int) -> Stage | None:
    """The stage of this number, the last one after the end; None in a recipe without stages."""
    return recipe.stages[min(index, len(recipe.stages) - 1)] if recipe.stages else None


def weighed(loss: LossSettings, stage: Stage | None) -> LossSettings:
    """The losses as they count in a stage."""
    if stage is None:
        return loss
    return loss.model_copy(
        update={name: getattr(loss, name).model_copy(update={"weight": w}) for name, w in stage.losses}
    )


def let_learn(model: nn.Module, stage: Stage | None) -> None:
    """Only the components of the stage take gradients; without stages what learns is nobody's business here."""
    if stage is None:
        return
    wanted = tuple(PREFIXES[c] for c in stage.train) if stage.train else ("",)
    n = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(wanted))
        n += parameter.requires_grad
    if not n:
        raise UserError(f"stage {stage.name!r} trains components that have no weights")
