"""The printed output of trainers: lines with a counter and named numbers, among banners, warnings and tracebacks."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from arcuate.doctor.columns import HELD_OUT, METRICS, TRAIN, Facts, parse_name, split_words

_MAX_LINE = 2000
_EARLY = 3000  # lines that are searched for facts more thoroughly
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
_EVALUATED = ("per", "wer", "loss")  # quantities of an evaluation on a line of its own
_QUALIFIER = frozenset("train val ma max min best avg mean std ema test eval".split())


class _Number(NamedTuple):
    """A number in a line with its name."""

    name: str
    text: str  # with a percent sign if the line has one
    name_start: int
    stop: int


def read_printed(blocks: Iterable[list[str]], facts: Facts) -> Iterator[dict[str, Any]]:
    """The rows of printed output; facts are extracted from the other lines."""
    context: dict[str, str] = {}  # the last counters, for evaluations printed on a line of their own
    lines = (line for lines in blocks for line in lines if len(line) <= _MAX_LINE)
    for n_lines, line in enumerate(lines):
        line = _ANSI.sub("", line) if "\x1b" in line else line
        messages = _messages(line) if _RELEVANT.search(line) else ()
        rows = [row for message in messages if (row := _read_message(message, facts, context))]
        if not rows or n_lines < _EARLY:
            facts.scan_line(line, n_lines < _EARLY)
        yield from rows


def _messages(line: str) -> Iterator[str]:
    """Split two messages that two processes printed on one line, at the second counter."""
    starts = [m.start() for m in _MESSAGE.finditer(line)]
    if len(starts) < 2:
        yield line
        return
    for start, stop in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:stop]


def _read_message(line: str, facts: Facts, context: dict[str, str]) -> dict[str, Any] | None:
    """The row of a line; one without a counter, or with the epoch only, belongs to the counters before it."""
    step, epoch = _STEP.search(line), _EPOCH.search(line)
    if not step and not epoch:
        step = _POSITION.match(line)
    metrics = [n for n in _named_numbers(line) if parse_name(n.name).quantity in METRICS]
    facts.has_epochs = facts.has_epochs or epoch is not None
    if step and step[2] and not facts.has_epochs:  # within an epoch it is not the length of the run
        facts.set_planned(step[2].replace(",", ""), "stated beside the counter")
    used = {n.stop for n in metrics}
    axes = {name: found for name, found in (("step", step), ("epoch", epoch)) if found and found.end(1) not in used}
    counters = {name: found[1].replace(",", "") for name, found in axes.items()}
    before = line[: metrics[0].name_start] if metrics else line
    if _PER_TRIAL.search(before if counters else line) and not (counters and step):
        metrics = []
    words = [word for word in split_words(before) if word in TRAIN or word in HELD_OUT]
    split = ("train" if words[-1] in TRAIN else "val") if words else ""
    if not counters:
        metrics = [] if _BEST.search(line) else metrics
        carried = {f"carried {n.name}": n.text for n in metrics if parse_name(n.name).quantity in _EVALUATED}
        return {**carried, **context, "split": split} if carried and context else None
    if "step" not in counters and "step" in context and float(counters["epoch"]) == float(context.get("epoch", -1)):
        counters["step"] = context["step"]
    context.clear()
    context.update(counters)
    return {**counters, **{n.name: n.text for n in metrics}, "split": split} if metrics else None


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
        text = match["number"] + "%" * bool(match["percent"])
        found.setdefault(name, _Number(name, text, match.start("name"), match.end("number")))
    return list(found.values())
