"""`arcuate selftest`."""

from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, print_table, progress, say


@app.command()
def selftest(
    device: Annotated[str, typer.Option("--device", help="Device to test: auto, cpu, cuda or cuda:N.")] = "auto",
    full: Annotated[bool, typer.Option("--full", help="Time the official models at their full size.")] = False,
    as_json: Json = False,
) -> None:
    """Check numerics in every precision, multi-process training and speed; exit code 1 if a check fails."""
    from arcuate.experiments.selftest import selftest as run_selftest

    with progress("self-test") as report:
        result = run_selftest(device, full=full, progress=report)
    if as_json:
        emit_json(result.to_dict())
    else:
        rows = [
            (c.status, c.name, "" if c.value is None else str(c.value), str(c.bound or ""), c.remedy or "")
            for c in result.checks
        ]
        print_table(("status", "check", "value", "bound", "remedy or reason"), rows, fold=True)
        n_skipped = sum(c.status == "skipped" for c in result.checks)
        outcome = f"{result.n_failed} failed, {n_skipped} skipped, {result.seconds:.0f} s"
        say(f"{len(result.checks)} checks on {result.device['type']}: {outcome}")
        say("attach the output of --json to a bug report")
    if result.n_failed:
        raise typer.Exit(1)
