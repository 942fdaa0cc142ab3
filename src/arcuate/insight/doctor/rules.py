"""The rules: each verdict is one function from facts to a finding, with its reason in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.insight.doctor.facts import SILENT, Facts, Jump, broken_gradients, broken_losses, first_jump

FEW, FEW_IN_WARMUP = 5, 6  # evaluations: fewer than the first, or at most the second within the warm-up
FROZEN_HIGH = 0.5  # an output that never changes, at this error rate or above, is a constant one
WORSE, WORSE_BY = 0.15, 0.03  # degraded: relative and absolute
LOSS_ROSE = 0.15  # validation loss above its lowest
RATE_ROSE = 0.03  # error rate above its best, or gained since: more than the noise between evaluations
FLAT, FALLING, FALLING_LATE = 0.03, 0.06, 0.03  # better over the last third, twice, and over the last fifth
HIGH_FLAT, HIGH_DONE, HIGH_FALLING = 1.3, 1.5, 1.4  # multiples of the reference
ON_COURSE = 1.15  # multiples of the official curve at the same batch
HIGH_ANYWHERE = 0.4  # an error rate that is high on any data
LOSS_FLAT = (
    0.07  # share of all progress made in the last third, where only a loss was logged: a fifth of the pace
)
LOSS_LEARNT = 0.5  # a loss that fell by this share has learnt something, and may stand still at its end
TREND = 0.05  # of the training loss: less is standing still
BROKEN = frozenset({"exploded", "collapsed", "degraded", "too_short"})  # no healthy run is any of these
LOST = frozenset({"exploded", "collapsed", "degraded"})
RECOVERED = 0.05  # within this share of its best a run has come back


@dataclass(frozen=True)
class Finding:
    """A verdict that holds. A mild one is true, but never the first thing to say of a run; one without a name is
    evidence and nothing else."""

    verdict: str
    evidence: tuple[str, ...]
    since: int | None = None
    mild: bool = False


def findings(facts: Facts) -> list[Finding]:
    """All verdicts that hold, the leading one first."""
    held = [f for rule in RULES if (f := rule(facts)) is not None]
    if {f.verdict for f in held} & {"collapsed", "degraded"}:
        held = [f for f in held if f.verdict != "plateaued"]  # flat at a level it fell to is no plateau
    leading = [f for f in held if not f.mild]
    mild = [f for f in held if f.mild]
    return [*leading, *mild] if leading else [fallback(facts), *mild]


def beside(lead: Finding, rest: Sequence[Finding]) -> tuple[str, ...]:
    """The other verdicts by name. Healthy means that nothing is broken, so it never stands beside a verdict that
    says otherwise: beside a worse lead it is left out, and beside a healthy lead what was overcome stays evidence."""
    others = dict.fromkeys(f.verdict for f in rest if f.verdict not in ("", lead.verdict))
    if lead.verdict == "healthy":
        return tuple(v for v in others if v not in BROKEN)
    if lead.verdict in LOST:
        others.pop("unfinished", None)  # more of the same mends none of them
    broken = BROKEN & {lead.verdict, *others}
    return tuple(v for v in others if v != "healthy" or not broken)


def exploded(facts: Facts) -> Finding | None:
    """A loss that is no number ends the learning; a jump counts only where the error rate pays for it."""
    if losses := broken_losses(facts.log):
        return Finding("exploded", losses.evidence, losses.step)
    if (skipped := facts.log.skipped_steps) and not facts.log.grad_norm.broken_steps.size:
        told = (
            f"the guard skipped {len(skipped):,} steps that were not finite, the first at step {skipped[0]:,}"
        )
        return Finding("exploded", (told,), skipped[0], mild=True)
    came_back = facts.n > 0 and facts.fallen_back <= RECOVERED and not _silent(facts)
    if gradients := broken_gradients(facts.log):
        return Finding("exploded", gradients.evidence, gradients.step, mild=came_back)
    jump: Jump | None = first_jump(facts)
    return Finding("exploded", jump.evidence, jump.step, mild=came_back) if jump else None


def too_short(facts: Facts) -> Finding | None:
    """Fewer than five evaluations show no trend, and neither do five or six within the warm-up."""
    if facts.n == 0:
        return Finding("too_short", ("the log holds no evaluation, so it cannot be judged",))
    if facts.n >= FEW and not (facts.n <= FEW_IN_WARMUP and facts.in_warmup):
        return None
    where = ", all of them in the warm-up" if facts.n >= FEW else ""
    few = f"{facts.n} evaluation{'s' * (facts.n > 1)} only{where}"
    return Finding("too_short", (few, *_dead(facts)))


def collapsed(facts: Facts) -> Finding | None:
    """A model that says nothing, or always the same, scores 0.8 to 1; what counts is where it stays."""
    if facts.n < FEW and facts.dead:
        return Finding("collapsed", (), int(facts.first_step), mild=True)
    if facts.by_loss or facts.n < FEW or not _silent(facts):
        return None
    name, since = facts.log.error_name, _silent_since(facts)
    learnt = facts.best < SILENT
    if learnt:
        told = f"{name} had reached {facts.best_seen:.3f} at step {facts.best_step:,} and went back to {facts.end:.3f}"
    else:
        told = f"{name} never left the level of a constant output: best {facts.best_seen:.3f}, last {facts.end:.3f}"
    falling = not learnt and facts.gain >= FALLING and facts.fallen_back <= RECOVERED
    slow = (f"it is still falling, {_percent(facts.gain)} over the last third",) if falling else ()
    return Finding("collapsed", (told, *slow, *_frozen(facts)), since, mild=falling)


def degraded(facts: Facts) -> Finding | None:
    """Learnt first, then lost 15 % and 0.03 of it at least and did not come back; a loss alone if training lost too."""
    if facts.n < FEW or facts.fallen_back < WORSE:
        return None
    if not _rising(facts) if facts.by_loss else facts.end - facts.best < WORSE_BY:
        return None
    told = (
        f"best {_judged(facts)} {facts.best_seen:.3f} at step {facts.best_step:,}, "
        f"then {facts.end:.3f} at the end (+{_percent(facts.fallen_back)})"
    )
    return Finding("degraded", (told, *_trend(facts)), facts.best_step)


def overfit(facts: Facts) -> Finding | None:
    """A rising validation loss is over-confidence as long as the error rate still falls; then it is over-fitting."""
    if facts.n < FEW or facts.loss_rise is None:
        return None
    rise, step = facts.loss_rise
    if rise < LOSS_ROSE or _rising(facts):
        return None
    told = f"validation loss ended {_percent(rise)} above its lowest at step {step:,}"
    if facts.by_loss:
        return Finding("overfit", (told, *_trend(facts)), step)
    name = facts.log.error_name
    since_then = 1 - facts.end / facts.value_at(step) if facts.value_at(step) > 0 else 0.0
    early = step <= facts.step_at(2 / 3)
    if facts.fallen_back >= max(RATE_ROSE, 2 * facts.noise):
        told += f", and {name} ended {_percent(facts.fallen_back)} above its best of step {facts.best_step:,}"
        return Finding("overfit", (told, *_trend(facts)), step)
    if early and since_then < RATE_ROSE:
        return Finding("overfit", (f"{told}, and {name} has not improved since", *_trend(facts)), step)
    told += f" while {name} improved by another {_percent(since_then)}: over-confidence that does not hurt"
    return Finding("overfit", (told,), step, mild=True)


def plateaued(facts: Facts) -> Finding | None:
    """Flat, or at the end of its schedule, at a level that other runs on the same data leave behind."""
    if facts.n < FEW:
        return None
    if facts.by_loss:
        return _flat_loss(facts)
    flat = facts.gain < FLAT or facts.frozen_since is not None
    if facts.level is None:
        high, done = facts.best >= HIGH_ANYWHERE, False
    else:
        high = facts.level >= HIGH_FLAT
        done = facts.level >= HIGH_DONE and not _falling(facts) and not _on_course(facts)
    if not (flat and high) and not done:
        return None
    told = f"{_gain(facts)}, at {facts.log.error_name} {facts.best_seen:.3f}{_against(facts)}"
    since = facts.frozen_since if facts.frozen_since is not None else int(facts.step_at(2 / 3))
    return Finding("plateaued", (told, *_frozen(facts), *_trend(facts)), since)


def unfinished(facts: Facts) -> Finding | None:
    """Still clearly falling with its best at the end: more training is worth more than any change."""
    if facts.n < FEW:
        return None
    falling = _loss_falls(facts) if facts.by_loss else facts.gain >= FALLING
    at_best = facts.fallen_back <= (RECOVERED if not facts.by_loss else 0.01)
    cut = facts.finished is False
    if not at_best or not (falling or (cut and facts.gain >= FLAT)):
        return None
    limit = HIGH_DONE if facts.finished else HIGH_FALLING
    high = facts.level is not None and facts.level >= limit and _falling(facts)
    unknown = facts.level is None and (facts.by_loss or facts.best >= HIGH_ANYWHERE)
    leads = falling and (cut or high or unknown)
    told = f"{_judged(facts)} was still falling, {_percent(facts.gain)} over the last third, best at the end"
    if facts.finished and not leads:
        return Finding("", (f"{told}: a longer plan may gain more",), None, mild=True)
    stop = (
        f"the log stops at step {facts.log.last_step:,} of {facts.planned:,}" if cut and facts.planned else ""
    )
    return Finding("unfinished", tuple(t for t in (told + _against(facts), stop) if t), None, mild=not leads)


def fallback(facts: Facts) -> Finding:
    """Where no rule speaks: healthy, unless the run lost more than evaluations differ by, or its level is no end."""
    if facts.by_loss:
        return _slipped(facts) if facts.fallen_back > RECOVERED else healthy(facts)
    high = facts.best >= HIGH_ANYWHERE if facts.level is None else facts.level >= HIGH_DONE
    if facts.fallen_back > RECOVERED and not high:
        return _slipped(facts)
    if not high:
        return healthy(facts)
    told = f"{_gain(facts)}, at {facts.log.error_name} {facts.best_seen:.3f}{_against(facts)}"
    if facts.gain >= FLAT and facts.finished is not True and facts.fallen_back <= RECOVERED:
        return Finding("unfinished", (told,))
    return Finding("plateaued", (told, *_trend(facts)), int(facts.step_at(2 / 3)))


def _slipped(facts: Facts) -> Finding:
    """A little worse than its best at the end: over-fitting where training went on to improve, else lost ground."""
    told = (
        f"{_judged(facts)} ended at {facts.end:.3f}, {_percent(facts.fallen_back)} above its best of step "
        f"{facts.best_step:,}"
    )
    rose = facts.loss_rise is None or facts.loss_rise[0] > RECOVERED
    verdict = "overfit" if rose and not _rising(facts) else "degraded"
    return Finding(verdict, (told, *_trend(facts)), facts.best_step)


def healthy(facts: Facts) -> Finding:
    """Ends within 5 % of its best, at a level that is normal for the data, and nothing else is wrong."""
    above = f", {_percent(facts.fallen_back)} above its best" if facts.fallen_back > 0.001 else ", its best"
    return Finding("healthy", (f"{_judged(facts)} ended at {facts.end:.3f}{above}{_against(facts)}",))


def nearly_healthy(facts: Facts) -> Finding | None:
    """Said beside a leading verdict: the curve itself is in order."""
    if facts.by_loss or facts.n < FEW or facts.fallen_back > RECOVERED or facts.level is None:
        return None
    return Finding("healthy", (), None, mild=True) if facts.level < HIGH_DONE and not _silent(facts) else None


RULES = (exploded, too_short, collapsed, degraded, overfit, plateaued, unfinished, nearly_healthy)


def _silent(facts: Facts) -> bool:
    """Whether the last third lies where a constant output lies."""
    if facts.log.silent_since is not None:
        return True
    if facts.frozen_since is not None and facts.end >= FROZEN_HIGH:
        return True
    late = facts.evaluations.between(facts.step_at(2 / 3), facts.last_step).values
    return not facts.by_loss and facts.end >= SILENT and float(np.median(late)) >= SILENT


def _silent_since(facts: Facts) -> int:
    """The first evaluation from which on the error rate never came below the level again."""
    if facts.log.silent_since is not None:
        return facts.log.silent_since
    if facts.frozen_since is not None:
        return facts.frozen_since
    below = np.flatnonzero(facts.evaluations.values < SILENT)
    return int(
        facts.evaluations.steps[min(int(below[-1]) + 1, facts.n - 1)] if len(below) else facts.first_step
    )


def _loss_falls(facts: Facts) -> bool:
    """At a fifth of its usual pace at least, or by what counts for an error rate too."""
    return facts.progress_share >= LOSS_FLAT or facts.gain >= FALLING


def _flat_loss(facts: Facts) -> Finding | None:
    """A loss that stands still: where it ended is what nobody can tell, but whether anything was learnt is."""
    if _loss_falls(facts) or facts.fallen_back > RECOVERED:
        return None
    fell = 1 - facts.best / float(facts.smooth.max()) if facts.smooth.max() > 0 else 0.0
    told = (
        f"without an error rate only the shape of the validation loss can be judged: it fell by {_percent(fell)}, "
        f"and the last third brought {_percent(max(facts.progress_share, 0))} of that"
    )
    return Finding("plateaued", (told, *_trend(facts)), int(facts.step_at(2 / 3)), mild=fell >= LOSS_LEARNT)


def _falling(facts: Facts) -> bool:
    """Still clearly getting better when it stopped; a schedule that ends is slower in its last fifth."""
    late = max(FALLING_LATE, 2 * facts.noise)
    return facts.gain >= FALLING and (facts.finished is False or facts.late_gain >= late)


def _dead(facts: Facts) -> tuple[str, ...]:
    if facts.dead is None:
        return ()
    return (
        f"yet nothing moved in it: {facts.log.error_name} is still {facts.evaluations.values[-1]:.3f}, and training"
        f" loss went from {facts.dead[0]:.3g} to {facts.dead[1]:.3g}; going on as it is will hardly help",
    )


def _rising(facts: Facts) -> bool:
    """Whether training itself got worse since the best evaluation."""
    return facts.train_trend is not None and facts.train_trend > TREND


def _judged(facts: Facts) -> str:
    return "validation loss" if facts.by_loss else facts.log.error_name


def _frozen(facts: Facts) -> tuple[str, ...]:
    if facts.frozen_since is None:
        return ()
    return (
        f"every evaluation since step {facts.frozen_since:,} is the same to the last digit: nothing is learnt",
    )


def _gain(facts: Facts) -> str:
    return (
        f"{_percent(facts.gain)} better over the last third"
        if facts.gain > 0
        else "no better over the last third"
    )


def _on_course(facts: Facts) -> bool:
    return facts.course is not None and facts.end <= ON_COURSE * facts.course


def _against(facts: Facts) -> str:
    if facts.level is None:
        return ""
    return f" ({facts.level:.2f} times the reference level {facts.reference:g})"


def _trend(facts: Facts) -> tuple[str, ...]:
    """What the training loss says about the reason."""
    if facts.train_trend is None:
        return ()
    if facts.by_heart:
        return ("training loss is next to nothing: the training sentences are known by heart",)
    if facts.train_trend > TREND:
        return (
            f"training loss rose with it ({_percent(facts.train_trend)}): the rate, not the regularisation",
        )
    if facts.train_trend < -TREND:
        return (
            f"training loss kept falling ({_percent(-facts.train_trend)}): the regularisation, not the rate",
        )
    return ("training loss stood still as well",)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.1f} %"
