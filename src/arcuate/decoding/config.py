"""Settings of the word search; docs/decoding.md says in which order to turn them."""

from typing import Literal

from pydantic import Field

from arcuate.config import Settings


class Decoding(Settings):
    """score = acoustic_scale · sound + lm_weight · n-gram + word_bonus · words, in nat; silences count as sound."""

    beam: int = Field(200, ge=1, le=1_000_000, description="readings kept per frame")
    threshold: float = Field(12.0, gt=0.0, le=1e9, description="and at most this much worse than the best")
    acoustic_scale: float = Field(1.0, gt=0.0, le=100.0)
    lm_weight: float = Field(0.8, ge=0.0, le=100.0, description="per nat of the n-gram")
    word_bonus: float = Field(0.8, ge=-100.0, le=100.0, description="per word")
    silence_bonus: float = Field(-2.5, ge=-100.0, le=100.0, description="per silence")
    join_bonus: float = Field(
        -10.0, ge=-100.0, le=100.0, description="per word that begins without a silence before it"
    )
    blank_penalty: float = Field(0.5, ge=-100.0, le=100.0, description="taken off every blank")
    alignments: Literal["sum", "best"] = Field("sum", description="of the ways to say the same words")
    boundary: str | None = Field(
        None,
        max_length=40,
        description="class between words; null = SIL, |, > or <space>, whichever is there",
    )
    fold: tuple[str, ...] = Field((), max_length=100, description="further classes that mean the boundary")
    merge_histories: bool = Field(
        True, description="readings the n-gram cannot tell apart become one; n-best lists still hold both"
    )
