"""`judge_ablation`: find the factor that caused a difference, and write the ablation page.

Each factor is tested twice, changed alone and with all others changed, against the variation over trials and seeds. The
p-values of all effects are Holm-adjusted together.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.evaluation.significance import Arm as ScoredArm
from arcuate.evaluation.significance import Contrast, difference, holm
from arcuate.experiments.ablation import (
    BASE,
    BUT,
    AblationRuns,
    Arm,
    ArmComparison,
    Experiment,
    arm_comparisons,
    cells,
    is_scored,
    missing_reason,
    overview,
)
from arcuate.files import fields_to_dict, to_frame, write_json, write_text
from arcuate.insight.charts import base, plots
from arcuate.insight.charts.base import Chart
from arcuate.insight.charts.formats import MISSING, percent
from arcuate.insight.overlay import FOREST_LEGEND, any_simulated, overlaid_figures
from arcuate.insight.render import Figure, make_figure, render, standalone_svg
from arcuate.insight.runs import Diagnose
from arcuate.insight.scores import ALPHA, RunScores, check_same_trials, describe_method, p_text, read_scores, to_arm
from arcuate.progress import counted


@dataclass(frozen=True)
class Effect:
    """The effect of a change on the error rate, between two arms that differ only in it; positive is worse."""

    comparison: ArmComparison
    contrast: Contrast
    p_adjusted: float
    rate_name: str  # such as PER

    @property
    def significant(self) -> bool:
        return self.p_adjusted < ALPHA

    @property
    def points(self) -> float:
        return 100 * self.contrast.estimate

    def to_dict(self) -> dict[str, Any]:
        c = self.contrast
        return {
            "before": self.comparison.before,
            "after": self.comparison.after,
            "difference": c.estimate,
            "low": c.low,
            "high": c.high,
            "p": c.p,
            "p_adjusted": self.p_adjusted,
            "significant": self.significant,
            "df": c.df,
            "n_runs": list(c.n_runs),
        }


@dataclass(frozen=True)
class FactorResult:
    """The effect of a factor alone, and with all others changed."""

    factor: str
    alone: Effect | None  # None if runs are missing
    with_others: Effect | None  # None if runs are missing or there is only one factor
    sentence: str

    @property
    def effects(self) -> list[Effect]:
        return [e for e in (self.alone, self.with_others) if e]

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class ArmResult:
    """The error rates of the complete runs of one arm, and the doctor's verdicts on them."""

    arm: str
    description: str
    rates: ScoredArm | None  # None if no run is scored
    verdicts: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "description": self.description,
            "per": self.rates.rate if self.rates else None,
            "seed_sd": self.rates.seed_sd if self.rates else None,
            "per_by_run": [float(r) for r in self.rates.rates] if self.rates else [],
            "verdicts": dict(self.verdicts),
        }


@dataclass(frozen=True)
class AblationResult:
    """Result of an ablation; partial until all of its runs are scored."""

    experiment: Experiment
    runs: Mapping[str, tuple[RunScores, ...]]  # by arm
    total: Effect | None  # all factors at once
    factors: tuple[FactorResult, ...]
    arms: tuple[ArmResult, ...]
    n_comparisons: int
    verdict: str
    missing: tuple[str, ...]
    failed: Mapping[str, str]  # run folder -> reason

    @property
    def rate_name(self) -> str:
        return run_rate_name(*(of_arm[0].run for of_arm in list(self.runs.values())[:1]))

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
        if not self.n_comparisons:
            raise UserError(f"{self.experiment.out} has no effect to plot yet; at least two arms must be complete")
        return base.for_notebook(_effects_chart(self))

    def to_frame(self) -> Any:
        """The effects as a pandas DataFrame, one row each."""
        effects = [("all", self.total), *((f.factor, e) for f in self.factors for e in f.effects)]
        return to_frame({"factor": name, **effect.to_dict()} for name, effect in effects if effect)


def judge_ablation(
    experiment: Experiment, failed: Mapping[Path, str] | None = None, *, diagnose: Diagnose | None = None
) -> AblationResult:
    """Test every effect for which all runs of both arms are complete and scored; `failed` lists runs that failed.

    The verdicts of the arms are those of `diagnose`; without it they have none.

    A run that is unfinished, failed or was stopped by the guard is excluded from all effects, and so are the other
    seeds of its arm: an arm without its failed seeds would look better than it is.
    """
    runs: dict[str, tuple[RunScores, ...]] = {}
    for cell in cells(experiment):
        if is_scored(experiment, cell):
            scores = read_scores(cell.run, experiment.split, experiment.label)
            runs[cell.arm.name] = (*runs.get(cell.arm.name, ()), scores)
    runs = {arm.name: runs[arm.name] for arm in experiment.arms if arm.name in runs}
    all_scores = [s for of_arm in runs.values() for s in of_arm]
    if all_scores:
        check_same_trials(all_scores)
    rates = {arm: to_arm(of_arm) for arm, of_arm in runs.items()}
    complete = {arm: rates[arm] for arm, of_arm in runs.items() if len(of_arm) == experiment.n_seeds}
    everything = experiment.arms[-1].name
    total_comparison = ArmComparison("all", "everything", BASE, everything)
    by_arms = {(q.before, q.after): q for q in (total_comparison, *arm_comparisons(experiment.factors))}
    measured = [q for q in by_arms.values() if q.before in complete and q.after in complete]
    contrasts = [difference(complete[q.before], complete[q.after]) for q in measured]
    adjusted = holm([c.p for c in contrasts])
    rate_name = run_rate_name(*(s.run for s in all_scores[:1]))
    effects = {
        (q.before, q.after): Effect(q, c, p, rate_name) for q, c, p in zip(measured, contrasts, adjusted, strict=True)
    }
    factors = _judge_factors(experiment, effects)
    total = effects.get((BASE, everything))
    incomplete = [arm.name for arm in experiment.arms if arm.name not in complete]
    verdict = _verdict_text(total, factors, incomplete)
    if total is not None and experiment.n_seeds == 1:
        verdict += " One run per arm: variation between seeds is not included."
    missing = (
        f"{cell.arm.name}, seed {cell.seed}: {reason}"
        for cell in cells(experiment)
        if (reason := missing_reason(experiment, cell))
    )
    arms = tuple(
        ArmResult(arm.name, _describe_arm(arm), rates.get(arm.name), _count_verdicts(runs.get(arm.name, ()), diagnose))
        for arm in experiment.arms
    )
    return AblationResult(
        experiment=experiment,
        runs=runs,
        total=total,
        factors=factors,
        arms=arms,
        n_comparisons=len(measured),
        verdict=verdict,
        missing=tuple(missing),
        failed={str(path): reason for path, reason in (failed or {}).items()},
    )


def _judge_factors(experiment: Experiment, effects: Mapping[tuple[str, str], Effect]) -> tuple[FactorResult, ...]:
    names = [f.name for f in experiment.factors]
    by_changes = {arm.changed: arm.name for arm in experiment.arms}
    every = frozenset(names)
    results = []
    for name in names:
        alone = effects.get((BASE, by_changes[frozenset([name])]))
        with_others = effects.get((by_changes[every - {name}], by_changes[every])) if len(names) > 1 else None
        results.append(FactorResult(name, alone, with_others, _factor_text(name, alone, with_others)))
    return tuple(results)


def _describe_arm(arm: Arm) -> str:
    if not arm.changed:
        return "baseline"
    if arm.name.startswith(BUT):
        return f"all changed except {arm.name.removeprefix(BUT)}"
    return "all changed" if len(arm.changed) > 1 and arm.name not in arm.changed else f"{arm.name} changed"


def _count_verdicts(scores: Sequence[RunScores], diagnose: Diagnose | None) -> dict[str, int]:
    if diagnose is None:
        return {}

    def verdict(run_scores: RunScores) -> str:
        try:
            return str(diagnose(run_scores.run.path).primary)
        except UserError:
            return "unreadable"

    return dict(Counter(map(verdict, scores)))


# Wording.


def _factor_text(name: str, alone: Effect | None, with_others: Effect | None) -> str:
    parts = []
    if alone:
        parts.append(f"changed alone, {_effect_text(alone)}")
    if with_others:
        parts.append(f"with the others changed too, {_effect_text(with_others)}")
    if not parts:
        return f"{name}: not measured; runs are missing or incomplete."
    return f"{name}: {'; '.join(parts)}."


def _effect_text(effect: Effect) -> str:
    c = effect.contrast
    interval = f"{100 * c.low:+.1f} to {100 * c.high:+.1f}, {p_text(effect.p_adjusted)}"
    if effect.significant:
        direction = "falls" if c.estimate < 0 else "rises"
        text = f"{effect.rate_name} {direction} by {abs(effect.points):.1f} points ({interval})"
    else:
        corrected = " after correction for all comparisons" if c.p < ALPHA else ""
        text = f"no significant effect{corrected} ({effect.points:+.1f} points, {interval})"
    return text.replace("-", "−")


def _verdict_text(total: Effect | None, factors: Sequence[FactorResult], incomplete: Sequence[str]) -> str:
    """The answer in one or two sentences. A cause is named only if every arm is complete."""
    arms = f"{'arm' if len(incomplete) == 1 else 'arms'} {_enumerate(incomplete)}"
    if total is None:
        return f"No verdict yet: runs of the {arms} are missing or incomplete."
    head = f"All changes together: {_effect_text(total)}."
    if incomplete:
        return f"{head} No verdict yet on the factors: runs of the {arms} are missing or incomplete."
    if not total.significant:
        names = [f.factor for f in factors if any(e.significant for e in f.effects)]
        if not names:
            return f"{head} No factor has a significant effect, alone or with the others."
        return f"{head} Single factors do have significant effects: {_enumerate(names)}."

    def same_direction(effect: Effect) -> bool:
        return effect.significant and (effect.points > 0) == (total.points > 0)

    responsible = [f for f in factors if any(map(same_direction, f.effects))]
    both = [f for f in responsible if len(f.effects) == 2 and all(map(same_direction, f.effects))]
    if not responsible:
        return (
            f"{head} No single factor explains it: none has a significant effect in this direction, alone or with the"
            " others."
        )
    responsible.sort(key=lambda f: -max(abs(e.points) for e in f.effects))
    names_text = _enumerate([f.factor for f in responsible])
    if len(responsible) == 1:
        only = responsible[0]
        if both or len(factors) == 1:
            return (
                f"{head} {names_text} caused it: the only factor with a significant effect in this direction, alone and"
                " with the others."
            )
        where = "alone" if only.alone and only.alone.significant else "only with the others changed"
        return f"{head} {names_text} is the only factor with a significant effect in this direction, {where}."
    in_both = _enumerate([f.factor for f in responsible if f in both])
    return f"{head} Factors with a significant effect in this direction, largest first: {names_text}." + (
        f" Both alone and with the others: {in_both}." if both else " None of them both alone and with the others."
    )


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part) if names else ""


# Output files.


def report_ablation(runs: AblationRuns, *, diagnose: Diagnose | None = None) -> AblationResult:
    """Judge an ablation; write ablation.json, ablation.html and the figures into its folder if any run is scored."""
    result = judge_ablation(runs.experiment, runs.failed, diagnose=diagnose)
    folder = result.experiment.out
    if result.runs:
        write_json(folder / "ablation.json", result.to_dict())
        write_text(folder / "ablation.html", ablation_page(result))
    if result.n_comparisons:
        write_text(folder / "effects.svg", standalone_svg(_effects_chart(result)))
    return result


def ablation_page(result: AblationResult) -> str:
    curves = [(arm, s.run.metrics()) for arm, scores in result.runs.items() for s in scores]
    experiment = result.experiment
    return render(
        "ablation.html",
        heading=" · ".join(factor.name for factor in experiment.factors),
        kind="ablation",
        simulated=any_simulated(s.run for scores in result.runs.values() for s in scores),
        result=result,
        effects=_effects_figure(result),
        arm_rows=[_arm_row(arm) for arm in result.arms],
        curves=overlaid_figures(curves, result.rate_name),
        common=", ".join(experiment.overrides) or "none",
        n_seeds=counted(experiment.n_seeds, "seed"),
        factor_rows=[(f.name, ", ".join(f.overrides)) for f in experiment.factors],
    )


def _effects_chart(result: AblationResult) -> Chart:
    effects = {"all factors at once": result.total}
    for factor in result.factors:
        effects[f"{factor.factor}, alone"] = factor.alone
        effects[f"{factor.factor}, with the others"] = factor.with_others
    rows = [(name, effect.contrast, effect.significant) for name, effect in effects.items() if effect]
    label = f"Effect of each factor on {result.rate_name}, alone and with the others"
    return plots.forest_chart(rows, title="Effects", label=label, rate_name=result.rate_name)


def _effects_figure(result: AblationResult) -> Figure | None:
    measured = [e for e in (result.total, *(e for f in result.factors for e in f.effects)) if e]
    if not measured:
        return None
    method = describe_method(measured[0].contrast, result.rate_name)
    caption = (
        f"Percentage points of {result.rate_name} with 95\u202f% intervals. Filled markers: significant after Holm"
        f" correction for {counted(result.n_comparisons, 'comparison')}. {method}"
    )
    return make_figure(_effects_chart(result), caption=caption, legend=FOREST_LEGEND, full=True)


def _arm_row(arm: ArmResult) -> tuple[object, ...]:
    sd = arm.rates.seed_sd if arm.rates else None
    verdicts = ", ".join(f"{name.replace('_', ' ')} × {n}" for name, n in arm.verdicts.items())
    per = percent(arm.rates.rate) if arm.rates else MISSING
    return (arm.arm, arm.description, per, MISSING if sd is None else f"{100 * sd:.1f} points", verdicts)
