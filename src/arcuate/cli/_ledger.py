"""`arcuate runs` and `arcuate ledger`: what the run folders say together. No model is needed."""

from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from arcuate.cli._recipes import shown
from arcuate.cli.console import check_output, emit_json, out, percent, progress, say
from arcuate.files import write_text
from arcuate.insight.ledger.diary import diary
from arcuate.insight.ledger.entries import read_entries
from arcuate.insight.ledger.parents import listing

N_CHANGES = 4


def runs_command(folder: Path, as_json: bool) -> None:
    rows = listing(read(folder))
    if as_json:
        emit_json(rows)
    else:
        show(rows)


def ledger_command(folder: Path, file: Path | None) -> None:
    check_output(file, "# Run diary", "DIARY.md")
    text = diary(read(folder), folder.resolve().name)
    if file is None:
        out.print(text, markup=False, soft_wrap=True, end="")
        return
    write_text(file, text)
    say(f"wrote {file}")


def read(folder: Path) -> list[Any]:
    with progress("reading runs") as report:
        return read_entries(folder, report)


def show(rows: list[dict[str, Any]]) -> None:
    """One line a run, what changed below it: names and settings are long, and terminals narrow."""
    head = ("run", "verdict", "best PER", "steps")
    table = [head, *((row["name"], verdict(row), best(row), steps(row)) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    narrow = sum(widths) + 2 * len(widths) > out.width
    for i, line in enumerate(table):
        cells = "  ".join(
            cell.ljust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        ).rstrip()
        name = f"{line[0]}\n    " if narrow else f"{line[0].ljust(widths[0])}  "
        out.print(Text(name + cells, style="bold" if i == 0 else ""), soft_wrap=True)
        if i and (changed := changes(rows[i - 1])):
            out.print(Padding(Text(changed, style="dim"), (0, 0, 0, 4)))
    for row in rows:
        for problem in row["problems"]:
            say(f"{row['name']}: {problem}")


def verdict(row: dict[str, Any]) -> str:
    also = f" ({', '.join(row['secondary'])})" if row["secondary"] else ""
    return f"{row['verdict'] or ('damaged' if row['problems'] else '–')}{also}"


def best(row: dict[str, Any]) -> str:
    return percent(row["best_per"]) + (f" at {row['best_step']}" if row["best_step"] is not None else "")


def steps(row: dict[str, Any]) -> str:
    done, planned = row["steps"], row["planned_steps"]
    return "–" if done is None else str(done) if planned in (None, done) else f"{done} of {planned}"


def changes(row: dict[str, Any]) -> str:
    """What the run is measured against, and the first few of its changes by their full names."""
    if row["parent"] is None:
        return ""
    listed = [f"{c['path']} {shown(c['before'])} → {shown(c['after'])}" for c in row["changes"][:N_CHANGES]]
    more = len(row["changes"]) - N_CHANGES
    told = ", ".join([*listed, f"and {more} more"] if more > 0 else listed) or "nothing changed"
    return f"against {row['parent']}: {told}"
