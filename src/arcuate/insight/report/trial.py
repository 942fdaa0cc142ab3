"""An example trial on one time axis: the recording, the reference and decoded phonemes, and the probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.data.alphabet import BLANK, CLASSES, SPACE, encode, token_groups
from arcuate.data.electrodes import list_features
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.hypothesis import TokenSpan, token_spans
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.insight.charts.base import Chart, Row, alt, tooltips
from arcuate.insight.charts.formats import percent
from arcuate.insight.charts.images import png, pool
from arcuate.insight.charts.theme import MONO, colour
from arcuate.insight.render import ColourScale, Figure, LegendEntry, make_figure
from arcuate.insight.report.errors import phoneme_symbol, with_example
from arcuate.insight.run_data import Decoding, Example, Results, RunData
from arcuate.progress import counted

_ROW, _LABEL = 12, 15  # heights of a row of probabilities and of a line of phonemes
_MAX_COLUMNS, _MAX_ROWS = 2000, 320
_SATURATION_SD = 3.5  # standard deviations above the mean of a channel that are drawn in full colour
_LABEL_COLOURS = {"right": "ink", "sub": "orange", "ins": "blue", "del": "purple"}


@dataclass(frozen=True)
class _Label:
    """A phoneme in the row of references or hypotheses."""

    text: str
    frame: float
    kind: str  # right, sub, ins, del
    title: str


def trial_figures(data: RunData, results: Results | None) -> list[Figure]:
    """The example trials of the results."""
    if results is None:
        return []
    stride = data.recipe.front_end.patch.stride if data.recipe else 1
    by_trial = {d.trial: d for d in results.decodings}
    return [_trial_figure(example, by_trial.get(example.trial), stride, data.classes) for example in results.examples]


def _trial_figure(example: Example, decoding: Decoding | None, stride: int, classes: Sequence[str]) -> Figure:
    rate = f", error rate {percent(decoding.rate)}" if decoding and decoding.rate is not None else ""
    caption = (
        f"Trial {example.trial}{rate}. Each channel is shown relative to its mean over the trial. Frames are placed at"
        " their first bin."
    )
    legend: list[LegendEntry] = []
    if decoding and decoding.reference is not None:
        caption += " The reference has no times: its tokens are placed at the decoded ones they are aligned with."
        kinds = (("sub", "substitution"), ("ins", "insertion"), ("del", "deletion"))
        legend = [LegendEntry(name, _LABEL_COLOURS[kind], "box") for kind, name in kinds]
    scales = [
        ColourScale("recording: mean", f"{_SATURATION_SD:g} SD above it or more"),
        ColourScale("probability: 0", "1"),
    ]
    return make_figure(trial_chart(example, decoding, stride, classes), caption=caption, legend=legend, scales=scales)


def trial_chart(example: Example, decoding: Decoding | None, stride: int, classes: Sequence[str] = CLASSES) -> Chart:
    """All rows of the trial over one time axis; vertical positions are pixels."""
    n_bins, n_frames = len(example.bins), len(example.log_probs)
    decoded = token_spans(np.nan_to_num(example.log_probs, nan=-np.inf))
    width = int(min(max(1020, 19 * len(decoded)), 4000))
    seconds = max(n_bins, n_frames * stride) * BIN_SECONDS
    at = lambda frame: frame * stride * BIN_SECONDS
    pixel = lambda frame: at(frame) / seconds * width
    backgrounds: list[Row] = []
    images: list[tuple[str, float, float, float]] = []  # address, top, width, height
    names: list[Row] = []
    y = 8.0
    for title, values in _panels(example.bins):
        height = float(min(max(values.shape[1] * 3, 36), 200))
        backgrounds.append({"top": y, "bottom": y + height})
        names.append({"y": y + height / 2, "text": title, "size": 12})
        images.append((png(intensity(values)), y, n_bins * BIN_SECONDS / seconds * width, height))
        y += height + 8
    rows = [("decoded", _decoded_labels(decoded, decoding, classes))]
    if decoding and decoding.reference is not None:
        rows.insert(0, ("reference", _reference_labels(decoded, decoding.reference, classes)))
    labels: list[Row] = []
    for title, members in rows:
        names.append({"y": y + 7, "text": title, "size": 12})
        placed, height = _place_labels(members, pixel, y)
        labels += [{**row, "time": at(row.pop("frame"))} for row in placed]
        y += height
    y += 4
    order = _class_order(example.log_probs.shape[1], classes)
    probabilities = np.exp(np.minimum(np.nan_to_num(example.log_probs, nan=-np.inf), 0.0))
    height = float(_ROW * len(order))
    backgrounds.append({"top": y, "bottom": y + height})
    names += _class_names(order, y, classes)
    connectors = [{"time": at(_centre(s)), "top": y - 4, "bottom": y + _ROW * order.index(s.token)} for s in decoded]
    image = pool(probabilities, _MAX_COLUMNS, max(len(classes), 41) * 8)[:, order].T  # (V, F)
    images.append((png(image), y, pixel(n_frames), height))
    total = y + height + 4

    def pixels(field: str) -> Any:
        return alt.Y(f"{field}:Q").scale(domain=[0, total], nice=False, reverse=True).axis(None)

    time = alt.X("time:Q").scale(domain=[0, seconds], nice=False).axis(alt.Axis(title="seconds", tickCount=10))
    text = alt.Chart(alt.Data(values=names)).mark_text(align="right", baseline="middle")
    layers: list[Chart] = [
        alt.Chart(alt.Data(values=backgrounds))
        .mark_rect(color=colour("ground"))
        .encode(x=alt.value(0), x2=alt.value(width), y=pixels("top"), y2="bottom:Q"),
        text.encode(x=alt.value(-8), y=pixels("y"), text="text:N", size=alt.Size("size:Q", scale=None, legend=None)),
        alt.Chart(alt.Data(values=connectors))
        .mark_rule(color=colour("quiet"), strokeWidth=0.8, opacity=0.45)
        .encode(x=time, y=pixels("top"), y2="bottom:Q"),
        *(_image_layer(*image, pixels) for image in images),
        alt.Chart(alt.Data(values=labels))
        .mark_text(baseline="middle", font=MONO, fontSize=12)
        .encode(
            x=time,
            y=pixels("y"),
            text="text:N",
            color=alt.Color("colour:N", scale=None, legend=None),
            opacity=alt.condition("phoneme === '' || datum.phoneme === phoneme", alt.value(1), alt.value(0.25)),
            tooltip=tooltips(("title:N", " "), ("time:Q", "seconds", ".2f")),
        ),
    ]
    title = f"“{decoding.text}”" if decoding and decoding.text else example.trial
    label = f"Recording and token probabilities of trial {example.trial}, {seconds:.1f} seconds"
    chart: Chart = alt.layer(*layers).resolve_scale(color="independent")
    chart = chart.properties(width=width, height=int(total), title=title, description=label)
    return chart.add_params(alt.param(name="phoneme", value=""))


def _image_layer(url: str, top: float, width: float, height: float, pixels: Callable[[str], Any]) -> Chart:
    data = alt.Data(values=[{"url": url, "y": top}])
    mark = alt.Chart(data).mark_image(
        aspect=False, align="left", baseline="top", smooth=False, width=width, height=height
    )
    return mark.encode(url="url:N", x=alt.value(0), y=pixels("y"))


def _panels(bins: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Threshold crossings and spike-band power; one panel if the channels are not paired."""
    features = list_features(bins.shape[1])
    if len(features) == 1:
        return [(counted(bins.shape[1], "channel"), bins)]
    kinds = zip(("crossings", "power"), features, strict=True)
    return [(kind, bins[:, f.channels.start : f.channels.stop]) for kind, f in kinds]


def intensity(bins: np.ndarray) -> np.ndarray:
    """Z-scored channels, clipped to [0, 1]. (T, C) -> (C, T)"""
    known = np.ma.masked_invalid(bins)
    scaled = ((known - known.mean(axis=0)) / known.std(axis=0)).filled(0.0)  # also channels without variation
    return np.clip(pool(scaled, _MAX_COLUMNS, _MAX_ROWS).T / _SATURATION_SD, 0.0, 1.0)


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


def _place_labels(labels: Sequence[_Label], pixel: Callable[[float], float], y: float) -> tuple[list[Row], float]:
    """Labels side by side, on a second or third line if they would overlap; with the height of the row."""
    ends = [0.0, 0.0, 0.0]
    rows: list[Row] = []
    for label in labels:
        x, half = pixel(label.frame), 3.9 * len(label.text) + 1.5
        free = (i for i, end in enumerate(ends) if x - half >= end)
        line = next(free, min(range(3), key=lambda i: ends[i]))
        ends[line] = x + half
        row = {"frame": label.frame, "y": y + 7 + line * _LABEL, "text": label.text, "title": label.title}
        phoneme = label.text.lstrip("+−")
        rows.append({**row, "colour": colour(_LABEL_COLOURS[label.kind]), "phoneme": phoneme})
    n_lines = max((i + 1 for i, end in enumerate(ends) if end), default=1)
    return rows, _LABEL * n_lines + 4


def _class_order(n_classes: int, classes: Sequence[str]) -> list[int]:
    """Classes by group (phonemes: in articulatory order) with the blank last; unchanged if they do not fit."""
    if n_classes != len(classes):
        return list(range(n_classes))
    return [*encode((name for group in token_groups(classes).values() for name in group), classes), BLANK]


def _class_names(order: Sequence[int], y: float, classes: Sequence[str]) -> list[Row]:
    """The names of the rows of probabilities."""
    if len(order) != len(classes):
        return [{"y": y + _ROW * len(order) / 2, "text": f"{len(order)} classes", "size": 12}]
    names = ["blank" if token == BLANK else classes[token].replace(SPACE, "space") for token in order]
    return [{"y": y + _ROW * (i + 0.5), "text": name, "size": 10} for i, name in enumerate(names)]
