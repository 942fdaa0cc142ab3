"""Error rate by recording session, in the order of recording."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arcuate.metrics import Score, bootstrap_interval, total
from arcuate.report.axes import dot, linear, rows_axis, rule, text
from arcuate.report.evidence import Decoding, Evidence, Results
from arcuate.report.markup import Html, figure, join, legend, svg, table, tag
from arcuate.report.wording import MISSING, counted, number, percent

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
