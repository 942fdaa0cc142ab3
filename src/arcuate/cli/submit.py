"""`arcuate submit`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json
from arcuate.cli.console import out as stdout


@app.command()
def submit(
    run: Annotated[Path, typer.Argument(help="Run folder with decoded words, or a file of `arcuate decode`.")],
    out: Annotated[Path, typer.Option(help="File to write: CSV for '25, text for '24.")] = ...,  # type: ignore[assignment]
    split: Annotated[str, typer.Option(help="Split to submit: test, or another one to check the format.")] = "test",
    label: Annotated[str | None, typer.Option(help="With a run folder: results/<split>.<label>.jsonl.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="b2t25 or b2t24; default: inferred from the session names.")
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Submit empty texts too.")] = False,
    as_json: Json = False,
) -> None:
    """Write decoded texts in the submission format of the benchmarks."""
    from arcuate.evaluation.submission import submit as write_submission

    submission = write_submission(run, out, split=split, label=label, format=format_, allow_empty=allow_empty)
    emit_json(submission.to_dict()) if as_json else stdout.print(f"{out}", soft_wrap=True, markup=False)
