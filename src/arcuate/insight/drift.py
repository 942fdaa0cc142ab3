"""`write_drift`: how recordings change over sessions, as charts of similarity, channels and error rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.adaptation.drift import DriftResult, SessionDrift, measure_drift
from arcuate.data.store import Store
from arcuate.evaluation.charts import plots
from arcuate.evaluation.charts.curves import Curve, Line, ValueAxis, group_colours
from arcuate.evaluation.charts.formats import MISSING, percent, short_session_names, split_name
from arcuate.evaluation.charts.plots import Cell, Rate
from arcuate.files import check_output, write_text
from arcuate.insight.overlay import line_figure
from arcuate.insight.render import ColourScale, Figure, LegendEntry, make_figure, render
from arcuate.progress import counted
from arcuate.run import RunLike

if TYPE_CHECKING:
    from arcuate.adaptation.evaluate import AdaptationResult  # imports torch

_UNADAPTED = "unadapted"


def write_drift(
    store: str | Path | Store, run: RunLike | None = None, *, out: str | Path = "drift.html", **options: Any
) -> DriftResult:
    """Measure drift as `measure_drift` does, with the same options, and write it to one self-contained HTML page."""
    check_output(out, "<!doctype html>", "drift.html")
    result = measure_drift(store, run, **options)
    write_text(Path(out), drift_page(result))
    return result


def drift_page(result: DriftResult) -> str:
    last = result.sessions[-1]
    compared = result.sessions[0] if last.session == result.reference else last
    rates = result.error_rates
    return render(
        "drift.html",
        heading=result.store.name,
        kind="drift",
        simulated=result.simulated,
        result=result,
        last=last,
        compared=compared,
        similarity=percent(compared.profile_similarity, 0),
        reordered=[row.session for row in result.sessions if row.reordered],
        errors=_errors_figure(rates) if rates is not None else None,
        error_rows=[] if rates is None else _error_rows(rates),
        method=rates.settings.method if rates is not None else "",
        arrays=_array_figure(result),
        matrix=_matrix_figure(result),
        profiles=_profile_figure(result),
        means=_mean_figure(result),
        channel_rows=[_channel_row(row) for row in result.sessions],
    )


# Error rates.


def _errors_figure(rates: "AdaptationResult") -> Figure:
    adapted = f"adapted with {rates.settings.method}"
    caption = "Trials in recording order; hollow markers are sessions that the model was not trained on."
    new = [row for row in rates.sessions if not row.known]
    if new:
        caption += f" Their adaptation starts from the layer of the nearest known session ({new[0].init_session})."
    values = [
        Rate(row.session, rate, note=f"{row.n_trials:,}", series=series, hollow=not row.known)
        for series in (_UNADAPTED, adapted)
        for row in rates.sessions
        for rate in [row.per_unadapted if series == _UNADAPTED else row.per]
    ]
    chart = plots.session_chart(
        values,
        short_session_names([row.session for row in rates.sessions]),
        title=f"{rates.run.name}, {split_name(rates.provenance.split)} trials",
        label=f"Phoneme error rate of {counted(len(rates.sessions), 'session')} with and without adaptation.",
    )
    legend = [LegendEntry(_UNADAPTED, "train", "line", _UNADAPTED), LegendEntry(adapted, "blue", "line", adapted)]
    return make_figure(chart, caption=caption, legend=legend, full=True)


def _error_rows(rates: "AdaptationResult") -> list[tuple[object, ...]]:
    return [
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


# Similarity.


def _array_figure(result: DriftResult) -> Figure:
    """Subspace similarity of each array over days."""
    days = tuple(float(i if day is None else day) for i, day in enumerate(result.days_since_first))
    styles = group_colours(list(result.sessions[0].arrays))
    lines = []
    for name, (colour, dashed) in styles.items():
        values = [row.arrays[name].subspace_similarity for row in result.sessions]
        lines.append(Line(name, colour, Curve.through(zip(days, values, strict=True)), dashed, dots=True))
    caption = (
        f"Overlap of the principal subspace of an array's activity with that in {result.reference}: 100 % is identical,"
        " 0 % is chance level."
    )
    return line_figure(
        lines,
        ValueAxis(percent=True),
        caption=caption,
        title="Similarity by array",
        label=f"Similarity of {counted(len(lines), 'array')} over days.",
        x_title="days since the first session",
    )


def _matrix_figure(result: DriftResult) -> Figure:
    """Similarity of every pair of sessions."""
    names = short_session_names([row.session for row in result.sessions])
    sessions = list(names)
    cells = [
        Cell(names[a], names[b], "heat", max(float(value), 0.0), f"similarity {percent(float(value), 0)}")
        for a, row in zip(sessions, result.similarity, strict=True)
        for b, value in zip(sessions, row, strict=True)
        if np.isfinite(value)
    ]
    labels = list(names.values())
    chart = plots.matrix_chart(
        cells,
        labels,
        labels,
        title="All pairs of sessions",
        label="Similarity of all pairs of sessions.",
        size=max(4, min(44, 264 // len(labels))),
        row_title="",
        column_title="",
        top=False,
    )
    caption = "The same over all channels. Similarity decreases with distance as tuning drifts."
    return make_figure(chart, caption=caption, scales=[ColourScale("0\u202f%", "100\u202f%")])


# Channels.


def _profile_figure(result: DriftResult) -> Figure:
    profiles = np.array([row.channels.profile_similarity for row in result.sessions], dtype=np.float64).T
    caption = (
        "One row per channel, one column per session: similarity of its correlations with all other channels to those"
        f" in {result.reference}. Empty stretches are flat channels or different tuning."
    )
    scale = ColourScale("different: 0\u202f%", "similar: 100\u202f%")
    return _channel_figure("Correlation profiles", "Similarity", profiles, result, caption, scale)


def _mean_figure(result: DriftResult) -> Figure:
    shifts = np.array([row.channels.mean_shift for row in result.sessions], dtype=np.float64).T  # None becomes NaN
    caption = (
        f"Shift of the mean of each channel from that in {result.reference}; empty: no shift, or a flat channel. The"
        " mean of threshold crossings is their rate."
    )
    scale = ColourScale("0", "1 SD or more")
    return _channel_figure("Mean shifts", "Mean shift", np.minimum(np.abs(shifts), 1.0), result, caption, scale)


def _channel_figure(
    title: str, quantity: str, values: np.ndarray, result: DriftResult, caption: str, scale: ColourScale
) -> Figure:
    """Channels by sessions; `values` (channels, sessions) from 0 to 1, NaN for flat channels."""
    n_channels, n_sessions = values.shape
    names = list(short_session_names([row.session for row in result.sessions]).values())
    chart = plots.image_chart(
        np.nan_to_num(values),
        names,
        title=title,
        label=f"{quantity} of {counted(n_channels, 'channel')} over {counted(n_sessions, 'session')}.",
        y_title="channel",
        height=int(min(max(2.4 * n_channels, 160.0), 520.0)),
    )
    return make_figure(chart, caption=caption, scales=[scale], full=True)


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
    """How many channels, then which: `2 (channels 58, 61)`."""
    if not channels:
        return "0"
    shown = ", ".join(map(str, channels[:n])) + (", …" if len(channels) > n else "")
    return f"{len(channels)} ({'channel' if len(channels) == 1 else 'channels'} {shown})"
