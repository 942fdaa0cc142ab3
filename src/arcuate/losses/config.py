"""Settings of the losses. The classes need no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from arcuate.config import PluginSettings, Settings, plugin_validator

LossWeight = Annotated[float, Field(ge=0.0, le=1000.0)]
_Layer = Annotated[int, Field(ge=1, le=64)]


class CTCSettings(Settings):
    """CTC loss. The '24 baseline uses mean_per_token with zero_infinity, the '25 baseline sum_per_trial without it."""

    reduction: Literal["mean_per_token", "sum_per_trial"] = Field(
        "sum_per_trial",
        description="Reduction over a trial; sum_per_trial is about 35 times larger, so lr and eps must match it.",
    )
    zero_infinity: bool = Field(False, description="Loss of 0 instead of infinity for trials that cannot be aligned.")
    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")


class RNNTSettings(Settings):
    """RNN-T loss of the transducer head, if enabled. Use the reduction of `loss.ctc` to give both the same scale."""

    reduction: Literal["mean_per_token", "sum_per_trial", "half_mean_frames"] = Field(
        "mean_per_token",
        description="Reduction over a trial; half_mean_frames divides by half the mean frame count of the batch.",
    )
    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")


class IntermediateSettings(Settings):
    """Intermediate CTC (Lee & Watanabe 2021): CTC loss on intermediate layers through the same output layer.

    Used in training only, with the reduction of `loss.ctc`.
    """

    layers: tuple[_Layer, ...] = Field((), description="Encoder layers with a loss (1 = the first); empty disables it.")
    weight: ClassVar[float] = 0.3  # of their mean in the total loss

    @model_validator(mode="after")
    def _layers_distinct(self) -> "IntermediateSettings":
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {list(self.layers)} contains a layer twice; list each layer once")
        return self


class ModeLossSettings(Settings):
    """Cross-entropy of the speaking mode, if `mode.enabled`, with both modes weighted equally."""

    weight: LossWeight = Field(0.1, description="Weight in the total loss; 0 disables it.")


class DenoiseSettings(Settings):
    """Flow-matching error of the denoiser, if enabled, normalised by the error of predicting zero flow."""

    weight: LossWeight = Field(0.05, description="Weight in the total loss; 0 disables it.")


class CustomLossSettings(PluginSettings):
    """Base class for the settings of a user-defined loss."""

    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")


class LossSettings(Settings):
    """All losses; the total is their weighted sum."""

    ctc: CTCSettings = CTCSettings()
    rnnt: RNNTSettings = RNNTSettings()
    intermediate: IntermediateSettings = IntermediateSettings()
    mode: ModeLossSettings = ModeLossSettings()
    denoise: DenoiseSettings = DenoiseSettings()
    custom: Annotated[SerializeAsAny[CustomLossSettings], plugin_validator("losses")] | None = Field(
        None, description="User-defined loss; null = none."
    )

    @property
    def has_custom(self) -> bool:
        return self.custom is not None and self.custom.weight > 0
