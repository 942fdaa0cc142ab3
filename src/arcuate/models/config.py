"""Settings of the model: everything deterministic between stored bins and token scores."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from arcuate.config import Settings
from arcuate.data.config import Wanted

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = TypeVar("Count")


class Patch(Settings):
    """How many bins make a frame, and how far apart frames are."""

    bins: int = Field(14, ge=1, le=200, description="Bins in one frame.")
    stride: int = Field(4, ge=1, le=200, description="Bins from one frame to the next.")

    @model_validator(mode="after")
    def _no_gaps(self) -> "Patch":
        if self.stride > self.bins:
            raise ValueError("stride must not exceed bins: the bins between two patches would be ignored")
        return self

    def count_frames(self, n_bins: Count) -> Count:
        """floor((max(T, k) - k) / s) + 1 for an int, an array or a tensor of lengths T.

        A trial shorter than one patch is padded to it, so every trial has at least one frame.
        """
        beyond: Any = n_bins - self.bins  # type: ignore[operator]
        n_frames: Count = (beyond * (beyond > 0)) // self.stride + 1
        return n_frames


class Smoothing(Settings):
    """Gaussian smoothing over time; sd 0 switches it off. '25 uses 9 taps, '24 uses 20 (centre at 9.5)."""

    sd: float = Field(2.0, ge=0.0, le=50.0, description="bins")
    taps: int = Field(9, ge=1, le=101)


class SessionLayer(Settings):
    """One affine map per recording session, starting at the identity."""

    enabled: bool = Field(True, description="false removes the maps and keeps activation, norm and dropout")
    activation: Literal["softsign", "none"] = "softsign"
    layer_norm: bool = False
    dropout: Probability = 0.0


class ChannelGate(Settings):
    """Scales every channel by what the mean over time of all channels says (squeeze and excite)."""

    enabled: bool = False
    ratio: int = Field(16, ge=1, le=1024, description="channels per hidden unit")


class ConvStem(Settings):
    """A depthwise convolution over bins with a residual, before patches are cut."""

    enabled: bool = False
    taps: int = Field(7, ge=2, le=101)


class FrontEnd(Settings):
    normalise: Literal["none", "block", "rolling"] = "none"
    log: bool = Field(False, description="log(1 + x) before normalising; for raw, non-negative features")
    rolling_bins: int = Field(
        1500, ge=50, le=100_000, description="rolling: at most this many past bins count (1500 = 30 s)"
    )
    smoothing: Smoothing = Smoothing()
    session_layer: SessionLayer = SessionLayer()
    channel_gate: ChannelGate = ChannelGate()
    stem: ConvStem = ConvStem()
    patch: Patch = Patch()

    @property
    def wanted(self) -> Wanted:
        """Which statistics of a trial's surroundings normalisation needs."""
        return Wanted(self.normalise, self.log)


class GRUEncoder(Settings):
    kind: Literal["gru"] = "gru"
    width: int = Field(768, ge=1, le=8192)
    depth: int = Field(5, ge=1, le=64)
    dropout: Probability = 0.4
    bidirectional: bool = False
    learned_start: bool = Field(True, description="a learned initial state shared by all layers")

    @property
    def causal(self) -> bool:
        return not self.bidirectional


class SSMEncoder(Settings):
    """Selective state-space blocks with scalar decays, expansion 1."""

    kind: Literal["ssm"] = "ssm"
    width: int = Field(512, ge=1, le=8192)
    depth: int = Field(8, ge=1, le=64)
    heads: int = Field(8, ge=1, le=1024, description="parts of the width that forget at a pace of their own")
    state: int = Field(64, ge=1, le=1024, description="numbers remembered per channel")
    taps: int = Field(4, ge=2, le=32, description="frames the convolution before the scan sees")
    dropout: Probability = 0.1
    bidirectional: bool = Field(False, description="half of the heads read backwards; no streaming then")

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    @property
    def n_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @model_validator(mode="after")
    def _divides(self) -> "SSMEncoder":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.bidirectional and self.heads % 2:
            raise ValueError(f"a bidirectional encoder needs an even number of heads, not {self.heads}")
        return self


class TransformerEncoder(Settings):
    """Pre-norm attention over a bounded past, with relative positions; meant for heavy time masking.

    Frames are the patches: non-overlapping ones keep it small (`front_end.patch: {bins: 5, stride: 5}`).
    """

    kind: Literal["transformer"] = "transformer"
    width: int = Field(384, ge=1, le=8192)
    depth: int = Field(5, ge=1, le=64)
    heads: int = Field(6, ge=1, le=1024, description="parts of the width that look for themselves")
    expansion: int = Field(4, ge=1, le=64, description="the inner layer of a block is so many times wider")
    context: int = Field(
        125, ge=1, le=10_000, description="frames that a layer sees, itself and those before it"
    )
    buckets: int = Field(
        32, ge=2, le=1024, description="distances told apart: near ones exactly, far ones in growing steps"
    )
    input_dropout: Probability = Field(0.2, description="share of embedded values set to 0 in training")
    attention_dropout: Probability = Field(0.35, description="share of looks set to 0 in training")
    dropout: Probability = 0.35
    bidirectional: bool = Field(False, description="sees `context` frames ahead too; no streaming then")

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    @model_validator(mode="after")
    def _divides(self) -> "TransformerEncoder":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.bidirectional and self.buckets % 2:
            raise ValueError(f"a bidirectional encoder needs an even number of buckets, not {self.buckets}")
        return self


def _gru_unless_named(value: Any) -> Any:
    """Configs and recipes written when there was one kind need not name it."""
    return {"kind": "gru", **value} if isinstance(value, dict) else value


AnyEncoder = GRUEncoder | SSMEncoder | TransformerEncoder
Encoder = Annotated[AnyEncoder, Field(discriminator="kind"), BeforeValidator(_gru_unless_named)]


class Transducer(Settings):
    """A second head beside CTC: prediction network and joiner."""

    enabled: bool = False
    predictor: Literal["stateless", "lstm"] = Field(
        "stateless", description="what the prediction network remembers: the last tokens, or all of them"
    )
    context: int = Field(2, ge=1, le=8, description="stateless: how many tokens back it sees")
    width: int = Field(512, ge=1, le=8192, description="of prediction network and joiner")
    depth: int = Field(1, ge=1, le=16, description="lstm: layers")
    dropout: Probability = 0.1


class SpeakingMode(Settings):
    """Whether a trial was voiced or silent, told from its bins; channel gains follow the answer."""

    enabled: bool = False
    lags: int = Field(5, ge=1, le=64, description="frames over which each channel is compared with itself")
    prior_frames: int = Field(
        25,
        ge=1,
        le=10_000,
        description="before anything was heard the answer weighs as much as so many frames",
    )
    conditions: bool = Field(
        True, description="channels are scaled and shifted by the mode; false = only told"
    )
    labels: Literal["use", "ignore"] = Field(
        "use", description="modes that the data know: learnt from, or set aside so that all are inferred"
    )
    shared_by: Literal["block", "trial"] = Field(
        "block", description="inference: trials of a block share one mode, or each has its own"
    )


class Denoiser(Settings):
    """A flow that carries frames of noisy bins towards those of clean bins, in a few steps."""

    enabled: bool = False
    width: int = Field(64, ge=1, le=8192, description="of its hidden layer")
    taps: int = Field(5, ge=2, le=101, description="frames that it sees at once")
    steps: int = Field(2, ge=1, le=64, description="steps along the flow")


class ModelSettings(Settings):
    front_end: FrontEnd = FrontEnd()
    encoder: Encoder = GRUEncoder()
    transducer: Transducer = Transducer()
    mode: SpeakingMode = SpeakingMode()
    denoiser: Denoiser = Denoiser()
    output_init: Literal["default", "xavier"] = "default"


class ModelConfig(Settings):
    """What a checkpoint says about its model: with it, loading needs a path and nothing else."""

    settings: ModelSettings
    n_channels: int = Field(ge=1, le=65536)
    sessions: tuple[str, ...] = Field(max_length=10_000)
    classes: tuple[str, ...] = Field(min_length=2, max_length=10_000)

    @model_validator(mode="after")
    def _sessions_unique(self) -> "ModelConfig":
        if len(set(self.sessions)) != len(self.sessions):
            raise ValueError("sessions must be distinct")
        return self


class Runtime(Settings):
    threads: int | None = Field(None, ge=1, le=1024, description="null = found by a short probe at start")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    compile: bool = Field(False, description="torch.compile, on CUDA only")
    cudnn_benchmark: bool = Field(False, description="let cuDNN try its kernels; faster, not reproducible")
    tf32: bool = Field(False, description="float32 products with TF32 on CUDA")

    @model_validator(mode="after")
    def _fits_the_device(self) -> "Runtime":
        wanted = [name for name in ("compile", "cudnn_benchmark", "tf32") if getattr(self, name)]
        if self.device in ("cpu", "mps") and wanted:
            raise ValueError(
                f"{' and '.join(wanted)} act on CUDA only and device is {self.device}; set device to cuda or auto,"
                f" or {wanted[0]} to false"
            )
        return self
