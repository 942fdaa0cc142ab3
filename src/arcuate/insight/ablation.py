"""Which factor caused the difference: each in both directions, against the spread over trials and seeds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arcuate.errors import UserError
from arcuate.evaluation.significance import Arm as Rates
from arcuate.evaluation.significance import Contrast, contrast, difference, holm
from arcuate.experiments.ablation import (
    BASE,
    BUT,
    Arm,
    Experiment,
    Question,
    cells,
    overview,
    questions,
    scored,
)
from arcuate.insight.doctor import diagnose
from arcuate.insight.ledger.scores import (
    ALPHA,
    Scores,
    method,
    p_text,
    read_scores,
    refuse_unlike,
    side_by_side,
)
from arcuate.insight.report.curves import Traced, overlay
from arcuate.insight.report.forest import Row, forest, rates, standalone
from arcuate.insight.report.markup import Html, document, figure, join, percent, split_name, table, tag


@dataclass(frozen=True)
class Effect:
    """What a change does to PER, between two arms that differ in it alone; positive is worse."""

    question: Question
    contrast: Contrast
    p_adjusted: float

    @property
    def real(self) -> bool:
        return self.p_adjusted < ALPHA

    @property
    def points(self) -> float:
        return 100 * self.contrast.estimate


@dataclass(frozen=True)
class Judged:
    """A factor: its effect alone, its effect once the others are changed, and whether the two differ."""

    factor: str
    alone: Effect | None  # None where its runs are missing
    together: Effect | None  # None also where there is no other factor
    interaction: Contrast | None
    p_interaction: float | None
    sentence: str

    @property
    def effects(self) -> list[Effect]:
        return [e for e in (self.alone, self.together) if e]


@dataclass(frozen=True)
class Ablation:
    """The experiment as far as it has been run."""

    experiment: Experiment
    runs: Mapping[str, tuple[Scores, ...]]  # by arm
    whole: Effect | None  # all factors at once
    judged: tuple[Judged, ...]
    n_asked: int
    verdict: str
    missing: tuple[str, ...]

    def rates(self, arm: str) -> Rates:
        return side_by_side(self.runs[arm])


def judge(experiment: Experiment) -> Ablation:
    """Everything the scored runs of an experiment say."""
    runs = read_runs(experiment)
    everything = [s for scores in runs.values() for s in scores]
    if everything:
        refuse_unlike(everything)
    rates = {arm: side_by_side(scores) for arm, scores in runs.items()}
    last = experiment.arms[-1]
    top = Question("all", "everything", BASE, last.name)
    asked = {(q.before, q.after): q for q in (top, *questions(experiment.factors))}
    measured = [q for q in asked.values() if q.before in rates and q.after in rates]
    found = [difference(rates[q.before], rates[q.after]) for q in measured]
    adjusted = holm([c.p for c in found])
    effects = {
        (q.before, q.after): Effect(q, c, p) for q, c, p in zip(measured, found, adjusted, strict=True)
    }
    judged = judge_factors(experiment, rates, effects)
    missing = tuple(f"{c.arm.name}, seed {c.seed}" for c in cells(experiment) if not scored(experiment, c))
    whole = effects.get((BASE, last.name))
    verdict = say_verdict(whole, judged)
    if runs and max(len(scores) for scores in runs.values()) == 1:
        verdict += " One run an arm: the luck of the seed is not ruled out."
    return Ablation(experiment, runs, whole, judged, len(measured), verdict, missing)


def read_runs(experiment: Experiment) -> dict[str, tuple[Scores, ...]]:
    runs: dict[str, tuple[Scores, ...]] = {}
    for cell in cells(experiment):
        if scored(experiment, cell):
            scores = read_scores(cell.run, experiment.split, experiment.label)
            runs[cell.arm.name] = (*runs.get(cell.arm.name, ()), scores)
    return {arm.name: runs[arm.name] for arm in experiment.arms if arm.name in runs}


def judge_factors(
    experiment: Experiment, rates: Mapping[str, Rates], effects: Mapping[tuple[str, str], Effect]
) -> tuple[Judged, ...]:
    names = [f.name for f in experiment.factors]
    by_set = {arm.changed: arm.name for arm in experiment.arms}
    everything = frozenset(names)
    corners = {
        n: (by_set[frozenset()], by_set[frozenset([n])], by_set[everything - {n}], by_set[everything])
        for n in names
    }
    crossed = {
        n: contrast([rates[a] for a in corner], (1.0, -1.0, -1.0, 1.0))
        for n, corner in corners.items()
        if len(names) > 1 and all(a in rates for a in corner)
    }
    adjusted = dict(zip(crossed, holm([c.p for c in crossed.values()]), strict=True))
    judged = []
    for name, (none, alone, but, full) in corners.items():
        first = effects.get((none, alone))
        second = effects.get((but, full)) if len(names) > 1 else None
        p = adjusted.get(name)
        judged.append(Judged(name, first, second, crossed.get(name), p, say_factor(name, first, second, p)))
    return tuple(judged)


def say_factor(name: str, alone: Effect | None, together: Effect | None, p_interaction: float | None) -> str:
    parts = []
    if alone:
        parts.append(f"changed alone, {said(alone)}")
    if together:
        parts.append(f"with the others changed too, {said(together)}")
    if not parts:
        return f"{name}: not measured yet."
    depends = p_interaction is not None and p_interaction < ALPHA
    end = "; what it does depends on the others" if depends else ""
    return f"{name}: {'; '.join(parts)}{end}."


def said(effect: Effect) -> str:
    c = effect.contrast
    spread = f"{100 * c.low:+.1f} to {100 * c.high:+.1f}, {p_text(effect.p_adjusted)}".replace("-", "−")
    if not effect.real:
        counted = " once all comparisons are accounted for" if c.p < ALPHA else ""
        return f"no evidence of an effect{counted} ({100 * c.estimate:+.1f} points, {spread})".replace(
            "-", "−"
        )
    return f"PER {'falls' if c.estimate < 0 else 'rises'} by {abs(effect.points):.1f} points ({spread})"


def say_verdict(whole: Effect | None, judged: Sequence[Judged]) -> str:
    """The answer in a sentence or two, or that there is none."""
    if whole is None:
        return (
            "The baseline and the recipe with all changes are not both measured yet, so there is no answer."
        )
    found = [j for j in judged if any(e.real for e in j.effects)]
    if not whole.real:
        together = f"All changes together: {said(whole)}."
        return f"{together} {cancelling(found)}"
    worse = whole.points > 0
    same = [j for j in found if any(e.real and (e.points > 0) == worse for e in j.effects)]
    both = [
        j for j in same if len(j.effects) == 2 and all(e.real and (e.points > 0) == worse for e in j.effects)
    ]
    head = f"All changes together: {said(whole)}."
    if not same:
        return f"{head} No single factor accounts for it: none has a real effect that way, alone or with the others."
    ordered = sorted(same, key=lambda j: -max(abs(e.points) for e in j.effects))
    names = listed([j.factor for j in ordered])
    if len(same) == 1 and (both or len(judged) == 1):
        return f"{head} {names} caused it: the only factor with a real effect that way, alone and with the others."
    if len(same) == 1:
        how = "alone" if same[0].alone and same[0].alone.real else "only with the others changed"
        return f"{head} {names} is the only factor with a real effect in that direction, {how}."
    strict = listed([j.factor for j in ordered if j in both])
    return f"{head} Factors with a real effect in that direction, largest first: {names}." + (
        f" In both settings, alone and with the others: {strict}."
        if both
        else " Not one of them in both settings."
    )


def cancelling(found: Sequence[Judged]) -> str:
    if not found:
        return "No factor has a real effect, alone or with the others."
    return f"Single factors do have real effects: {listed([j.factor for j in found])}."


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def describe_arm(arm: Arm) -> str:
    """An arm in words for tables."""
    if not arm.changed:
        return "baseline"
    if arm.name.startswith(BUT):
        return f"all changed but {arm.name.removeprefix(BUT)}"
    return "all changed" if len(arm.changed) > 1 and arm.name not in arm.changed else f"{arm.name} changed"


# An ablation as plain values: for `--json`, for ablation.json, and for tables.


def summarise(ablation: Ablation) -> dict[str, Any]:
    experiment = ablation.experiment
    return {
        "out": str(experiment.out),
        "recipe": experiment.recipe,
        "overrides": list(experiment.overrides),
        "factors": {f.name: list(f.overrides) for f in experiment.factors},
        "split": experiment.split,
        "checkpoint": experiment.checkpoint,
        "n_seeds": experiment.n_seeds,
        "n_comparisons": ablation.n_asked,
        "verdict": ablation.verdict,
        "difference": effect_json(ablation.whole),
        "effects": [
            {
                "factor": j.factor,
                "alone": effect_json(j.alone),
                "with_others": effect_json(j.together),
                "interaction": None
                if j.interaction is None
                else {**asdict(j.interaction), "p_adjusted": j.p_interaction},
                "sentence": j.sentence,
            }
            for j in ablation.judged
        ],
        "arms": [arm_json(ablation, arm.name, describe_arm(arm)) for arm in experiment.arms],
        "missing": list(ablation.missing),
        "runs": overview(experiment),
    }


def effect_json(effect: Effect | None) -> dict[str, Any] | None:
    if effect is None:
        return None
    q, c = effect.question, effect.contrast
    return {
        "before": q.before,
        "after": q.after,
        "difference": c.estimate,
        "low": c.low,
        "high": c.high,
        "p": c.p,
        "p_adjusted": effect.p_adjusted,
        "real": effect.real,
        "df": c.df,
        "n_runs": list(c.n_runs),
    }


def arm_json(ablation: Ablation, name: str, meaning: str) -> dict[str, Any]:
    scores = ablation.runs.get(name, ())
    rates = ablation.rates(name) if scores else None
    return {
        "arm": name,
        "meaning": meaning,
        "per": rates.rate if rates else None,
        "seed_sd": rates.seed_sd if rates else None,
        "per_by_run": [float(r) for r in rates.rates] if rates else [],
        "verdicts": dict(Counter(verdict_of(s) for s in scores)),
    }


def verdict_of(scores: Scores) -> str:
    """What the doctor says of a run; a run it cannot read is worth knowing about, not worth stopping for."""
    try:
        return diagnose(scores.run.path).primary
    except UserError:
        return "unreadable"


# The ablation as a page and as a figure: the answer, effects in both directions, every run, the curves.

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
