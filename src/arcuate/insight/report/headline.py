"""The top of the page: what this run is, in one sentence and a few figures."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from arcuate.insight.report.evidence import Evidence, Results, lookup
from arcuate.insight.report.markup import (
    MISSING,
    Html,
    count,
    counted,
    duration,
    join,
    millions,
    number,
    percent,
    split_name,
    tag,
    whole,
)
from arcuate.insight.report.sessions import calibration_of, read_points


def headline(evidence: Evidence) -> Html:
    return tag(
        "header",
        tag("p", "arcuate run report", class_="kicker"),
        tag("h1", evidence.run.name),
        tag("p", *lead(evidence), class_="lead"),
        selection(evidence),
        tiles(evidence),
    )


def lead(evidence: Evidence) -> list[Html | str]:
    """One sentence that says what was measured and on what, without a verdict."""
    results = evidence.results
    if results is None:
        return calibrated(calibration_of(evidence.run)) or unscored(evidence)
    trials = f"{counted(results.n_trials, f'{split_name(results.split)} trial')}{of_sessions(results)}"
    if results.rate is None:
        return [f"{trials} decoded. They carry no labels, so there is no error rate."]
    n_scored = whole(results.summary.get("n_scored"))
    if n_scored is not None and n_scored < results.n_trials:
        trials += f" ({n_scored:,} of them with labels)"
    spread = within(*(results.interval or (None, None)))
    step = whole(results.summary.get("step"))
    checkpoint = f", with the checkpoint of step {step:,}" if step is not None else ""
    how = read_how(results.summary)
    return ["Phoneme error rate ", tag("b", percent(results.rate)), f"{spread} on {trials}{checkpoint}{how}."]


def within(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95\u202f% interval {100 * low:.1f}–{100 * high:.1f})"


def read_how(summary: Mapping[str, Any]) -> str:
    """Where frames were not simply read greedily off the CTC head, that is part of the result."""
    head, search, beam = summary.get("head"), summary.get("search"), whole(summary.get("beam"))
    parts = []
    if isinstance(head, str) and head != "ctc":
        parts.append(f"the {head} head" if head != "both" else "both heads")
    if search == "beam":
        parts.append(f"a beam of {beam:,}" if beam is not None else "a beam search")
    return f", read with {' and '.join(parts)}" if parts else ""


def calibrated(told: Mapping[str, Any] | None) -> list[Html | str]:
    """The same for a run that was calibrated and not evaluated; empty where there is nothing to tell."""
    points = read_points(told) if told else []
    if told is None or not points:
        return []
    last, first = points[-1], points[0]
    spread = within(last.low, last.high)
    before = f"; {percent(first.per)} without" if first.sentences == 0 and len(points) > 1 else ""
    where = f"{counted(last.n_trials, 'sentence')} of {told.get('session', MISSING)}"
    how = f"after calibration with {counted(last.sentences, 'sentence')}{before}"
    return ["Phoneme error rate ", tag("b", percent(last.per)), f"{spread} on {where}, {how}."]


def unscored(evidence: Evidence) -> list[Html | str]:
    step, planned = evidence.last_step, whole(evidence.setting("train.steps"))
    if step is None:
        done = "Nothing has been logged yet."
    else:
        done = f"Trained for {step:,}" + (f" of {planned:,}" if planned else "") + " steps"
        best = evidence.best
        if best:
            done += (
                f"; best {split_name(best[0])} error rate in the log {percent(best[2])}, at step {best[1]:,}"
            )
        done += "."
    return [f"{done} Not evaluated yet."]


def of_sessions(results: Results) -> str:
    n_sessions = len({d.session for d in results.decodings})
    return f" of {counted(n_sessions, 'session')}" if n_sessions else ""


def selection(evidence: Evidence) -> Html | None:
    """Whether the checkpoint was chosen on the very trials that are scored."""
    results, on = evidence.results, evidence.selected_on
    if results is None or results.rate is None:
        return None
    scored = results.split.split(".")[0]
    if on is None:
        return tag("p", "On which split the checkpoint was chosen is not recorded.", class_="notice")
    if on == scored:
        words = (
            f"The checkpoint was chosen on the same {split_name(on)} trials that are scored here,"
            " so the rate leans to the low side."
        )
        return tag("p", words, class_="notice")
    return tag(
        "p",
        f"The checkpoint was chosen on the {split_name(on)} split, apart from the trials scored here.",
        class_="notice",
    )


def tiles(evidence: Evidence) -> Html:
    shown = [
        rate_tile(evidence),
        kinds_tile(evidence),
        steps_tile(evidence),
        size_tile(evidence),
        time_tile(evidence),
    ]
    return tag("div", *(t for t in shown if t), class_="tiles")


def tile(name: str, value: object, *below: object, kind: str = "") -> Html:
    extra = [tag("p", part, class_="below") for part in below if part]
    return tag(
        "div",
        tag("p", name, class_="name"),
        tag("p", value, class_="value"),
        *extra,
        class_=f"tile {kind}".strip(),
    )


def rate_tile(evidence: Evidence) -> Html | None:
    results = evidence.results
    if results and results.rate is not None:
        words: list[str] = []
        if results.interval:
            low, high = results.interval
            words = [f"{100 * low:.1f}–{100 * high:.1f}\u202f%", "95\u202f% interval"]
        return tile("Phoneme error rate", percent(results.rate), *words, kind="first")
    if evidence.best:
        split, step, rate = evidence.best
        return tile(
            "Best error rate in the log", percent(rate), f"{split_name(split)}, step {step:,}", kind="first"
        )
    return None


def kinds_tile(evidence: Evidence) -> Html | None:
    """Substitutions, insertions and deletions as shares of one bar."""
    results = evidence.results
    if results is None or results.rate is None:
        return None
    counts = [whole(results.summary.get(key)) for key in ("substitutions", "insertions", "deletions")]
    if any(n is None for n in counts):
        counts = [results.total.substitutions, results.total.insertions, results.total.deletions]
    kinds = [(n or 0, kind, name) for n, (kind, name) in zip(counts, KINDS, strict=True)]
    errors = sum(n for n, _, _ in kinds)
    length = whole(results.summary.get("n_tokens")) or results.total.length
    parts = []
    for n, kind, name in kinds:
        share = f" · {percent(n / length)}" if length else ""
        parts.append(tag("li", tag("i", class_=f"mark {kind}"), tag("b", f"{n:,}"), f" {name}{share}"))
    below = f"of {length:,} phonemes, silences included" if length else None
    return tag(
        "div",
        tag("p", "Errors by kind", class_="name"),
        bar([(n / errors, kind) for n, kind, _ in kinds if n])
        if errors
        else tag("p", "none", class_="value"),
        tag("ul", *parts),
        tag("p", below, class_="below") if below else None,
        class_="tile kinds",
    )


KINDS = (("sub", "substituted"), ("ins", "added"), ("del", "missed"))


def bar(shares: Sequence[tuple[float, str]]) -> Html:
    label = ", ".join(f"{dict(KINDS)[kind]} {percent(share, 0)}" for share, kind in shares)
    pieces = [tag("span", class_=kind, style=f"flex-grow:{share:.4f}") for share, kind in shares]
    return tag("div", *pieces, class_="bar", role="img", aria_label=label)


def steps_tile(evidence: Evidence) -> Html:
    planned = whole(evidence.setting("train.steps"))
    best = evidence.best
    words = f"best {split_name(best[0])} rate at {best[1]:,}" if best else None
    of = f"of {planned:,} planned" if planned and planned != evidence.last_step else None
    return tile("Optimizer steps", count(evidence.last_step), of, words)


def size_tile(evidence: Evidence) -> Html:
    n_parameters = number(evidence.environment.get("n_parameters"))
    channels = whole(lookup(evidence.environment, "data.n_channels"))
    sessions = len(evidence.sessions)
    made = [f"{channels} channels" if channels else "", counted(sessions, "session") if sessions else ""]
    return tile("Parameters", millions(n_parameters), " × ".join(m for m in made if m) or None)


def time_tile(evidence: Evidence) -> Html | None:
    seconds, steps = evidence.seconds, evidence.last_step
    if seconds is None or not steps:
        return None
    device = evidence.environment.get("device")
    where = f"on {device}" if device else None
    return tile("Time in training steps", duration(seconds), f"{seconds / steps:.2g}\u202fs per step", where)


def commands(evidence: Evidence) -> Html:
    """How to get the part of the report that is not there yet."""
    path = shlex.quote(str(evidence.run.path))
    return join(
        [
            tag(
                "p",
                "Error rates by session, confusions, the picture of a trial and example decodings come from"
                " an evaluation, which this run has not had yet. Run",
            ),
            tag("pre", f"arcuate evaluate {path} --split val\narcuate report {path}"),
        ]
    )


def others_table(evidence: Evidence) -> Html:
    """Further results in the folder, so that none is overlooked."""
    if not evidence.others:
        return Html()
    names = ", ".join(
        f"{name} {percent(s.get('per')) if s.get('per') is not None else MISSING}"
        for name, s in evidence.others
    )
    return tag("p", f"Other results in this folder: {names}.", class_="absent")
