"""`arcuate export-data`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from arcuate.cli.app import Json, app, complete_from
from arcuate.cli.console import counted, emit_json, progress, say


@app.command("export-data")
def export_data(
    store: Annotated[Path, typer.Argument(help="Prepared store.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        str,
        typer.Option(help="nwb or brainsets.", autocompletion=complete_from("nwb", "brainsets")),
    ] = "nwb",
    experimenter: Annotated[str | None, typer.Option(help="Name recorded in NWB files.")] = None,
    institution: Annotated[str | None, typer.Option(help="Name recorded in NWB files.")] = None,
    as_json: Json = False,
) -> None:
    """Write the trials of a store as NWB or brainsets (temporaldata)."""
    from arcuate.data.export import export_data as export

    with progress("writing sessions") as report:
        options: dict[str, Any] = {"to": to, "experimenter": experimenter, "institution": institution}
        result = export(store, out, progress=report, **options)
    say(f"{counted(result.n_trials, 'trial')} in {counted(len(result.files), 'file')}: {out}")
    if as_json:
        emit_json(result.to_dict())
