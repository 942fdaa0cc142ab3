"""Text logs: encodings, blocks of lines, and the printed output of trainers.

Printed output has lines with a counter and named numbers, among banners, warnings and tracebacks. The first line of
each kind is parsed with general expressions. It then becomes a template, one compiled regular expression with fixed
words and variable numbers, which parses all further lines of that kind.
"""

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from arcuate.doctor.columns import (
    HELD_OUT,
    METRICS,
    TRAIN,
    Collector,
    parse_column_name,
    parse_number,
    scan_line,
    split_words,
)
from arcuate.errors import UserError

_BLOCK = 1 << 20  # characters
_LONGEST_LINE = 1 << 26  # characters
_HEAD = 1 << 16  # bytes that determine the format
_MAX_DAMAGE = 0.1  # fraction of damaged bytes up to which a file is still treated as text


def read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def detect_encoding(head: bytes) -> str | None:
    """The encoding of a text file, None for binary data; zero bytes left by a full disk are tolerated."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, zeros, others in (("utf-16-le", head[1::2], head[::2]), ("utf-16-be", head[::2], head[1::2])):
        if zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.02 * len(others) + 1:
            return encoding
    text = head.replace(b"\0", b"")
    n_control = sum(text.count(bytes([c])) for c in range(32) if c not in (8, 9, 10, 12, 13, 27))
    n_invalid = text.decode("utf-8", errors="replace").count("\ufffd")
    if len(head) - len(text) > _MAX_DAMAGE * len(head):
        return None
    if n_control > 0.02 * len(text) + 2 or n_invalid > _MAX_DAMAGE * len(text) + 2:
        return None
    return "utf-8-sig"


def line_blocks(path: Path, encoding: str) -> Iterator[list[str]]:
    """Blocks of lines without line ends; the last line may be incomplete."""
    rest = ""
    with path.open("rb") as raw:
        text = io.TextIOWrapper(io.BufferedReader(raw, _BLOCK), encoding=encoding, errors="replace")
        while block := text.read(_BLOCK):
            rest += block.replace("\0", "")
            if len(rest) > _LONGEST_LINE and "\n" not in rest:
                raise UserError(f"{path} is not a log: it has a line of more than {_LONGEST_LINE:,} characters")
            *lines, rest = rest.split("\n")
            if lines:
                yield lines
    if rest:
        yield [rest]


# Documents: diaries, READMEs and notes quote numbers with a step, but not as a series.

_MARKUP = re.compile(r"\s*(?:#{1,6}\s|[-*+•]\s|\d+[.)]\s|>\s|```|\|.*\|\s*$)|.*(?:\*\*\S|\]\(|\d\s*(?:→|->|=>)\s*\d)")
_SENTENCE = re.compile(r"(?:[^\W\d_]['’\w-]*[ ,;:]+){6}")  # seven words in a row
_DOCUMENT = 0.25  # fraction of such lines; real logs have less than 0.1, documents more than 0.6
_REPEATED = 3  # lines that differ only in their digits and occur this often were printed by a program


def count_document_lines(lines: Sequence[str]) -> tuple[int, int]:
    """The number of headings, list items and sentences among the filled lines, and the number of filled lines."""
    filled = [line[:_MAX_LINE] for line in lines if line.strip()]
    kinds = Counter(line.translate(_NO_DIGITS) for line in filled)
    written = [
        line
        for line in filled
        if kinds[line.translate(_NO_DIGITS)] < _REPEATED and (_MARKUP.match(line) or _SENTENCE.search(line))
    ]
    return len(written), len(filled)


def is_document(lines: Sequence[str]) -> bool:
    """Whether a text was written by a person rather than printed by a trainer."""
    n_written, n_filled = count_document_lines(lines)
    return n_written >= _DOCUMENT * n_filled > 0


# Printed output.

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
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
_POSITION = re.compile(r"\W{0,3}\[\s*(\d+)\s*/\s*\d+\s*\]")  # [300/10000] at the start of a line
_OTHER_NUMBER = re.compile(r"[-+]?\d[\d.,:/-]*(?:[eE][-+]?\d+)?")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RELEVANT = re.compile(r"loss|\b\w{0,6}per(?![a-z]{2})|cer\b|wer\b|error.rate|batch|epoch|step|iter", re.I)
_PER_TRIAL = re.compile(r"t1[0-9]\.20\d\d\.\d\d|\b(?:sample|trial|example|session|day)s?\b", re.I)
_QUALIFIER = frozenset("train val ma max min best avg mean std ema test eval".split())
_MAX_TEMPLATES = 12
_MAX_LINE = 2000
_EARLY = 3000  # lines that are searched for metadata more thoroughly
_MAX_IRRELEVANT = 20_000  # kinds of irrelevant lines that are remembered
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}
_TEMPLATE_NUMBER = r"([-+]?[\d.,]+(?:[eE][-+]?\d+)?|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"


@dataclass
class _Template:
    """A kind of line as one regular expression, with the names of its numbers."""

    expression: re.Pattern[str]
    names: tuple[str, ...]
    percent: tuple[bool, ...]
    split: str
    rows: list[int] = field(default_factory=list)
    values: list[tuple[str, ...]] = field(default_factory=list)

    def counters(self, values: tuple[str, ...]) -> dict[str, str]:
        """The step and epoch of a line of this kind."""
        counters = {n: v.replace(",", "") for n, v in zip(self.names, values, strict=True) if n in ("step", "epoch")}
        return {name: value for name, value in counters.items() if parse_number(value) is not None}

    def flush(self, collector: Collector) -> None:
        if not self.rows:
            return
        transposed = zip(*self.values, strict=True)
        columns = {
            name: [v + "%" for v in column] if percent else column
            for name, percent, column in zip(self.names, self.percent, transposed, strict=True)
        }
        columns["split"] = [self.split] * len(self.rows)
        collector.add_columns(columns, np.array(self.rows, dtype=float))
        self.rows, self.values = [], []


@dataclass(frozen=True)
class _NamedNumber:
    """The name and position of a number in a line."""

    name: str
    start: int
    stop: int
    percent: bool = False
    name_start: int = 0


def read_text(blocks: Iterable[list[str]], collector: Collector) -> None:
    templates: list[_Template] = []
    context: dict[str, str] = {}  # the last counters for evaluations printed on a line of their own
    irrelevant: set[str] = set()  # kinds of lines without metrics
    n_lines = 0
    latest: tuple[_Template, tuple[str, ...]] | None = None  # the last matched line for its counters
    for lines in blocks:
        for line in lines:
            n_lines += 1
            for template in templates:
                if found := template.expression.match(line):
                    template.rows.append(collector.n_rows)
                    template.values.append(values := found.groups())
                    latest = template, values
                    collector.n_rows += 1
                    break
            else:
                kind = line[:_MAX_LINE].translate(_NO_DIGITS)
                if kind in irrelevant:
                    continue
                if latest is not None:
                    context, latest = latest[0].counters(latest[1]), None
                relevant = _read_new_line(line, templates, context, collector, n_lines < _EARLY)
                if not relevant and len(irrelevant) < _MAX_IRRELEVANT:
                    irrelevant.add(kind)
        for template in templates:
            template.flush(collector)


def _read_new_line(
    line: str, templates: list[_Template], context: dict[str, str], collector: Collector, early: bool
) -> bool:
    """Parse a line of an unknown kind and make it a template; return whether the line was relevant."""
    relevant = scan_line(line[:_MAX_LINE], collector.metadata, early)
    if len(line) > _MAX_LINE or not _RELEVANT.search(line):
        return relevant
    for part in _split_messages(_ANSI.sub("", line)):
        parsed = _parse_line(part, context)
        if parsed is None:
            relevant = relevant or bool(_STEP.search(part) or _EPOCH.search(part))
            continue
        relevant = True
        numbers, split, carried = parsed
        row = {n.name: part[n.start : n.stop].replace(",", "") + "%" * n.percent for n in numbers}
        collector.add_rows([row | carried | {"split": split}])
        if not carried and part == line and len(templates) < _MAX_TEMPLATES:
            templates.append(_make_template(line, numbers, split))
    return relevant


def _split_messages(line: str) -> Iterator[str]:
    """Split two messages that two processes printed on one line, at the second counter."""
    starts = [m.start() for m in re.finditer(r"(?<![\w/])(?:(?:train|val)\s+)?batch\s+\d+\b", line, re.I)]
    if len(starts) < 2:
        yield line
        return
    for start, stop in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:stop]


def _parse_line(line: str, context: dict[str, str]) -> tuple[list[_NamedNumber], str, dict[str, str]] | None:
    """The named numbers of a line, its split, and counters carried over from earlier lines."""
    step, epoch = _STEP.search(line), _EPOCH.search(line)
    if not step and not epoch:
        step = _POSITION.match(line)
    metrics = [n for n in _named_numbers(line) if parse_column_name(n.name).role in METRICS]
    used = {(n.start, n.stop) for n in metrics}
    axes = [
        _NamedNumber(name, *found.span(1))
        for name, found in (("step", step), ("epoch", epoch))
        if found and found.span(1) not in used
    ]
    counters = {n.name: line[n.start : n.stop].replace(",", "") for n in axes}
    carried = {"step": context["step"]} if _is_same_epoch(counters, context) else {}
    if axes:
        context.clear()
        context.update(counters | carried)
    if not metrics:
        return None
    before_metrics = line[: metrics[0].name_start]
    split = _split_of(before_metrics)
    if axes:
        return None if _PER_TRIAL.search(before_metrics) and not step else ([*axes, *metrics], split, carried)
    if not context or _PER_TRIAL.search(line) or re.search(r"\bbest\b", line, re.I):
        return None
    evaluated = [
        _NamedNumber(f"carried {n.name}", n.start, n.stop, n.percent)
        for n in metrics
        if parse_column_name(n.name).role in ("per", "wer", "loss")
    ]
    return (evaluated, split, dict(context)) if evaluated else None


def _is_same_epoch(counters: dict[str, str], context: dict[str, str]) -> bool:
    """Whether a line names only an epoch, the one of the batches before it."""
    only_epoch = "step" not in counters and "step" in context
    return only_epoch and float(counters.get("epoch", -1)) == float(context.get("epoch", -2))


def _named_numbers(line: str) -> list[_NamedNumber]:
    found: dict[str, _NamedNumber] = {}
    before = ""
    matches = sorted([*_NAMED.finditer(line), *_BARE.finditer(line)], key=lambda m: m.start("number"))
    for match in matches:
        name = match["name"].strip()
        in_brackets = line[: match.start()].rstrip().endswith("(")
        if in_brackets and name.lower() in _QUALIFIER:
            name = f"{before}_{name}"
        else:
            before = name
        if name not in found:
            percent = bool(match["percent"])
            found[name] = _NamedNumber(name, *match.span("number"), percent, match.start("name"))
    return list(found.values())


def _split_of(text: str) -> str:
    words = [word for word in split_words(text) if word in TRAIN or word in HELD_OUT]
    return ("train" if words[-1] in TRAIN else "val") if words else ""


def _make_template(line: str, numbers: list[_NamedNumber], split: str) -> _Template:
    """An expression for lines that differ from this one only in their numbers."""
    parts, at = [], 0
    ordered = sorted(numbers, key=lambda n: n.start)
    for number in ordered:
        parts += [_fixed_text(line[at : number.start]), _TEMPLATE_NUMBER]
        at = number.stop
    parts.append(_fixed_text(line[at:]))
    names, percent = tuple(n.name for n in ordered), tuple(n.percent for n in ordered)
    return _Template(re.compile("".join(parts) + r"\s*$"), names, percent, split)


def _fixed_text(text: str) -> str:
    """An expression for text between metrics: words as they are, times, dates and other numbers variable."""
    words = [re.sub(r"(?:\\?\s)+", r"\\s+", re.escape(part)) for part in _OTHER_NUMBER.split(text)]
    return r"[-+\d.,:/eE]*".join(words)
