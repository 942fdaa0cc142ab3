"""`arcuate runs` and `arcuate ledger`: what the run folders say together. No model is needed."""

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from arcuate.cli.console import check_output, emit_json, out, percent, progress, say
from arcuate.cli.recipes import shown
from arcuate.ledger.diary import diary
from arcuate.ledger.entries import read_entries
from arcuate.ledger.listing import listing
from arcuate.run import write_aside

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
    write_aside(file, text)
    say(f"wrote {file}")


def read(folder: Path) -> list[Any]:
    with progress("reading runs") as report:
        return read_entries(folder, report)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("run", "verdict", "best PER", "steps", "changed against"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, (row["name"], verdict(row), best(row), steps(row), changes(row))))
    out.print(table)
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


def leaf(path: str) -> str:
    """The last word of a setting, and the one before where that alone says little."""
    words = path.split(".")
    return ".".join(words[-2:]) if words[-1] in ("kind", "seed", "enabled", "action") else words[-1]


def changes(row: dict[str, Any]) -> str:
    if row["parent"] is None:
        return "–"
    listed = [
        f"{leaf(c['path'])} {shown(c['before'])} → {shown(c['after'])}" for c in row["changes"][:N_CHANGES]
    ]
    more = len(row["changes"]) - N_CHANGES
    lines = [f"{row['parent']}:" if listed else f"{row['parent']}: nothing", *listed]
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)
