"""The drawings of the drift page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.adaptation.drift import DriftResult
from arcuate.files import write_text
from arcuate.insight.pages.formatting import MISSING, counted, percent
from arcuate.insight.pages.markup import Html, document, figure, join, legend, svg, table, tag
from arcuate.insight.pages.svg import Scale, dot, path, text
from arcuate.insight.pages.svg import heat_map as shade
from arcuate.insight.pages.svg import line as rule
from arcuate.insight.pages.svg import linear_scale as linear
from arcuate.insight.pages.svg import x_axis as columns_axis
from arcuate.insight.pages.svg import y_axis as rows_axis
from arcuate.insight.report.sessions import short_session_names as short_names

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
    for key, kind in (("per_unadapted", "train"), ("per", "validation")):
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
            value = row["arrays"][name]["subspace_similarity"]
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


# The page about drift: one file, no scripts, light and dark.

KINDS = ("validation", "second", "third", "train")  # line styles, one per array


def write_drift_page(result: DriftResult, path: Path) -> None:
    """Write the page of `measure_drift`."""
    data = result.to_dict()
    page = drift_page(
        result.store.name,
        data["sessions"],
        result.reference,
        result.days_since_first,
        result.similarity,
        data["error_rates"],
    )
    write_text(path, page)


def drift_page(
    store: str,
    rows: Sequence[Mapping[str, Any]],
    reference: str,
    days: Sequence[int | None],
    likeness: np.ndarray,
    rates: Mapping[str, Any] | None,
) -> str:
    """`likeness` (days, days) of subspaces, `rates` of a run."""
    parts = [
        ("likeness", "How alike the days are", alike(rows, reference, days, likeness)),
        ("channels", "Channels", channels(rows, reference)),
    ]
    if rates is not None:
        parts.insert(0, ("errors", "Error rate by day", errors(rates)))
    links = [tag("a", title, href=f"#{key}") for key, title, _ in parts]
    body = join(
        [
            header(store, rows, reference),
            tag("nav", *links, aria_label="Sections"),
            tag("main", *(tag("section", tag("h2", t), b, id=k) for k, t, b in parts)),
            tag(
                "footer",
                "Written by arcuate from the recordings of the store; labels served error rates only.",
            ),
        ]
    )
    return document(f"{store} · arcuate drift", body)


def header(store: str, rows: Sequence[Mapping[str, Any]], reference: str) -> Html:
    last = rows[-1]
    dead = len(last["flat"])
    moved = [r["session"] for r in rows if r["reordered"]]
    lead = [
        f"{counted(len(rows), 'recording day')} from {rows[0]['session']} to {last['session']}."
        " On the last one the median channel keeps ",
        tag(
            "b", percent(last["profile_similarity"], 0) if last["profile_similarity"] is not None else MISSING
        ),
        f" of its likeness to {reference}; {counted(dead, 'channel')} flat.",
    ]
    notice = None
    if moved:
        notice = tag(
            "p",
            f"The channels of {', '.join(moved)} do not look like the same channels on the day before: the mapping may"
            " have changed. No adaptation can undo that; put the channels in the old order and prepare the day again,"
            " or calibrate it with many sentences.",
            class_="notice",
        )
    return tag(
        "header",
        tag("p", "arcuate drift", class_="kicker"),
        tag("h1", store),
        tag("p", *lead, class_="lead"),
        notice,
    )


def errors(rates: Mapping[str, Any]) -> Html:
    days = rates["sessions"]
    method = rates["adapt"]["method"]
    key = legend(("train", "unadapted"), ("validation", f"followed with {method}"))
    new = [d for d in days if not d["known"]]
    note = "Every day read from its first trial to its last; a hollow mark is a day the model was not trained on."
    if new:
        note += f" New days are read with the layer of the nearest known day ({new[0]['init_session']})."
    body: list[tuple[object, ...]] = [
        (
            d["session"],
            "its own" if d["known"] else d["init_session"],
            d["n_trials"],
            share(d["per_unadapted"]),
            share(d["per"]),
            d["n_steps"],
            d["n_fallbacks"],
        )
        for d in days
    ]
    head = ("day", "layer of", "trials", "unadapted", method, "steps", "fell back")
    chart = rates_chart(days)
    return join(
        [
            figure(f"{rates['run']}, {rates['split']} trials", chart, note, key, wide=True),
            tag("div", table(head, body, "numbers"), class_="scroll"),
        ]
    )


def alike(
    rows: Sequence[Mapping[str, Any]], reference: str, days: Sequence[int | None], likeness: np.ndarray
) -> Html:
    names = list(rows[0]["arrays"])
    key = legend(*((KINDS[i % len(KINDS)], name) for i, name in enumerate(names)))
    lines = likeness_chart(rows, names, days, KINDS)
    matrix = matrix_chart(likeness, [r["session"] for r in rows])
    return tag(
        "div",
        figure(
            "Likeness by array",
            lines,
            f"How much of the main directions of an array's activity a day shares with {reference}: 100 % the same,"
            " 0 % no more than chance.",
            key,
        ),
        figure(
            "Every day with every other",
            matrix,
            "The same over all channels; full colour is alike. Days fade from the diagonal as tuning wanders.",
        ),
        class_="pair",
    )


def channels(rows: Sequence[Mapping[str, Any]], reference: str) -> Html:
    head = ("day", "flat", "died", "came back", "level moved", "spread moved", "same channels")
    where = (
        "Level and spread: the array that moved most, median over its channels, against the reference day; a z-scored"
        " release shows next to nothing here. Same channels: rank correlation of shape and memory of the channels with"
        " the day before."
    )
    return join(
        [
            *channel_pictures(rows, reference),
            tag("div", table(head, [channel_row(row) for row in rows], "numbers"), class_="scroll"),
            tag("p", where, class_="muted"),
        ]
    )


def channel_pictures(rows: Sequence[Mapping[str, Any]], reference: str) -> list[Html]:
    days = [row["session"] for row in rows]
    alike, level = by_day(rows, "profile_similarity"), by_day(rows, "mean_shift")
    alike_note = (
        f"Each line a channel, each column a day: how alike its correlations with all other channels are to those on"
        f" {reference}. Full colour is alike; an empty stretch is a flat channel or one that listens to something else."
    )
    level_note = (
        f"How far the mean of each channel has moved from that on {reference}: full colour is an SD or more, empty not"
        " at all, or flat. The mean of crossings is their rate."
    )
    likeness = channel_chart("profiles", "Likeness", alike, days)
    levels = channel_chart("levels", "Change of level", np.minimum(np.abs(level), 1.0), days)
    return [
        figure("What channels go along with", likeness, alike_note, wide=True),
        figure("How far levels moved", levels, level_note, wide=True),
    ]


def channel_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    arrays = row["arrays"].values()
    levels = [a["mean_shift"] for a in arrays if a["mean_shift"] is not None]
    spreads = [a["sd_ratio"] for a in arrays if a["sd_ratio"] is not None]
    return (
        row["session"],
        listed(row["flat"]),
        listed(row["newly_flat"]),
        listed(row["recovered"]),
        f"{max(levels):.2f} SD" if levels else MISSING,
        f"× {max(spreads):.2f}" if spreads else MISSING,
        "re-ordered?" if row["reordered"] else share(row["channel_order_similarity"]),
    )


def by_day(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A number of every channel on every day; NaN where there is none. (channels, days)"""
    return np.array([row["channels"][name] for row in rows], dtype=np.float64).T


def listed(channels: Sequence[int], n: int = 6) -> str:
    if not channels:
        return MISSING
    return ", ".join(map(str, channels[:n])) + (f" … ({len(channels)})" if len(channels) > n else "")


def share(rate: float | None) -> str:
    return MISSING if rate is None else percent(rate)
