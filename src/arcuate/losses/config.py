"""Settings of the losses. The classes need no torch."""

from typing import Annotated, Literal

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
    weight: LossWeight = Field(0.3, description="Weight of their mean in the total loss; 0 disables it.")

    @model_validator(mode="after")
    def _layers_distinct(self) -> "IntermediateSettings":
        if len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers {list(self.layers)} contains a layer twice; list each layer once")
        return self

    @property
    def active_layers(self) -> tuple[int, ...]:
        """The layers if their loss has a weight above 0."""
        return self.layers if self.weight > 0 else ()


class ConsistencySettings(Settings):
    """CR-CTC (Yao et al. 2024): consistency between the frame posteriors of two augmented views of every trial.

    The CTC and other losses are means over both views, so a step costs about twice as much. The reduction is that of
    `loss.ctc`. Used in training only; the authors increase time masking with it (`augment.time_masks`).
    """

    weight: LossWeight = Field(0.0, description="Weight in the total loss; 0 disables the second view.")

    @property
    def n_views(self) -> int:
        """Number of augmented views of a trial in a training step."""
        return 2 if self.weight > 0 else 1


class AlignmentSettings(Settings):
    """Cross-entropy on the model's own Viterbi CTC alignment; intended for fine-tuning a trained CTC model.

    The alignment is recomputed at every step; the reduction is that of `loss.ctc`. To enable it in one stage only, set
    `stages.losses.alignment`.
    """

    weight: LossWeight = Field(0.0, description="Weight in the total loss; 0 disables it.")


class DistillationSettings(Settings):
    """Divergence of the frame posteriors from those of a trained model on the same trials without augmentation."""

    teacher: str | None = Field(
        None, min_length=1, description="Run folder of the teacher, RUN or RUN@last; null = no distillation."
    )
    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")
    temperature: float = Field(1.0, ge=0.1, le=100.0, description="Softmax temperature of both posteriors.")
    delay: int = Field(
        0, ge=0, le=1000, description="Number of frames by which this model may lag behind a bidirectional teacher."
    )


class ModeLossSettings(Settings):
    """Cross-entropy of the speaking mode, if `mode.enabled`, with both modes weighted equally."""

    weight: LossWeight = Field(0.1, description="Weight in the total loss; 0 disables it.")


class DenoiseSettings(Settings):
    """Flow-matching error of the denoiser, if enabled, normalised by the error of predicting zero flow."""

    weight: LossWeight = Field(0.05, description="Weight in the total loss; 0 disables it.")


class ReconstructionLossSettings(Settings):
    """Squared error of the predicted masked bins, relative to predicting their mean; needs `reconstruction.enabled`."""

    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")


class CustomLossSettings(PluginSettings):
    """Base class for the settings of a user-defined loss."""

    weight: LossWeight = Field(1.0, description="Weight in the total loss; 0 disables it.")


class LossSettings(Settings):
    """All losses; the total is their weighted sum."""

    ctc: CTCSettings = CTCSettings()
    rnnt: RNNTSettings = RNNTSettings()
    intermediate: IntermediateSettings = IntermediateSettings()
    consistency: ConsistencySettings = ConsistencySettings()
    alignment: AlignmentSettings = AlignmentSettings()
    distillation: DistillationSettings = DistillationSettings()
    mode: ModeLossSettings = ModeLossSettings()
    denoise: DenoiseSettings = DenoiseSettings()
    reconstruction: ReconstructionLossSettings = ReconstructionLossSettings()
    custom: Annotated[SerializeAsAny[CustomLossSettings], plugin_validator("losses")] | None = Field(
        None, description="User-defined loss; null = none."
    )

    @property
    def has_custom(self) -> bool:
        return self.custom is not None and self.custom.weight > 0
