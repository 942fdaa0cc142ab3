"""The printed output of trainers: lines with a counter and named numbers, among banners, warnings and tracebacks.

Lines that differ only in their numbers have the same shape. The first line of each shape is parsed with general
expressions, which shows the name of each number; further lines only supply other numbers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from arcuate.doctor.columns import HELD_OUT, METRICS, TRAIN, Facts, parse_name, split_words

_MAX_LINE = 2000
_EARLY = 3000  # lines that are searched for facts more thoroughly
_MAX_SHAPES = 20_000  # shapes that are remembered
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}

# Documents: diaries, READMEs and notes quote numbers with a step, but not as a series.

_MARKUP = re.compile(r"\s*(?:#{1,6}\s|[-*+•]\s|\d+[.)]\s|>\s|```|\|.*\|\s*$)|.*(?:\*\*\S|\]\(|\d\s*(?:→|->|=>)\s*\d)")
_SENTENCE = re.compile(r"(?:[^\W\d_]['’\w-]*[ ,;:]+){6}")  # seven words in a row
_DOCUMENT = 0.25  # fraction of such lines; real logs have less than 0.1, documents more than 0.6
_REPEATED = 3  # lines that differ only in their digits and occur this often were printed by a program


def is_document(lines: Sequence[str]) -> bool:
    """Whether a text was written by a person: headings, list items and sentences among its filled lines."""
    filled = [line[:_MAX_LINE] for line in lines if line.strip()]
    kinds = Counter(line.translate(_NO_DIGITS) for line in filled)
    single = (line for line in filled if kinds[line.translate(_NO_DIGITS)] < _REPEATED)
    n_written = sum(bool(_MARKUP.match(line) or _SENTENCE.search(line)) for line in single)
    return n_written >= _DOCUMENT * len(filled) > 0


# Lines with numbers.

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
_NUMBERS = re.compile(
    r"(?<![\w.])([-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|(?:nan|inf(?:inity)?)\b))", re.I
)
_NAMED = re.compile(
    r"(?P<name>[A-Za-z][\w./-]*(?:[ ][A-Za-z][\w./-]*){0,3})\s*(?:\([^()]{0,24}\)|\[[^\[\]]{0,24}\])?[\"']?"
    rf"\s*[:=]\s*[\"']?(?P<number>{_NUMBER})(?![\w.:-]*[A-Za-z_]{{3}})(?P<percent>\s?%)?",
    re.I,
)
_BARE = re.compile(
    r"(?<![\w/])(?P<name>(?:(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|dev|test)[_/ ])?\w*loss\w*"
    r"|(?:\w+[_/ ])?(?:per|cer|wer)(?:_\w+)?|lr|grad[_ ]?norm)"
    rf"\s+(?P<number>{_NUMBER})(?P<percent>\s?%)?(?![\w.])",
    re.I,
)
_STEP = re.compile(
    r"(?<![\w/])(?:global[_ ]?step|step|batch|iteration|iter|update)s?[\"']?\s*[:=#]?\s*\[?\s*"
    r"(\d+(?:,\d{3})*)(?:\.0+)?(?!\.?\d|\s?%)(?:\s*/\s*(\d+(?:,\d{3})*))?",
    re.I,
)
_EPOCH = re.compile(r"(?<![\w/])epochs?[\"']?\s*[:=#]?\s*\[?\s*(\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?", re.I)
_POSITION = re.compile(r"\W{0,3}\[\s*(\d+)\s*/\s*(\d+)\s*\]")  # [300/10000] at the start of a line
_MESSAGE = re.compile(r"(?<![\w/])(?:(?:train|val)\s+)?batch\s+\d+\b", re.I)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RELEVANT = re.compile(r"loss|\b\w{0,6}per(?![a-z]{2})|cer\b|wer\b|error.rate|batch|epoch|step|iter", re.I)
_PER_TRIAL = re.compile(r"t1[0-9]\.20\d\d\.\d\d|\b(?:sample|trial|example|session|day)s?\b", re.I)
_BEST = re.compile(r"\bbest\b", re.I)
_QUALIFIER = frozenset("train val ma max min best avg mean std ema test eval".split())


class _Number(NamedTuple):
    """A number in a line with its name."""

    name: str
    start: int
    stop: int
    is_percent: bool
    name_start: int


class _Shape(NamedTuple):
    """The names of the numbers of a line by their positions among its numbers."""

    axes: tuple[tuple[str, int], ...]  # step and epoch
    metrics: tuple[tuple[str, int, bool], ...]  # name, position, whether it is in per cent
    split: str


def read_printed(blocks: Iterable[list[str]], facts: Facts) -> Iterator[dict[str, Any]]:
    """The rows of printed output; facts are extracted from the other lines."""
    context: dict[str, str] = {}  # the last counters, for evaluations printed on a line of their own
    shapes: dict[tuple[str, ...], _Shape | None] = {}  # None: irrelevant
    n_lines = 0
    for line in (line for lines in blocks for line in lines if len(line) <= _MAX_LINE):
        n_lines += 1
        line = _ANSI.sub("", line) if "\x1b" in line else line
        parts = _NUMBERS.split(line)
        key = tuple(parts[::2])
        if key in shapes:
            if (shape := shapes[key]) is not None and (row := _row(shape, parts[1::2], context)):
                yield row
            continue
        is_fact = facts.scan_line(line, n_lines < _EARLY)
        messages = list(_messages(line)) if _RELEVANT.search(line) else []
        for message in messages:
            shape, numbers, is_known = _parse_line(message, facts, context)
            if shape is not None and (row := _row(shape, numbers, context)):
                yield row
            is_fact = is_fact or not is_known
        if not is_fact and len(messages) < 2 and len(shapes) < _MAX_SHAPES:
            shapes[key] = shape if messages else None


def _row(shape: _Shape, numbers: Sequence[str], context: dict[str, str]) -> dict[str, Any] | None:
    """The row of a line; one without a counter, or with the epoch only, belongs to the counters before it."""
    counters = {name: numbers[i].replace(",", "") for name, i in shape.axes}
    values = {name: numbers[i] + "%" * is_percent for name, i, is_percent in shape.metrics}
    if not counters:
        return (
            {**{f"carried {name}": v for name, v in values.items()}, **context, "split": shape.split}
            if context
            else None
        )
    if "step" not in counters and "step" in context and float(counters["epoch"]) == float(context.get("epoch", -1)):
        counters["step"] = context["step"]
    context.clear()
    context.update(counters)
    return {**counters, **values, "split": shape.split} if values else None


def _messages(line: str) -> Iterator[str]:
    """Split two messages that two processes printed on one line, at the second counter."""
    starts = [m.start() for m in _MESSAGE.finditer(line)]
    if len(starts) < 2:
        yield line
        return
    for start, stop in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:stop]


def _parse_line(line: str, facts: Facts, context: Mapping[str, str]) -> tuple[_Shape | None, list[str], bool]:
    """The shape of a line, its numbers, and whether the shape fits all lines that differ only in their numbers."""
    step, epoch = _STEP.search(line), _EPOCH.search(line)
    if not step and not epoch:
        step = _POSITION.match(line)
    metrics = [n for n in _named_numbers(line) if parse_name(n.name).quantity in METRICS]
    used = {n.stop for n in metrics}
    axes = [(name, found) for name, found in (("step", step), ("epoch", epoch)) if found and found.end(1) not in used]
    if step and step[2] and not epoch and "epoch" not in context:  # within an epoch it is not the length of the run
        facts.set_planned(step[2].replace(",", ""), "stated beside the counter")
    before = line[: metrics[0].name_start] if metrics else line
    if axes:
        metrics = [] if _PER_TRIAL.search(before) and not step else metrics
    elif _PER_TRIAL.search(line) or _BEST.search(line):
        metrics = []
    else:
        metrics = [n for n in metrics if parse_name(n.name).quantity in ("per", "wer", "loss")]
    if not axes and not metrics:
        return None, [], True
    words = [word for word in split_words(before) if word in TRAIN or word in HELD_OUT]
    split = ("train" if words[-1] in TRAIN else "val") if words else ""
    spans = [found.span(1) for _, found in axes] + [(n.start, n.stop) for n in metrics]
    found = {m.span(1): i for i, m in enumerate(_NUMBERS.finditer(line))}
    is_known = all(span in found for span in spans)
    numbers = _NUMBERS.split(line)[1::2] if is_known else [line[start:stop] for start, stop in spans]
    at = [found[span] for span in spans] if is_known else list(range(len(spans)))
    named = tuple((n.name, i, n.is_percent) for n, i in zip(metrics, at[len(axes) :], strict=True))
    counters = tuple((name, i) for (name, _), i in zip(axes, at[: len(axes)], strict=True))
    return _Shape(counters, named, split), numbers, is_known


def _named_numbers(line: str) -> list[_Number]:
    found: dict[str, _Number] = {}
    before = ""
    matches = sorted([*_NAMED.finditer(line), *_BARE.finditer(line)], key=lambda m: m.start("number"))
    for match in matches:
        name = match["name"].strip()
        in_brackets = line[: match.start()].rstrip().endswith("(")
        if in_brackets and name.lower() in _QUALIFIER:
            name = f"{before}_{name}"
        else:
            before = name
        span = match.span("number")
        found.setdefault(name, _Number(name, *span, bool(match["percent"]), match.start("name")))
    return list(found.values())
