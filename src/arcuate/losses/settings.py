"""Settings of the losses."""

from typing import Literal

from pydantic import Field

from arcuate.settings import Settings


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


class ModeLoss(Settings):
    """Cross-entropy of the speaking mode, where the model has one; both modes count alike however rare one is."""

    weight: float = Field(0.1, ge=0.0, le=1000.0, description="0 = left out")


class Denoise(Settings):
    """Error of the denoiser's flow over that of no flow at all, where the model has a denoiser."""

    weight: float = Field(0.05, ge=0.0, le=1000.0, description="0 = left out")


class Loss(Settings):
    ctc: CTC = CTC()
    rnnt: RNNT = RNNT()
    mode: ModeLoss = ModeLoss()
    denoise: Denoise = Denoise()
