"""`arcuate rescore`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def rescore(
    hyps: Annotated[Path, typer.Argument(help="Decodings with n-best lists, from `arcuate decode --out`.")],
    llm: Annotated[Path, typer.Option(help="A causal language model: a folder or a .gguf file.")] = ...,  # type: ignore[assignment]
    references: Annotated[
        Path | None, typer.Option(help="Lines with id and text, to fit on and score.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the causal model; left out: fitted.")
    ] = None,
    acoustic: Annotated[float | None, typer.Option(min=0.0, help="Weight of the sound.")] = None,
    length: Annotated[float | None, typer.Option(help="Per word.")] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Only the first entries of each list.")] = None,
    context: Annotated[
        Path | None, typer.Option(help="A text the model reads before every sentence.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, max=100, help="Of sessions, for fitting.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the decodings with their new scores.")] = None,
    as_json: Json = False,
) -> None:
    """Score n-best lists anew with a causal language model (extra: llm)."""
    from arcuate.cli._rescore import Asked, rescore_command

    rescore_command(
        Asked(hyps, llm, references, alpha, acoustic, length, n_best, context, folds, out), as_json
    )
