"""Errors of a run: error rates by session, phoneme confusions, and aligned example decodings."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from arcuate.data.alphabet import CLASSES, SILENCE_NAME, SPACE, boundary_index, token_groups
from arcuate.evaluation.metrics import DELETED, INSERTED, align, confusions, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import finite_number
from arcuate.insight.charts import base, plots
from arcuate.insight.charts.formats import confidence_text, percent, short_session_names, split_name
from arcuate.insight.charts.plots import Cell, Rate
from arcuate.insight.render import ColourScale, Figure, LegendEntry, make_figure
from arcuate.insight.run_data import Decoding, Results, RunData
from arcuate.progress import counted


def sessions_figure(data: RunData, results: Results | None) -> Figure | None:
    """Error rates by session; None without labels."""
    rates = _session_rates(results, data.sessions) if results else []
    if not results or not rates:
        return None
    by_rate = sorted(rates, key=lambda r: r.rate)
    best, worst = by_rate[0], by_rate[-1]
    if len(rates) == 1:
        caption = f"One session, {percent(best.rate)}."
    else:
        caption = f"From {percent(best.rate)} ({best.session}) to {percent(worst.rate)} ({worst.session})."
    if unscored := set(data.sessions) - {r.session for r in rates}:
        caption += f" Without scored trials: {counted(len(unscored), 'session')}."
    legend = [LegendEntry("session, with 95 % interval over its trials", "blue", "dot")]
    if results.rate is not None:
        legend.append(LegendEntry(f"all trials, {percent(results.rate)}", "ink", "limit"))
    chart = plots.session_chart(
        rates,
        short_session_names([r.session for r in rates]),
        title="Sessions in recording order",
        label=f"{data.rate_title} of {counted(len(rates), 'session')}. {caption}",
        overall=results.rate,
    )
    return make_figure(chart, caption=caption, legend=legend)


def _session_rates(results: Results, order: Sequence[str]) -> list[Rate]:
    """Error rates of the scored sessions in recording order."""
    trials: dict[str, list[Decoding]] = {}
    for decoding in results.decodings:
        trials.setdefault(decoding.session, []).append(decoding)
    by_session = results.summary.get("per_by_session")
    summary = by_session if isinstance(by_session, Mapping) else {}
    position = {session: i for i, session in enumerate(order)}
    rates = []
    for session in sorted({*trials, *map(str, summary)}, key=lambda s: (position.get(s, len(position)), s)):
        scores = [d.score for d in trials.get(session, ()) if d.score]
        rate = total(scores).rate if scores else finite_number(summary.get(session))
        if rate is not None:
            low, high = bootstrap_interval(scores, n_resamples=500)
            rates.append(Rate(session, rate, low, high, note=f"{len(scores):,}" if scores else "not listed"))
    return rates


# Phonemes.

EXAMPLE_WORDS: dict[str, str] = {
    "IY": "see", "IH": "sit", "EY": "say", "EH": "bed", "AE": "cat", "AH": "cup", "ER": "bird",
    "AA": "hot", "AO": "law", "OW": "go", "UH": "book", "UW": "food", "AY": "my", "AW": "now",
    "OY": "boy", "P": "pen", "B": "ball", "T": "tea", "D": "day", "K": "key", "G": "get",
    "CH": "chair", "JH": "jam", "F": "fish", "V": "very", "TH": "thin", "DH": "this", "S": "sun",
    "Z": "zoo", "SH": "she", "ZH": "vision", "HH": "hat", "M": "man", "N": "no", "NG": "sing",
    "W": "we", "R": "red", "L": "leg", "Y": "yes",
}  # fmt: skip
WORD_BOUNDARY = "|"  # symbol for silence between words where space is short


def with_example(name: str) -> str:
    """`T (tea)`; silence and names outside the alphabet are returned as they are."""
    if name == SILENCE_NAME:
        return "silence"
    return f"{name} ({EXAMPLE_WORDS[name]})" if name in EXAMPLE_WORDS else name


def phoneme_symbol(name: str) -> str:
    return WORD_BOUNDARY if name in (SILENCE_NAME, SPACE) else name


# Confusions.

_SATURATION = 0.25  # fraction of errors that is drawn in full colour
_Counts = Counter[tuple[str, str]]  # (reference, hypothesis)
_Key = TypeVar("_Key")
# title, head, rows (phoneme, cells)
_ErrorTable = tuple[str, tuple[str, ...], Sequence[tuple[str, tuple[object, ...]]]]


def confusions_section(data: RunData, results: Results | None) -> tuple[Figure, list[_ErrorTable]] | None:
    """The confusion matrix and the most frequent errors; None without labels."""
    decodings = results.decodings if results else ()
    groups, unit = token_groups(data.classes), data.unit
    known_names = tuple(name for group in groups.values() for name in group)
    counts = confusions([(d.reference, d.hypothesis) for d in decodings if d.reference is not None])
    expected, decoded = {*known_names, INSERTED}, {*known_names, DELETED}
    known: _Counts = Counter({pair: n for pair, n in counts.items() if pair[0] in expected and pair[1] in decoded})
    if not known:
        return None
    caption = (
        f"Rows: reference {unit}s; columns: decoded {unit}s; each row sums to 100 %. The row “inserted” shows decoded"
        f" {unit}s without a reference, the column “deleted” reference {unit}s that were not decoded. The colour of"
        " confusions follows the square root of their share, so that rare ones are visible."
    )
    if n_unknown := counts.total() - known.total():
        caption += f" Not shown: {counted(n_unknown, 'token')} outside the alphabet."
    scales = [
        ColourScale("correct: 0", "100\u202f%", "teal"),
        ColourScale("confused: 0", f"{percent(_SATURATION, 0)} or more", "orange"),
    ]
    return make_figure(_matrix(known, groups, unit), caption=caption, scales=scales), _most_frequent(known, unit)


def _matrix(counts: _Counts, groups: Mapping[str, tuple[str, ...]], unit: str) -> base.Chart:
    """The row-normalised matrix, phonemes grouped by manner of articulation."""
    totals = _reference_totals(counts)
    names: list[str] = []
    for i, group in enumerate(groups.values()):
        names += [*group, " " * (i + 1)]  # blank names are gaps
    cells = []
    for (reference, hypothesis), n in sorted(counts.items()):
        fraction = n / totals[reference]
        kind, opacity = "teal", 0.12 + 0.88 * fraction
        if reference != hypothesis:
            kind, opacity = "orange", min(1.0, max(0.1, math.sqrt(fraction / _SATURATION)))
        row = "inserted" if reference == INSERTED else reference
        column = "deleted" if hypothesis == DELETED else hypothesis
        cells.append(Cell(row, column, kind, opacity, _tooltip(reference, hypothesis, n, fraction)))
    return plots.matrix_chart(
        cells,
        [*names, "inserted"],
        [*names, "deleted"],
        title=f"Reference and decoded {unit}s",
        label=f"{unit.capitalize()} confusion matrix",
    )


def _tooltip(reference: str, hypothesis: str, n: int, fraction: float) -> str:
    if reference == INSERTED:
        return f"{hypothesis} inserted {counted(n, 'time')}, {percent(fraction)} of all insertions"
    if hypothesis == DELETED:
        return f"{reference} deleted {counted(n, 'time')}, {percent(fraction)}"
    return f"{reference} decoded as {hypothesis} {counted(n, 'time')}, {percent(fraction)}"


def _reference_totals(counts: _Counts) -> Counter[str]:
    return Counter(reference for reference, _ in counts.elements())


def _most_frequent(counts: _Counts, unit: str) -> list[_ErrorTable]:
    """The most frequent errors of each kind."""
    totals = _reference_totals(counts)
    substituted = {k: n for k, n in counts.items() if k[0] != k[1] and k[0] != INSERTED and k[1] != DELETED}
    deleted = {reference: n for (reference, hypothesis), n in counts.items() if hypothesis == DELETED}
    inserted = {hypothesis: n for (reference, hypothesis), n in counts.items() if reference == INSERTED}
    substitutions = [
        (a, (f"{with_example(a)} as {with_example(b)}", n, percent(n / totals[a])))
        for (a, b), n in _largest(substituted, 10)
    ]
    deletions = [(a, (with_example(a), n, percent(n / totals[a]))) for a, n in _largest(deleted, 5)]
    insertions = [(a, (with_example(a), n)) for a, n in _largest(inserted, 5)]
    tables: list[_ErrorTable] = [
        ("Most frequent substitutions", ("reference as decoded", "count", "of reference"), substitutions),
        ("Most frequent deletions", (unit, "count", "of reference"), deletions),
        ("Most frequent insertions", (unit, "count"), insertions),
    ]
    return [table for table in tables if table[2]]


def _largest(counts: Mapping[_Key, int], n: int) -> list[tuple[_Key, int]]:
    """The largest counts; ties in the order of their names, so that the page is reproducible."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:n]


# Example decodings, with every error marked by a symbol as well as a colour.

_N_EACH = 4  # trials of each kind
_MAX_TOKENS = 200  # tokens shown of one decoding


class Chip(NamedTuple):
    """An aligned pair of phonemes or words: right, gap (a word boundary), sub, ins or del."""

    kind: str
    expected: str
    decoded: str
    title: str


class ExampleLine(NamedTuple):
    """One example: the sentence, where it is from, its error rate, and the aligned tokens."""

    sentence: str
    where: str
    rate: str
    chips: list[Chip]
    n_hidden: int


class ExamplesSection(NamedTuple):
    lead: str
    legend: list[tuple[Chip, str]]
    groups: list[tuple[str, list[ExampleLine]]]


def examples_section(data: RunData, results: Results | None) -> ExamplesSection | None:
    """Decoded trials with every wrong phoneme, or word, marked."""
    groups = _choose_examples(results.decodings) if results else []
    if results is None or not groups:
        return None
    labelled, lead = any(d.rate is not None for d in results.decodings), ""
    if results.metric == "wer":
        lm = f", language model {results.summary['lm']}" if isinstance(results.summary.get("lm"), str) else ""
        rate = f"{percent(results.rate)}{confidence_text(results.interval)}"
        lead = f"Word error rate {rate} on the {split_name(results.split)} trials{lm}."
        if results.rate is None:
            lead = f"{counted(len(results.decodings), 'decoded trial')} without reference texts{lm}."
        legend = _legend("tea", "bee")
    else:
        lead = "" if labelled else f"No labels: decoded {data.unit}s without error marks."
        legend = _token_legend(data.classes)
    lines = [(title, [_example_line(decoding) for decoding in members]) for title, members in groups]
    return ExamplesSection(lead, legend if labelled else [], lines)


def _token_legend(classes: Sequence[str]) -> list[tuple[Chip, str]]:
    """Legend with two tokens of the alphabet as examples."""
    edge = boundary_index(classes)
    examples = ("T", "D") if tuple(classes) == CLASSES else (classes[1], classes[min(2, len(classes) - 1)])
    return _legend(*examples, boundary=classes[edge] if edge > 0 else None)


def _example_line(decoding: Decoding) -> ExampleLine:
    """One chip per aligned pair."""
    remarks = [decoding.trial] if decoding.text else []
    remarks += [f"block {decoding.block}"] if decoding.block else []
    remarks += [f"flagged: {', '.join(decoding.flags)}"] if decoding.flags else []
    reference = decoding.hypothesis if decoding.reference is None else decoding.reference
    chips = [_chip(*pair) for pair in align(reference, decoding.hypothesis)]
    rate = "" if decoding.rate is None else percent(decoding.rate)
    n_hidden = max(len(chips) - _MAX_TOKENS, 0)
    return ExampleLine(decoding.text or decoding.trial, " · ".join(remarks), rate, chips[:_MAX_TOKENS], n_hidden)


def _choose_examples(decodings: Sequence[Decoding]) -> list[tuple[str, list[Decoding]]]:
    """Best, typical and worst trials without overlap; the first trials if there are no labels."""
    scored = sorted(
        (d for d in decodings if d.rate is not None), key=lambda d: (d.rate or 0.0, -len(d.reference or ()), d.trial)
    )
    if not scored:
        return [("The first trials", list(decodings[: 3 * _N_EACH]))] if decodings else []
    if len(scored) <= 3 * _N_EACH:
        return [(f"All {counted(len(scored), 'trial')}, from best to worst", scored)]
    middle = (len(scored) - _N_EACH) // 2
    return [
        ("Best: lowest error rates, longest trials first", scored[:_N_EACH]),
        ("Typical: around the median trial", scored[middle : middle + _N_EACH]),
        ("Worst: highest error rates", scored[::-1][:_N_EACH]),
    ]


def _chip(reference: str, hypothesis: str) -> Chip:
    """An aligned pair of phonemes or words."""
    expected, decoded = phoneme_symbol(reference), phoneme_symbol(hypothesis)
    if reference == hypothesis:
        return Chip("gap" if expected == WORD_BOUNDARY else "right", expected, decoded, with_example(reference))
    if reference == INSERTED:
        return Chip("ins", "", decoded, f"{with_example(hypothesis)} inserted")
    if hypothesis == DELETED:
        return Chip("del", expected, "", f"{with_example(reference)} deleted")
    return Chip("sub", expected, decoded, f"{with_example(reference)} decoded as {with_example(hypothesis)}")


def _legend(right: str, wrong: str, boundary: str | None = None) -> list[tuple[Chip, str]]:
    entries = [
        (_chip(right, right), "correct"),
        (_chip(right, wrong), f"{right} decoded as {wrong}"),
        (_chip(INSERTED, right), f"{right} inserted"),
        (_chip(right, DELETED), f"{right} deleted"),
    ]
    return [*entries, *([(_chip(boundary, boundary), "word boundary")] if boundary else [])]
