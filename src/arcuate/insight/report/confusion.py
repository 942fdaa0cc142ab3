"""Which phonemes were read as which: the whole table as a picture, its largest entries in words."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from arcuate.evaluation.metrics import DELETED, INSERTED, confusions
from arcuate.insight.report.axes import place, text
from arcuate.insight.report.evidence import Evidence
from arcuate.insight.report.markup import (
    GROUPS,
    ORDER,
    Html,
    counted,
    figure,
    join,
    legend,
    percent,
    spoken,
    svg,
    table,
    tag,
)

CELL, GAP, LEFT, TOP = 16, 6, 74, 62
SHORT = {"affricates": "affr."}  # two columns have no room for more
STRONGEST = 0.25  # the share of errors that gets the full colour
Table = Counter[tuple[str, str]]
Name = TypeVar("Name")


def confusion(evidence: Evidence) -> Html:
    results = evidence.results
    pairs = (
        [(d.reference, d.hypothesis) for d in results.decodings if d.reference is not None] if results else []
    )
    counts = confusions(pairs)
    known: Table = Counter(
        {k: n for k, n in counts.items() if k[0] in (*ORDER, INSERTED) and k[1] in (*ORDER, DELETED)}
    )
    if not known:
        return tag("p", "Confusions need labelled trials, and these results have none.", class_="absent")
    foreign = counts.total() - known.total()
    note = (
        "Rows are what was said, columns what was read; every row adds up to 100 %. The row “added” shows"
        " which phonemes were read where none was said, the column “missed” which were said and not read."
    )
    if foreign:
        note += f" {counted(foreign, 'token')} outside the alphabet left out."
    key = legend(
        ("right", "read correctly"), ("wrong", f"read wrongly, full colour from {percent(STRONGEST, 0)}")
    )
    picture = figure("Said against read", matrix(known), note, key, wide=True)
    return tag("div", picture, tag("div", *most_frequent(known), class_="lists"), class_="beside")


def matrix(counts: Table) -> Html:
    """Row-normalised, phonemes grouped by how they are made."""
    places = positions()
    end = places[ORDER[-1]] + CELL
    beyond = end + GAP  # of "added" and "missed"
    rows = {**places, INSERTED: beyond}
    columns = {**places, DELETED: beyond}
    sums: Counter[str] = Counter()
    for (said, _), n in counts.items():
        sums[said] += n
    parts = [*frame(places, end, beyond)]
    for name in (*ORDER, INSERTED):
        label = "added" if name == INSERTED else name
        y = TOP + rows[name] + 12
        parts.append(text(LEFT - 6, y, label, "small", "end"))
        parts.append(
            text(LEFT + beyond + CELL + 40, y, f"{sums[name]:,}" if sums[name] else "–", "small quiet", "end")
        )
    for name in (*ORDER, DELETED):
        label = "missed" if name == DELETED else name
        spot = f"translate({LEFT + columns[name] + 11} {TOP - 6}) rotate(-90)"
        parts.append(tag("text", label, transform=spot, class_="small"))
    for (said, read), n in sorted(counts.items()):
        share = n / sums[said]
        parts.append(
            cell(LEFT + columns[read], TOP + rows[said], share, said == read, sentence(said, read, n, share))
        )
    size = LEFT + beyond + CELL + 48
    return svg(
        size,
        TOP + beyond + CELL + 8,
        "Phoneme confusion matrix",
        *parts,
        style=f"min-width:40rem;max-width:{size / 16:.1f}rem",
    )


def positions() -> dict[str, float]:
    """Where each phoneme's row and column begins, with a gap between groups."""
    places, at = {}, 0.0
    for group in GROUPS.values():
        for name in group:
            places[name] = at
            at += CELL
        at += GAP
    return places


def frame(places: dict[str, float], end: float, beyond: float) -> Iterable[Html]:
    """A pale ground per pair of groups, and the names of the groups that have room for them."""
    spans = [(places[g[0]], places[g[-1]] + CELL) for g in GROUPS.values()] + [(beyond, beyond + CELL)]
    for y0, y1 in spans:
        for x0, x1 in spans:
            yield tag(
                "rect",
                x=place(LEFT + x0),
                y=place(TOP + y0),
                width=place(x1 - x0),
                height=place(y1 - y0),
                class_="ground",
            )
    for name, (start, stop) in zip(GROUPS, spans, strict=False):
        if stop - start > CELL:
            name, middle = SHORT.get(name, name), (start + stop) / 2
            yield text(LEFT + middle, 14, name, "small strong", "middle")
            spot = f"translate(14 {place(TOP + middle)}) rotate(-90)"
            yield tag("text", name, transform=spot, class_="small strong", text_anchor="middle")
    yield text(LEFT + beyond + CELL + 40, TOP - 6, "said", "small quiet", "end")


def cell(x: float, y: float, share: float, right: bool, title: str) -> Html:
    strength = 0.12 + 0.88 * share if right else min(1.0, max(0.1, math.sqrt(share / STRONGEST)))
    return tag(
        "rect",
        tag("title", title),
        x=place(x + 0.5),
        y=place(y + 0.5),
        width=CELL - 1,
        height=CELL - 1,
        class_="right" if right else "wrong",
        fill_opacity=f"{strength:.2f}",
    )


def sentence(said: str, read: str, n: int, share: float) -> str:
    if said == INSERTED:
        return f"{read} added {counted(n, 'time')}, {percent(share)} of all added"
    if read == DELETED:
        return f"{said} missed {counted(n, 'time')}, {percent(share)}"
    return f"{said} read as {read} {counted(n, 'time')}, {percent(share)}"


def most_frequent(counts: Table) -> list[Html]:
    """The commonest errors of each kind."""
    said: Counter[str] = Counter()
    for (reference, _), n in counts.items():
        said[reference] += n
    swapped = Counter(
        {k: n for k, n in counts.items() if k[0] != k[1] and k[0] != INSERTED and k[1] != DELETED}
    )
    missed = Counter({k[0]: n for k, n in counts.items() if k[1] == DELETED})
    added = Counter({k[1]: n for k, n in counts.items() if k[0] == INSERTED})
    lists: list[Html] = []
    if swapped:
        rows: list[tuple[object, ...]] = [
            (
                join([tag("span", spoken(a)), Html(" read as "), tag("span", spoken(b))]),
                n,
                percent(n / said[a]),
            )
            for (a, b), n in top(swapped, 10)
        ]
        lists += [
            tag("h3", "Most frequent confusions"),
            table(("said and read", "times", "of said"), rows, "numbers"),
        ]
    if missed:
        rows = [(spoken(a), n, percent(n / said[a])) for a, n in top(missed, 5)]
        lists += [tag("h3", "Most often missed"), table(("said", "times", "of said"), rows, "numbers")]
    if added:
        rows = [(spoken(a), n) for a, n in top(added, 5)]
        lists += [tag("h3", "Most often added"), table(("read", "times"), rows, "numbers")]
    return lists or [tag("p", "Not one phoneme was read wrongly.")]


def top(counts: Counter[Name], n: int) -> list[tuple[Name, int]]:
    """The largest counts, ties in the order of their names so that the page is the same every time."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:n]
