"""`arcuate compare`: whether runs really differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from arcuate.cli.console import check_output, emit_json, out, percent, progress, say
from arcuate.errors import UserError
from arcuate.files import write_text
from arcuate.insight.ledger.compare import Comparison, compare, runs_of, score_missing, to_json
from arcuate.insight.ledger.scores import method
from arcuate.run import Run

LAST = "last"
OVER = ("trials", "sessions")


def compare_command(
    paths: Sequence[Path], split: str, label: str | None, over: str, html: Path | None, as_json: bool
) -> None:
    if over not in OVER:
        raise UserError(f"--over {over} is not known; choose {' or '.join(OVER)}")
    check_output(html, "<!doctype html", "compare.html")
    runs = runs_of(paths)
    if label is None and only_last(runs, split):
        label = LAST
        say(f"taking the results of the last checkpoint ({split}.{LAST}), which all of these runs have")

    def score(run: Run) -> None:
        if label is not None:
            raise UserError(
                f"{run.path} has no results {split}.{label}; make them with: arcuate evaluate {run.path}"
                f" --split {split} --label {label}"
            )
        from arcuate.evaluation.evaluate import evaluate

        say(f"{run.path} was not evaluated on {split} yet; doing it now")
        with progress("scoring trials") as report:
            evaluate(run, split=split, progress=report)

    score_missing(runs, split, label, score)
    comparison = compare(runs, split, label, over)
    found = to_json(comparison)
    if html is not None:
        from arcuate.insight.ledger.page import comparison_page

        write_text(html, comparison_page(comparison))
    if as_json:
        emit_json({**found, "html": str(html) if html else None})
    else:
        show(comparison, found, html)


def only_last(runs: Sequence[Run], split: str) -> bool:
    """Whether the last checkpoint is what all runs were scored with, as the arms of an ablation are."""
    scored = [run.results_file(split).is_file() for run in runs]
    return not all(scored) and all(run.results_file(split, LAST).is_file() for run in runs)


def show(comparison: Comparison, found: dict[str, Any], html: Path | None) -> None:
    table = Table(box=None, header_style="bold", title=f"PER on {found['n_trials']} {found['split']} trials")
    table.title_justify = "left"
    for heading in ("", "PER", "runs", "SD over seeds"):
        table.add_column(heading, overflow="fold")
    for group in found["groups"]:
        sd = "–" if group["seed_sd"] is None else f"{100 * group['seed_sd']:.1f}"
        table.add_row(*map(Text, (group["name"], percent(group["per"]), str(len(group["runs"])), sd)))
    out.print(table)
    for one, compared in zip(found["comparisons"], comparison.found, strict=True):
        out.print(f"\n{one['sentence']}", markup=False, soft_wrap=True)
        n_sessions = one["sessions_better"] + one["sessions_worse"]
        if n_sessions > 1:
            out.print(f"Fewer errors in {one['sessions_better']} of {n_sessions} sessions that differ.")
        changed = [c.path for c in compared.changes]
        out.print(f"Changed: {', '.join(changed) if changed else 'nothing'}.", markup=False, soft_wrap=True)
    say("")
    for note in comparison.notes:
        say(note)
    say(method(comparison.found[0].contrast))
    if html is not None:
        say(f"wrote {html}")
