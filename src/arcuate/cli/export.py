"""`arcuate export`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Head, Json, LexiconFile, LmFile, ModelPath, NoWords, WeightsFile, app
from arcuate.cli.console import emit_json, out, progress
from arcuate.errors import UserError


@app.command()
def export(
    run: ModelPath,
    model: Annotated[str, typer.Argument(metavar="OUT", help="File such as model.arcx, hf:ORG/NAME, or a folder.")],
    session: Annotated[
        str | None, typer.Option("--session", help="Keep the layer of this session only; default: all sessions.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise matrix products to int8; the result is compared with fp32.")
    ] = False,
    no_words: NoWords = False,
    lm: LmFile = "default",
    lexicon: LexiconFile = "default",
    config: WeightsFile = None,
    head: Head = None,
    data: Annotated[Path | None, typer.Option("--data", help="Store for --int8; default: that of the run.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository on the hub, not a private one.")
    ] = False,
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence in the model card, such as cc-by-4.0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a model to one file that decodes without torch, a model to the hub, or a store to NWB."""
    from arcuate.decoding.options import SearchOptions
    from arcuate.experiments.export import export as export_run

    if no_words and (lm, lexicon, config) != ("default", "default", None):
        raise UserError("--no-words leaves out the word search; remove --lm, --lexicon and --config, or --no-words")
    search = SearchOptions(lm="none" if no_words else lm, lexicon=lexicon, config=config, head=head)
    with progress("exporting") as report:
        result = export_run(run, model, session, int8, search, data, public, licence, progress=report)
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True, markup=False)
