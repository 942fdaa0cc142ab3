"""One trial on one time axis: what the electrodes recorded, what the model made of it, what was said."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.alphabet import BLANK, CLASSES
from arcuate.data.arrays import list_features
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.greedy import TokenSpan, token_spans
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.insight.report.axes import Scale, columns_axis, place, rule, shade, text
from arcuate.insight.report.evidence import Decoding, Evidence, Example
from arcuate.insight.report.markup import (
    GROUPS,
    ORDER,
    Html,
    brief,
    counted,
    figure,
    join,
    legend,
    percent,
    spoken,
    svg,
    tag,
    whole,
)

LEFT, TOP, ROW, LABEL = 84, 8, 12, 15
MAX_COLUMNS, MAX_ROWS = 2000, 320
BRIGHT_SD = 3.5  # this far above its mean a channel is drawn in full colour


@dataclass(frozen=True)
class Label:
    words: str
    at: float  # frame
    kind: str  # right, sub, ins, del
    title: str


def raster(evidence: Evidence) -> Html:
    results = evidence.results
    if results is None or not results.examples:
        problem = results.examples_problem if results else None
        return tag("p", problem or "These results were written without example trials.", class_="absent")
    stride = whole(evidence.setting("front_end.patch.stride")) or 1
    by_trial = {d.trial: d for d in results.decodings}
    pictures = [
        trial_figure(example, by_trial.get(example.trial), max(stride, 1), f"shade{i}")
        for i, example in enumerate(results.examples)
    ]
    if len(pictures) == 1:
        return pictures[0]
    more = tag("details", tag("summary", f"{counted(len(pictures) - 1, 'more trial')}"), *pictures[1:])
    return join([pictures[0], more])


def trial_figure(example: Example, decoding: Decoding | None, stride: int, name: str) -> Html:
    title = f"“{decoding.text}”" if decoding and decoding.text else example.trial
    rate = f", error rate {percent(decoding.rate)}" if decoding and decoding.rate is not None else ""
    note = (
        f"Trial {example.trial}{rate}. Each channel is drawn against its own mean over the trial, from"
        f" the mean (empty) to {BRIGHT_SD:g} standard deviations above it (full). A frame stands where"
        " its first bin stands."
    )
    if decoding and decoding.reference is not None:
        note += (
            " What was said carries no times: its phonemes stand at the decoded ones they are aligned with."
        )
    entries = [
        ("crossings", "threshold crossings"),
        ("power", "spike-band power"),
        ("probability", "probability"),
    ]
    if decoding and decoding.reference is not None:
        entries += [("sub", "substituted"), ("ins", "added"), ("del", "missed")]
    return figure(title, trial_drawing(example, decoding, stride, name), note, legend(*entries), wide=True)


def trial_drawing(example: Example, decoding: Decoding | None, stride: int, name: str) -> Html:
    n_bins, n_frames = len(example.bins), len(example.log_probs)
    found = token_spans(np.nan_to_num(example.log_probs, nan=-np.inf))
    plot = min(max(1020.0, 19.0 * len(found)), 4000.0)
    right = LEFT + plot
    n_wide = max(n_bins, n_frames * stride)
    time = Scale(0.0, n_wide * BIN_SECONDS, LEFT, right)

    def at(frame: float) -> float:
        return time(frame * stride * BIN_SECONDS)

    parts: list[Html] = []
    y = float(TOP)
    for title, kind, values in panels(example.bins):
        height = float(min(max(values.shape[1] * 3, 36), 200))
        parts.append(panel(title, y, height, right))
        width = time(n_bins * BIN_SECONDS) - LEFT
        parts.append(shade(brightness(values), f"{name}{kind}", LEFT, y, width, height, f"heat {kind}"))
        y += height + 8
    rows = [("said", said_labels(found, decoding))] if decoding and decoding.reference is not None else []
    for title, labels in [*rows, ("read", read_labels(found, decoding))]:
        drawn, height = label_row(title, labels, at, y)
        parts.append(drawn)
        y += height
    y += 4
    order = class_order(example.log_probs.shape[1])
    probabilities = np.exp(np.minimum(np.nan_to_num(example.log_probs, nan=-np.inf), 0.0))
    height = ROW * len(order)
    parts.append(panel(None, y, height, right))
    parts.append(class_names(order, y, right))
    for span in found:  # a thread from each decoded token to the place where it was read
        x = at(span.first + 0.5 * span.n_frames)
        parts.append(rule(x, y - 4, x, y + ROW * order.index(span.token), "thread"))
    image = pooled(probabilities, MAX_COLUMNS, len(CLASSES) * 8)[:, order].T  # (V, F)
    parts.append(shade(image, f"{name}p", LEFT, y, at(n_frames) - LEFT, height, "heat probability"))
    y += height
    parts.append(columns_axis(time, y + 4, "seconds"))
    label = (
        f"Recording and phoneme probabilities of trial {example.trial}, {n_wide * BIN_SECONDS:.1f} seconds"
    )
    return svg(right + 12, y + 54, label, *parts, style=f"min-width:{max(760, plot * 0.75) / 16:.1f}rem")


def panels(bins: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
    """Crossings are the first half of the channels, power the second; an odd number is drawn as it is."""
    features = list_features(bins.shape[1])
    if len(features) == 1:
        return [(counted(bins.shape[1], "channel"), "crossings", bins)]
    kinds = zip(("crossings", "power"), features, strict=True)
    return [(kind, kind, bins[:, f.channels.start : f.channels.stop]) for kind, f in kinds]


def brightness(bins: np.ndarray) -> np.ndarray:
    """Channels by time, each channel on its own scale. (T, C) -> (C, T) from 0 to 1"""
    clean = np.where(np.isfinite(bins), bins, np.nan)
    known = np.isfinite(clean)
    n_known = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, clean, 0.0).sum(axis=0) / n_known
    away = np.where(known, clean - mean, 0.0)
    sd = np.sqrt((away**2).sum(axis=0) / n_known)
    scaled = away / np.where(sd > 0, sd, 1.0)
    return np.clip(pooled(scaled, MAX_COLUMNS, MAX_ROWS).T / BRIGHT_SD, 0.0, 1.0)


def pooled(values: np.ndarray, n_first: int, n_second: int) -> np.ndarray:
    """Averages of neighbours where an axis is longer than a picture needs."""
    for axis, limit in ((0, n_first), (1, n_second)):
        size = -(-values.shape[axis] // limit)
        if size > 1:
            starts = np.arange(0, values.shape[axis], size)
            lengths = np.diff(np.append(starts, values.shape[axis]))
            sums = np.add.reduceat(values, starts, axis=axis)
            values = sums / (lengths[:, None] if axis == 0 else lengths[None, :])
    return values


def panel(title: str | None, y: float, height: float, right: float) -> Html:
    ground = tag("rect", x=LEFT, y=place(y), width=place(right - LEFT), height=place(height), class_="ground")
    return join([ground, text(LEFT - 8, y + height / 2 + 4, title, anchor="end")]) if title else ground


def token_name(token: int) -> str:
    return CLASSES[token] if token < len(CLASSES) else str(token)


def read_labels(found: Sequence[TokenSpan], decoding: Decoding | None) -> list[Label]:
    """The decoded tokens at their times, marked where they are wrong."""
    reference = decoding.reference if decoding else None
    labels = []
    read = [token_name(s.token) for s in found]
    pairs = (
        [p for p in align(reference, read) if p[1] != DELETED]
        if reference is not None
        else [(r, r) for r in read]
    )
    for span, (said, name) in zip(found, pairs, strict=True):
        kind = "ins" if said == INSERTED else "right" if said == name else "sub"
        title = {"ins": "added", "right": spoken(name), "sub": f"said {spoken(said)}"}[kind]
        words = f"+{brief(name)}" if kind == "ins" else brief(name)
        labels.append(Label(words, span.first + 0.5 * span.n_frames, kind, title))
    return labels


def said_labels(found: Sequence[TokenSpan], decoding: Decoding | None) -> list[Label]:
    """The reference at the times of what it was read as; missed phonemes evenly between their neighbours."""
    if decoding is None or decoding.reference is None:
        return []
    centres = [s.first + 0.5 * s.n_frames for s in found]
    read = [token_name(s.token) for s in found]
    labels: list[Label] = []
    waiting: list[str] = []
    before, index = 0.0, 0

    def place_missed(until: float) -> None:
        for i, name in enumerate(waiting, start=1):
            frame = before + (until - before) * i / (len(waiting) + 1)
            labels.append(Label(f"−{brief(name)}", frame, "del", f"{spoken(name)} missed"))
        waiting.clear()

    for said, name in align(decoding.reference, read):
        if name == DELETED:
            waiting.append(said)
            continue
        place_missed(centres[index])
        if said != INSERTED:
            labels.append(
                Label(brief(said), centres[index], "right" if said == name else "sub", spoken(said))
            )
        before = centres[index]
        index += 1
    place_missed(before + 4.0 * (len(waiting) + 1))
    return labels


def label_row(
    title: str, labels: Sequence[Label], at: Callable[[float], float], y: float
) -> tuple[Html, float]:
    """Labels side by side, on a second or third line where they would touch."""
    ends = [0.0, 0.0, 0.0]
    parts = [text(LEFT - 8, y + 11, title, anchor="end")]
    for label in labels:
        x, half = at(label.at), 3.9 * len(label.words) + 1.5
        line = next(
            (i for i, end in enumerate(ends) if x - half >= end), min(range(3), key=lambda i: ends[i])
        )
        ends[line] = x + half
        mark = tag(
            "text",
            tag("title", label.title),
            label.words,
            x=place(x),
            y=place(y + 11 + line * LABEL),
            text_anchor="middle",
            class_=f"token {label.kind}",
        )
        parts.append(mark)
    n_lines = max((i + 1 for i, end in enumerate(ends) if end), default=1)
    return join(parts), LABEL * n_lines + 4


def class_order(n_classes: int) -> list[int]:
    """Classes by how they are made, the blank last; as they come where the alphabet is another one."""
    if n_classes != len(CLASSES):
        return list(range(n_classes))
    return [CLASSES.index(name) for name in ORDER] + [BLANK]


def class_names(order: Sequence[int], y: float, right: float) -> Html:
    """Names of the rows, with a line between groups."""
    if len(order) != len(CLASSES):
        return text(LEFT - 8, y + ROW * len(order) / 2, f"{len(order)} classes", anchor="end")
    parts = []
    for i, token in enumerate(order):
        name = "blank" if token == BLANK else CLASSES[token]
        parts.append(text(LEFT - 8, y + ROW * i + 9.5, name, "tiny", "end"))
    row = 0
    for group in GROUPS.values():
        row += len(group)
        parts.append(rule(LEFT, y + ROW * row, right, y + ROW * row, "guide"))
    return join(parts)
