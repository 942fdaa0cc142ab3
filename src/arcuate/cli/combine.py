"""`arcuate combine`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def combine(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A .jsonl with candidates per trial; or several runs, .jsonl or .npz files."),
    ],
    method: Annotated[
        str, typer.Option(help="linear, mbr or rover for words; arithmetic or geometric for frame scores.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="Of runs: whose results to take.")] = "val",
    label: Annotated[str | None, typer.Option(help="Of runs: results/<split>.<label>.jsonl.")] = None,
    voters: Annotated[str, typer.Option(help="equal, or weighted by their agreement.")] = "equal",
    scale: Annotated[float, typer.Option(min=0.0, help="Of scores, before they become probabilities.")] = 1.0,
    lm: Annotated[str | None, typer.Option(help="An n-gram model as one more criterion.")] = None,
    llm: Annotated[Path | None, typer.Option(help="A causal language model as one more criterion.")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the weights of the criteria; each trial by the other folds.")
    ] = False,
    folds: Annotated[int, typer.Option(min=2, max=100)] = 5,
    weights: Annotated[Path | None, typer.Option(help="Weights fitted before.")] = None,
    save_weights: Annotated[Path | None, typer.Option(help="Write the weights fitted on all trials.")] = None,
    references: Annotated[Path | None, typer.Option(help="Lines with id and text, to score against.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the combined texts (.jsonl) or scores (.npz).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine several decoders' readings, word by word or frame by frame."""
    from arcuate.cli._combine import Asked, combine_command

    asked = Asked(
        sources,
        method,
        split,
        label,
        voters,
        scale,
        lm,
        llm,
        fit,
        folds,
        weights,
        save_weights,
        references,
        out,
    )
    combine_command(asked, as_json)
