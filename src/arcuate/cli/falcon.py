"""`arcuate falcon`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, LexiconFile, ModelPath, WeightsFile, app, complete_from
from arcuate.cli.console import counted, emit_json, percent, say


@app.command()
def falcon(
    run: ModelPath,
    data: Annotated[Path, typer.Option("--data", help="Folder of the FALCON H2 files (DANDI 000950).")],
    phase: Annotated[
        str, typer.Option(help="minival or test.", autocompletion=complete_from("minival", "test"))
    ] = "minival",
    lm: Annotated[
        str | None, typer.Option("--lm", help="Decode words with this language model; default: characters only.")
    ] = None,
    lexicon: LexiconFile = "default",
    config: WeightsFile = None,
    as_json: Json = False,
) -> None:
    """Score a handwriting model with the official evaluator of FALCON H2."""
    from arcuate.live.falcon import evaluate_falcon

    result = evaluate_falcon(run, data, phase=phase, lm=lm, lexicon=lexicon, config=config)
    if as_json:
        emit_json(result.to_dict())
        return
    say(
        f"{phase}, {counted(result.n_files, 'file')}: WER {percent(result.wer)}, CER {percent(result.cer)}, normalised"
        f" latency {result.normalised_latency:.3f}"
    )
