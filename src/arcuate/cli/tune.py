"""`arcuate tune`."""

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
)


@app.command()
def tune(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="YAML file of weights to write.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    references: RefsPath = None,
    config: ConfigPath = None,
    beam: Beam = None,
    threshold: Threshold = None,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds to spend.")] = 300.0,
    folds: Annotated[int, typer.Option(min=0, max=100, help="Cross-fit by session; 0 = do not.")] = 0,
    split: SplitName = "val",
    data: DataPath = None,
    as_json: Json = False,
) -> None:
    """Find the weights of `decode` on trials with references."""
    from arcuate.cli._decode import Source, tune_command

    source = Source(scores, lexicon, lm, config, references, beam, threshold, split, data)
    tune_command(source, out, budget, folds, as_json)
