"""`SearchOptions`: which word search decodes; the options that `decode`, `tune`, `export` and live decoding share."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from arcuate.config import Settings
from arcuate.decoding.config import DecodingConfig, parse_decoding_config, read_decoding_config
from arcuate.models.layout import Head


def _to_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


NameOrPath = Annotated[str, BeforeValidator(_to_text)]


class SearchOptions(Settings):
    """Language model, lexicon, weights and head of a word search."""

    lm: NameOrPath = Field("default", description="Language model: a model file, an ARPA file, or `default`.")
    lexicon: NameOrPath = Field("default", description="Pronunciation lexicon: a file, or `default`.")
    config: Path | None = Field(None, description="Search weights, a YAML file of `arcuate tune`.")
    beam: int | None = Field(
        None, ge=1, le=1_000_000, description="Maximum number of beam entries per frame; default: as in the weights."
    )
    words: tuple[str, ...] = Field(
        (), description="Words to add to the lexicon: word, word=weight or word=weight=PHONEMES."
    )
    head: Head | None = Field(
        None, description="ctc, transducer or both; default: both if the transducer was trained, else ctc."
    )

    def weights(self, stored: DecodingConfig | None = None) -> tuple[DecodingConfig, dict[str, Any]]:
        """Settings of the search and the record of `arcuate tune`: of `config`, else `stored`, else defaults.

        `beam` overrides theirs.
        """
        settings, tuned = (stored or DecodingConfig(), {}) if self.config is None else read_decoding_config(self.config)
        if self.beam is not None:
            settings = parse_decoding_config(settings.model_dump() | {"beam": self.beam}, "the search options")
        return settings, tuned


class DecoderOptions(SearchOptions):
    """How a stream decodes: search, session layer, rescoring and online adaptation."""

    session: str | None = Field(None, description="Session layer; default: the last one.")
    llm: Path | None = Field(None, description="Causal language model that rescores every sentence.")
    adapt: bool = Field(False, description="Adapt the session layer online, without labels.")
    data: Path | None = Field(
        None, description="Store to replay, of known sessions and statistics; default: the store of the training run."
    )
