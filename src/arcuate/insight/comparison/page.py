"""`write_comparison_page`: the differences, the overlaid learning curves, and the changed settings."""

from pathlib import Path

from arcuate.files import write_text
from arcuate.insight.comparison.compare import Comparison
from arcuate.insight.ledger.runs import value_text
from arcuate.insight.pages.charts import ForestRow, GroupedRun, dot_plot, forest_plot, overlaid_curves
from arcuate.insight.pages.formatting import count, percent, split_name
from arcuate.insight.pages.markup import Html, figure, join, notice, page, scroll_table, tag


def write_comparison_page(comparison: Comparison, path: str | Path) -> Path:
    """Write a comparison as one self-contained HTML page."""
    write_text(Path(path), comparison_page(comparison))
    return Path(path)


def comparison_page(comparison: Comparison) -> str:
    reference, *others = comparison.groups
    curves = [GroupedRun(g.name, s.run.metrics()) for g in comparison.groups for s in g.scores]
    scored_on = f"Scored on the same {comparison.n_trials:,} {split_name(comparison.split)} trials."
    header = tag(
        "header",
        tag("p", "arcuate comparison", class_="kicker"),
        tag("h1", " · ".join(group.name for group in comparison.groups)),
        *(tag("p", found.sentence, class_="lead") for found in comparison.differences),
        *(notice(text) for text in (scored_on, *comparison.notes)),
    )
    sections = [
        ("difference", "Differences", _differences(comparison)),
        ("curves", "Learning curves", overlaid_curves(curves)),
        ("changes", "Changed settings", _changes(comparison)),
        ("runs", "Runs", _runs_table(comparison)),
    ]
    title = f"{reference.name} against {', '.join(g.name for g in others)} · arcuate"
    return page(title, header, sections, "Written by arcuate from the files of the run folders.", "groups.css")


def _differences(comparison: Comparison) -> Html:
    reference = comparison.groups[0].name
    rows = [
        ForestRow(d.group.name, 100 * c.estimate, 100 * c.low, 100 * c.high, d.significant)
        for d in comparison.differences
        for c in [d.contrast]
    ]
    n = len(rows)
    corrected = f" after Holm correction for {n} comparisons" if n > 1 else ""
    level = f"{100 * comparison.differences[0].contrast.level:.0f}\u202f%"
    caption = (
        f"Difference from {reference} in percentage points of PER, with {level} intervals. Filled markers:"
        f" significant{corrected}. {comparison.method}"
    )
    arms = [(g.name, [100 * float(r) for r in g.arm.rates]) for g in comparison.groups]
    forest = forest_plot(rows, f"Differences in PER from {reference}")
    dots = dot_plot(arms, "PER of every run, by group")
    return join(
        [
            figure(f"Difference from {reference}", forest, caption, wide=True),
            figure("PER of every run", dots, None, wide=True),
        ]
    )


def _changes(comparison: Comparison) -> Html:
    parts = []
    for found in comparison.differences:
        names = found.reference.name, found.group.name
        rows = [(c.path, value_text(c.before), value_text(c.after)) for c in found.changes]
        parts.append(tag("h3", f"{names[0]} → {names[1]}"))
        parts.append(scroll_table(("setting", *names), rows) if rows else tag("p", "No setting differs."))
        if len(rows) > 1:
            text = f"{len(rows)} settings changed at once, so the difference cannot be attributed to one of them."
            parts.append(notice(text))
    return join(parts)


def _runs_table(comparison: Comparison) -> Html:
    rows = [
        (str(scores.run.path), group.name, seed, count(scores.step), percent(float(rate)))
        for group in comparison.groups
        for scores, seed, rate in zip(group.scores, group.seeds, group.arm.rates, strict=True)
    ]
    return scroll_table(("run", "group", "seed", "scored at step", "PER"), rows)
