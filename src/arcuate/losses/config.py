"""Settings of the losses."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings


class CTC(Settings):
    """'24: mean_per_token with zero_infinity; '25: sum_per_trial without."""

    reduction: Literal["mean_per_token", "sum_per_trial"] = Field(
        "sum_per_trial",
        description="sum_per_trial is some 35 times larger; rate and eps belong with it",
    )
    zero_infinity: bool = Field(False, description="a trial that cannot be aligned counts 0")
    weight: float = Field(1.0, ge=0.0, le=1000.0, description="0 = left out")


class RNNT(Settings):
    """The transducer's loss, where there is a transducer; reduced as CTC is, the two are of one size."""

    reduction: Literal["mean_per_token", "sum_per_trial", "document_mean_t_half"] = Field(
        "mean_per_token",
        description="document_mean_t_half divides by half the mean number of frames of the batch",
    )
    weight: float = Field(1.0, ge=0.0, le=1000.0, description="0 = left out")


class Intermediate(Settings):
    """The CTC loss of inner layers too, read by the same head; in training only, and reduced as `loss.ctc` is."""

    layers: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (), description="after which layers of the encoder (1 = the first); none = off"
    )
    weight: float = Field(0.3, ge=0.0, le=1000.0, description="of their mean; 0 = left out")

    @model_validator(mode="after")
    def _each_once(self) -> "Intermediate":
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {list(self.layers)} names a layer twice; name each once")
        return self

    @property
    def counted(self) -> tuple[int, ...]:
        """The layers whose loss has any weight."""
        return self.layers if self.weight > 0 else ()


class ModeLoss(Settings):
    """Cross-entropy of the speaking mode, where the model has one; both modes count alike however rare one is."""

    weight: float = Field(0.1, ge=0.0, le=1000.0, description="0 = left out")


class Denoise(Settings):
    """Error of the denoiser's flow over that of no flow at all, where the model has a denoiser."""

    weight: float = Field(0.05, ge=0.0, le=1000.0, description="0 = left out")


class Loss(Settings):
    ctc: CTC = CTC()
    rnnt: RNNT = RNNT()
    intermediate: Intermediate = Intermediate()
    mode: ModeLoss = ModeLoss()
    denoise: Denoise = Denoise()
