"""`arcuate compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, app

if TYPE_CHECKING:
    from arcuate.insight.comparison import Comparison


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs; the first is the reference.")],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train; runs without results on it are evaluated.")
    ] = "val",
    label: Annotated[str | None, typer.Option(help="Compare results/<split>.<label>.jsonl.")] = None,
    over: Annotated[str, typer.Option(help="Sampling unit: trials (of the same sessions) or sessions.")] = "trials",
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with curves and differences to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test whether runs differ significantly: paired by trial; runs that differ only in seed form a group."""
    from arcuate.cli.console import check_output, emit_json, progress, say
    from arcuate.insight.comparison import compare as compare_runs
    from arcuate.insight.comparison import write_comparison_page

    check_output(html, "<!doctype html", "compare.html")
    with progress("comparing runs") as report:
        comparison = compare_runs(*runs, split=split, label=label, over=over, progress=report)
    if html is not None:
        write_comparison_page(comparison, html)
    if as_json:
        emit_json({**comparison.to_dict(), "html": str(html) if html else None})
        return
    print_comparison(comparison)
    if html is not None:
        say(f"wrote {html}")


def print_comparison(comparison: "Comparison") -> None:
    from rich.table import Table
    from rich.text import Text

    from arcuate.cli.console import out, percent, say

    title = f"PER on {comparison.n_trials} {comparison.split} trials"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for heading in ("", "PER", "runs", "SD over seeds"):
        table.add_column(heading, overflow="fold")
    for group in comparison.groups:
        sd = "–" if group.arm.seed_sd is None else f"{100 * group.arm.seed_sd:.1f}"
        table.add_row(*map(Text, (group.name, percent(group.arm.rate), str(len(group.scores)), sd)))
    out.print(table)
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
