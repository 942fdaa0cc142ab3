"""Curriculum: consecutive stages, each with its losses, its trained components and its length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from arcuate.config import Settings, parse_settings, to_tree
from arcuate.losses.config import LossSettings
from arcuate.training.schedule import MAX_STEPS, Steps

Component = Literal["front_end", "encoder", "ctc", "transducer", "mode", "denoiser"]
_Weight = Annotated[float, Field(ge=0.0, le=1000.0)]
Count = Annotated[int, Field(ge=0, lt=2**53)]

# Components that receive gradients from a loss.
_TRAINED_BY: dict[str, tuple[Component, ...]] = {
    "ctc": ("front_end", "encoder", "ctc", "mode", "denoiser"),
    "rnnt": ("front_end", "encoder", "transducer", "mode", "denoiser"),
    "mode": ("mode",),
    "denoise": ("denoiser",),
}
# Component without which a loss cannot be computed.
_NEEDS: dict[str, Component] = {"rnnt": "transducer", "mode": "mode", "denoise": "denoiser"}


class StageLosses(Settings):
    """Loss weights of a stage, in place of `loss.*.weight`; a loss that is not named has weight 0."""

    ctc: _Weight = Field(0.0, description="Weight of the CTC loss.")
    rnnt: _Weight = Field(0.0, description="Weight of the RNN-T loss.")
    mode: _Weight = Field(0.0, description="Weight of the speaking-mode loss.")
    denoise: _Weight = Field(0.0, description="Weight of the denoising loss.")

    @property
    def active(self) -> dict[str, float]:
        return {name: weight for name, weight in self if weight > 0}


class Stage(Settings):
    """One stage of a curriculum; set by index or name on the command line: stages.0.epochs=2, stages.ctc.epochs=2."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="Name of the stage, as written to the rows of metrics.jsonl."
    )
    steps: Steps | None = Field(None, description="Length in optimizer steps; or give `epochs`.")
    epochs: float | None = Field(None, gt=0.0, le=1e6, description="Length in passes over the training trials.")
    losses: StageLosses = StageLosses()
    train: tuple[Component, ...] = Field((), description="Trained components; empty = all of them.")
    requires: Literal["transducer", "mode", "denoiser"] | None = Field(
        None, description="Component that the stage needs: models without it skip the stage; null = never skipped."
    )
    lr_factor: float = Field(1.0, gt=0.0, le=1000.0, description="Factor on the scheduled learning rate.")
    schedule: Literal["restart", "continue"] = Field(
        "restart", description="`restart`: the schedule starts again and spans the stage; `continue`: it spans the run."
    )
    patience: int | None = Field(
        None, ge=1, le=10_000, description="Validations without improvement that end the stage early; null = never."
    )
    min_improvement: float = Field(
        0.0, ge=0.0, lt=1.0, description="Smallest relative decrease of train.select_by that counts as an improvement."
    )

    @model_validator(mode="after")
    def _is_complete(self) -> "Stage":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"stage {self.name!r} needs exactly one of steps and epochs")
        if not self.losses.active:
            raise ValueError(
                f"all losses of stage {self.name!r} have weight 0, so nothing would be learnt; set losses.ctc,"
                " losses.rnnt, losses.mode or losses.denoise above 0"
            )
        if len(set(self.train)) != len(self.train):
            raise ValueError(f"stage {self.name!r} names a component twice in train")
        trainable = list(dict.fromkeys(part for loss in self.losses.active for part in _TRAINED_BY[loss]))
        if self.train and not set(self.train) & set(trainable):
            raise ValueError(
                f"stage {self.name!r} trains {', '.join(self.train)}, which none of its losses"
                f" ({', '.join(self.losses.active)}) reaches; add one of {', '.join(trainable)} to train, or give"
                " another loss a weight"
            )
        return self


def drop_optional_stages(tree: Any) -> Any:
    """Remove the stages that require a component which is not enabled."""
    if not isinstance(tree, Mapping) or not isinstance(stages := tree.get("stages"), (list, tuple)):
        return tree
    kept = [stage for stage in stages if _is_enabled(tree, _value(stage, "requires"))]
    return tree if len(kept) == len(stages) else {**tree, "stages": kept}


def _is_enabled(tree: Mapping[str, Any], component: Any) -> bool:
    if component not in ("transducer", "mode", "denoiser"):
        return True  # no requirement, or an unknown one, which is rejected later
    return bool(_value(tree.get(component), "enabled"))


def _value(settings: Any, name: str) -> Any:
    """Return a setting of a tree of plain values or of parsed settings."""
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def fill_length(tree: Any) -> Any:
    """Set train.steps of a recipe with stages to their total, unless it is given and smaller.

    Stages in epochs are converted to steps once the data are known; until then the run has no limit.
    """
    if not isinstance(tree, Mapping) or not isinstance(train := tree.get("train") or {}, Mapping):
        return tree
    stages = tree.get("stages")
    if not stages:
        if "steps" in train and train["steps"] is None:
            raise ValueError("train.steps is null and there are no stages to define its value; set train.steps")
        return tree
    if not isinstance(stages, (list, tuple)):
        return tree  # rejected later, with its own message
    steps = [_value(stage, "steps") for stage in stages]
    known = all(type(n) is int for n in steps)
    total = min(sum(n for n in steps if n), MAX_STEPS) if known else MAX_STEPS
    given = train.get("steps")
    if given is not None and type(given) is not int:
        return tree  # rejected later, with its own message
    return {**tree, "train": {**train, "steps": total if given is None else min(given, total)}}


def find_stage_problems(stages: Sequence[Stage], components: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each stage that names a component or a loss the model does not have."""
    names = [stage.name for stage in stages]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        yield f"two stages are called {duplicates[0]!r}; rename one of them"
    for stage in stages:
        for component in stage.train:
            if component not in components:
                yield (
                    f"stage {stage.name!r} trains {component!r}, which this model does not have; set"
                    f" {component}.enabled=true, or remove it from train"
                )
        for loss in stage.losses.active:
            if (part := _NEEDS.get(loss, "ctc")) not in components:
                yield (
                    f"stage {stage.name!r} uses the {loss} loss, but the model has no {part}; set"
                    f" {part}.enabled=true, or stages.{stage.name}.losses.{loss}=0"
                )


@dataclass(frozen=True)
class StageProgress:
    """Position in the curriculum; `index` is the number of completed stages."""

    index: Count = 0
    began: Count = 0  # number of steps completed when this stage started
    best: float | None = None  # lowest error rate (train.select_by) in this stage
    n_bad: Count = 0  # validations since then

    def after_validation(self, stage: Stage, rate: float | None) -> "StageProgress":
        if rate is None:
            return self
        if self.best is None or rate < self.best * (1 - stage.min_improvement):
            return replace(self, best=rate, n_bad=0)
        return replace(self, n_bad=self.n_bad + 1)

    def is_out_of_patience(self, stage: Stage) -> bool:
        return stage.patience is not None and self.n_bad >= stage.patience

    def is_over(self, stage: Stage, step: int) -> bool:
        assert stage.steps is not None
        return self.is_out_of_patience(stage) or step - self.began >= stage.steps


C = TypeVar("C", bound=Settings)


def resolve_epochs(recipe: C, steps_per_epoch: float) -> C:
    """Return the recipe with the length of every stage in steps, and train.steps set to their total."""
    tree = to_tree(recipe)
    if all(stage["epochs"] is None for stage in tree["stages"]):
        return recipe
    for stage in tree["stages"]:
        if stage["epochs"] is not None:
            stage["steps"], stage["epochs"] = max(1, round(stage["epochs"] * steps_per_epoch)), None
    return parse_settings(type(recipe), tree, str(tree.get("name", "")))


def describe_stages(stages: Sequence[Stage]) -> str:
    """Return the stages and their lengths in one line."""
    parts = [f"{s.name} {s.steps}" + (" or fewer" if s.patience is not None else "") for s in stages]
    return f"stages, in steps: {', '.join(parts)}"


def stage_at(stages: Sequence[Stage], index: int) -> Stage | None:
    """Return the stage with this index, or the last stage if the index is too large; None without stages."""
    return stages[min(index, len(stages) - 1)] if stages else None


def transducer_was_trained(loss: LossSettings, stages: Sequence[Stage], n_started: int) -> bool:
    """Return whether the transducer loss had a weight in one of the stages so far, or in a run without stages."""
    return any(stage.losses.rnnt > 0 for stage in stages[:n_started]) if stages else loss.rnnt.weight > 0


def stage_loss(loss: LossSettings, stage: Stage | None) -> LossSettings:
    """Return the loss settings with the weights of a stage."""
    if stage is None:
        return loss
    weighted = {name: getattr(loss, name).model_copy(update={"weight": weight}) for name, weight in stage.losses}
    return loss.model_copy(update=weighted)
