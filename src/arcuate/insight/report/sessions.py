"""Error rate by recording session, in recording order, and by block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arcuate.evaluation.metrics import Score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.insight.pages import svg
from arcuate.insight.pages.formatting import finite_number, percent, whole_percent
from arcuate.insight.pages.markup import Html, figure, join, legend, muted, table, tag
from arcuate.insight.report.run_data import Decoding, Results, RunData
from arcuate.progress import counted

_LEFT, _TOP, _PLOT_HEIGHT = 62, 16, 210
_MAX_BLOCKS = 600


@dataclass(frozen=True)
class _SessionRate:
    session: str
    rate: float
    low: float | None
    high: float | None
    n_trials: int | None


def sessions_section(data: RunData) -> Html:
    results = data.results
    rates = _session_rates(results, data.sessions) if results else []
    if not results or not rates:
        return muted("These results have no labels, so error rates by session are unknown.")
    best, worst = min(rates, key=lambda r: r.rate), max(rates, key=lambda r: r.rate)
    if len(rates) == 1:
        caption = f"One session, {percent(best.rate)}."
    else:
        caption = f"From {percent(best.rate)} ({best.session}) to {percent(worst.rate)} ({worst.session})."
    if unscored := set(data.sessions) - {r.session for r in rates}:
        caption += f" Without scored trials: {counted(len(unscored), 'session')}."
    key = legend(
        ("point", "session, with 95 % interval over its trials"), ("limit", f"all trials, {percent(results.rate)}")
    )
    chart = _session_chart(rates, results.rate, caption)
    return join(
        figure("Sessions in recording order", chart, caption, key, wide=True),
        _block_table(results, {r.session: i for i, r in enumerate(rates)}),
    )


def _session_rates(results: Results, order: Sequence[str]) -> list[_SessionRate]:
    """Error rates of the scored sessions in recording order."""
    trials: dict[str, list[Decoding]] = {}
    for decoding in results.decodings:
        trials.setdefault(decoding.session, []).append(decoding)
    by_session = results.summary.get("per_by_session")
    summary = by_session if isinstance(by_session, Mapping) else {}
    position = {session: i for i, session in enumerate(order)}
    rates = []
    for session in sorted({*trials, *map(str, summary)}, key=lambda s: (position.get(s, len(position)), s)):
        scores = [d.score for d in trials.get(session, ()) if d.score]
        rate = total(scores).rate if scores else finite_number(summary.get(session))
        if rate is not None:
            low, high = bootstrap_interval(scores, n_resamples=500)
            rates.append(_SessionRate(session, rate, low, high, len(scores) or None))
    return rates


def _session_chart(rates: Sequence[_SessionRate], overall: float | None, caption: str) -> Html:
    names = short_session_names([r.session for r in rates])
    longest = max(len(name) for name in names)
    column = min(max(1040 / len(rates), 20.0), 175.0)
    width = max(_LEFT + column * len(rates) + 20, 420)
    rotated = column < 7.5 * longest
    bottom = _TOP + _PLOT_HEIGHT
    values = [v for r in rates for v in (r.rate, r.high) if v is not None]
    y = svg.linear_scale([*values, *([overall] if overall is not None else [])], bottom, _TOP, 0.0)
    places = [_LEFT + column * (i + 0.5) for i in range(len(rates))]
    parts = [svg.y_axis(y, _LEFT, width - 8, whole_percent), svg.line(_LEFT, bottom, width - 8, bottom, "axis")]
    if overall is not None:
        parts.append(svg.line(_LEFT, y(overall), width - 8, y(overall), "line limit"))
    for x, rate in zip(places, rates, strict=True):
        if rate.low is not None and rate.high is not None:
            parts.append(svg.line(x, y(rate.low), x, y(rate.high), "whisker"))
        n_trials = counted(rate.n_trials, "trial") if rate.n_trials else "trials not listed"
        parts.append(svg.dot(x, y(rate.rate), 4.5, "point", f"{rate.session}: {percent(rate.rate)}, {n_trials}"))
    parts += svg.column_labels(places, bottom, names, rotated)
    height = bottom + (5.4 * longest + 24 if rotated else 34)
    label = f"Phoneme error rate of {counted(len(rates), 'session')}. {caption}"
    style = f"max-width:{width / 16:.1f}rem;min-width:{min(width, 760) / 16:.1f}rem"
    return svg.drawing(width, height, label, *parts, style=style)


def short_session_names(names: Sequence[str]) -> list[str]:
    """Session names without the participant if it is the same for all; long names are truncated."""
    participants = {name.partition(".")[0] for name in names}
    if len(names) > 1 and len(participants) == 1:
        names = [name.partition(".")[2] or name for name in names]
    return [name if len(name) <= 16 else name[:15] + "…" for name in names]


def _block_table(results: Results, order: Mapping[str, int]) -> Html:
    """Error rate by block, collapsed by default."""
    blocks: dict[tuple[str, str], list[Score]] = {}
    for decoding in results.decodings:
        if decoding.score:
            blocks.setdefault((decoding.session, decoding.block), []).append(decoding.score)
    if not blocks:
        return Html()

    def position(key: tuple[str, str]) -> tuple[int, str, int, str]:
        session, block = key
        number = int(block) if block.isdigit() and len(block) < 9 else 0
        return order.get(session, len(order)), session, number, block

    ordered = sorted(blocks, key=position)
    rows = [
        (session, block, len(scores), percent(total(scores).rate))
        for session, block in ordered[:_MAX_BLOCKS]
        for scores in [blocks[session, block]]
    ]
    n_hidden = len(ordered) - len(rows)
    head = ("session", "block", "trials", "error rate")
    return tag(
        "details",
        tag("summary", f"By block ({counted(len(ordered), 'block')})"),
        tag("div", table(head, rows, "numbers"), class_="scroll tall"),
        muted(f"{counted(n_hidden, 'more block')} not listed.") if n_hidden else None,
    )
