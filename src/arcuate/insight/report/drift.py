"""The report of a store: how its recordings change over sessions, as a chart of similarity and a table of channels."""

from collections.abc import Sequence
from pathlib import Path

from arcuate.adaptation.drift import DriftResult, SessionDrift, measure_drift
from arcuate.data.store import Store
from arcuate.files import write_text
from arcuate.insight.charts.curves import Curve, Line, ValueAxis, group_colours
from arcuate.insight.charts.formats import MISSING, percent
from arcuate.insight.render import Figure, line_figure, render
from arcuate.progress import Progress, counted


def is_store(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def report_file(store: Path) -> Path:
    """Where the report of a store is written: beside it, because nothing but `prepare` writes into a store."""
    return store.with_name(f"{store.resolve().name}.report.html")


def write_drift(store: str | Path, *, progress: Progress | None = None) -> DriftResult:
    """Measure how the recordings of a store change over sessions, and write a page about it beside the store."""
    opened = Store.open(Path(store))
    result = measure_drift(opened, progress=progress)
    write_text(report_file(opened.path), drift_page(result))
    return result


def drift_page(result: DriftResult) -> str:
    last = result.sessions[-1]
    compared = result.sessions[0] if last.session == result.reference else last
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
        arrays=_array_figure(result),
        channel_rows=[_channel_row(row) for row in result.sessions],
    )


def _array_figure(result: DriftResult) -> Figure:
    """Similarity of each array over days."""
    days = tuple(float(i if day is None else day) for i, day in enumerate(result.days_since_first))
    styles = group_colours(list(result.sessions[0].arrays))
    lines = []
    for name, (colour, dashed) in styles.items():
        values = [row.arrays[name].profile_similarity for row in result.sessions]
        lines.append(Line(name, colour, Curve.through(zip(days, values, strict=True)), dashed, dots=True))
    caption = (
        f"Similarity to {result.reference}: median over the channels of an array, of the correlations of a channel with"
        " all others."
    )
    return line_figure(
        lines,
        ValueAxis(percent=True),
        caption=caption,
        title="Similarity by array",
        label=f"Similarity of {counted(len(lines), 'array')} over days.",
        x_title="days since the first session",
    )


def _channel_row(row: SessionDrift) -> tuple[object, ...]:
    shifts = [array.mean_shift for array in row.arrays.values() if array.mean_shift is not None]
    ratios = [array.sd_ratio for array in row.arrays.values() if array.sd_ratio is not None]
    return (
        row.session,
        percent(row.profile_similarity, 0),
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
