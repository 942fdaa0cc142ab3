"""The comparison as a page: the answer, the differences, the curves together, and what was changed."""

from arcuate.experiments.recipe import run_recipe
from arcuate.insight.ledger.compare import Compared, Comparison, Group
from arcuate.insight.ledger.diary import value
from arcuate.insight.ledger.scores import compared_sentence, method
from arcuate.insight.report.curves import Traced, overlay
from arcuate.insight.report.forest import Row, forest, rates
from arcuate.insight.report.markup import Html, count, document, figure, join, percent, split_name, table, tag


def comparison_page(comparison: Comparison) -> str:
    first = comparison.groups[0]
    n_trials = len(first.scores[0].lengths)
    sections = [
        ("difference", "The difference", differences(comparison)),
        ("curves", "Learning curves", overlay([t for g in comparison.groups for t in traced(g)])),
        ("changes", "What was changed", changes(comparison)),
        ("runs", "The runs", runs_table(comparison)),
    ]
    head = tag(
        "header",
        tag("p", "arcuate comparison", class_="kicker"),
        tag("h1", " · ".join(group.name for group in comparison.groups)),
        *(tag("p", sentence(c, comparison), class_="lead") for c in comparison.found),
        tag("p", f"Scored on the same {n_trials:,} {split_name(comparison.split)} trials.", class_="notice"),
        *(tag("p", note, class_="notice") for note in comparison.notes),
    )
    bodies = [tag("section", tag("h2", title), body, id=key) for key, title, body in sections]
    links = tag(
        "nav", *(tag("a", title, href=f"#{key}") for key, title, _ in sections), aria_label="Sections"
    )
    foot = tag("footer", "Written by arcuate from the files of the run folders.")
    title = f"{first.name} against {', '.join(g.name for g in comparison.groups[1:])} · arcuate"
    return document(title, join([head, links, tag("main", *bodies), foot]), "together.css")


def sentence(c: Compared, comparison: Comparison) -> str:
    return compared_sentence(c.after.name, c.before.name, c.contrast, c.p_adjusted, len(comparison.found))


def traced(group: Group) -> list[Traced]:
    return [Traced(group.name, s.run.metrics()) for s in group.scores]


def differences(comparison: Comparison) -> Html:
    reference = comparison.groups[0].name
    rows = [row(c) for c in comparison.found]
    drawing = forest(rows, f"Differences in PER against {reference}")
    level = f"{100 * comparison.found[0].contrast.level:.0f}\u202f%"
    asked = len(comparison.found)
    counted = (
        f" Filled where real after accounting for {asked} comparisons (Holm)."
        if asked > 1
        else " Filled where real."
    )
    note = f"Points of PER against {reference}, with {level} intervals.{counted} {method(comparison.found[0].contrast)}"
    arms = [(g.name, [100 * float(r) for r in g.arm.rates]) for g in comparison.groups]
    dots = figure("PER of every run", rates(arms, "PER of every run, by group"), None, wide=True)
    return join([figure(f"Against {reference}", drawing, note, wide=True), dots])


def row(c: Compared) -> Row:
    found = c.contrast
    return Row(c.after.name, 100 * found.estimate, 100 * found.low, 100 * found.high, c.real)


def changes(comparison: Comparison) -> Html:
    parts = []
    for c in comparison.found:
        rows: list[tuple[object, ...]] = [(x.path, value(x.before), value(x.after)) for x in c.changes]
        head = tag("h3", f"{c.before.name} → {c.after.name}")
        body = (
            table(("setting", c.before.name, c.after.name), rows) if rows else tag("p", "No setting differs.")
        )
        warn = f"{len(rows)} settings changed at once, so none of them is shown to be the cause."
        parts += [
            head,
            tag("div", body, class_="scroll"),
            tag("p", warn, class_="notice") if len(rows) > 1 else Html(),
        ]
    return join(parts)


def runs_table(comparison: Comparison) -> Html:
    rows: list[tuple[object, ...]] = []
    for group in comparison.groups:
        for scores, rate in zip(group.scores, group.arm.rates, strict=True):
            seed = run_recipe(scores.run).train.seed
            rows.append((str(scores.run.path), group.name, seed, count(scores.step), percent(float(rate))))
    return tag("div", table(("run", "group", "seed", "scored at step", "PER"), rows), class_="scroll")
