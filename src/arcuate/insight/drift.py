"""`write_drift`: how recordings change over sessions, as charts of similarity, channels and error rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.adaptation.drift import DriftResult, SessionDrift, measure_drift
from arcuate.data.store import Store
from arcuate.files import check_output, write_text
from arcuate.insight import charts
from arcuate.insight.formats import MISSING, percent, whole_percent
from arcuate.insight.pages import Html, figure, join, legend, muted, notice, page, scroll_table, tag
from arcuate.insight.report.errors import short_session_names
from arcuate.progress import counted
from arcuate.run import RunLike

if TYPE_CHECKING:
    from arcuate.adaptation.evaluate import AdaptationResult, SessionResult  # imports torch

_ARRAY_STYLES = ("validation", "second", "third", "train")  # line styles, one per array
_NARROW = 80  # columns narrower than this have rotated labels


def write_drift(
    store: str | Path | Store, run: RunLike | None = None, *, out: str | Path = "drift.html", **options: Any
) -> DriftResult:
    """Measure drift as `measure_drift` does, with the same options, and write it to one self-contained HTML page."""
    check_output(out, "<!doctype html>", "drift.html")
    result = measure_drift(store, run, **options)
    write_text(Path(out), drift_page(result))
    return result


def drift_page(result: DriftResult) -> str:
    sections = [
        ("similarity", "Similarity of sessions", _similarity_section(result)),
        ("channels", "Channels", _channels_section(result)),
    ]
    if result.error_rates is not None:
        sections.insert(0, ("errors", "Error rate by session", _errors_section(result.error_rates)))
    footer = "Written by arcuate from the recordings of the store; labels are used for error rates only."
    return page(f"{result.store.name} · arcuate drift", _header(result), sections, footer)


def _header(result: DriftResult) -> Html:
    first, last = result.sessions[0], result.sessions[-1]
    reordered = [row.session for row in result.sessions if row.reordered]
    warning = (
        f"The channels of {', '.join(reordered)} do not match those of the previous session: the channel mapping may"
        " have changed. Adaptation cannot correct that; restore the channel order and prepare the session again, or"
        " calibrate it with many sentences."
    )
    return tag(
        "header",
        tag("p", "arcuate drift", class_="kicker"),
        tag("h1", result.store.name),
        tag(
            "p",
            f"{counted(len(result.sessions), 'session')} from {first.session} to {last.session}. In the last one the"
            f" median channel has a similarity of ",
            tag("b", whole_percent(last.profile_similarity)),
            f" to {result.reference}; flat channels: {len(last.flat)}.",
            class_="lead",
        ),
        notice(warning) if reordered else None,
    )


# Error rates.


def _errors_section(rates: "AdaptationResult") -> Html:
    method = rates.settings.method
    key = legend(("train", "unadapted"), ("validation", f"adapted with {method}"))
    caption = "Trials in recording order; hollow markers are sessions that the model was not trained on."
    new = [row for row in rates.sessions if not row.known]
    if new:
        caption += f" Their adaptation starts from the layer of the nearest known session ({new[0].init_session})."
    rows = [
        (
            row.session,
            "its own" if row.known else row.init_session,
            row.n_trials,
            percent(row.per_unadapted),
            percent(row.per),
            row.n_steps,
            row.n_fallbacks,
        )
        for row in rates.sessions
    ]
    head = ("session", "initial layer", "trials", "unadapted", method, "steps", "fallbacks")
    title = f"{rates.run.name}, {rates.provenance.split} trials"
    chart = figure(title, _errors_chart(rates.sessions), caption, key, wide=True)
    return join(chart, scroll_table(head, rows, "numbers"))


def _errors_chart(sessions: Sequence["SessionResult"]) -> Html:
    """Error rate of every session with and without adaptation."""
    column = min(max(1040 / len(sessions), 24.0), 150.0)
    width = max(charts.LEFT + column * len(sessions) + 20, 420)
    adapted, unadapted = [row.per for row in sessions], [row.per_unadapted for row in sessions]
    y = charts.linear_scale([v for v in (*adapted, *unadapted) if v is not None], 0.0)
    places = _column_centres(column, len(sessions))
    parts = [
        charts.y_axis(y, charts.LEFT, width - 8, whole_percent),
        charts.line(charts.LEFT, charts.BOTTOM, width - 8, charts.BOTTOM, "axis"),
    ]
    for rates, kind in ((unadapted, "train"), (adapted, "validation")):
        points = [(x, y(rate)) if rate is not None else None for x, rate in zip(places, rates, strict=True)]
        parts.append(charts.path(points, f"line {kind}"))
    for x, row in zip(places, sessions, strict=True):
        if row.per is not None:
            tooltip = f"{row.session}: {percent(row.per)}, unadapted {percent(row.per_unadapted)}"
            parts.append(charts.dot(x, y(row.per), 4.5, "point" if row.known else "best", tooltip))
    names = short_session_names([s.session for s in sessions])
    parts += charts.column_labels(places, charts.BOTTOM, names, column < _NARROW)
    label = f"Phoneme error rate of {counted(len(sessions), 'session')} with and without adaptation."
    height = charts.BOTTOM + (80 if column < _NARROW else 40)
    return charts.drawing(width, height, label, *parts, style=f"max-width:{width / 16:.1f}rem")


def _column_centres(column: float, n: int) -> list[float]:
    return [charts.LEFT + column * (i + 0.5) for i in range(n)]


# Similarity.


def _similarity_section(result: DriftResult) -> Html:
    arrays = list(result.sessions[0].arrays)
    key = legend(*((_array_style(i), name) for i, name in enumerate(arrays)))
    by_array = (
        f"Overlap of the principal subspace of an array's activity with that in {result.reference}: 100 % is identical,"
        " 0 % is chance level."
    )
    by_pair = "The same over all channels; full colour is similar. Similarity decreases with distance as tuning drifts."
    return tag(
        "div",
        figure("Similarity by array", _array_chart(result, arrays), by_array, key),
        figure("All pairs of sessions", _matrix_chart(result), by_pair),
        class_="pair",
    )


def _array_style(i: int) -> str:
    return _ARRAY_STYLES[i % len(_ARRAY_STYLES)]


def _array_chart(result: DriftResult, arrays: Sequence[str]) -> Html:
    """Subspace similarity of each array over days."""
    days = [float(i if day is None else day) for i, day in enumerate(result.days_since_first)]
    x = charts.Scale(min(days), max(max(days), min(days) + 1.0), charts.LEFT, charts.RIGHT)
    y = charts.Scale(0.0, 1.0, charts.BOTTOM, charts.TOP)
    lines = []
    for i, name in enumerate(arrays):
        values = [row.arrays[name].subspace_similarity for row in result.sessions]
        lines.append(charts.path(charts.points(days, values, x, y), f"line {_array_style(i)}"))
    label = f"Similarity of {counted(len(arrays), 'array')} over days."
    return charts.plot(label, x, y, "days since the first session", lines, whole_percent)


def _matrix_chart(result: DriftResult) -> Html:
    """Similarity of every pair of sessions."""
    side, left, top = 250.0, 92.0, 10.0
    names = short_session_names([row.session for row in result.sessions])
    step = side / len(names)
    parts = [charts.heat_map(result.similarity, "pairs", left, top, side, side, "heat")]
    every = max(1, round(14 / step))
    for i, name in list(enumerate(names))[::every]:
        centre = (i + 0.5) * step
        parts.append(charts.text(left - 8, top + centre + 4, name, anchor="end"))
        parts.append(charts.text(left + centre + 3, top + side + 16, name, anchor="end", angle=-45))
    label = "Similarity of all pairs of sessions."
    return charts.drawing(left + side + 60, top + side + 70, label, *parts, style="max-width:30rem")


# Channels.


def _channels_section(result: DriftResult) -> Html:
    profile_caption = (
        "One row per channel, one column per session: similarity of its correlations with all other channels to those"
        f" in {result.reference}. Full colour is similar; empty stretches are flat channels or different tuning."
    )
    mean_caption = (
        f"Shift of the mean of each channel from that in {result.reference}: full colour is one SD or more, empty is no"
        " shift or a flat channel. The mean of threshold crossings is their rate."
    )
    head = ("session", "flat", "newly flat", "recovered", "mean shift", "SD ratio", "channel order")
    remarks = (
        "Mean shift and SD ratio: the array with the largest change, median over its channels, relative to the"
        " reference session; z-scored releases show hardly any change. Channel order: rank correlation of the skew and"
        " autocorrelation of channels with the previous session."
    )
    sessions = [row.session for row in result.sessions]
    profiles = np.array([row.channels.profile_similarity for row in result.sessions], dtype=np.float64).T
    shifts = np.array([row.channels.mean_shift for row in result.sessions], dtype=np.float64).T  # None becomes NaN
    profile_chart = _channel_chart("profiles", "Similarity", profiles, sessions)
    mean_chart = _channel_chart("means", "Mean shift", np.minimum(np.abs(shifts), 1.0), sessions)
    return join(
        figure("Correlation profiles", profile_chart, profile_caption, wide=True),
        figure("Mean shifts", mean_chart, mean_caption, wide=True),
        scroll_table(head, [_channel_row(row) for row in result.sessions], "numbers"),
        muted(remarks),
    )


def _channel_chart(name: str, quantity: str, values: np.ndarray, sessions: Sequence[str]) -> Html:
    """Channels by sessions; `values` (channels, sessions) from 0 to 1, NaN for flat channels."""
    n_channels, n_sessions = values.shape
    column = min(max(900 / n_sessions, 22.0), 110.0)
    height = float(min(max(2.4 * n_channels, 160.0), 520.0))
    parts = [charts.heat_map(np.nan_to_num(values), name, charts.LEFT, charts.TOP, column * n_sessions, height, "heat")]
    y = charts.Scale(0, n_channels, charts.TOP, charts.TOP + height)
    parts += [charts.text(charts.LEFT - 8, y(tick) + 4, f"{tick:.0f}", anchor="end") for tick in y.ticks(6)]
    places, names = _column_centres(column, n_sessions), short_session_names(sessions)
    parts += charts.column_labels(places, charts.TOP + height, names, column < _NARROW)
    width = charts.LEFT + column * n_sessions + 20
    label = f"{quantity} of {counted(n_channels, 'channel')} over {counted(n_sessions, 'session')}."
    bottom = charts.TOP + height + (80 if column < _NARROW else 36)
    return charts.drawing(width, bottom, label, *parts, style=f"max-width:{width / 16:.1f}rem")


def _channel_row(row: SessionDrift) -> tuple[object, ...]:
    shifts = [array.mean_shift for array in row.arrays.values() if array.mean_shift is not None]
    ratios = [array.sd_ratio for array in row.arrays.values() if array.sd_ratio is not None]
    return (
        row.session,
        _channel_list(row.flat),
        _channel_list(row.newly_flat),
        _channel_list(row.recovered),
        f"{max(shifts):.2f} SD" if shifts else MISSING,
        f"× {max(ratios):.2f}" if ratios else MISSING,
        "re-ordered?" if row.reordered else percent(row.channel_order_similarity),
    )


def _channel_list(channels: Sequence[int], n: int = 6) -> str:
    if not channels:
        return MISSING
    return ", ".join(map(str, channels[:n])) + (f" … ({len(channels)})" if len(channels) > n else "")
