"""Example decodings, phoneme by phoneme, with every error named by sign as well as by colour."""

from collections.abc import Sequence

from arcuate.data.alphabet import SILENCE_NAME
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.insight.report.evidence import Decoding, Evidence
from arcuate.insight.report.markup import BOUNDARY, Html, brief, counted, join, percent, spoken, tag

EACH = 4  # trials of each kind
MAX_TOKENS = 200  # of one decoding


def decodings(evidence: Evidence) -> Html:
    rows = evidence.results.decodings if evidence.results else ()
    groups = chosen(rows)
    if not groups:
        return tag("p", "The results hold no decodings.", class_="absent")
    scored = any(d.rate is not None for d in rows)
    parts: list[Html] = [
        key() if scored else tag("p", "No labels here: what was read, unmarked.", class_="absent")
    ]
    for title, members in groups:
        parts += [tag("h3", title), tag("ol", *(entry(d) for d in members), class_="decodings")]
    return join(parts)


def chosen(rows: Sequence[Decoding]) -> list[tuple[str, list[Decoding]]]:
    """Best, typical and worst trials, none twice; without labels the first ones."""
    scored = sorted((d for d in rows if d.rate is not None), key=difficulty)
    if not scored:
        return [("The first trials", list(rows[: 3 * EACH]))] if rows else []
    if len(scored) <= 3 * EACH:
        return [(f"All {counted(len(scored), 'trial')}, from best to worst", scored)]
    middle = (len(scored) - EACH) // 2
    return [
        ("Best: the lowest error rates, longer trials first", scored[:EACH]),
        ("Typical: around the median trial", scored[middle : middle + EACH]),
        ("Worst: the highest error rates", scored[::-1][:EACH]),
    ]


def difficulty(decoding: Decoding) -> tuple[float, int, str]:
    return decoding.rate or 0.0, -len(decoding.reference or ()), decoding.trial


def entry(decoding: Decoding) -> Html:
    known = [decoding.trial] if decoding.text else []
    known += [f"block {decoding.block}"] if decoding.block else []
    known += [f"flagged: {', '.join(decoding.flags)}"] if decoding.flags else []
    where = " · ".join(known)
    rate = tag("b", percent(decoding.rate)) if decoding.rate is not None else None
    said = tag("span", decoding.text or decoding.trial, class_="said")
    line = tag("p", said, tag("span", where, class_="where"), rate, class_="line")
    return tag("li", line, tag("p", *chips(decoding), class_="chips"))


def chips(decoding: Decoding) -> list[Html]:
    """One chip per aligned pair, words kept together by the spaces between them."""
    if decoding.reference is None:
        pairs = [(name, name) for name in decoding.hypothesis]
    else:
        pairs = align(decoding.reference, decoding.hypothesis)
    parts = [joined for pair in pairs[:MAX_TOKENS] for joined in (chip(*pair), Html(" "))]
    left = len(pairs) - MAX_TOKENS
    return [*parts, tag("span", f"… {left} more", class_="where")] if left > 0 else parts


def chip(said: str, read: str) -> Html:
    if said == read:
        return tag(
            "span",
            brief(said),
            class_="chip" + (" gap" if brief(said) == BOUNDARY else ""),
            title=spoken(said),
        )
    if said == INSERTED:
        return tag("ins", "+", brief(read), class_="chip ins", title=f"{spoken(read)} added")
    if read == DELETED:
        return tag("del", "−", brief(said), class_="chip del", title=f"{spoken(said)} missed")
    both = (brief(said), tag("i", "→"), tag("b", brief(read)))
    return tag("span", *both, class_="chip sub", title=f"{spoken(said)} read as {spoken(read)}")


def key() -> Html:
    """What the chips mean."""
    entries = (
        (chip("T", "T"), "correct"),
        (chip("T", "D"), "T read as D"),
        (chip(INSERTED, "T"), "T added"),
        (chip("T", DELETED), "T missed"),
        (chip(SILENCE_NAME, SILENCE_NAME), "boundary between words"),
    )
    return tag("p", *(tag("span", mark, " ", words) for mark, words in entries), class_="legend")
