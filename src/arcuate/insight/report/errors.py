"""Errors of a run: error rates by session and block, phoneme confusions, and aligned example decodings."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from arcuate.data.alphabet import CLASSES, SILENCE_NAME, SPACE, boundary_index, punctuation_classes
from arcuate.data.text import normalise_text
from arcuate.evaluation.metrics import DELETED, INSERTED, Score, align, confusions, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.insight import charts
from arcuate.insight.formats import MISSING, finite_number, percent, split_name, whole_percent
from arcuate.insight.pages import Html, figure, join, legend, muted, table, tag
from arcuate.insight.report.run_data import DecodedText, Decoding, Results, RunData
from arcuate.progress import counted

_PLOT_TOP, _PLOT_HEIGHT = 16, 210
_MAX_BLOCKS = 600


@dataclass(frozen=True)
class _SessionRate:
    session: str
    rate: float
    low: float | None
    high: float | None
    n_trials: int | None


def sessions_section(data: RunData) -> Html:
    results = data.results
    rates = _session_rates(results, data.sessions) if results else []
    if not results or not rates:
        return muted("These results have no labels, so error rates by session are unknown.")
    best, worst = min(rates, key=lambda r: r.rate), max(rates, key=lambda r: r.rate)
    if len(rates) == 1:
        caption = f"One session, {percent(best.rate)}."
    else:
        caption = f"From {percent(best.rate)} ({best.session}) to {percent(worst.rate)} ({worst.session})."
    if unscored := set(data.sessions) - {r.session for r in rates}:
        caption += f" Without scored trials: {counted(len(unscored), 'session')}."
    key = legend(
        ("point", "session, with 95 % interval over its trials"), ("limit", f"all trials, {percent(results.rate)}")
    )
    chart = _session_chart(rates, results.rate, caption, data.rate_name)
    return join(
        figure("Sessions in recording order", chart, caption, key, wide=True),
        _block_table(results, {r.session: i for i, r in enumerate(rates)}),
    )


def _session_rates(results: Results, order: Sequence[str]) -> list[_SessionRate]:
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
            rates.append(_SessionRate(session, rate, low, high, len(scores) or None))
    return rates


def _session_chart(rates: Sequence[_SessionRate], overall: float | None, caption: str, rate_name: str) -> Html:
    names = short_session_names([r.session for r in rates])
    longest = max(len(name) for name in names)
    column = min(max(1040 / len(rates), 20.0), 175.0)
    width = max(charts.LEFT + column * len(rates) + 20, 420)
    rotated = column < 7.5 * longest
    bottom = _PLOT_TOP + _PLOT_HEIGHT
    values = [v for r in rates for v in (r.rate, r.high) if v is not None]
    y = charts.linear_scale([*values, *([overall] if overall is not None else [])], 0.0, bottom, _PLOT_TOP)
    places = [charts.LEFT + column * (i + 0.5) for i in range(len(rates))]
    parts = [
        charts.y_axis(y, charts.LEFT, width - 8, whole_percent),
        charts.line(charts.LEFT, bottom, width - 8, bottom, "axis"),
    ]
    if overall is not None:
        parts.append(charts.line(charts.LEFT, y(overall), width - 8, y(overall), "line limit"))
    for x, rate in zip(places, rates, strict=True):
        if rate.low is not None and rate.high is not None:
            parts.append(charts.line(x, y(rate.low), x, y(rate.high), "whisker"))
        n_trials = counted(rate.n_trials, "trial") if rate.n_trials else "trials not listed"
        parts.append(charts.dot(x, y(rate.rate), 4.5, "point", f"{rate.session}: {percent(rate.rate)}, {n_trials}"))
    parts += charts.column_labels(places, bottom, names, rotated)
    height = bottom + (5.4 * longest + 24 if rotated else 34)
    label = f"{rate_name} of {counted(len(rates), 'session')}. {caption}"
    style = f"max-width:{width / 16:.1f}rem;min-width:{min(width, 760) / 16:.1f}rem"
    return charts.drawing(width, height, label, *parts, style=style)


def short_session_names(names: Sequence[str]) -> list[str]:
    """Session names without the participant if it is the same for all; long names are truncated."""
    participants = {name.partition(".")[0] for name in names}
    if len(names) > 1 and len(participants) == 1:
        names = [name.partition(".")[2] or name for name in names]
    return [name if len(name) <= 16 else name[:15] + "…" for name in names]


def _block_table(results: Results, order: Mapping[str, int]) -> Html:
    """Error rate by block, collapsed by default."""
    blocks: dict[tuple[str, str], list[Score]] = {}
    for decoding in results.decodings:
        if decoding.score:
            blocks.setdefault((decoding.session, decoding.block), []).append(decoding.score)
    if not blocks:
        return Html()

    def position(key: tuple[str, str]) -> tuple[int, str, int, str]:
        session, block = key
        number = int(block) if block.isdigit() and len(block) < 9 else 0
        return order.get(session, len(order)), session, number, block

    ordered = sorted(blocks, key=position)
    rows = [
        (session, block, len(scores), percent(total(scores).rate))
        for session, block in ordered[:_MAX_BLOCKS]
        for scores in [blocks[session, block]]
    ]
    n_hidden = len(ordered) - len(rows)
    head = ("session", "block", "trials", "error rate")
    return tag(
        "details",
        tag("summary", f"By block ({counted(len(ordered), 'block')})"),
        tag("div", table(head, rows, "numbers"), class_="scroll tall"),
        muted(f"{counted(n_hidden, 'more block')} not listed.") if n_hidden else None,
    )


# Phonemes.

# Neighbours are similar: vowels from front to back, voiceless consonants next to voiced ones.
PHONEME_GROUPS: dict[str, tuple[str, ...]] = {
    "vowels": ("IY", "IH", "EY", "EH", "AE", "AH", "ER", "AA", "AO", "OW", "UH", "UW", "AY", "AW", "OY"),
    "stops": ("P", "B", "T", "D", "K", "G"),
    "affricates": ("CH", "JH"),
    "fricatives": ("F", "V", "TH", "DH", "S", "Z", "SH", "ZH", "HH"),
    "nasals": ("M", "N", "NG"),
    "approximants": ("W", "R", "L", "Y"),
    "silence": (SILENCE_NAME,),
}
PHONEME_ORDER: tuple[str, ...] = tuple(name for group in PHONEME_GROUPS.values() for name in group)

EXAMPLE_WORDS: dict[str, str] = {
    "IY": "see", "IH": "sit", "EY": "say", "EH": "bed", "AE": "cat", "AH": "cup", "ER": "bird",
    "AA": "hot", "AO": "law", "OW": "go", "UH": "book", "UW": "food", "AY": "my", "AW": "now",
    "OY": "boy", "P": "pen", "B": "ball", "T": "tea", "D": "day", "K": "key", "G": "get",
    "CH": "chair", "JH": "jam", "F": "fish", "V": "very", "TH": "thin", "DH": "this", "S": "sun",
    "Z": "zoo", "SH": "she", "ZH": "vision", "HH": "hat", "M": "man", "N": "no", "NG": "sing",
    "W": "we", "R": "red", "L": "leg", "Y": "yes",
}  # fmt: skip
WORD_BOUNDARY = "|"  # symbol for silence between words where space is short


def token_groups(classes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tokens of an alphabet by kind, in the order in which charts show them."""
    if tuple(classes) == CLASSES:
        return PHONEME_GROUPS
    marks = punctuation_classes(classes)
    edge = (classes[boundary_index(classes)],) if boundary_index(classes) > 0 else ()
    plain = tuple(name for name in classes[1:] if name not in (*marks, *edge))
    groups = {"tokens": plain, "marks": marks, "boundary": edge}
    return {name: members for name, members in groups.items() if members}


def with_example(name: str) -> str:
    """`T (tea)`; silence and names outside the alphabet are returned as they are."""
    if name == SILENCE_NAME:
        return "silence"
    return f"{name} ({EXAMPLE_WORDS[name]})" if name in EXAMPLE_WORDS else name


def phoneme_symbol(name: str) -> str:
    return WORD_BOUNDARY if name in (SILENCE_NAME, SPACE) else name


# Confusions.

_CELL, _GAP, _LEFT, _TOP = 16, 6, 74, 62
_ABBREVIATIONS = {"affricates": "affr."}  # a group of two columns has no room for more
_SATURATION = 0.25  # fraction of errors that is drawn in full colour
_Counts = Counter[tuple[str, str]]  # (reference, hypothesis)
_Key = TypeVar("_Key")


def confusions_section(data: RunData) -> Html:
    decodings = data.results.decodings if data.results else ()
    groups, unit = token_groups(data.classes), data.unit
    known_names = tuple(name for group in groups.values() for name in group)
    counts = confusions([(d.reference, d.hypothesis) for d in decodings if d.reference is not None])
    known: _Counts = Counter(
        {
            (reference, hypothesis): n
            for (reference, hypothesis), n in counts.items()
            if reference in (*known_names, INSERTED) and hypothesis in (*known_names, DELETED)
        }
    )
    if not known:
        return muted("Confusions require labelled trials; these results have none.")
    caption = (
        f"Rows: reference {unit}s; columns: decoded {unit}s; each row sums to 100 %. The row “inserted” shows decoded"
        f" {unit}s without a reference, the column “deleted” reference {unit}s that were not decoded."
    )
    if n_unknown := counts.total() - known.total():
        caption += f" Not shown: {counted(n_unknown, 'token')} outside the alphabet."
    key = legend(("right", "correct"), ("wrong", f"confused, full colour from {percent(_SATURATION, 0)}"))
    chart = figure(f"Reference and decoded {unit}s", _matrix(known, groups, unit), caption, key, wide=True)
    return tag("div", chart, tag("div", *_most_frequent(known, unit), class_="lists"), class_="beside")


def _matrix(counts: _Counts, groups: Mapping[str, tuple[str, ...]], unit: str) -> Html:
    """The row-normalised matrix, phonemes grouped by manner of articulation."""
    offsets = _offsets(groups)
    extra = max(offsets.values()) + _CELL + _GAP  # offset of the row "inserted" and the column "deleted"
    rows, columns = {**offsets, INSERTED: extra}, {**offsets, DELETED: extra}
    totals = _reference_totals(counts)
    right = _LEFT + extra + _CELL
    parts = [*_frame(offsets, extra, groups)]
    for name, offset in rows.items():
        y = _TOP + offset + 12
        parts.append(charts.text(_LEFT - 6, y, "inserted" if name == INSERTED else name, "small", "end"))
        total = f"{totals[name]:,}" if totals[name] else MISSING
        parts.append(charts.text(right + 40, y, total, "small quiet", "end"))
    for name, offset in columns.items():
        label = "deleted" if name == DELETED else name
        parts.append(charts.text(_LEFT + offset + 11, _TOP - 6, label, "small", angle=-90))
    for (reference, hypothesis), n in sorted(counts.items()):
        fraction = n / totals[reference]
        x, y = _LEFT + columns[hypothesis], _TOP + rows[reference]
        kind, opacity = "right", 0.12 + 0.88 * fraction
        if reference != hypothesis:
            kind, opacity = "wrong", min(1.0, max(0.1, math.sqrt(fraction / _SATURATION)))
        tooltip = tag("title", _tooltip(reference, hypothesis, n, fraction))
        box = x + 0.5, y + 0.5, _CELL - 1, _CELL - 1
        parts.append(charts.rectangle(*box, kind, tooltip, fill_opacity=f"{opacity:.2f}"))
    style = f"min-width:40rem;max-width:{(right + 48) / 16:.1f}rem"
    height = _TOP + extra + _CELL + 8
    return charts.drawing(right + 48, height, f"{unit.capitalize()} confusion matrix", *parts, style=style)


def _offsets(groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The offset of the row and column of each token, with a gap between groups."""
    offsets, at = {}, 0.0
    for group in groups.values():
        for name in group:
            offsets[name] = at
            at += _CELL
        at += _GAP
    return offsets


def _frame(offsets: Mapping[str, float], extra: float, groups: Mapping[str, tuple[str, ...]]) -> Iterator[Html]:
    """A pale background for each pair of groups, and the names of the groups."""
    spans = [(offsets[g[0]], offsets[g[-1]] + _CELL) for g in groups.values()]
    spans.append((extra, extra + _CELL))
    for y0, y1 in spans:
        for x0, x1 in spans:
            yield charts.rectangle(_LEFT + x0, _TOP + y0, x1 - x0, y1 - y0, "ground")
    for name, (start, stop) in zip(groups, spans, strict=False):
        if stop - start > _CELL:
            label, middle = _ABBREVIATIONS.get(name, name), (start + stop) / 2
            yield charts.text(_LEFT + middle, 14, label, "small strong", "middle")
            yield charts.text(14, _TOP + middle, label, "small strong", "middle", -90)
    yield charts.text(_LEFT + extra + _CELL + 40, _TOP - 6, "total", "small quiet", "end")


def _tooltip(reference: str, hypothesis: str, n: int, fraction: float) -> str:
    if reference == INSERTED:
        return f"{hypothesis} inserted {counted(n, 'time')}, {percent(fraction)} of all insertions"
    if hypothesis == DELETED:
        return f"{reference} deleted {counted(n, 'time')}, {percent(fraction)}"
    return f"{reference} decoded as {hypothesis} {counted(n, 'time')}, {percent(fraction)}"


def _reference_totals(counts: _Counts) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (reference, _), n in counts.items():
        totals[reference] += n
    return totals


def _most_frequent(counts: _Counts, unit: str) -> list[Html]:
    """The most frequent errors of each kind."""
    totals = _reference_totals(counts)
    substituted = {k: n for k, n in counts.items() if k[0] != k[1] and k[0] != INSERTED and k[1] != DELETED}
    deleted = {reference: n for (reference, hypothesis), n in counts.items() if hypothesis == DELETED}
    inserted = {hypothesis: n for (reference, hypothesis), n in counts.items() if reference == INSERTED}
    tables = []
    if substituted:
        rows: list[tuple[object, ...]] = [
            (join(tag("span", with_example(a)), Html(" as "), tag("span", with_example(b))), n, percent(n / totals[a]))
            for (a, b), n in _largest(substituted, 10)
        ]
        head = ("reference as decoded", "count", "of reference")
        tables += [tag("h3", "Most frequent substitutions"), table(head, rows, "numbers")]
    if deleted:
        rows = [(with_example(a), n, percent(n / totals[a])) for a, n in _largest(deleted, 5)]
        head = (unit, "count", "of reference")
        tables += [tag("h3", "Most frequent deletions"), table(head, rows, "numbers")]
    if inserted:
        rows = [(with_example(a), n) for a, n in _largest(inserted, 5)]
        tables += [tag("h3", "Most frequent insertions"), table((unit, "count"), rows, "numbers")]
    return tables or [tag("p", f"All {unit}s were decoded correctly.")]


def _largest(counts: Mapping[_Key, int], n: int) -> list[tuple[_Key, int]]:
    """The largest counts; ties in the order of their names, so that the page is reproducible."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:n]


# Example decodings, with every error marked by a symbol as well as a colour.

_N_EACH = 4  # trials of each kind
_MAX_TOKENS = 200  # of one decoding


def decodings_section(data: RunData) -> Html:
    decodings = data.results.decodings if data.results else ()
    groups = _choose_examples(decodings)
    if not groups:
        return muted("The results contain no decodings.")
    labelled = any(d.rate is not None for d in decodings)
    edge = boundary_index(data.classes)
    parts: list[Html] = [
        _legend(*_legend_examples(data.classes), boundary=data.classes[edge] if edge > 0 else None)
        if labelled
        else muted(f"No labels: decoded {data.unit}s without error marks.")
    ]
    for title, members in groups:
        parts += [tag("h3", title), tag("ol", *(_entry(d) for d in members), class_="decodings")]
    return join(*parts)


def sentences_section(data: RunData) -> Html:
    """Decoded sentences with every wrong word marked, under the word error rate."""
    words = data.words
    groups = _choose_examples(words.texts) if words else []
    if words is None or not groups:
        return muted("The trials have not been decoded to words.")
    summary = words.summary
    interval = (
        f" (95\u202f% interval {100 * words.interval[0]:.1f}–{100 * words.interval[1]:.1f})" if words.interval else ""
    )
    lm = f", language model {summary['lm']}" if isinstance(summary.get("lm"), str) else ""
    lead = f"Word error rate {percent(words.rate)}{interval} on the {split_name(words.split)} trials{lm}."
    if words.rate is None:
        lead = f"{counted(len(words.texts), 'decoded trial')} without reference texts{lm}."
    parts: list[Html] = [tag("p", lead), _legend("tea", "bee") if words.rate is not None else Html()]
    for title, members in groups:
        parts += [tag("h3", title), tag("ol", *(_sentence(text) for text in members), class_="decodings")]
    return join(*parts)


def _sentence(decoded: DecodedText) -> Html:
    rate = tag("b", percent(decoded.rate)) if decoded.rate is not None else None
    shown = decoded.reference if decoded.reference is not None else decoded.trial
    where = tag("span", decoded.trial if decoded.reference is not None else "", class_="where")
    line = tag("p", tag("span", shown, class_="sentence"), where, rate, class_="line")
    hypothesis = decoded.text.split()
    pairs = [(word, word) for word in hypothesis]
    if decoded.reference is not None:
        pairs = align(normalise_text(decoded.reference).split(), normalise_text(decoded.text).split())
    chips = [part for pair in pairs[:_MAX_TOKENS] for part in (_chip(*pair), Html(" "))]
    return tag("li", line, tag("p", *(chips or [muted("no words")]), class_="chips"))


_Example = TypeVar("_Example", Decoding, DecodedText)


def _choose_examples(decodings: Sequence[_Example]) -> list[tuple[str, list[_Example]]]:
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


def _entry(decoding: Decoding) -> Html:
    remarks = [decoding.trial] if decoding.text else []
    remarks += [f"block {decoding.block}"] if decoding.block else []
    remarks += [f"flagged: {', '.join(decoding.flags)}"] if decoding.flags else []
    rate = tag("b", percent(decoding.rate)) if decoding.rate is not None else None
    sentence = tag("span", decoding.text or decoding.trial, class_="sentence")
    line = tag("p", sentence, tag("span", " · ".join(remarks), class_="where"), rate, class_="line")
    return tag("li", line, tag("p", *_chips(decoding), class_="chips"))


def _chips(decoding: Decoding) -> list[Html]:
    """One chip per aligned pair of phonemes."""
    if decoding.reference is None:
        pairs = [(name, name) for name in decoding.hypothesis]
    else:
        pairs = align(decoding.reference, decoding.hypothesis)
    parts = [part for pair in pairs[:_MAX_TOKENS] for part in (_chip(*pair), Html(" "))]
    n_hidden = len(pairs) - _MAX_TOKENS
    return [*parts, tag("span", f"… {n_hidden} more", class_="where")] if n_hidden > 0 else parts


def _chip(reference: str, hypothesis: str) -> Html:
    """An aligned pair of phonemes or words; errors are marked."""
    expected, decoded = phoneme_symbol(reference), phoneme_symbol(hypothesis)
    if reference == hypothesis:
        class_ = "chip" + (" gap" if expected == WORD_BOUNDARY else "")
        return tag("span", expected, class_=class_, title=with_example(reference))
    if reference == INSERTED:
        return tag("ins", "+", decoded, class_="chip ins", title=f"{with_example(hypothesis)} inserted")
    if hypothesis == DELETED:
        return tag("del", "−", expected, class_="chip del", title=f"{with_example(reference)} deleted")
    title = f"{with_example(reference)} decoded as {with_example(hypothesis)}"
    return tag("span", expected, tag("i", "→"), tag("b", decoded), class_="chip sub", title=title)


def _legend_examples(classes: Sequence[str]) -> tuple[str, str]:
    return ("T", "D") if tuple(classes) == CLASSES else (classes[1], classes[min(2, len(classes) - 1)])


def _legend(right: str, wrong: str, boundary: str | None = None) -> Html:
    entries = [
        (_chip(right, right), "correct"),
        (_chip(right, wrong), f"{right} decoded as {wrong}"),
        (_chip(INSERTED, right), f"{right} inserted"),
        (_chip(right, DELETED), f"{right} deleted"),
        *([(_chip(boundary, boundary), "word boundary")] if boundary else []),
    ]
    return tag("p", *(tag("span", chip, " ", meaning) for chip, meaning in entries), class_="legend")
