"""Settings of a live session: endpointing, faults in the input, limits on clients, and the gate."""

from typing import Literal

from pydantic import Field

from arcuate.config import Settings


class Endpoints(Settings):
    """Start and end of sentences when the source does not mark them."""

    enabled: bool = Field(
        True, description="Find sentences by silence; otherwise only the source or the page ends them."
    )
    silence_s: float = Field(1.2, gt=0.0, le=60.0, description="Duration of silence that ends a sentence, in s.")
    speech_threshold: float = Field(
        0.5, gt=0.0, lt=1.0, description="Probability of phonemes above which a frame counts as speech."
    )
    onset_frames: int = Field(2, ge=1, le=50, description="Speech frames within 0.5 s that start a sentence.")
    pre_roll_s: float = Field(
        0.6, ge=0.0, le=10.0, description="Time before the onset that is included in the sentence, in s."
    )
    max_s: float = Field(60.0, gt=1.0, le=3600.0, description="Maximum length of a sentence, in s.")


class Faults(Settings):
    """Handling of missing and invalid bins."""

    not_finite: Literal["hold", "zero"] = Field(
        "hold", description="Replacement of NaN, infinity and values beyond max_value: the channel's last value, or 0."
    )
    max_value: float = Field(1e6, gt=0.0, le=1e30, description="Largest valid absolute value.")
    gap: Literal["hold", "zero", "reset"] = Field(
        "hold", description="Handling of short gaps: repeat the last bin, insert zeros, or end the sentence."
    )
    max_gap_s: float = Field(0.5, gt=0.0, le=60.0, description="Gap above which the sentence ends, in s.")
    tolerance_s: float = Field(
        0.05, gt=0.0, le=10.0, description="Timestamp jitter that does not count as a gap, in s."
    )


class Limits(Settings):
    """Limits on clients."""

    viewers: int = Field(64, ge=1, le=10_000, description="Maximum number of connected pages.")
    message_bytes: int = Field(
        1_000_000, ge=1_000, le=100_000_000, description="Maximum size of a message of bins, in bytes."
    )
    messages_per_s: float = Field(200.0, gt=0.0, le=100_000.0, description="Maximum rate of messages of bins, per s.")
    queue: int = Field(256, ge=8, le=100_000, description="Messages that may be queued for a slow viewer.")
    commands_per_s: float = Field(20.0, gt=0.0, le=10_000.0, description="Maximum rate of commands of a viewer, per s.")
    chunk_s: float = Field(5.0, gt=0.0, le=600.0, description="Maximum duration of the bins in a message, in s.")


class Start(Settings):
    """The gate: while it is closed, nothing is shown or recorded."""

    closed: bool = Field(False, description="Start with the gate closed, until a key or the phrase opens it.")
    phrase: str | None = Field(None, max_length=200, description="Sentence that opens the gate.")


class LiveSettings(Settings):
    """All settings of `arcuate live --settings`."""

    endpoints: Endpoints = Endpoints()
    faults: Faults = Faults()
    limits: Limits = Limits()
    start: Start = Start()
    alternatives: int = Field(
        5, ge=1, le=100, description="Number of hypotheses from which word alternatives are taken."
    )
