"""Phoneme confusions: the confusion matrix as a chart, and its largest entries as tables."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from arcuate.evaluation.metrics import DELETED, INSERTED, confusions
from arcuate.insight.pages.formatting import MISSING, counted, percent
from arcuate.insight.pages.markup import Html, figure, join, legend, muted, svg, table, tag
from arcuate.insight.pages.svg import rectangle, rotated_text, text
from arcuate.insight.report.phonemes import PHONEME_GROUPS, PHONEME_ORDER, with_example
from arcuate.insight.report.run_data import RunData

_CELL, _GAP, _LEFT, _TOP = 16, 6, 74, 62
_ABBREVIATIONS = {"affricates": "affr."}  # a group of two columns has no room for more
_SATURATION = 0.25  # share of errors that is drawn in full colour
_Counts = Counter[tuple[str, str]]  # (reference, hypothesis)
_Key = TypeVar("_Key")


def confusions_section(data: RunData) -> Html:
    decodings = data.results.decodings if data.results else ()
    counts = confusions([(d.reference, d.hypothesis) for d in decodings if d.reference is not None])
    known: _Counts = Counter(
        {
            (reference, hypothesis): n
            for (reference, hypothesis), n in counts.items()
            if reference in (*PHONEME_ORDER, INSERTED) and hypothesis in (*PHONEME_ORDER, DELETED)
        }
    )
    if not known:
        return muted("Confusions require labelled trials; these results have none.")
    caption = (
        "Rows: reference phonemes; columns: decoded phonemes; each row sums to 100 %. The row “inserted” shows decoded"
        " phonemes without a reference, the column “deleted” reference phonemes that were not decoded."
    )
    if n_unknown := counts.total() - known.total():
        caption += f" {counted(n_unknown, 'token')} outside the alphabet not shown."
    key = legend(("right", "correct"), ("wrong", f"confused, full colour from {percent(_SATURATION, 0)}"))
    chart = figure("Reference against decoded phonemes", _matrix(known), caption, key, wide=True)
    return tag("div", chart, tag("div", *_most_frequent(known), class_="lists"), class_="beside")


def _matrix(counts: _Counts) -> Html:
    """The row-normalised matrix, phonemes grouped by manner of articulation."""
    offsets = _offsets()
    extra = offsets[PHONEME_ORDER[-1]] + _CELL + _GAP  # offset of the row "inserted" and the column "deleted"
    rows, columns = {**offsets, INSERTED: extra}, {**offsets, DELETED: extra}
    totals = _reference_totals(counts)
    right = _LEFT + extra + _CELL
    parts = [*_frame(offsets, extra)]
    for name, offset in rows.items():
        y = _TOP + offset + 12
        parts.append(text(_LEFT - 6, y, "inserted" if name == INSERTED else name, "small", "end"))
        total = f"{totals[name]:,}" if totals[name] else MISSING
        parts.append(text(right + 40, y, total, "small quiet", "end"))
    for name, offset in columns.items():
        label = "deleted" if name == DELETED else name
        parts.append(rotated_text(_LEFT + offset + 11, _TOP - 6, label, -90, "small"))
    for (reference, hypothesis), n in sorted(counts.items()):
        share = n / totals[reference]
        x, y = _LEFT + columns[hypothesis], _TOP + rows[reference]
        parts.append(_cell(x, y, share, reference == hypothesis, _tooltip(reference, hypothesis, n, share)))
    style = f"min-width:40rem;max-width:{(right + 48) / 16:.1f}rem"
    height = _TOP + extra + _CELL + 8
    return svg(right + 48, height, "Phoneme confusion matrix", *parts, style=style)


def _offsets() -> dict[str, float]:
    """The offset of the row and column of each phoneme, with a gap between groups."""
    offsets, at = {}, 0.0
    for group in PHONEME_GROUPS.values():
        for name in group:
            offsets[name] = at
            at += _CELL
        at += _GAP
    return offsets


def _frame(offsets: Mapping[str, float], extra: float) -> Iterator[Html]:
    """A pale background for each pair of groups, and the names of the groups."""
    spans = [(offsets[g[0]], offsets[g[-1]] + _CELL) for g in PHONEME_GROUPS.values()]
    spans.append((extra, extra + _CELL))
    for y0, y1 in spans:
        for x0, x1 in spans:
            yield rectangle(_LEFT + x0, _TOP + y0, x1 - x0, y1 - y0, "ground")
    for name, (start, stop) in zip(PHONEME_GROUPS, spans, strict=False):
        if stop - start > _CELL:
            label, middle = _ABBREVIATIONS.get(name, name), (start + stop) / 2
            yield text(_LEFT + middle, 14, label, "small strong", "middle")
            yield rotated_text(14, _TOP + middle, label, -90, "small strong", "middle")
    yield text(_LEFT + extra + _CELL + 40, _TOP - 6, "total", "small quiet", "end")


def _cell(x: float, y: float, share: float, correct: bool, tooltip: str) -> Html:
    opacity = 0.12 + 0.88 * share if correct else min(1.0, max(0.1, math.sqrt(share / _SATURATION)))
    return rectangle(
        *(x + 0.5, y + 0.5, _CELL - 1, _CELL - 1, "right" if correct else "wrong"),
        tag("title", tooltip),
        fill_opacity=f"{opacity:.2f}",
    )


def _tooltip(reference: str, hypothesis: str, n: int, share: float) -> str:
    if reference == INSERTED:
        return f"{hypothesis} inserted {counted(n, 'time')}, {percent(share)} of all insertions"
    if hypothesis == DELETED:
        return f"{reference} deleted {counted(n, 'time')}, {percent(share)}"
    return f"{reference} decoded as {hypothesis} {counted(n, 'time')}, {percent(share)}"


def _reference_totals(counts: _Counts) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (reference, _), n in counts.items():
        totals[reference] += n
    return totals


def _most_frequent(counts: _Counts) -> list[Html]:
    """The most frequent errors of each kind."""
    totals = _reference_totals(counts)
    substituted = {k: n for k, n in counts.items() if k[0] != k[1] and k[0] != INSERTED and k[1] != DELETED}
    deleted = {reference: n for (reference, hypothesis), n in counts.items() if hypothesis == DELETED}
    inserted = {hypothesis: n for (reference, hypothesis), n in counts.items() if reference == INSERTED}
    tables = []
    if substituted:
        rows: list[tuple[object, ...]] = [
            (
                join([tag("span", with_example(a)), Html(" as "), tag("span", with_example(b))]),
                n,
                percent(n / totals[a]),
            )
            for (a, b), n in _largest(substituted, 10)
        ]
        head = ("reference as decoded", "count", "of reference")
        tables += [tag("h3", "Most frequent substitutions"), table(head, rows, "numbers")]
    if deleted:
        rows = [(with_example(a), n, percent(n / totals[a])) for a, n in _largest(deleted, 5)]
        head = ("phoneme", "count", "of reference")
        tables += [tag("h3", "Most frequent deletions"), table(head, rows, "numbers")]
    if inserted:
        rows = [(with_example(a), n) for a, n in _largest(inserted, 5)]
        tables += [tag("h3", "Most frequent insertions"), table(("phoneme", "count"), rows, "numbers")]
    return tables or [tag("p", "All phonemes were decoded correctly.")]


def _largest(counts: Mapping[_Key, int], n: int) -> list[tuple[_Key, int]]:
    """The largest counts; ties in the order of their names, so that the page is reproducible."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:n]
