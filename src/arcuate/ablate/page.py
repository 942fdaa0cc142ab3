"""The ablation as a page and as a figure: the answer, effects in both directions, every run, the curves."""

from typing import Any

from arcuate.ablate.verdict import Ablation, Effect, Judged
from arcuate.ledger.verdicts import method
from arcuate.report.document import document
from arcuate.report.forest import Row, forest, rates, standalone
from arcuate.report.markup import Html, figure, join, table, tag
from arcuate.report.overlay import Traced, overlay
from arcuate.report.wording import percent, split_name

DIRECTIONS = {"alone": "changed alone", "with the others": "with the others changed too"}


def ablation_page(ablation: Ablation, summary: dict[str, Any]) -> str:
    experiment = ablation.experiment
    sections = [
        ("effects", "What each factor does", effects(ablation)),
        ("arms", "Every arm", arms(ablation, summary)),
        ("curves", "Learning curves", curves(ablation)),
        ("setting", "The setting", setting(ablation)),
    ]
    head = tag(
        "header",
        tag("p", "arcuate ablation", class_="kicker"),
        tag("h1", " · ".join(f.name for f in experiment.factors)),
        tag("p", ablation.verdict, class_="lead"),
        tag("ul", *(tag("li", j.sentence) for j in ablation.judged), class_="verdicts"),
        *missing(ablation),
    )
    bodies = [tag("section", tag("h2", title), body, id=key) for key, title, body in sections]
    links = tag(
        "nav", *(tag("a", title, href=f"#{key}") for key, title, _ in sections), aria_label="Sections"
    )
    foot = tag("footer", "Written by arcuate from the files of the run folders.")
    return document("Ablation · arcuate", join([head, links, tag("main", *bodies), foot]), "together.css")


def missing(ablation: Ablation) -> list[Html]:
    if not ablation.missing:
        return []
    return [tag("p", f"Not measured yet: {'; '.join(ablation.missing)}.", class_="notice")]


def rows(ablation: Ablation) -> list[Row]:
    listed = [row("all factors", ablation.whole, "Everything at once")] if ablation.whole else []
    for judged in ablation.judged:
        listed += factor_rows(judged)
    return listed


def factor_rows(judged: Judged) -> list[Row]:
    return [
        row(
            DIRECTIONS["alone" if effect is judged.alone else "with the others"],
            effect,
            judged.factor if not i else None,
        )
        for i, effect in enumerate(judged.effects)
    ]


def row(name: str, effect: Effect, title: str | None) -> Row:
    c = effect.contrast
    return Row(name, 100 * c.estimate, 100 * c.low, 100 * c.high, effect.real, title)


def effects(ablation: Ablation) -> Html:
    if not rows(ablation):
        return tag("p", "No two arms are measured yet.", class_="absent")
    drawing = forest(rows(ablation), "Effect of each factor on PER, alone and with the others")
    first = next(e for e in (ablation.whole, *(e for j in ablation.judged for e in j.effects)) if e)
    note = (
        f"Points of PER with 95\u202f% intervals. Filled where real after accounting for {ablation.n_asked} comparisons"
        f" (Holm). {method(first.contrast)}"
    )
    return figure("Effects", drawing, note, wide=True)


def measured(ablation: Ablation) -> list[tuple[str, list[float]]]:
    return [(arm, [100 * float(r) for r in ablation.rates(arm).rates]) for arm in ablation.runs]


def arms(ablation: Ablation, summary: dict[str, Any]) -> Html:
    if not ablation.runs:
        return tag("p", "No run is scored yet.", class_="absent")
    split, checkpoint = split_name(ablation.experiment.split), ablation.experiment.checkpoint
    dots = rates(measured(ablation), f"PER of every run by arm, {checkpoint} checkpoint")
    listed: list[tuple[object, ...]] = [
        (
            arm["arm"],
            arm["meaning"],
            percent(arm["per"]),
            "–" if arm["seed_sd"] is None else f"{100 * arm['seed_sd']:.1f}",
            ", ".join(f"{name} × {n}" for name, n in arm["verdicts"].items()),
        )
        for arm in summary["arms"]
    ]
    head = ("arm", "what it is", "PER", "SD over seeds", "verdicts of the doctor")
    body = tag("div", table(head, listed), class_="scroll")
    return join([figure(f"PER on {split} trials, {checkpoint} checkpoint", dots, None, wide=True), body])


def curves(ablation: Ablation) -> Html:
    return overlay([Traced(arm, s.run.metrics()) for arm, scores in ablation.runs.items() for s in scores])


def setting(ablation: Ablation) -> Html:
    experiment = ablation.experiment
    listed: list[tuple[object, ...]] = [(f.name, ", ".join(f.overrides)) for f in experiment.factors]
    common = ", ".join(experiment.overrides) or "none"
    return join(
        [
            tag(
                "p", f"Baseline {experiment.recipe}, {experiment.n_seeds} seeds. Set in every arm: {common}."
            ),
            tag("div", table(("factor", "changed to"), listed), class_="scroll"),
        ]
    )


def effects_svg(ablation: Ablation) -> str:
    """The effects as a picture of its own."""
    return standalone(forest(rows(ablation), "Effect of each factor on PER, alone and with the others"))


def arms_svg(ablation: Ablation) -> str:
    return standalone(rates(measured(ablation), "PER of every run by arm"))
