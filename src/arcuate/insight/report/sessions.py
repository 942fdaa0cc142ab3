"""Error rate by recording session, in the order of recording."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arcuate.evaluation.metrics import Score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import read_json
from arcuate.insight.report.axes import Scale, band, columns_axis, dot, linear, path, rows_axis, rule, text
from arcuate.insight.report.evidence import Decoding, Evidence, Results
from arcuate.insight.report.markup import (
    MISSING,
    Html,
    counted,
    figure,
    join,
    legend,
    number,
    percent,
    svg,
    table,
    tag,
    whole,
)
from arcuate.run import Run

LEFT, TOP, PLOT = 62, 16, 210
MAX_BLOCKS = 600


@dataclass(frozen=True)
class SessionRate:
    session: str
    rate: float
    low: float | None
    high: float | None
    n_trials: int | None


def session_rates(results: Results, order: Sequence[str]) -> list[SessionRate]:
    """Rates of the sessions that were scored, chronologically."""
    trials: dict[str, list[Decoding]] = {}
    for decoding in results.decodings:
        trials.setdefault(decoding.session, []).append(decoding)
    given = results.summary.get("per_by_session")
    summary = given if isinstance(given, Mapping) else {}
    place = {session: i for i, session in enumerate(order)}
    rates = []
    for session in sorted({*trials, *map(str, summary)}, key=lambda s: (place.get(s, len(place)), s)):
        scores = [d.score for d in trials.get(session, ()) if d.score]
        rate = total(scores).rate if scores else number(summary.get(session))
        if rate is not None:
            low, high = bootstrap_interval(scores, n_resamples=500)
            rates.append(SessionRate(session, rate, low, high, len(scores) or None))
    return rates


def sessions(evidence: Evidence) -> Html:
    results = evidence.results
    rates = session_rates(results, evidence.sessions) if results else []
    if not results or not rates:
        return tag(
            "p",
            "These results have no labels to score against, so there is no rate by session.",
            class_="absent",
        )
    best, worst = min(rates, key=lambda r: r.rate), max(rates, key=lambda r: r.rate)
    if len(rates) == 1:
        note = f"One session, {percent(best.rate)}."
    else:
        note = f"From {percent(best.rate)} ({best.session}) to {percent(worst.rate)} ({worst.session})."
    silent = set(evidence.sessions) - {r.session for r in rates}
    if silent:
        note += f" {counted(len(silent), 'session')} of the data without a scored trial."
    key = legend(
        ("point", "session, with 95 % interval over its trials"),
        ("limit", f"all trials, {percent(results.rate)}"),
    )
    return join(
        [
            figure(
                "In the order of recording", session_chart(rates, results.rate, note), note, key, wide=True
            ),
            block_table(results, {r.session: i for i, r in enumerate(rates)}),
        ]
    )


def session_chart(rates: Sequence[SessionRate], overall: float | None, note: str) -> Html:
    names = short_names([r.session for r in rates])
    longest = max(len(name) for name in names)
    column = min(max(1040 / len(rates), 20.0), 175.0)
    width = max(LEFT + column * len(rates) + 20, 420)
    turned = column < 7.5 * longest
    bottom = TOP + PLOT
    height = bottom + (5.4 * longest + 24 if turned else 34)
    values = [v for r in rates for v in (r.rate, r.high) if v is not None]
    y = linear([*values, *([overall] if overall is not None else [])], bottom, TOP, 0.0)
    parts = [
        rows_axis(y, LEFT, width - 8, lambda v: percent(v, 0)),
        rule(LEFT, bottom, width - 8, bottom, "axis"),
    ]
    if overall is not None:
        parts.append(rule(LEFT, y(overall), width - 8, y(overall), "line limit"))
    for i, (rate, name) in enumerate(zip(rates, names, strict=True)):
        x = LEFT + column * (i + 0.5)
        if rate.low is not None and rate.high is not None:
            parts.append(rule(x, y(rate.low), x, y(rate.high), "whisker"))
        number_of = counted(rate.n_trials, "trial") if rate.n_trials else "trials not listed"
        parts.append(dot(x, y(rate.rate), 4.5, "point", f"{rate.session}: {percent(rate.rate)}, {number_of}"))
        if turned:
            spot = f"translate({x + 3:.1f} {bottom + 16}) rotate(-45)"
            parts.append(tag("text", name, transform=spot, text_anchor="end"))
        else:
            parts.append(text(x, bottom + 20, name, anchor="middle"))
    label = f"Phoneme error rate of {counted(len(rates), 'session')}. {note}"
    style = f"max-width:{width / 16:.1f}rem;min-width:{min(width, 760) / 16:.1f}rem"
    return svg(width, height, label, *parts, style=style)


def short_names(names: Sequence[str]) -> list[str]:
    """The dates alone where one participant stands before all of them; long names cut."""
    heads = {name.partition(".")[0] for name in names}
    if len(names) > 1 and len(heads) == 1:
        names = [name.partition(".")[2] or name for name in names]
    return [name if len(name) <= 16 else name[:15] + "…" for name in names]


def block_table(results: Results, order: Mapping[str, int]) -> Html:
    """The same by block, folded away."""
    blocks: dict[tuple[str, str], list[Score]] = {}
    for decoding in results.decodings:
        if decoding.score:
            blocks.setdefault((decoding.session, decoding.block), []).append(decoding.score)
    if not blocks:
        return Html()

    def recorded(key: tuple[str, str]) -> tuple[int, str, int, str]:
        session, block = key
        return (
            order.get(session, len(order)),
            session,
            int(block) if block.isdigit() and len(block) < 9 else 0,
            block,
        )

    ordered = sorted(blocks, key=recorded)
    rows: list[tuple[object, ...]] = []
    for session, block in ordered[:MAX_BLOCKS]:
        whole = total(blocks[session, block])
        rate = percent(whole.rate) if whole.rate is not None else MISSING
        rows.append((session, block, len(blocks[session, block]), rate))
    left = len(ordered) - len(rows)
    return tag(
        "details",
        tag("summary", f"By block ({counted(len(ordered), 'block')})"),
        tag(
            "div", table(("session", "block", "trials", "error rate"), rows, "numbers"), class_="scroll tall"
        ),
        tag("p", f"{counted(left, 'further block')} not listed.", class_="absent") if left else None,
    )


# What sentences of calibration were worth: the error rate of the rest of the day over their number.

FILE = "calibration.json"
WIDTH, HEIGHT = 560, 314
CURVE_LEFT, RIGHT, CURVE_TOP, BOTTOM = 62, 540, 14, 258


@dataclass(frozen=True)
class Point:
    sentences: int
    per: float
    low: float | None
    high: float | None
    n_trials: int


def calibration_of(run: Run) -> Mapping[str, Any] | None:
    """What `arcuate calibrate` left in a run folder; None for an ordinary run."""
    file = run.path / FILE
    return read_json(file) if file.is_file() else None


def read_points(told: Mapping[str, Any]) -> list[Point]:
    """The points that can be drawn; a damaged file gives fewer, never an error."""
    given = told.get("curve")
    points = []
    for row in given if isinstance(given, list) else ():
        if not isinstance(row, Mapping):
            continue
        sentences, rate = whole(row.get("sentences")), number(row.get("per"))
        if sentences is not None and rate is not None:
            n_trials = whole(row.get("n_trials")) or 0
            points.append(Point(sentences, rate, number(row.get("low")), number(row.get("high")), n_trials))
    return sorted(points, key=lambda p: p.sentences)


def calibration(told: Mapping[str, Any]) -> Html:
    points = read_points(told)
    lead = (
        f"Calibrated to {told.get('session', MISSING)} from {told.get('parent', MISSING)}, with"
        f" {counted(whole(told.get('sentences')) or 0, 'sentence')}; the layer began as that of"
        f" {told.get('began_as', MISSING)}."
    )
    if not points:
        absent = "No labelled sentence was left to measure on."
        return join([tag("p", lead), tag("p", absent, class_="absent")])
    note = f"Measured on the {counted(points[-1].n_trials, 'sentence')} that came after; the band is the 95 % interval."
    head = ("sentences", "error rate", "95 % interval")
    rows: list[tuple[object, ...]] = [
        (p.sentences, percent(p.per), MISSING if p.low is None else f"{percent(p.low)} – {percent(p.high)}")
        for p in points
    ]
    return join(
        [
            tag("p", lead),
            tag(
                "div",
                figure("Error rate of the rest of the day", curve(points), note),
                tag("div", table(head, rows, "numbers")),
                class_="pair",
            ),
        ]
    )


def curve(points: list[Point]) -> Html:
    x = Scale(0.0, float(max(points[-1].sentences, 1)), CURVE_LEFT, RIGHT)
    y = linear([v for p in points for v in (p.per, p.high) if v is not None], BOTTOM, CURVE_TOP, 0.0)
    spread = [(x(p.sentences), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    parts = [
        rows_axis(y, CURVE_LEFT, RIGHT, lambda v: percent(v, 0)),
        columns_axis(x, BOTTOM, "sentences of calibration"),
        band([(at, y(high)) for at, _, high in spread], [(at, y(low)) for at, low, _ in spread], "band held"),
        path([(x(p.sentences), y(p.per)) for p in points], "line held"),
        *(dot(x(p.sentences), y(p.per), 4.5, "point", f"{p.sentences}: {percent(p.per)}") for p in points),
    ]
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    return svg(WIDTH, HEIGHT, label, *parts)
