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


class Loss(Settings):
    ctc: CTC = CTC()
