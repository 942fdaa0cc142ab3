"""`arcuate decode`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.options import (
    Beam,
    ConfigPath,
    DataPath,
    LexiconName,
    LmOption,
    RefsPath,
    ScoresPath,
    SplitName,
    Threshold,
    Words,
)


@app.command()
def decode(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="JSON lines to write, a trial each.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    beam: Beam = None,
    threshold: Threshold = None,
    config: ConfigPath = None,
    references: RefsPath = None,
    nbest: Annotated[int, typer.Option(min=1, max=10_000, help="Readings to write per trial.")] = 10,
    word: Words = None,
    split: SplitName = "val",
    data: DataPath = None,
    head: Annotated[str, typer.Option(help="Of a run: ctc, or both, where it has a transducer.")] = "ctc",
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best, last, step-NNNNNNNN or stage-NAME.")
    ] = "best",
    as_json: Json = False,
) -> None:
    """Frame scores to words, with a pronunciation lexicon and a language model."""
    from arcuate.cli._decode import Source, decode_command

    source = Source(
        *(scores, lexicon, lm, config, references, beam, threshold, split, data, tuple(word or ())),
        *(head, checkpoint),
    )
    decode_command(source, out, nbest, as_json)
