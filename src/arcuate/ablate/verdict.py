"""Which factor caused the difference: each in both directions, against the spread over trials and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arcuate.ablate.experiment import Experiment, cells, scored
from arcuate.ablate.factors import BASE, BUT, Arm, Question, questions
from arcuate.ledger.scores import Scores, read_scores, refuse_unlike, side_by_side
from arcuate.ledger.verdicts import ALPHA, p_text
from arcuate.paired import Arm as Rates
from arcuate.paired import Contrast, contrast, difference, holm


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
