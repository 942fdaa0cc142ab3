"""`arcuate verify`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, print_table, progress, say


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Unpacked release, or one of its archives.")],
    layout: Annotated[str | None, typer.Option(help="falcon-h2 for FALCON H2; default: detected.")] = None,
    as_json: Json = False,
) -> None:
    """Check that a downloaded release is complete: sessions, trials, channels, sizes."""
    from arcuate.data.verify import verify as check

    with progress("counting trials") as report:
        result = check(path, layout=layout, progress=report)
    if as_json:
        emit_json(result.to_dict())
    else:
        print_table(
            ("property", "found", "expected", "status"),
            [(c.what, c.found, c.expected, c.status) for c in result.checks],
        )
        verdict = "complete; all known numbers match" if result.complete else "incomplete or altered; download it again"
        say(f"{path}, {result.release} (doi:{result.doi}): {verdict}")
    raise typer.Exit(0 if result.complete else 1)
