"""`arcuate combine`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, progress
from arcuate.cli.console import out as console


@app.command()
def combine(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Several runs, .jsonl or .npz files; or one .jsonl file with several candidates per trial."
        ),
    ],
    method: Annotated[str, typer.Option(help="linear or mbr on words; geometric on frame scores; or auto.")] = "auto",
    split: Annotated[str, typer.Option(help="With runs: split whose results are combined.")] = "val",
    label: Annotated[str | None, typer.Option(help="With runs: read results/<split>.<label>.jsonl.")] = None,
    lm: Annotated[str | None, typer.Option(help="With --method linear: n-gram model whose score is a feature.")] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Fit the weights of --method linear by cross-validation over folds of trials."),
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="File of fitted weights to use; with --fit: file to write them to.")
    ] = None,
    references: Annotated[Path | None, typer.Option(help="JSON lines with id and text to score against.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the combined texts (.jsonl) or frame scores (.npz).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine several decoders, by words or by frame scores."""
    from arcuate.evaluation.combine import combine as combine_sources

    with progress("combining") as report:
        result = combine_sources(
            *sources,
            method=method,
            split=split,
            label=label,
            lm=lm,
            fit=fit,
            weights=weights,
            references=references,
            out=out,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else console.print(result.summary(), soft_wrap=True)
