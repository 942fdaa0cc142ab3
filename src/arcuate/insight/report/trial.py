"""An example trial on one time axis: the recording, the reference and decoded phonemes, and the probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.alphabet import BLANK, SPACE, encode
from arcuate.data.trial import BIN_SECONDS, list_features
from arcuate.decoding.hypothesis import TokenSpan, token_spans
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.insight import charts
from arcuate.insight.formats import finite_int, percent
from arcuate.insight.pages import Html, figure, join, legend, muted, tag
from arcuate.insight.report.errors import phoneme_symbol, token_groups, with_example
from arcuate.insight.report.run_data import Decoding, Example, RunData
from arcuate.progress import counted

_LEFT, _TOP, _ROW, _LABEL = 84, 8, 12, 15
_MAX_COLUMNS, _MAX_ROWS = 2000, 320
_SATURATION_SD = 3.5  # standard deviations above the mean of a channel that are drawn in full colour


@dataclass(frozen=True)
class _Label:
    """A phoneme in the row of references or hypotheses."""

    text: str
    frame: float
    kind: str  # right, sub, ins, del
    title: str


def trial_section(data: RunData) -> Html:
    results = data.results
    if results is None or not results.examples:
        problem = results.examples_problem if results else None
        return muted(problem or "These results were written without example trials.")
    stride = max(finite_int(data.setting("front_end.patch.stride")) or 1, 1)
    by_trial = {d.trial: d for d in results.decodings}
    figures = [
        _trial_figure(example, by_trial.get(example.trial), stride, f"heat{i}", data.classes)
        for i, example in enumerate(results.examples)
    ]
    if len(figures) == 1:
        return figures[0]
    more = tag("details", tag("summary", counted(len(figures) - 1, "more trial")), *figures[1:])
    return join(figures[0], more)


def _trial_figure(example: Example, decoding: Decoding | None, stride: int, name: str, classes: Sequence[str]) -> Html:
    title = f"“{decoding.text}”" if decoding and decoding.text else example.trial
    rate = f", error rate {percent(decoding.rate)}" if decoding and decoding.rate is not None else ""
    caption = (
        f"Trial {example.trial}{rate}. Each channel is shown relative to its mean over the trial, from the mean (empty)"
        f" to {_SATURATION_SD:g} standard deviations above it (full colour). Frames are placed at their first bin."
    )
    entries = [("crossings", "threshold crossings"), ("power", "spike-band power"), ("probability", "probability")]
    if decoding and decoding.reference is not None:
        caption += " The reference has no times: its tokens are placed at the decoded ones they are aligned with."
        entries += [("sub", "substitution"), ("ins", "insertion"), ("del", "deletion")]
    return figure(title, _drawing(example, decoding, stride, name, classes), caption, legend(*entries), wide=True)


def _drawing(example: Example, decoding: Decoding | None, stride: int, name: str, classes: Sequence[str]) -> Html:
    n_bins, n_frames = len(example.bins), len(example.log_probs)
    decoded = token_spans(np.nan_to_num(example.log_probs, nan=-np.inf))
    plot_width = min(max(1020.0, 19.0 * len(decoded)), 4000.0)
    right = _LEFT + plot_width
    seconds = max(n_bins, n_frames * stride) * BIN_SECONDS
    time = charts.Scale(0.0, seconds, _LEFT, right)

    def at(frame: float) -> float:
        return time(frame * stride * BIN_SECONDS)

    parts: list[Html] = []
    y = float(_TOP)
    for title, kind, values in _panels(example.bins):
        height = float(min(max(values.shape[1] * 3, 36), 200))
        width = time(n_bins * BIN_SECONDS) - _LEFT
        parts.append(_panel(title, y, height, right))
        parts.append(charts.heat_map(intensity(values), f"{name}{kind}", _LEFT, y, width, height, f"heat {kind}"))
        y += height + 8
    rows = [("decoded", _decoded_labels(decoded, decoding, classes))]
    if decoding and decoding.reference is not None:
        rows.insert(0, ("reference", _reference_labels(decoded, decoding.reference, classes)))
    for title, labels in rows:
        drawn, height = _label_row(title, labels, at, y)
        parts.append(drawn)
        y += height
    y += 4
    order = _class_order(example.log_probs.shape[1], classes)
    probabilities = np.exp(np.minimum(np.nan_to_num(example.log_probs, nan=-np.inf), 0.0))
    height = _ROW * len(order)
    parts += [_panel(None, y, height, right), _class_names(order, y, right, classes)]
    for span in decoded:  # a line from each decoded phoneme to its row of the probabilities
        x = at(_centre(span))
        parts.append(charts.line(x, y - 4, x, y + _ROW * order.index(span.token), "thread"))
    image = _pool(probabilities, _MAX_COLUMNS, max(len(classes), 41) * 8)[:, order].T  # (V, F)
    parts.append(charts.heat_map(image, f"{name}p", _LEFT, y, at(n_frames) - _LEFT, height, "heat probability"))
    y += height
    parts.append(charts.x_axis(time, y + 4, "seconds"))
    label = f"Recording and token probabilities of trial {example.trial}, {seconds:.1f} seconds"
    style = f"min-width:{max(760, plot_width * 0.75) / 16:.1f}rem"
    return charts.drawing(right + 12, y + 54, label, *parts, style=style)


def _panels(bins: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
    """Threshold crossings and spike-band power; one panel if the channels are not paired."""
    features = list_features(bins.shape[1])
    if len(features) == 1:
        return [(counted(bins.shape[1], "channel"), "crossings", bins)]
    kinds = zip(("crossings", "power"), features, strict=True)
    return [(kind, kind, bins[:, f.channels.start : f.channels.stop]) for kind, f in kinds]


def intensity(bins: np.ndarray) -> np.ndarray:
    """Z-scored channels, clipped to [0, 1]. (T, C) -> (C, T)"""
    known = np.isfinite(bins)
    n_known = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, bins, 0.0).sum(axis=0) / n_known
    centred = np.where(known, np.where(known, bins, 0.0) - mean, 0.0)
    sd = np.sqrt((centred**2).sum(axis=0) / n_known)
    scaled = centred / np.where(sd > 0, sd, 1.0)
    return np.clip(_pool(scaled, _MAX_COLUMNS, _MAX_ROWS).T / _SATURATION_SD, 0.0, 1.0)


def _pool(values: np.ndarray, n_rows: int, n_columns: int) -> np.ndarray:
    """Average neighbours along an axis that is longer than the image needs."""
    for axis, limit in ((0, n_rows), (1, n_columns)):
        size = -(-values.shape[axis] // limit)
        if size > 1:
            starts = np.arange(0, values.shape[axis], size)
            lengths = np.diff(np.append(starts, values.shape[axis]))
            sums = np.add.reduceat(values, starts, axis=axis)
            values = sums / (lengths[:, None] if axis == 0 else lengths[None, :])
    return values


def _panel(title: str | None, y: float, height: float, right: float) -> Html:
    ground = charts.rectangle(_LEFT, y, right - _LEFT, height, "ground")
    return join(ground, charts.text(_LEFT - 8, y + height / 2 + 4, title, anchor="end")) if title else ground


def _token_name(token: int, classes: Sequence[str]) -> str:
    return classes[token] if token < len(classes) else str(token)


def _centre(span: TokenSpan) -> float:
    return span.first + 0.5 * span.n_frames


def _decoded_labels(decoded: Sequence[TokenSpan], decoding: Decoding | None, classes: Sequence[str]) -> list[_Label]:
    """The decoded phonemes at their times, with errors marked."""
    names = [_token_name(s.token, classes) for s in decoded]
    pairs = [(name, name) for name in names]
    if decoding and decoding.reference is not None:
        pairs = [pair for pair in align(decoding.reference, names) if pair[1] != DELETED]
    labels = []
    for span, (expected, name) in zip(decoded, pairs, strict=True):
        symbol = phoneme_symbol(name)
        if expected == INSERTED:
            label = _Label(f"+{symbol}", _centre(span), "ins", "inserted")
        elif expected == name:
            label = _Label(symbol, _centre(span), "right", with_example(name))
        else:
            label = _Label(symbol, _centre(span), "sub", f"reference {with_example(expected)}")
        labels.append(label)
    return labels


def _reference_labels(decoded: Sequence[TokenSpan], reference: Sequence[str], classes: Sequence[str]) -> list[_Label]:
    """The reference at the times of the decoded phonemes; deleted ones evenly between their neighbours."""
    labels: list[_Label] = []
    deleted: list[str] = []
    before, index = 0.0, 0

    def place_deleted(until: float) -> None:
        for i, name in enumerate(deleted, start=1):
            frame = before + (until - before) * i / (len(deleted) + 1)
            labels.append(_Label(f"−{phoneme_symbol(name)}", frame, "del", f"{with_example(name)} deleted"))
        deleted.clear()

    for expected, name in align(reference, [_token_name(s.token, classes) for s in decoded]):
        if name == DELETED:
            deleted.append(expected)
            continue
        centre = _centre(decoded[index])
        place_deleted(centre)
        if expected != INSERTED:
            kind = "right" if expected == name else "sub"
            labels.append(_Label(phoneme_symbol(expected), centre, kind, with_example(expected)))
        before = centre
        index += 1
    place_deleted(before + 4.0 * (len(deleted) + 1))
    return labels


def _label_row(title: str, labels: Sequence[_Label], at: Callable[[float], float], y: float) -> tuple[Html, float]:
    """Labels side by side, on a second or third line if they would overlap; with the height of the row."""
    ends = [0.0, 0.0, 0.0]
    parts = [charts.text(_LEFT - 8, y + 11, title, anchor="end")]
    for label in labels:
        x, half = at(label.frame), 3.9 * len(label.text) + 1.5
        free = (i for i, end in enumerate(ends) if x - half >= end)
        row = next(free, min(range(3), key=lambda i: ends[i]))
        ends[row] = x + half
        mark = tag(
            "text",
            tag("title", label.title),
            label.text,
            x=charts.coordinate(x),
            y=charts.coordinate(y + 11 + row * _LABEL),
            text_anchor="middle",
            class_=f"token {label.kind}",
        )
        parts.append(mark)
    n_rows = max((i + 1 for i, end in enumerate(ends) if end), default=1)
    return join(*parts), _LABEL * n_rows + 4


def _class_order(n_classes: int, classes: Sequence[str]) -> list[int]:
    """Classes by group (phonemes: in articulatory order) with the blank last; unchanged if they do not fit."""
    if n_classes != len(classes):
        return list(range(n_classes))
    return [*encode((name for group in token_groups(classes).values() for name in group), classes), BLANK]


def _class_names(order: Sequence[int], y: float, right: float, classes: Sequence[str]) -> Html:
    """The names of the rows, with a line between groups."""
    if len(order) != len(classes):
        return charts.text(_LEFT - 8, y + _ROW * len(order) / 2, f"{len(order)} classes", anchor="end")
    parts = []
    for i, token in enumerate(order):
        name = "blank" if token == BLANK else classes[token].replace(SPACE, "space")
        parts.append(charts.text(_LEFT - 8, y + _ROW * i + 9.5, name, "tiny", "end"))
    row = 0
    for group in token_groups(classes).values():
        row += len(group)
        parts.append(charts.line(_LEFT, y + _ROW * row, right, y + _ROW * row, "guide"))
    return join(*parts)
