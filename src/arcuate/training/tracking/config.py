"""Settings of the trackers; they do not affect what is trained."""

from typing import Annotated, Literal

from pydantic import Field

from arcuate.config import Settings

_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Tag = Annotated[str, Field(min_length=1, max_length=64)]


class TensorBoard(Settings):
    """TensorBoard; its files go to RUN/tensorboard."""

    enabled: bool = Field(False, description="Write TensorBoard event files.")


class Wandb(Settings):
    """Weights & Biases; its files go to RUN/wandb."""

    enabled: bool = Field(False, description="Send metrics to Weights & Biases.")
    project: _Name = Field("arcuate", description="Project of the run.")
    entity: _Name | None = Field(None, description="User or team; null = the default of the account.")
    run_name: _Name | None = Field(None, description="Displayed name; null = the name of the run folder.")
    tags: tuple[_Tag, ...] = Field((), description="Tags of the run.")
    notes: str = Field("", description="Notes on the run.")
    mode: Literal["online", "offline", "disabled"] = Field(
        "online", description="`offline`: nothing is sent until `wandb sync`; `disabled`: as if not enabled."
    )


class Track(Settings):
    """Trackers of metrics during training."""

    tensorboard: TensorBoard = TensorBoard()
    wandb: Wandb = Wandb()
    samples: bool = Field(False, description="Send a decoded validation trial as text, besides the metrics.")
