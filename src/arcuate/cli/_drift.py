"""`arcuate drift`: what changes in the recordings of a store from day to day."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from arcuate.adaptation.config import METHODS
from arcuate.adaptation.drift import DayNumbers, likeness_table, measure_days, summarise
from arcuate.cli.console import check_output, counted, emit_json, out, percent, progress, say
from arcuate.data.arrays import list_arrays
from arcuate.data.sessions import days_since_first
from arcuate.data.store import Store
from arcuate.data.trial import SPLITS
from arcuate.errors import UserError
from arcuate.files import write_text
from arcuate.insight.drift import drift_page
from arcuate.run import open_run


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    store: Path
    run: Path | None = None
    out: Path = Path("drift.html")
    adapt: str = "one-step"
    split: str = "val"
    reference: str | None = None
    trials: int = 40


def drift_command(asked: Asked, as_json: bool) -> None:
    check_output(asked.out, "<!doctype html>", "drift.html")
    run = open_run(asked.run) if asked.run is not None else None  # told before anything is measured
    store = Store.open(asked.store)
    check(asked, store)
    with progress("measuring days") as report:
        days = measure_days(store, asked.trials, report)
    if not days:
        raise UserError(f"{asked.store} has no trial long enough to measure; prepare some recordings first")
    rates = None
    if run is not None:
        from arcuate.cli._follow import Following, follow_run
        from arcuate.evaluation.evaluate import SearchOptions

        label = f"drift-{asked.adapt}"  # of its own: an evaluation of the user's stays as it is
        rates = follow_run(
            run, asked.split, asked.store, "best", label, None, Following(asked.adapt), SearchOptions()
        )
    reference = choose_reference(days, asked.reference, rates)
    groups = list_arrays(store.layout, store.n_channels)
    rows = summarise(days, groups, reference)
    every = likeness_table(days, np.arange(store.n_channels))
    page = drift_page(
        asked.store.name,
        rows,
        reference.session,
        days_since_first([day.session for day in days]),
        every,
        rates,
    )
    write_text(asked.out, page)
    summary = {
        "store": str(asked.store),
        "page": str(asked.out),
        "reference": reference.session,
        "n_channels": store.n_channels,
        "days": rows,
        "likeness": every.tolist(),
        "errors": rates,
    }
    emit_json(summary) if as_json else show(asked, summary)


def check(asked: Asked, store: Store) -> None:
    """Names that nothing is called by, told before anything is measured."""
    if asked.reference is not None and asked.reference not in store.sessions:
        known = ", ".join(store.sessions)
        raise UserError(
            f"there is no session {asked.reference} to compare with; {store.path.name} holds {known}"
        )
    if asked.adapt not in METHODS:
        raise UserError(f"--adapt {asked.adapt!r} is unknown; choose {', '.join(METHODS)}")
    if asked.split not in ("dev", *SPLITS):
        raise UserError(f"there is no split {asked.split!r}; choose {', '.join(SPLITS)} or dev")


def choose_reference(days: list[DayNumbers], named: str | None, rates: dict[str, Any] | None) -> DayNumbers:
    """The day asked for; else the last one that the model knows; else the first."""
    if named is not None:
        found = [d for d in days if d.session == named]
        if not found:
            raise UserError(f"session {named} has no trial long enough to compare with; choose another")
        return found[0]
    known = {d["session"] for d in (rates or {}).get("days", ()) if d["known"]}
    return next((d for d in reversed(days) if d.session in known), days[0])


def show(asked: Asked, summary: dict[str, Any]) -> None:
    table = Table(
        box=None,
        header_style="bold",
        title=f"likeness to {summary['reference']}",
        title_justify="left",
    )
    table.add_column("session")
    for name in ("channels", *summary["days"][0]["arrays"], "flat"):
        table.add_column(name, justify="right")
    for row in summary["days"]:
        arrays = [percent(a["subspace_likeness"]) for a in row["arrays"].values()]
        table.add_row(row["session"], percent(row["profile_likeness"]), *arrays, str(len(row["flat"])))
    out.print(table)
    for row in summary["days"]:
        if row["reordered"]:
            say(f"warning: the channels of {row['session']} look re-ordered against the day before")
        if row["died"]:
            say(f"{row['session']}: {counted(len(row['died']), 'channel')} fell silent")
    say(f"page in {asked.out}")
