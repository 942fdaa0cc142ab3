"""Example decodings, phoneme by phoneme, with every error marked by a symbol as well as a colour."""

from collections.abc import Sequence

from arcuate.data.alphabet import SILENCE_NAME
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.insight.pages.formatting import counted, percent
from arcuate.insight.pages.markup import Html, join, muted, tag
from arcuate.insight.report.phonemes import WORD_BOUNDARY, phoneme_symbol, with_example
from arcuate.insight.report.run_data import Decoding, RunData

_N_EACH = 4  # trials of each kind
_MAX_TOKENS = 200  # of one decoding


def decodings_section(data: RunData) -> Html:
    decodings = data.results.decodings if data.results else ()
    groups = _choose_examples(decodings)
    if not groups:
        return muted("The results contain no decodings.")
    labelled = any(d.rate is not None for d in decodings)
    parts: list[Html] = [_legend() if labelled else muted("No labels: decoded phonemes without error marks.")]
    for title, members in groups:
        parts += [tag("h3", title), tag("ol", *(_entry(d) for d in members), class_="decodings")]
    return join(parts)


def _choose_examples(decodings: Sequence[Decoding]) -> list[tuple[str, list[Decoding]]]:
    """Best, typical and worst trials without overlap; the first trials if there are no labels."""
    scored = sorted((d for d in decodings if d.rate is not None), key=_difficulty)
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


def _difficulty(decoding: Decoding) -> tuple[float, int, str]:
    return decoding.rate or 0.0, -len(decoding.reference or ()), decoding.trial


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


def _legend() -> Html:
    entries = (
        (_chip("T", "T"), "correct"),
        (_chip("T", "D"), "T decoded as D"),
        (_chip(INSERTED, "T"), "T inserted"),
        (_chip("T", DELETED), "T deleted"),
        (_chip(SILENCE_NAME, SILENCE_NAME), "word boundary"),
    )
    return tag("p", *(tag("span", chip, " ", meaning) for chip, meaning in entries), class_="legend")
