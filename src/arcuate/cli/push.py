"""`arcuate push`."""

import sys
from typing import Annotated

import typer

from arcuate.cli.app import Json, ModelPath, app
from arcuate.cli.console import emit_json, err, out, print_table
from arcuate.errors import UserError


@app.command()
def push(
    run: ModelPath,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository ORG/NAME; created if it is missing.")],
    checkpoint: Annotated[str, typer.Option(help="best, last, step-NNNNNNNN or stage-NAME.")] = "best",
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    licence: Annotated[str | None, typer.Option("--license", help="Licence in the card, such as cc-by-4.0.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files and sizes; upload nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a model and its card to the Hugging Face Hub, after listing the files and asking for confirmation."""
    from arcuate.experiments.push import plan_push, upload

    plan = plan_push(run, repository, checkpoint=checkpoint, private=private, licence=licence)
    if not as_json:
        rows = [(file.name, f"{file.n_bytes:,}") for file in plan.files]
        print_table(("file", "bytes"), rows, title=plan.summary(), right=("bytes",))
    if not (dry_run or yes):
        if as_json or not sys.stdin.isatty():
            raise UserError(f"not uploaded: {plan.summary()}; confirm with --yes, or list the files with --dry-run")
        err.print("Upload these files? [y/N] ", end="", markup=False)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError("nothing was uploaded")
    result = upload(plan, dry_run=dry_run)
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True, markup=False)
