"""What trainers print: any line with a counter and named numbers, among banners, warnings and tracebacks."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from arcuate.insight.doctor.columns import METRICS, Collector, look_at, number
from arcuate.insight.doctor.names import HELD_OUT, TRAIN, read_name, words

NUMBER = r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
_NAMED = re.compile(
    r"(?P<name>[A-Za-z][\w./-]*(?:[ ][A-Za-z][\w./-]*){0,3})\s*(?:\([^()]{0,24}\)|\[[^\[\]]{0,24}\])?[\"']?"
    rf"\s*[:=]\s*[\"']?(?P<number>{NUMBER})(?![\w.:-]*[A-Za-z_]{{3}})(?P<percent>\s?%)?",
    re.I,
)
_BARE = re.compile(
    r"(?<![\w/])(?P<name>(?:(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|dev|test)[_/ ])?\w*loss\w*"
    r"|(?:\w+[_/ ])?(?:per|cer|wer)(?:_\w+)?|lr|grad[_ ]?norm)"
    rf"\s+(?P<number>{NUMBER})(?P<percent>\s?%)?(?![\w.])",
    re.I,
)
_STEP = re.compile(
    r"(?<![\w/])(?:global[_ ]?step|step|batch|iteration|iter|update)s?[\"']?\s*[:=#]?\s*\[?\s*"
    r"(\d+(?:,\d{3})*)(?:\.0+)?(?!\.?\d|\s?%)(?:\s*/\s*(\d+(?:,\d{3})*))?",
    re.I,
)
_EPOCH = re.compile(r"(?<![\w/])epochs?[\"']?\s*[:=#]?\s*\[?\s*(\d+(?:\.\d+)?)(?:\s*/\s*(\d+))?", re.I)
_PLACE = re.compile(r"\W{0,3}\[\s*(\d+)\s*/\s*\d+\s*\]")  # [300/10000] at the start of a line
_UNWANTED = re.compile(r"[-+]?\d[\d.,:/-]*(?:[eE][-+]?\d+)?")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INTEREST = re.compile(r"loss|\b\w{0,6}per(?![a-z]{2})|cer\b|wer\b|error.rate|batch|epoch|step|iter", re.I)
_ASIDE = re.compile(r"t1[0-9]\.20\d\d\.\d\d|\b(?:sample|trial|example|session|day)s?\b", re.I)
_QUALIFIER = frozenset(
    {"train", "val", "ma", "max", "min", "best", "avg", "mean", "std", "ema", "test", "eval"}
)
MAX_TEMPLATES, MAX_LINE, EARLY, MANY = 12, 2000, 3000, 20_000
_NO_DIGITS = {ord(digit): None for digit in "0123456789"}
_VALUE = r"([-+]?[\d.,]+(?:[eE][-+]?\d+)?|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"


@dataclass
class Template:
    """A kind of line: which of its numbers mean what, as one expression that reads the next line of its kind."""

    expression: re.Pattern[str]
    names: tuple[str, ...]
    shares: tuple[bool, ...]  # which of them are in per cent
    split: str
    rows: list[int] = field(default_factory=list)
    values: list[tuple[str, ...]] = field(default_factory=list)

    def counters(self, values: tuple[str, ...]) -> dict[str, str]:
        """The step and epoch of a line of this kind."""
        named = {
            n: v.replace(",", "") for n, v in zip(self.names, values, strict=True) if n in ("step", "epoch")
        }
        return {name: value for name, value in named.items() if number(value) is not None}

    def flush(self, collector: Collector) -> None:
        if not self.rows:
            return
        columns = {
            name: [v + "%" for v in column] if share else column
            for name, share, column in zip(
                self.names, self.shares, zip(*self.values, strict=True), strict=True
            )
        }
        columns["split"] = [self.split] * len(self.rows)
        collector.add_columns(columns, np.array(self.rows, dtype=float))
        self.rows, self.values = [], []


@dataclass(frozen=True)
class Found:
    """A number in a line: what it is called and where it stands."""

    name: str
    start: int
    stop: int
    percent: bool = False
    begins: int = 0  # where its name stands


def read_text(blocks: Iterable[list[str]], collector: Collector) -> None:
    templates: list[Template] = []
    context: dict[str, str] = {}  # the last counter seen, for evaluations printed on a line of their own
    boring: set[str] = set()  # kinds of lines that hold nothing of interest
    n_lines = 0
    latest: tuple[Template, tuple[str, ...]] | None = None  # the last line of a known kind, for its counter
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
                kind = line[:MAX_LINE].translate(_NO_DIGITS)
                if kind in boring:
                    continue
                if latest is not None:
                    context, latest = latest[0].counters(latest[1]), None
                if not _read_new(line, templates, context, collector, n_lines < EARLY) and len(boring) < MANY:
                    boring.add(kind)
        for template in templates:
            template.flush(collector)


def _read_new(
    line: str, templates: list[Template], context: dict[str, str], collector: Collector, early: bool
) -> bool:
    """A line of a kind not seen before: read it the slow way, and learn its kind; whether it was of any use."""
    noted = look_at(line[:MAX_LINE], collector, early)
    if len(line) > MAX_LINE or not _INTEREST.search(line):
        return noted
    plain = _ANSI.sub("", line)
    for part in _unglued(plain):
        found = read_line(part, context)
        if found is None:
            noted = noted or bool(_STEP.search(part) or _EPOCH.search(part))
            continue
        noted = True
        numbers, split, carried = found
        row = {f.name: part[f.start : f.stop].replace(",", "") + "%" * f.percent for f in numbers}
        collector.add_rows([row | carried | {"split": split}])
        if not carried and part == line and len(templates) < MAX_TEMPLATES:
            templates.append(_learn(line, numbers, split))
    return noted


def _unglued(line: str) -> Iterator[str]:
    """Two messages on one line, as when two processes print at once, are taken apart at the second counter."""
    starts = [m.start() for m in re.finditer(r"(?<![\w/])(?:(?:train|val)\s+)?batch\s+\d+\b", line, re.I)]
    if len(starts) < 2:
        yield line
        return
    for start, stop in zip(starts, [*starts[1:], len(line)], strict=True):
        yield line[start:stop]


def read_line(line: str, context: dict[str, str]) -> tuple[list[Found], str, dict[str, str]] | None:
    """The numbers of a line with their names, the split it speaks of, and a counter carried over from before."""
    step, epoch = _STEP.search(line), _EPOCH.search(line)
    if not step and not epoch:
        step = _PLACE.match(line)
    metrics = [f for f in _metrics(line) if read_name(f.name).role in METRICS]
    taken = {(f.start, f.stop) for f in metrics}
    axes = [
        Found(name, *found.span(1))
        for name, found in (("step", step), ("epoch", epoch))
        if found and found.span(1) not in taken
    ]
    told = {f.name: line[f.start : f.stop].replace(",", "") for f in axes}
    within = {"step": context["step"]} if _same_epoch(told, context) else {}
    if axes:
        context.clear()
        context.update(told | within)
    if not metrics:
        return None
    split = _split_of(line[: metrics[0].begins])
    if axes:
        if _ASIDE.search(line[: metrics[0].begins]) and not step:
            return None
        return [*axes, *metrics], split, within
    if not context or _ASIDE.search(line) or re.search(r"\bbest\b", line, re.I):
        return None
    held = [f for f in metrics if read_name(f.name).role in ("per", "wer", "loss")]
    return (
        ([Found(f"carried {f.name}", f.start, f.stop, f.percent) for f in held], split, dict(context))
        if held
        else None
    )


def _same_epoch(told: dict[str, str], context: dict[str, str]) -> bool:
    """Whether a line names nothing but the epoch that the batches before it were in."""
    return (
        "step" not in told
        and "step" in context
        and float(told.get("epoch", -1)) == float(context.get("epoch", -2))
    )


def _metrics(line: str) -> list[Found]:
    found: dict[str, Found] = {}
    before = ""
    spans = sorted([*_NAMED.finditer(line), *_BARE.finditer(line)], key=lambda m: m.start("number"))
    for match in spans:
        name = match["name"].strip()
        inside = line[: match.start()].rstrip().endswith("(")
        if inside and name.lower() in _QUALIFIER:
            name = f"{before}_{name}"
        else:
            before = name
        if name not in found:
            found[name] = Found(name, *match.span("number"), bool(match["percent"]), match.start("name"))
    return list(found.values())


def _split_of(text: str) -> str:
    said = [word for word in words(text) if word in TRAIN or word in HELD_OUT]
    return ("train" if said[-1] in TRAIN else "val") if said else ""


def _learn(line: str, numbers: list[Found], split: str) -> Template:
    """An expression for lines that differ from this one in nothing but their numbers."""
    parts, at = [], 0
    ordered = sorted(numbers, key=lambda f: f.start)
    for found in ordered:
        parts += [_between(line[at : found.start]), _VALUE]
        at = found.stop
    parts.append(_between(line[at:]))
    names, shares = tuple(f.name for f in ordered), tuple(f.percent for f in ordered)
    return Template(re.compile("".join(parts) + r"\s*$"), names, shares, split)


def _between(text: str) -> str:
    """The words as they are; times, dates and numbers of no interest as a stretch of their signs."""
    words_only = [re.sub(r"(?:\\?\s)+", r"\\s+", re.escape(part)) for part in _UNWANTED.split(text)]
    return r"[-+\d.,:/eE]*".join(words_only)
