"""`arcuate compare`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, out, percent, print_table, progress, say


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs; the first is the reference.")],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train; runs without results on it are evaluated.")
    ] = "val",
    label: Annotated[str | None, typer.Option(help="Compare results/<split>.<label>.jsonl.")] = None,
    over: Annotated[
        str, typer.Option(help="Unit of resampling: trials (within fixed sessions) or sessions.")
    ] = "trials",
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with curves and differences to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test whether runs differ significantly: paired by trial; runs that differ only in seed form a group."""
    from arcuate.insight.comparison import compare as compare_runs

    with progress("comparing runs") as report:
        comparison = compare_runs(*runs, split=split, label=label, over=over, html=html, progress=report)
    if as_json:
        emit_json({**comparison.to_dict(), "html": str(html) if html else None})
        return
    rows = []
    for group in comparison.groups:
        sd = "–" if group.arm.seed_sd is None else f"{100 * group.arm.seed_sd:.1f}"
        rows.append((group.name, percent(group.arm.rate), str(len(group.scores)), sd))
    title = f"{comparison.rate_name} on {comparison.n_trials} {comparison.split} trials"
    print_table(("", comparison.rate_name, "runs", "SD over seeds"), rows, title=title, fold=True)
    for found in comparison.differences:
        out.print(f"\n{found.sentence}", markup=False, soft_wrap=True)
        n_sessions = found.sessions_better + found.sessions_worse
        if n_sessions > 1:
            out.print(f"Fewer errors in {found.sessions_better} of the {n_sessions} sessions that differ.")
        changed = ", ".join(change.path for change in found.changes) or "nothing"
        out.print(f"Changed: {changed}.", markup=False, soft_wrap=True)
    say("")
    for note in (*comparison.notes, comparison.method):
        say(note)
    if html is not None:
        say(f"wrote {html}")
