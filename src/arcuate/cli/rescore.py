"""`arcuate rescore`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, progress
from arcuate.cli.console import out as stdout


@app.command()
def rescore(
    hyps: Annotated[Path, typer.Argument(help="File with n-best lists, written by `arcuate decode --out`.")],
    llm: Annotated[Path, typer.Option(help="Causal language model: a folder or a .gguf file.")] = ...,  # type: ignore[assignment]
    references: Annotated[
        Path | None, typer.Option(help="JSON lines with id and text for fitting and scoring.")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Weight of the causal model in the LM score; default: fitted."),
    ] = None,
    n_best: Annotated[
        int | None,
        typer.Option(
            "--n-best", "--nbest", min=1, help="Number of hypotheses per list to rescore, best first; default: all."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines to write, with the new scores.")] = None,
    as_json: Json = False,
) -> None:
    """Rescore n-best lists with a causal language model (extra: llm)."""
    from arcuate.evaluation.rescore import rescore as rescore_lists

    with progress("loading the language model") as report:
        result = rescore_lists(
            hyps,
            llm,
            references=references,
            alpha=alpha,
            n_best=n_best,
            out=out,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else stdout.print(result.summary(), soft_wrap=True)
