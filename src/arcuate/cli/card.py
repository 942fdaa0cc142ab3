"""`arcuate card`."""

from typing import Annotated

import typer

from arcuate.cli.app import Force, Json, ModelPath, app
from arcuate.cli.console import emit_json, out


@app.command()
def card(
    run: ModelPath,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Licence identifier, such as cc-by-4.0."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the model card of a run, MODEL_CARD.md; for an exported model, print the card that it contains."""
    from arcuate.evaluation.card import exported_card, write_card

    if (text := exported_card(run)) is not None:
        emit_json({"path": str(run), "card": text}) if as_json else out.print(text, markup=False, soft_wrap=True)
        return
    result = write_card(run, licence=licence, force=force)
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True, markup=False)
