"""The run diary as Markdown: purpose, changes, result, finding of every run, from the run folders alone."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from arcuate.config import Change
from arcuate.errors import UserError
from arcuate.evaluation.significance import difference
from arcuate.experiments.recipe import OFFICIAL, load_recipe
from arcuate.files import read_json
from arcuate.insight.ledger.entries import Entry
from arcuate.insight.ledger.parents import SEEDS, Parent, only_seeds, parents
from arcuate.insight.ledger.scores import (
    compared_sentence,
    read_scores,
    refuse_unlike,
    selected_there,
    side_by_side,
)
from arcuate.training.checks import coupling_warnings

MAX_CHANGES = 12
MAX_EVIDENCE = 4
SPLITS = ("val", "dev", "test")


def diary(entries: Sequence[Entry], title: str) -> str:
    """The whole diary; written anew each time, so it cannot disagree with the folders."""
    lineage = parents(entries)
    parts = [
        f"# Run diary: {plain(title)}",
        opening(entries),
        overview(entries, lineage),
        *ablations(entries),
    ]
    for number, (entry, parent) in enumerate(zip(entries, lineage, strict=True), start=1):
        parts.append(section(number, entry, parent))
    return "\n\n".join(part for part in parts if part) + "\n"


def opening(entries: Sequence[Entry]) -> str:
    damaged = sum(bool(e.problems) for e in entries)
    n_data = len({json.dumps(e.data_hashes, sort_keys=True, default=str) for e in entries if e.data_hashes})
    said = [
        f"{len(entries)} run{'' if len(entries) == 1 else 's'}, in the order they were started."
        " Written by `arcuate ledger` from the run folders; edit the `notes` of a recipe, not this page.",
    ]
    if any(e.recipe and not e.recipe.notes.strip() for e in entries):
        said.append('A purpose is stated when training: `arcuate train … "notes=why this run"`.')
    if n_data > 1:
        said.append(
            f"The runs used {n_data} different data sets; error rates compare only within one of them."
        )
    if damaged:
        said.append(
            f"{damaged} of the folders could not be read whole; what is missing is named where it is missing."
        )
    return " ".join(said)


def overview(entries: Sequence[Entry], lineage: Sequence[Parent | None]) -> str:
    lines = ["| | run | verdict | best PER | steps | parent | changed |", "|---|---|---|---|---|---|---|"]
    for number, (entry, parent) in enumerate(zip(entries, lineage, strict=True), start=1):
        logged = entry.logged
        best = "–" if logged.best_per is None else f"{percent(logged.best_per)} ({logged.best_step})"
        cells = (
            str(number),
            plain(entry.name),
            entry.verdict or ("unreadable" if entry.problems else "–"),
            best,
            steps(entry),
            plain(parent.name) if parent else "–",
            short_changes(parent.changes) if parent else "–",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ablations(entries: Sequence[Entry]) -> list[str]:
    """What the ablations say that runs of this list are a part of: all seeds together, where a run is one seed."""
    said = []
    for home in dict.fromkeys(e.ablation for e in entries if e.ablation):
        n_runs = sum(e.ablation == home for e in entries)
        try:
            verdict = str(read_json(home / "ablation.json").get("verdict") or "")
        except UserError:
            verdict = "not judged yet"
        said.append(f"**Ablation {plain(home.name)}** ({n_runs} of the runs): {plain(verdict)}")
    return said


def section(number: int, entry: Entry, parent: Parent | None) -> str:
    verdict = f": {entry.verdict}" if entry.verdict else ""
    parts = [f"## {number}. {plain(entry.name)}{verdict}"]
    if entry.problems:
        parts.append("**Could not be read:** " + plain("; ".join(entry.problems)) + ".")
    parts += [purpose(entry), changed(entry, parent), result(entry), finding(entry, parent)]
    return "\n\n".join(part for part in parts if part)


def purpose(entry: Entry) -> str:
    recipe = entry.recipe
    if recipe is None:
        return ""
    text = plain(recipe.notes.strip()) or "not stated"
    what = f" ({plain(recipe.summary.strip().rstrip('.'))})" if recipe.summary.strip() else ""
    began = f", started {moment(entry.started)}" if entry.started else ""
    return (
        f"**Purpose:** {text.rstrip('.')}.\n\n"
        f"**Recipe:** `{plain(recipe.name)}`{what}, seed {recipe.train.seed}{began}."
    )


def moment(stamp: str) -> str:
    """A time as people write it; whatever is no time stays as it is."""
    try:
        return f"{datetime.fromisoformat(stamp).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return plain(stamp)


def changed(entry: Entry, parent: Parent | None) -> str:
    if entry.recipe is None:
        return ""
    if parent is None:
        return "**Changes:** no earlier run and no packaged recipe to compare with."
    against = {
        "weights": f"the run {plain(parent.name)}, whose weights it began with",
        "base": f"{plain(parent.name)}, the baseline of its ablation with the same seed",
        "run": f"{plain(parent.name)}, the earlier run it differs least from",
        "recipe": f"the packaged recipe `{plain(parent.name)}`",
    }[parent.kind]
    if not parent.changes:
        return f"**Changes** against {against}: none."
    listed = [f"- `{c.path}`: {value(c.before)} → {value(c.after)}" for c in parent.changes[:MAX_CHANGES]]
    if len(parent.changes) > MAX_CHANGES:
        listed.append(f"- … and {len(parent.changes) - MAX_CHANGES} more (`arcuate runs --json` has all)")
    return f"**Changes** against {against}:\n\n" + "\n".join(listed)


def result(entry: Entry) -> str:
    logged = entry.logged
    said = []
    if logged.best_per is not None:
        said.append(f"best PER {percent(logged.best_per)} at step {logged.best_step}")
        if logged.last_per is not None and logged.last_per != logged.best_per:
            said.append(f"{percent(logged.last_per)} at the end")
    if logged.steps is not None:
        said.append(f"{steps(entry)} steps")
    if entry.n_incidents:
        said.append(f"{entry.n_incidents} incident{'' if entry.n_incidents == 1 else 's'} of the guard")
    for name, summary in entry.results.items():
        if isinstance(summary.get("per"), (int, float)):
            said.append(evaluated(entry, name, summary))
    return f"**Result:** {'; '.join(said) if said else 'nothing was logged'}."


def evaluated(entry: Entry, name: str, summary: Mapping[str, Any]) -> str:
    low, high = summary.get("per_low"), summary.get("per_high")
    spread = f" ({percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    same = ", the split it was selected on" if selected_there(entry.run, summary) else ""
    split, _, label = name.partition(".")
    which = (
        f" ({plain(label)} checkpoint)"
        if label in ("last", "best")
        else f" ({plain(label)})"
        if label
        else ""
    )
    return f"evaluated on {plain(split)}{which}: {percent(summary.get('per'))}{spread}{same}"


def finding(entry: Entry, parent: Parent | None) -> str:
    """What the files allow to be said: how it went, whether it differs from its parent, and what that proves."""
    said = [plain(line) for line in (entry.diagnosis.evidence[:MAX_EVIDENCE] if entry.diagnosis else ())]
    if entry.diagnosis and entry.verdict != "healthy" and entry.diagnosis.suggestion:
        said.append(f"To try: {plain(entry.diagnosis.suggestion)}")
    if parent and parent.entry:
        said += against_parent(entry, parent, parent.entry)
    said += unit_warnings(entry)
    sentences = [s if s.endswith((".", "!", "?")) else f"{s}." for s in said if s]
    return f"**Finding:** {' '.join(sentences) or 'none; the log is empty.'}"


def against_parent(entry: Entry, parent: Parent, before: Entry) -> list[str]:
    settings = [c.path for c in parent.changes if c.path not in SEEDS]
    if parent.kind == "base":
        arm = plain(entry.run.path.resolve().parent.name)
        cause = f"It is the arm `{arm}` of an ablation, which tells its factors apart over all seeds"
    elif not parent.changes:
        cause = "Nothing was changed against it, so this is a repetition"
    elif only_seeds(parent.changes):
        cause = "Only the seed differs, so this is the luck of the seed"
    elif len(settings) == 1:
        cause = f"`{settings[0]}` is the only setting that changed" + (
            " besides the seed" if len(settings) < len(parent.changes) else ""
        )
    else:
        cause = (
            f"{len(settings)} settings changed at once, so none of them is shown to be the cause"
            " (`arcuate ablate` tells them apart)"
        )
    return [measured(entry, before), cause, *unlike(entry, before)]


def unlike(entry: Entry, before: Entry) -> list[str]:
    """What differs between two runs beside their settings, so that nobody takes one for the other."""
    said = [
        f"{plain(e.name)} stopped at step {e.logged.steps:,} of {e.planned_steps:,}, so the two are not equally long"
        for e in (before, entry)
        if e.stopped_early and before.logged.steps != entry.logged.steps
    ]
    if before.revision and entry.revision and before.revision != entry.revision:
        said.append(
            f"They were trained with different code ({plain(before.revision)} and {plain(entry.revision)}), which may"
            " be part of the difference"
        )
    return said


def shared_results(entry: Entry, before: Entry) -> tuple[str, str | None] | None:
    """A split, with its label, on which both were evaluated: the best checkpoint's before any labelled ones."""
    both = [name for name in entry.results if name in before.results]
    ranked = [
        (SPLITS.index(split), label, name)
        for name in both
        if (split := name.partition(".")[0]) in SPLITS
        for label in [name.partition(".")[2]]
    ]
    if not ranked:
        return None
    _, label, name = min(ranked, key=lambda r: (bool(r[1]), r[0], r[1]))
    return name.partition(".")[0], label or None


def measured(entry: Entry, before: Entry) -> str:
    """The tested difference where both were evaluated on the same trials; else the logged one, untested."""
    found = shared_results(entry, before)
    why = "both need an evaluation on the same split"
    if found is not None:
        try:
            scores = [read_scores(e.run, *found) for e in (before, entry)]
            refuse_unlike(scores)
            c = difference(side_by_side(scores[:1]), side_by_side(scores[1:]))
            return plain(compared_sentence(entry.name, before.name, c, c.p, 1))
        except UserError as error:
            why = plain(str(error).rstrip("."))
    a, b = before.logged.best_per, entry.logged.best_per
    if a is None or b is None:
        return f"Not compared with {plain(before.name)}: {why}"
    return (
        f"Best PER in the log {percent(b)} against {percent(a)} of {plain(before.name)}; whether that is a real"
        f" difference was not tested ({why})"
    )


def unit_warnings(entry: Entry) -> list[str]:
    recipe = entry.recipe
    official = next((n for n in (recipe.name, recipe.extends) if n in OFFICIAL), None) if recipe else None
    if recipe is None or official is None:
        return []
    return [plain(text) for text in coupling_warnings(recipe, load_recipe(official), official)]


def steps(entry: Entry) -> str:
    done, planned = entry.logged.steps, entry.planned_steps
    if done is None:
        return "–"
    return f"{done:,}" if planned in (None, done) else f"{done:,} of {planned:,}"


def short_changes(changes: Sequence[Change], n_shown: int = 3) -> str:
    shown = [f"{c.path} {value(c.before)} → {value(c.after)}" for c in changes[:n_shown]]
    more = f" + {len(changes) - n_shown} more" if len(changes) > n_shown else ""
    return (", ".join(shown) + more) or "nothing"


def value(of: Any) -> str:
    """A setting short enough for a line; a component by its kind."""
    if isinstance(of, Mapping):
        kind = of.get("kind")
        rest = ", ".join(f"{k} {value(v)}" for k, v in of.items() if k != "kind" and v is not None)
        return plain(f"{kind} ({rest})" if kind else rest)[:160]
    if isinstance(of, float):
        return f"{of:g}"
    return plain(of if isinstance(of, str) else json.dumps(of))[:160]


def percent(rate: Any) -> str:
    return "–" if not isinstance(rate, (int, float)) else f"{100 * rate:.1f} %"


def plain(text: str) -> str:
    """Words from a folder as words on the page: one line, no table bars, nothing that starts markup."""
    one_line = " ".join(str(text).split())
    for sign, instead in (("|", "\\|"), ("<", "&lt;"), ("`", "'"), ("[", "\\[")):
        one_line = one_line.replace(sign, instead)
    return one_line
