"""`arcuate sweep`: settings tried one after another, by as many workers as are started."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from arcuate.cli.console import emit_json, out, percent, say
from arcuate.errors import UserError
from arcuate.experiments.sweep import read_space
from arcuate.training.environment import installed_version
from arcuate.training.interrupts import handle_signals


def sweep_command(
    recipe: str,
    space: Path,
    overrides: Sequence[str],
    data: Path,
    folder: Path,
    n_trials: int,
    seed: int,
    as_json: bool,
) -> int:
    if installed_version("optuna") is None:
        raise UserError("sweeps need the package optuna: pip install -e '.[sweep]' -c constraints.txt")
    from arcuate.experiments.sweep import Sweep, open_study, summarise, work

    dimensions = read_space(space, recipe, overrides)
    sweep = Sweep(recipe, tuple(overrides), dimensions, data, folder, n_trials, seed)
    study = open_study(sweep)
    with handle_signals() as stop:
        work(sweep, study, stop, say)
    summary = summarise(sweep, study)
    if as_json:
        emit_json(summary)
    else:
        show(summary)
    if stop.signal is not None:
        say(f"stopped by {stop.signal.name}; the same command goes on from here")
        return stop.exit_code
    return 1 if all(t["state"] == "fail" for t in summary["trials"]) else 0


def show(summary: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("trial", "state", "PER", "settings", "remark"):
        table.add_column(heading, overflow="fold")
    for trial in sorted(summary["trials"], key=by_result):
        settings, remark = "\n".join(trial["overrides"]), trial["reason"] or ""
        cells = (str(trial["number"]), trial["state"], percent(trial["per"]), settings, remark)
        table.add_row(*map(Text, cells))
    out.print(table)
    running = sum(t["state"] == "running" for t in summary["trials"])
    if running:
        say(f"{running} still running, in other workers")
    if summary["best_trial"] is None:
        say("no trial came to its end")
        return
    out.print(
        f"\nbest: trial {summary['best_trial']}, PER {percent(summary['best_per'])}, {summary['best_run']}"
    )
    out.print(shlex.join(summary["command"]), markup=False, soft_wrap=True)


def by_result(trial: dict[str, Any]) -> tuple[bool, float, int]:
    """Those that came to their end first, the best of them on top."""
    per = float("inf") if trial["per"] is None else trial["per"]
    return trial["state"] != "complete", per, trial["number"]
