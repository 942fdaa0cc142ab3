"""An ablation as plain values: for `--json`, for ablation.json, and for tables."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from arcuate.ablate.experiment import overview
from arcuate.ablate.verdict import Ablation, Effect, describe_arm
from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.ledger.scores import Scores


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
