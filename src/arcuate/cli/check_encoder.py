"""`arcuate check-encoder`."""

from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import counted, emit_json, print_table, say


@app.command("check-encoder")
def check_encoder(
    kind: Annotated[str, typer.Argument(help="Import path such as mylab.models:ConvNet, or the name of an encoder.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the encoder, such as width=32.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check an encoder: streaming = offline, padding, batch order, gradients, saving, export."""
    from arcuate.models.check import check_encoder as check

    result = check(kind, settings or [])
    if as_json:
        emit_json(result.to_dict())
    else:
        words = {True: "passed", False: "FAILED", None: "–"}
        rows = [(check.name, words[check.passed], check.detail) for check in result.checks]
        print_table(("property", "result", "detail"), rows)
        verdict = "all checks passed" if result.passed else "some checks failed; see the table"
        say(f"{kind}, {counted(result.n_parameters, 'parameter')} in the test model: {verdict}")
    raise typer.Exit(0 if result.passed else 1)
