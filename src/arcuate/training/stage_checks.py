"""What makes a curriculum whole: its length, and components that are there."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arcuate.training.settings import MAX_STEPS, HoldDecay, Restarts, WarmupCosine
from arcuate.training.stage_settings import NEEDS, Stage


def fill_length(tree: Any) -> Any:
    """A run with stages lasts as long as they do, unless train.steps ends it earlier; null = as long as they do.

    Stages in epochs are made steps when the data are known; until then the run counts as of any length.
    """
    if not isinstance(tree, Mapping) or not isinstance(train := tree.get("train") or {}, Mapping):
        return tree
    stages = tree.get("stages")
    if not stages:
        if "steps" in train and train["steps"] is None:
            raise ValueError(
                "train.steps is null, and there are no stages to tell the length of the run; set train.steps"
            )
        return tree
    steps = [
        stage.get("steps") if isinstance(stage, Mapping) else getattr(stage, "steps", None)
        for stage in stages
    ]
    known = all(type(n) is int for n in steps)
    whole = min(sum(n for n in steps if n), MAX_STEPS) if known else MAX_STEPS
    asked = train.get("steps")
    if asked is not None and type(asked) is not int:
        return tree  # refused with its own words
    return {**tree, "train": {**train, "steps": whole if asked is None else min(asked, whole)}}


def stage_problems(stages: Sequence[Stage], components: Sequence[str]) -> Iterator[str]:
    """Stages that name what is not there, each with what to change."""
    names = [stage.name for stage in stages]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two stages are called {twice[0]!r}; give each a name of its own"
    for stage in stages:
        for component in stage.train:
            if component not in components:
                yield (
                    f"stage {stage.name!r} trains {component!r}, which this model does not have; set"
                    f" {component}.enabled=true, or take it out of train"
                )
        for loss in stage.losses.counted:
            if NEEDS.get(loss, "ctc") not in components:
                part = NEEDS[loss]
                yield (
                    f"stage {stage.name!r} weighs the {loss} loss, and the model has no {part}; set"
                    f" {part}.enabled=true, or stages.{stage.name}.losses.{loss}=0"
                )


def too_short(name: str, schedule: Any, steps: int, stages: Sequence[Stage]) -> Iterator[str]:
    """A warm-up that does not fit into the run, or into a stage over which it starts again."""
    for part, length in lead_in(schedule):
        if length > steps:
            yield (
                f"{name}.{part} {length} is longer than train.steps {steps}; lower {name}.{part} or raise"
                " train.steps"
            )
        for stage in stages:
            if stage.schedule == "anew" and stage.steps is not None and length > stage.steps:
                yield (
                    f"{name}.{part} {length} is longer than stage {stage.name!r} of {stage.steps} steps; lower"
                    f" it, lengthen the stage, or set stages.{stage.name}.schedule=on"
                )


def lead_in(schedule: Any) -> Iterator[tuple[str, int]]:
    """Lengths that have to fit into the run. A schedule laid out for longer than this run may be cut anywhere."""
    if isinstance(schedule, Restarts):
        yield "warmup", schedule.warmup
    if isinstance(schedule, WarmupCosine) and schedule.decay_steps is None:
        yield "warmup", schedule.warmup
    if isinstance(schedule, HoldDecay) and schedule.decay_steps is None:
        yield "hold", schedule.hold
