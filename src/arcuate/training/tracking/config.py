"""Settings of the trackers. What they are told never decides what is trained."""

from typing import Annotated, Literal

from pydantic import Field

from arcuate.config import Settings

Name = Annotated[str, Field(min_length=1, max_length=128)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]


class TensorBoard(Settings):
    enabled: bool = Field(False, description="write event files to RUN/tensorboard")


class Wandb(Settings):
    """Weights & Biases; its files go to RUN/wandb."""

    enabled: bool = Field(False, description="send numbers to Weights & Biases")
    project: Name = Field("arcuate", description="where the run appears")
    entity: Name | None = Field(None, description="user or team; null = the default of the account")
    run_name: Name | None = Field(None, description="null = the name of the run folder")
    tags: tuple[Tag, ...] = Field((), description="shown beside the run")
    notes: str = Field("", description="shown beside the run")
    mode: Literal["online", "offline", "disabled"] = Field(
        "online", description="offline: nothing is sent until `wandb sync`; disabled: as if not enabled"
    )


class Track(Settings):
    tensorboard: TensorBoard = TensorBoard()
    wandb: Wandb = Wandb()
    samples: bool = Field(
        False, description="also give trackers a decoded validation trial as text; else they get numbers only"
    )
