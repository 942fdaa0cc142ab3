"""Settings of a live session: when a sentence begins and ends, what is done about faults, what clients may do."""

from typing import Literal

from pydantic import Field

from arcuate.config import Settings


class Endpoints(Settings):
    """Where sentences begin and end when nobody says so."""

    enabled: bool = Field(
        True, description="false: sentences end only where the source or a person ends them"
    )
    silence_s: float = Field(1.2, gt=0.0, le=60.0, description="so much silence ends a sentence")
    speech: float = Field(
        0.5, gt=0.0, lt=1.0, description="a frame is speech above this probability of phonemes"
    )
    onset_frames: int = Field(2, ge=1, le=50, description="so many frames of speech within 0.5 s begin one")
    pre_roll_s: float = Field(0.6, ge=0.0, le=10.0, description="bins before the onset that belong to it")
    max_s: float = Field(60.0, gt=1.0, le=3600.0, description="a sentence ends after this in any case")


class Faults(Settings):
    """What is done about bins that are missing or make no sense."""

    not_finite: Literal["hold", "zero"] = Field(
        "hold", description="NaN, infinity and values beyond max_value become the channel's last value, or 0"
    )
    max_value: float = Field(1e6, gt=0.0, le=1e30, description="no measurement is larger than this")
    gap: Literal["hold", "zero", "reset"] = Field(
        "hold", description="short gaps are filled with the last bin, with zeros, or end the sentence"
    )
    max_gap_s: float = Field(0.5, gt=0.0, le=60.0, description="longer gaps end the sentence")
    tolerance_s: float = Field(0.05, gt=0.0, le=10.0, description="jitter of timestamps that is no gap")


class Limits(Settings):
    """What clients may do."""

    viewers: int = Field(64, ge=1, le=10_000, description="pages that may look on at once")
    frame_bytes: int = Field(1_000_000, ge=1_000, le=100_000_000, description="of one message of bins")
    frames_per_s: float = Field(200.0, gt=0.0, le=100_000.0, description="messages of bins")
    queue: int = Field(256, ge=8, le=100_000, description="events that may wait for a slow viewer")
    commands_per_s: float = Field(20.0, gt=0.0, le=10_000.0, description="wishes of one viewer")
    chunk_s: float = Field(5.0, gt=0.0, le=600.0, description="bins in one message, at most")


class Start(Settings):
    """Whether anything is decoded before it is wanted."""

    closed: bool = Field(False, description="begin closed: nothing is decoded until opened by key or phrase")
    phrase: str | None = Field(None, max_length=200, description="this sentence opens a closed session")


class LiveSettings(Settings):
    endpoints: Endpoints = Endpoints()
    faults: Faults = Faults()
    limits: Limits = Limits()
    start: Start = Start()
    alternatives: int = Field(5, ge=1, le=100, description="readings shown for the words on screen")
