"""Settings of the model, and the stored description from which a checkpoint is rebuilt.

Everything between stored bins and log-probabilities is set here. The classes need no torch.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, SerializeAsAny, Tag, model_validator

from arcuate.config import PluginSettings, Settings, plugin_validator
from arcuate.data.config import StatisticsSpec

_DEVICE = r"^(auto|cpu|cuda(:\d+)?|mps)$"
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = TypeVar("Count")


class Patch(Settings):
    """Number of bins in a frame, and distance between frames."""

    bins: int = Field(14, ge=1, le=200, description="Number of bins in one frame.")
    stride: int = Field(4, ge=1, le=200, description="Stride between frames, in bins.")
    dilation: int = Field(
        1,
        ge=1,
        le=200,
        description="Distance between the bins of a frame that the encoder receives: 4 gives it every fourth bin.",
    )

    @model_validator(mode="after")
    def _no_gaps(self) -> "Patch":
        if self.stride > self.bins:
            raise ValueError("stride must not exceed bins: the bins between two patches would be ignored")
        if self.stride % self.dilation:
            raise ValueError(f"stride {self.stride} must be a multiple of dilation {self.dilation}")
        if (self.bins - 1) % self.dilation:
            bins = self.bins - (self.bins - 1) % self.dilation
            raise ValueError(
                f"bins {self.bins} must be one more than a multiple of dilation {self.dilation}, so that a frame ends"
                f" with a bin in use; set bins to {bins} or {bins + self.dilation}"
            )
        return self

    @property
    def sampled(self) -> "Patch":
        """The same patches over every `dilation`-th bin, as encoders receive them."""
        return Patch(bins=(self.bins - 1) // self.dilation + 1, stride=self.stride // self.dilation)

    def count_frames(self, n_bins: Count) -> Count:
        """floor((max(T, k) - k) / s) + 1 for an int, an array or a tensor of lengths T.

        A trial shorter than one patch is padded to it, so every trial has at least one frame.
        """
        beyond: Any = n_bins - self.bins  # type: ignore[operator]
        n_frames: Count = (beyond * (beyond > 0)) // self.stride + 1
        return n_frames


class SmoothingSettings(Settings):
    """Gaussian smoothing over time. The '25 baseline uses 9 taps, the '24 baseline 20 (centred at 9.5)."""

    sd: float = Field(2.0, ge=0.0, le=50.0, description="Standard deviation of the kernel in bins; 0 = no smoothing.")
    taps: int = Field(9, ge=1, le=101, description="Length of the kernel in bins.")


class SessionLayerSettings(Settings):
    """One affine map per recording session, initialised to the identity."""

    enabled: bool = Field(True, description="Use one map per session; false = only activation, layer norm and dropout.")
    activation: Literal["softsign", "none"] = Field("softsign", description="Activation after the map.")
    layer_norm: bool = Field(False, description="Layer normalisation across channels after the activation.")
    dropout: Probability = Field(0.0, description="Dropout on the output of the layer.")


class ConvStemSettings(Settings):
    """Depthwise convolution over bins with a residual connection, before patches are extracted."""

    enabled: bool = Field(False, description="Enable the convolution.")
    conv_kernel: ClassVar[int] = 7  # bins


class FrontEndSettings(Settings):
    """Conversion of stored bins to the input of the encoder."""

    normalise: Literal["none", "block", "rolling"] = Field(
        "none",
        description="Z-score by the statistics of the block, or of all bins so far (rolling); none = no z-score.",
    )
    log1p: bool = Field(False, description="log(1 + x) before normalisation, intended for raw non-negative features.")
    rolling_bins: ClassVar[int] = 1500  # maximum weight of the bins before the trial in rolling statistics: 30 s
    smoothing: SmoothingSettings = SmoothingSettings()
    session_layer: SessionLayerSettings = SessionLayerSettings()
    stem: ConvStemSettings = ConvStemSettings()
    custom: Annotated[SerializeAsAny[PluginSettings], plugin_validator("front_end_steps")] | None = Field(
        None, description="User-defined transform of single bins, after the session layer; null = none."
    )
    patch: Patch = Patch()

    @property
    def statistics_spec(self) -> StatisticsSpec:
        """The statistics that normalisation needs with each trial."""
        return StatisticsSpec(self.normalise, self.log1p)


def full_session_layers(settings: FrontEndSettings) -> FrontEndSettings:
    """The same settings with one full map per session, as adaptation and calibration train it."""
    layer = settings.session_layer.model_copy(update={"enabled": True})
    return settings.model_copy(update={"session_layer": layer})


class GRUSettings(Settings):
    """Stacked GRU over patches, as in both official baselines."""

    kind: Literal["gru"] = Field("gru", description="Type of encoder.")
    width: int = Field(768, ge=1, le=8192, description="Number of units per layer and direction.")
    depth: int = Field(5, ge=1, le=64, description="Number of layers.")
    dropout: Probability = Field(0.4, description="Dropout between layers.")
    bidirectional: bool = Field(False, description="Run in both directions; such a model cannot stream.")
    learned_initial_state: bool = Field(True, description="Learned initial state, shared by all layers, or zeros.")

    @property
    def causal(self) -> bool:
        return not self.bidirectional


class SSMSettings(Settings):
    """Selective state-space blocks (Mamba-2 / SSD, Dao & Gu 2024) with one decay per head and expansion factor 1."""

    kind: Literal["ssm"] = Field("ssm", description="Type of encoder.")
    width: int = Field(512, ge=1, le=8192, description="Model dimension, and inner dimension of the state-space layer.")
    depth: int = Field(8, ge=1, le=64, description="Number of blocks.")
    n_heads: int = Field(8, ge=1, le=1024, description="Number of SSM heads, each with its own decay; divides width.")
    state_dim: int = Field(64, ge=1, le=1024, description="State size per channel.")
    conv_kernel: ClassVar[int] = 4  # frames, of the convolution before the scan
    dropout: Probability = Field(0.1, description="Dropout on the embedded patches and on each block's output.")
    bidirectional: bool = Field(False, description="Half of the heads run backwards; such a model cannot stream.")

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    @property
    def n_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "SSMSettings":
        if self.width % self.n_heads:
            raise ValueError(f"width {self.width} must be a multiple of n_heads {self.n_heads}")
        if self.bidirectional and self.n_heads % 2:
            raise ValueError(f"a bidirectional encoder needs an even number of heads, not {self.n_heads}")
        return self


class TransformerSettings(Settings):
    """Pre-norm Transformer with bounded context and relative positions, intended for heavy time masking.

    Each patch is one frame; non-overlapping patches keep the input layer small
    (`front_end.patch: {bins: 5, stride: 5}`).
    """

    kind: Literal["transformer"] = Field("transformer", description="Type of encoder.")
    width: int = Field(384, ge=1, le=8192, description="Model dimension.")
    depth: int = Field(5, ge=1, le=64, description="Number of blocks.")
    n_heads: int = Field(6, ge=1, le=1024, description="Number of attention heads; divides width.")
    ffn_expansion: ClassVar[int] = 4  # feed-forward hidden width / width
    context: int = Field(
        125, ge=1, le=10_000, description="Number of frames that a layer attends to, including the current one."
    )
    n_buckets: ClassVar[int] = 32  # of relative positions
    input_dropout: Probability = Field(0.2, description="Dropout on embedded patches.")
    attention_dropout: Probability = Field(0.35, description="Dropout on attention weights.")
    dropout: Probability = Field(0.35, description="Dropout on the outputs of attention and feed-forward layers.")
    bidirectional: bool = Field(
        False, description="Attend to the same number of future frames too; such a model cannot stream."
    )

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "TransformerSettings":
        if self.width % self.n_heads:
            raise ValueError(f"width {self.width} must be a multiple of n_heads {self.n_heads}")
        return self


class PluginEncoderSettings(PluginSettings):
    """Base class for the settings of a user-defined encoder."""

    width: int = Field(128, ge=1, le=8192, description="Model dimension.")
    depth: int = Field(1, ge=1, le=64, description="Number of layers.")

    @property
    def causal(self) -> bool:
        """Whether frames depend on past bins only; override it for an encoder that needs complete trials."""
        return True


AnyEncoderSettings = GRUSettings | SSMSettings | TransformerSettings
_ENCODER_KINDS = ("gru", "ssm", "transformer")


def _default_kind_gru(value: Any) -> Any:
    """Files written when the GRU was the only encoder have no `kind`."""
    return {"kind": "gru", **value} if isinstance(value, dict) else value


def _encoder_tag(value: Any) -> str | None:
    if isinstance(value, PluginEncoderSettings):
        return "plugin"
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in _ENCODER_KINDS else None


EncoderSettings = Annotated[
    Annotated[GRUSettings, Tag("gru")]
    | Annotated[SSMSettings, Tag("ssm")]
    | Annotated[TransformerSettings, Tag("transformer")]
    | Annotated[SerializeAsAny[PluginEncoderSettings], Tag("plugin")],
    Discriminator(_encoder_tag),
    plugin_validator("encoders", _ENCODER_KINDS),
    BeforeValidator(_default_kind_gru),
]


class TransducerSettings(Settings):
    """Second output head beside CTC: prediction network and joiner."""

    enabled: bool = Field(False, description="Enable the transducer head.")
    predictor: Literal["stateless", "lstm"] = Field(
        "stateless", description="Prediction network: over the last two tokens, or an LSTM over all of them."
    )
    context: ClassVar[int] = 2  # tokens, of the stateless predictor
    width: int = Field(512, ge=1, le=8192, description="Width of prediction network and joiner.")
    depth: int = Field(1, ge=1, le=16, description="Number of layers of the LSTM predictor.")
    dropout: Probability = Field(0.1, description="Dropout on token embeddings.")


class SpeakingModeSettings(Settings):
    """Classification of a trial as vocalised or silent from its bins, with mode-dependent channel gains (FiLM)."""

    enabled: bool = Field(False, description="Enable the classification of the speaking mode.")
    lags: ClassVar[int] = 5  # autocorrelation lags in frames, lag 0 included
    prior_frames: ClassVar[int] = 25  # weight of the prior, the average training trial
    labels: Literal["use", "ignore"] = Field("use", description="Use mode labels of the data, or infer all modes.")


class DenoiserSettings(Settings):
    """Flow-matching denoiser: maps encoder outputs of noisy bins towards those of clean bins."""

    enabled: bool = Field(False, description="Enable the denoiser.")
    width: int = Field(64, ge=1, le=8192, description="Width of the hidden layer.")
    conv_kernel: ClassVar[int] = 5  # frames, of the hidden convolution
    steps: int = Field(2, ge=1, le=64, description="Number of Euler steps along the flow.")


class ModelSettings(Settings):
    """All architecture settings: the part of a recipe that defines a model."""

    front_end: FrontEndSettings = FrontEndSettings()
    encoder: EncoderSettings = GRUSettings()
    transducer: TransducerSettings = TransducerSettings()
    mode: SpeakingModeSettings = SpeakingModeSettings()
    denoiser: DenoiserSettings = DenoiserSettings()
    output_init: Literal["default", "xavier"] = Field(
        "default", description="Initialisation of the output layer; the '25 baseline uses xavier."
    )


class ModelConfig(Settings):
    """Everything needed to rebuild a model; stored as `model.json` beside the weights."""

    settings: ModelSettings
    n_channels: int = Field(ge=1, le=65536)
    sessions: tuple[str, ...] = Field(max_length=10_000)
    classes: tuple[str, ...] = Field(min_length=2, max_length=10_000)

    @model_validator(mode="after")
    def _sessions_distinct(self) -> "ModelConfig":
        if len(set(self.sessions)) != len(self.sessions):
            raise ValueError("sessions must be distinct")
        return self


class RuntimeSettings(Settings):
    """Device and threads; they affect speed, not the model."""

    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads; null = by the size of the model.")
    device: str = Field("auto", pattern=_DEVICE, description="Device; auto = CUDA if available.")
    compile: bool = Field(False, description="Compile the blocks of a Transformer with torch.compile (CUDA only).")
    cudnn_benchmark: bool = Field(False, description="Choose cuDNN kernels by timing (CUDA only); not reproducible.")
    tf32: bool = Field(False, description="TF32 for float32 matrix products (CUDA only).")

    @model_validator(mode="after")
    def _cuda_options_need_cuda(self) -> "RuntimeSettings":
        cuda_only = [name for name in ("compile", "cudnn_benchmark", "tf32") if getattr(self, name)]
        if self.device in ("cpu", "mps") and cuda_only:
            raise ValueError(
                f"{' and '.join(cuda_only)} require CUDA, but device is {self.device}; set device to cuda or auto,"
                f" or {cuda_only[0]} to false"
            )
        return self
