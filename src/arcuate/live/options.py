"""`LiveOptions`: the options of `arcuate live`."""

from pathlib import Path

from pydantic import Field

from arcuate.decoding.options import DecoderOptions


class LiveOptions(DecoderOptions):
    """Where bins come from, how sentences start and end, what is recorded, and who may connect."""

    source: str = Field(
        "replay",
        description="Source of bins: replay, socket, lsl[:NAME], redis[:STREAM], redis-logits, or an import path such"
        " as mylab.live:Source.",
    )
    split: str = Field("val", description="Split to replay: val, test, train or all.")
    speed: float = Field(1.0, ge=0.1, le=64.0, description="Speed of the replay; 1 = real time.")
    continuous: bool = Field(False, description="With a replay: split sentences at silences, not at trials.")
    silence_s: float = Field(1.2, gt=0.0, le=60.0, description="Duration of silence that ends a sentence, in s.")
    max_s: float = Field(60.0, gt=1.0, le=3600.0, description="Maximum length of a sentence or trial, in s.")
    max_gap_s: float = Field(
        0.5,
        gt=0.0,
        le=60.0,
        description="Longest gap in the bins that is filled, in s; a longer one ends the sentence.",
    )
    closed: bool = Field(False, description="Start with decoding off; it is started on the page.")
    phrase: str | None = Field(
        None, max_length=200, description="Wake phrase: text is hidden until it is decoded or decoding is started."
    )
    record: Path | None = Field(None, description="Folder to record into; an interrupted recording is resumed.")
    record_session: str | None = Field(
        None, description="With `record`: name of the session, if it is new to the model."
    )
    host: str = Field("127.0.0.1", description="Address to listen on; non-loopback addresses require a token.")
    port: int = Field(8765, ge=0, le=65535, description="Port to listen on; 0 = any free one.")
