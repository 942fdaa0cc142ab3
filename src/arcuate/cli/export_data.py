"""`arcuate export-data`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Force, Json, app, complete_from
from arcuate.cli.console import counted, emit_json, progress, say


@app.command("export-data")
def export_data(
    store: Annotated[Path, typer.Argument(help="Prepared store.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        str,
        typer.Option(help="nwb, brainsets or parquet.", autocompletion=complete_from("nwb", "brainsets", "parquet")),
    ] = "nwb",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the trials of a store as NWB, brainsets (temporaldata) or Parquet with .npz."""
    from arcuate.data.export import export_data as export

    with progress("writing sessions") as report:
        result = export(store, out, to=to, force=force, progress=report)
    say(f"{counted(result.n_trials, 'trial')} in {counted(len(result.files), 'file')}: {out}")
    if as_json:
        emit_json(result.to_dict())
