"""The drawings of the drift page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arcuate.report.axes import Scale, columns_axis, dot, linear, path, rows_axis, rule, shade, text
from arcuate.report.markup import Html, svg, tag
from arcuate.report.sessions import short_names
from arcuate.report.wording import counted, percent

WIDTH, HEIGHT = 560, 314
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 14, 258


def rates_chart(days: Sequence[Mapping[str, Any]]) -> Html:
    """Error rates of all days, adapted and not."""
    names = short_names([d["session"] for d in days])
    column = min(max(1040 / len(days), 24.0), 150.0)
    width = max(LEFT + column * len(days) + 20, 420)
    values = [d[k] for d in days for k in ("per", "per_unadapted") if d[k] is not None]
    y = linear(values, BOTTOM, TOP, 0.0)
    parts = [
        rows_axis(y, LEFT, width - 8, lambda v: percent(v, 0)),
        rule(LEFT, BOTTOM, width - 8, BOTTOM, "axis"),
    ]
    places = [LEFT + column * (i + 0.5) for i in range(len(days))]
    for key, kind in (("per_unadapted", "train"), ("per", "held")):
        line = [(x, y(d[key])) if d[key] is not None else None for x, d in zip(places, days, strict=True)]
        parts.append(path(line, f"line {kind}"))
    for x, day, name in zip(places, days, names, strict=True):
        if day["per"] is not None:
            note = f"{day['session']}: {percent(day['per'])}, unadapted {percent(day['per_unadapted'])}"
            parts.append(dot(x, y(day["per"]), 4.5, "point" if day["known"] else "best", note))
        parts.append(turned(x, BOTTOM, name) if column < 80 else text(x, BOTTOM + 20, name, anchor="middle"))
    label = f"Phoneme error rate of {counted(len(days), 'day')} with and without adaptation."
    return svg(
        width, BOTTOM + (80 if column < 80 else 40), label, *parts, style=f"max-width:{width / 16:.1f}rem"
    )


def likeness_chart(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], days: Sequence[int | None], kinds: Sequence[str]
) -> Html:
    """Likeness of each array over the days since the first recording."""
    at = [float(i if d is None else d) for i, d in enumerate(days)]
    x = Scale(min(at), max(max(at), min(at) + 1.0), LEFT, RIGHT)
    y = Scale(0.0, 1.0, BOTTOM, TOP)
    parts = [
        rows_axis(y, LEFT, RIGHT, lambda v: percent(v, 0)),
        columns_axis(x, BOTTOM, "days since the first recording"),
    ]
    for i, name in enumerate(names):
        line = []
        for when, row in zip(at, rows, strict=True):
            value = row["arrays"][name]["subspace_likeness"]
            line.append(None if value is None else (x(when), y(value)))
        parts.append(path(line, f"line {kinds[i % len(kinds)]}"))
    return svg(WIDTH, HEIGHT, f"Likeness of {counted(len(names), 'array')} over days.", *parts)


def matrix_chart(likeness: np.ndarray, sessions: Sequence[str]) -> Html:
    """A square of days against days."""
    names = short_names(sessions)
    side = 250.0
    left, top = 92.0, 10.0
    step = side / len(sessions)
    parts = [shade(likeness, "alike", left, top, side, side, "heat")]
    every = max(1, round(14 / step))
    for i, name in enumerate(names):
        if i % every == 0:
            parts.append(text(left - 8, top + (i + 0.5) * step + 4, name, anchor="end"))
            parts.append(turned(left + (i + 0.5) * step, top + side, name))
    return svg(
        left + side + 60,
        top + side + 70,
        "Likeness of every day with every other.",
        *parts,
        style="max-width:30rem",
    )


def channel_chart(name: str, what: str, shares: np.ndarray, sessions: Sequence[str]) -> Html:
    """Channels down, days across; `shares` (channels, days) from 0 to 1, NaN where a channel is flat."""
    n_channels, n_days = shares.shape
    column = min(max(900 / n_days, 22.0), 110.0)
    height = float(min(max(2.4 * n_channels, 160.0), 520.0))
    parts = [shade(np.nan_to_num(shares), name, LEFT, TOP, column * n_days, height, "heat")]
    y = Scale(0, n_channels, TOP, TOP + height)
    for tick in y.ticks(6):
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:.0f}", anchor="end"))
    for i, day in enumerate(short_names(sessions)):
        x = LEFT + column * (i + 0.5)
        parts.append(
            turned(x, TOP + height, day) if column < 80 else text(x, TOP + height + 20, day, anchor="middle")
        )
    width = LEFT + column * n_days + 20
    label = f"{what} of {counted(n_channels, 'channel')} over {counted(n_days, 'day')}."
    return svg(
        width,
        TOP + height + (80 if column < 80 else 36),
        label,
        *parts,
        style=f"max-width:{width / 16:.1f}rem",
    )


def turned(x: float, bottom: float, name: str) -> Html:
    spot = f"translate({x + 3:.1f} {bottom + 16:.1f}) rotate(-45)"
    return tag("text", name, transform=spot, text_anchor="end")
