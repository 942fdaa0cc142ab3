"""`arcuate tune`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import (
    Beam,
    Head,
    Json,
    LexiconFile,
    LmFile,
    MovedStore,
    ReferencesFile,
    ScoresPath,
    SplitName,
    app,
)
from arcuate.cli.console import emit_json, progress, say
from arcuate.cli.console import out as stdout


@app.command()
def tune(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="YAML file of weights to write.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconFile = "default",
    lm: LmFile = "default",
    references: ReferencesFile = None,
    config: Annotated[Path | None, typer.Option("--config", help="Initial search weights.")] = None,
    beam: Beam = None,
    budget: Annotated[float, typer.Option(min=1.0, help="Time budget in seconds.")] = 300.0,
    folds: Annotated[
        int,
        typer.Option(
            min=0, max=100, help="Also report the cross-validated WER over this many folds of sessions; 0 = off."
        ),
    ] = 0,
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Also calibrate the confidences of words and sentences.")
    ] = False,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="With --confidence: calibrate only, and keep the weights of --config."),
    ] = False,
    accuracy: Annotated[
        float,
        typer.Option(min=0.5, max=0.999, help="With --confidence: fraction of accepted words that should be correct."),
    ] = 0.95,
    split: SplitName = "val",
    data: MovedStore = None,
    head: Head = None,
    as_json: Json = False,
) -> None:
    """Tune the search weights of `decode` on trials with references."""
    from arcuate.evaluation.tune import tune as tune_weights

    with progress("loading") as report:
        tuned = tune_weights(
            scores,
            out,
            lexicon=lexicon,
            lm=lm,
            references=references,
            config=config,
            beam=beam,
            budget=budget,
            folds=folds,
            split=split,
            data=data,
            head=head,
            confidence=confidence,
            keep_weights=keep_weights,
            accuracy=accuracy,
            progress=report,
        )
    if as_json:
        emit_json(tuned.to_dict())
        return
    stdout.print(tuned.summary(), soft_wrap=True)
    say(f"wrote {out}; use it with: arcuate decode … --config {out}")
