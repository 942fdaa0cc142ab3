"""`arcuate runs`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from arcuate.cli.app import app
from arcuate.cli.console import emit_json, out, percent, progress, say

if TYPE_CHECKING:
    from arcuate.insight.runs import RunEntry

_MAX_CHANGES = 4


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that contains runs, at any depth.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the runs as a JSON list on one line on stdout.")
    ] = False,
) -> None:
    """List runs: verdict, best error rate, WER, steps, target, and changes relative to the parent run."""
    from arcuate.doctor import diagnose
    from arcuate.insight.runs import list_runs

    with progress("reading runs") as report:
        found = list_runs(folder, diagnose=diagnose, progress=report)
    if as_json:
        emit_json(found.to_dicts())
        return
    head = ("run", "verdict", f"best {found.rate_name}", "WER", "steps", "target")
    # one line per run with its changes below, because names and settings are long
    table = [head, *((e.name, _verdict(e), _best(e, found.rate_name), _wer(e), _steps(e), _target(e)) for e in found)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    narrow = sum(widths) + 2 * len(widths) > out.width
    for i, line in enumerate(table):
        padded = [cell.ljust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        name = f"{line[0]}\n    " if narrow else f"{line[0].ljust(widths[0])}  "
        out.print(Text(name + "  ".join(padded).rstrip(), style="bold" if i == 0 else ""), soft_wrap=True)
        if i and (changes := _changes(found.entries[i - 1])):
            out.print(Padding(Text(changes, style="dim"), (0, 0, 0, 4)))
    for entry in found:
        for problem in entry.problems:
            say(f"{entry.name}: {problem}")


def _verdict(entry: "RunEntry") -> str:
    secondary = entry.diagnosis.secondary if entry.diagnosis else ()
    also = f" ({', '.join(secondary)})" if secondary else ""
    return f"{entry.shown_verdict or ('damaged' if entry.problems else '–')}{also}"


def _best(entry: "RunEntry", heading: str) -> str:
    step = entry.logged.best_step
    if step is None:
        return percent(entry.logged.best_per)
    name = "" if entry.rate_name == heading else f"{entry.rate_name} "  # runs on different alphabets
    return f"{name}{percent(entry.logged.best_per)} at {step}"


def _wer(entry: "RunEntry") -> str:
    return percent(entry.best_wer[0]) if entry.best_wer else "–"


def _target(entry: "RunEntry") -> str:
    return entry.target.status if entry.target else "–"


def _steps(entry: "RunEntry") -> str:
    done, planned = entry.logged.steps, entry.planned_steps
    return "–" if done is None else str(done) if planned in (None, done) else f"{done} of {planned}"


def _changes(entry: "RunEntry") -> str:
    """The parent and the first few changes relative to it."""
    from arcuate.config import value_text

    if entry.parent is None:
        return ""
    changes = entry.parent.changes
    shown = [f"{c.path} {value_text(c.before)} → {value_text(c.after)}" for c in changes[:_MAX_CHANGES]]
    if len(changes) > _MAX_CHANGES:
        shown.append(f"and {len(changes) - _MAX_CHANGES} more")
    return f"relative to {entry.parent.name}: {', '.join(shown) or 'no changes'}"
