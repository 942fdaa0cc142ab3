"""`judge_ablation`: find the factor that caused a difference, and write the ablation page.

Each factor is tested twice, changed alone and with all others changed, against the variation over trials and seeds. The
p-values of all effects are Holm-adjusted together.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.experiments.ablation import (
    BASE,
    BUT,
    AblationRuns,
    Arm,
    Experiment,
    arm_pairs,
    cells,
    is_scored,
    missing_reason,
    overview,
)
from arcuate.files import fields_to_dict, to_frame, write_json, write_text
from arcuate.insight.charts import base, plots
from arcuate.insight.charts.base import Chart
from arcuate.insight.charts.formats import MISSING, percent
from arcuate.insight.compare import ALPHA, Difference, Group, differences, read_scores
from arcuate.insight.render import FOREST_LEGEND, Figure, make_figure, overlaid_figures, render, standalone_svg
from arcuate.insight.run_data import Diagnose, read_run
from arcuate.progress import counted


@dataclass(frozen=True)
class FactorResult:
    """The effect of a factor alone, and with all others changed."""

    factor: str
    alone: Difference | None  # None if runs are missing
    with_others: Difference | None = None  # None if runs are missing or there is only one factor

    @property
    def effects(self) -> list[Difference]:
        return [effect for effect in (self.alone, self.with_others) if effect]

    @property
    def sentence(self) -> str:
        named = (("changed alone", self.alone), ("with the others changed too", self.with_others))
        parts = [f"{when}, {_effect_text(effect)}" for when, effect in named if effect]
        return f"{self.factor}: {'; '.join(parts) or 'not measured; runs are missing or incomplete'}."

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_dict(self), "sentence": self.sentence}


@dataclass(frozen=True)
class ArmResult:
    """The complete runs of one arm, and the doctor's verdicts on them."""

    arm: str
    description: str
    group: Group | None  # None if no run is scored
    verdicts: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        rates = self.group.arm if self.group else None
        return {
            "arm": self.arm,
            "description": self.description,
            "per": rates.rate if rates else None,
            "seed_sd": rates.seed_sd if rates else None,
            "per_by_run": [float(r) for r in rates.rates] if rates else [],
            "verdicts": dict(self.verdicts),
        }


@dataclass(frozen=True)
class AblationResult:
    """Result of an ablation; partial until all of its runs are scored."""

    experiment: Experiment
    total: Difference | None  # all factors at once
    factors: tuple[FactorResult, ...]
    arms: tuple[ArmResult, ...]
    n_comparisons: int
    verdict: str
    missing: tuple[str, ...]
    failed: Mapping[str, str]  # run folder -> reason

    @property
    def groups(self) -> list[Group]:
        """The arms with scored runs."""
        return [arm.group for arm in self.arms if arm.group]

    @property
    def rate_name(self) -> str:
        return self.groups[0].metric if self.groups else "PER"

    @property
    def effects(self) -> dict[tuple[str, str], Difference]:
        """The measured effects by factor and by what else is changed."""
        named = {("all", "at once"): self.total}
        for factor in self.factors:
            named |= {(factor.factor, "alone"): factor.alone, (factor.factor, "with the others"): factor.with_others}
        return {name: effect for name, effect in named.items() if effect}

    def to_dict(self) -> dict[str, Any]:
        """The content of ablation.json."""
        experiment = self.experiment
        return {
            "out": str(experiment.out),
            "recipe": experiment.recipe,
            "overrides": list(experiment.overrides),
            "factors": {f.name: list(f.overrides) for f in experiment.factors},
            "split": experiment.split,
            "checkpoint": experiment.checkpoint,
            "n_seeds": experiment.n_seeds,
            "n_comparisons": self.n_comparisons,
            "verdict": self.verdict,
            "difference": self.total.to_dict() if self.total else None,
            "effects": [factor.to_dict() for factor in self.factors],
            "arms": [arm.to_dict() for arm in self.arms],
            "missing": list(self.missing),
            "runs": overview(experiment),
            "failed": dict(self.failed),
        }

    def plot(self) -> Any:
        """The effects with their intervals as an Altair chart."""
        if not self.effects:
            raise UserError(f"{self.experiment.out} has no effect to plot yet; at least two arms must be complete")
        return base.for_notebook(_effects_chart(self))

    def to_frame(self) -> Any:
        """The effects as a pandas DataFrame, one row each."""
        return to_frame({"factor": factor, **effect.to_dict()} for (factor, _), effect in self.effects.items())


def judge_ablation(
    experiment: Experiment, failed: Mapping[Path, str] | None = None, *, diagnose: Diagnose | None = None
) -> AblationResult:
    """Test every effect for which all runs of both arms are complete and scored; `failed` lists runs that failed.

    The verdicts of the arms are those of `diagnose`; without it they have none.

    A run that is unfinished, failed or was stopped by the guard is excluded from all effects, and so are the other
    seeds of its arm: an arm without its failed seeds would look better than it is.
    """
    arms = _read_arms(experiment, diagnose)
    complete = {a.arm: a.group for a in arms if a.group and len(a.group.scores) == experiment.n_seeds}
    whole = BASE, experiment.arms[-1].name
    isolating = arm_pairs(experiment.factors)
    compared = dict.fromkeys([whole, *chain.from_iterable(isolating.values())])
    pairs = [(before, after) for before, after in compared if before in complete and after in complete]
    tested = differences([(complete[before], complete[after]) for before, after in pairs])
    effects = dict(zip(pairs, tested, strict=True))
    factors = tuple(FactorResult(name, *map(effects.get, found)) for name, found in isolating.items())
    total = effects.get(whole)
    verdict = _verdict_text(total, factors, [arm.arm for arm in arms if arm.arm not in complete])
    if total is not None and experiment.n_seeds == 1:
        verdict += " One run per arm: variation between seeds is not included."
    return AblationResult(
        experiment=experiment,
        total=total,
        factors=factors,
        arms=arms,
        n_comparisons=len(pairs),
        verdict=verdict,
        missing=_missing(experiment),
        failed={str(path): reason for path, reason in (failed or {}).items()},
    )


def _read_arms(experiment: Experiment, diagnose: Diagnose | None) -> tuple[ArmResult, ...]:
    """The scored runs of every arm, with the doctor's verdicts on them."""
    arms, planned = [], cells(experiment)
    for arm in experiment.arms:
        done = [cell.run for cell in planned if cell.arm == arm and is_scored(experiment, cell)]
        found = [read_run(run, diagnose=diagnose) for run in done]
        scores = tuple(read_scores(data, experiment.split, experiment.label) for data in found)
        verdicts = Counter(data.verdict or "unreadable" for data in found) if diagnose else {}
        arms.append(ArmResult(arm.name, _describe_arm(arm), Group(arm.name, scores) if scores else None, verdicts))
    return tuple(arms)


def _missing(experiment: Experiment) -> tuple[str, ...]:
    """The runs that are excluded from the effects, with the reason of each."""
    found = ((cell, missing_reason(experiment, cell)) for cell in cells(experiment))
    return tuple(f"{cell.arm.name}, seed {cell.seed}: {reason}" for cell, reason in found if reason)


def _describe_arm(arm: Arm) -> str:
    if not arm.changed:
        return "baseline"
    if arm.name.startswith(BUT):
        return f"all changed except {arm.name.removeprefix(BUT)}"
    return "all changed" if len(arm.changed) > 1 else f"{arm.name} changed"


# --- Wording ---------------------------------------------------------------------------------------------


def _effect_text(effect: Difference) -> str:
    interval = f"{effect.interval_text}, {effect.p_text}"
    if effect.significant:
        direction = "falls" if effect.points < 0 else "rises"
        return f"{effect.group.metric} {direction} by {abs(effect.points):.1f} points ({interval})"
    corrected = " after correction for all comparisons" if effect.contrast.p < ALPHA else ""
    points = f"{effect.points:+.1f}".replace("-", "−")
    return f"no significant effect{corrected} ({points} points, {interval})"


def _verdict_text(total: Difference | None, factors: Sequence[FactorResult], incomplete: Sequence[str]) -> str:
    """The answer in one or two sentences. A cause is named only if every arm is complete."""
    missing = (
        f"runs of the {'arm' if len(incomplete) == 1 else 'arms'} {_enumerate(incomplete)} are missing or incomplete"
    )
    if total is None:
        return f"No verdict yet: {missing}."
    head = f"All changes together: {_effect_text(total)}."
    if incomplete:
        return f"{head} No verdict yet on the factors: {missing}."
    if total.significant:
        return f"{head} {_cause_text(factors, total.points > 0)}"
    names = [f.factor for f in factors if any(e.significant for e in f.effects)]
    if names:
        return f"{head} Single factors do have significant effects: {_enumerate(names)}."
    return f"{head} No factor has a significant effect, alone or with the others."


def _cause_text(factors: Sequence[FactorResult], is_worse: bool) -> str:
    """The factors with a significant effect in the direction of the total one."""
    found = {f.factor: [e for e in f.effects if e.significant and (e.points > 0) == is_worse] for f in factors}
    responsible = sorted((f for f in factors if found[f.factor]), key=lambda f: -max(abs(e.points) for e in f.effects))
    names = _enumerate([f.factor for f in responsible])
    if not responsible:
        return (
            "No single factor explains it: none has a significant effect in this direction, alone or with the others."
        )
    both = [f.factor for f in responsible if len(found[f.factor]) == 2]
    only = "the only factor with a significant effect in this direction"
    if len(responsible) == 1:
        if both or len(factors) == 1:
            return f"{names} caused it: {only}, alone and with the others."
        alone = responsible[0].alone
        return f"{names} is {only}, {'alone' if alone and alone.significant else 'only with the others changed'}."
    in_both = (
        f"Both alone and with the others: {_enumerate(both)}" if both else "None of them both alone and with the others"
    )
    return f"Factors with a significant effect in this direction, largest first: {names}. {in_both}."


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part) if names else ""


# --- Output files ----------------------------------------------------------------------------------------


def report_ablation(runs: AblationRuns, *, diagnose: Diagnose | None = None) -> AblationResult:
    """Judge an ablation; write ablation.json, ablation.html and the figures into its folder if any run is scored."""
    result = judge_ablation(runs.experiment, runs.failed, diagnose=diagnose)
    folder = result.experiment.out
    if result.groups:
        write_json(folder / "ablation.json", result.to_dict())
        write_text(folder / "ablation.html", ablation_page(result))
    if result.effects:
        write_text(folder / "effects.svg", standalone_svg(_effects_chart(result)))
    return result


def ablation_page(result: AblationResult) -> str:
    runs = [(group.name, s.data) for group in result.groups for s in group.scores]
    experiment = result.experiment
    return render(
        "ablation.html",
        heading=" · ".join(factor.name for factor in experiment.factors),
        kind="ablation",
        simulated=any(data.simulated for _, data in runs),
        result=result,
        effects=_effects_figure(result),
        arm_rows=[_arm_row(arm) for arm in result.arms],
        curves=overlaid_figures(runs, result.rate_name),
        common=", ".join(experiment.overrides) or "none",
        n_seeds=counted(experiment.n_seeds, "seed"),
        factor_rows=[(f.name, ", ".join(f.overrides)) for f in experiment.factors],
    )


def _effects_chart(result: AblationResult) -> Chart:
    named = {"all factors at once" if f == "all" else f"{f}, {when}": e for (f, when), e in result.effects.items()}
    rows = [(name, effect.contrast, effect.significant) for name, effect in named.items()]
    label = f"Effect of each factor on {result.rate_name}, alone and with the others"
    return plots.forest_chart(rows, title="Effects", label=label, rate_name=result.rate_name)


def _effects_figure(result: AblationResult) -> Figure | None:
    measured = next(iter(result.effects.values()), None)
    if measured is None:
        return None
    caption = (
        f"Percentage points of {result.rate_name} with 95\u202f% intervals. Filled markers: significant after Holm"
        f" correction for {counted(result.n_comparisons, 'comparison')}. {measured.method}"
    )
    return make_figure(_effects_chart(result), caption=caption, legend=FOREST_LEGEND)


def _arm_row(arm: ArmResult) -> tuple[object, ...]:
    rates = arm.group.arm if arm.group else None
    sd = rates.seed_sd if rates else None
    verdicts = ", ".join(f"{name.replace('_', ' ')} × {n}" for name, n in arm.verdicts.items())
    shown = percent(rates.rate) if rates else MISSING
    return (arm.arm, arm.description, shown, MISSING if sd is None else f"{100 * sd:.1f} points", verdicts)
