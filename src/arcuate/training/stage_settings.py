"""Settings of a curriculum: stages one after the other, each with what it trains and which losses count."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from arcuate.settings import Settings
from arcuate.training.settings import Steps

Component = Literal["front_end", "encoder", "ctc", "transducer", "mode", "denoiser"]
Weight = Annotated[float, Field(ge=0.0, le=1000.0)]

# Which components a loss can move.
REACHES: dict[str, tuple[Component, ...]] = {
    "ctc": ("front_end", "encoder", "ctc", "mode", "denoiser"),
    "rnnt": ("front_end", "encoder", "transducer", "mode", "denoiser"),
    "mode": ("mode",),
    "denoise": ("denoiser",),
}
NEEDS: dict[str, Component] = {"rnnt": "transducer", "mode": "mode", "denoise": "denoiser"}


class StageLosses(Settings):
    """Weights of the losses in a stage, in place of `loss.*.weight`; a loss that is not named does not count."""

    ctc: Weight = Field(0.0, description="of the CTC loss")
    rnnt: Weight = Field(0.0, description="of the transducer's loss")
    mode: Weight = Field(0.0, description="of the speaking mode's loss")
    denoise: Weight = Field(0.0, description="of the denoiser's loss")

    @property
    def counted(self) -> dict[str, float]:
        return {name: weight for name, weight in self if weight > 0}


class Stage(Settings):
    """One stage of a curriculum; on the command line stages.0.epochs=2 or stages.ctc.epochs=2."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="by which rows of metrics.jsonl call it"
    )
    steps: Steps | None = Field(None, description="how long it lasts in optimizer steps; or `epochs`")
    epochs: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="or in passes over the training trials; made steps when training starts",
    )
    losses: StageLosses = StageLosses()
    train: tuple[Component, ...] = Field((), description="components that learn; empty = all there are")
    rate: float = Field(1.0, gt=0.0, le=1000.0, description="what the rate of the schedule is multiplied by")
    schedule: Literal["anew", "on"] = Field(
        "anew", description="the schedule starts again and spans the stage, or goes on and spans the run"
    )
    plateau: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="ends early after so many validations without improvement; null = by length alone",
    )
    gain: float = Field(0.0, ge=0.0, lt=1.0, description="plateau: relative gain in PER that counts")

    @model_validator(mode="before")
    @classmethod
    def _on_is_a_word(cls, given: Any) -> Any:
        """YAML takes a bare `on` for true, and `schedule: on` can mean one thing only."""
        if isinstance(given, dict) and given.get("schedule") is True:
            return {**given, "schedule": "on"}
        return given

    @model_validator(mode="after")
    def _one_length(self) -> "Stage":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"stage {self.name!r} needs a length: give steps or epochs, one of them")
        if not self.losses.counted:
            raise ValueError(
                f"all losses of stage {self.name!r} weigh 0, so nothing would be learnt; set losses.ctc,"
                " losses.rnnt, losses.mode or losses.denoise above 0"
            )
        if len(set(self.train)) != len(self.train):
            raise ValueError(f"stage {self.name!r} names a component twice in train")
        reached = list(dict.fromkeys(part for loss in self.losses.counted for part in REACHES[loss]))
        if self.train and not set(self.train) & set(reached):
            raise ValueError(
                f"stage {self.name!r} trains {', '.join(self.train)}, which none of its losses"
                f" ({', '.join(self.losses.counted)}) reaches; add one of {', '.join(reached)} to train, or weigh"
                " another loss"
            )
        return self
