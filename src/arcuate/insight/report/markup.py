"""HTML and SVG as nested calls. Text is escaped unless it is already markup, so nothing in a run folder can
become part of the page by accident."""

import html
import math
import re
from importlib.resources import files
from typing import Any

from arcuate.data.alphabet import SILENCE_NAME

# What no page should carry: control characters, lone surrogates, marks that reverse the reading direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Html(str):
    """A string that is markup already."""

    __slots__ = ()


def escape(text: object) -> Html:
    if isinstance(text, Html):
        return text
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True))


def join(parts: "list[Html] | tuple[Html, ...]", between: str = "") -> Html:
    return Html(between.join(parts))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. `class_` and `view_box` style names become `class` and `view-box`; None leaves one out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children if child is not None)
    return Html(f"<{name}{pairs}>{inner}</{name}>")


def svg(width: float, height: float, label: str, *children: object, style: str | None = None) -> Html:
    """A picture that scales with its column; `label` is what a screen reader says of it."""
    size = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *children, viewBox=size, role="img", aria_label=label, class_="plot", style=style)


def figure(
    title: str, drawing: Html, caption: object = None, legend: Html | None = None, wide: bool = False
) -> Html:
    """A titled drawing; a wide one scrolls sideways on a narrow screen instead of shrinking past reading."""
    body = (
        tag("div", drawing, class_="scroll", tabindex="0", role="group", aria_label=title)
        if wide
        else drawing
    )
    return tag(
        "figure",
        tag("h3", title),
        legend,
        body,
        tag("figcaption", caption) if caption else None,
    )


def legend(*entries: tuple[str, str]) -> Html:
    """Entries of (class of the mark, its meaning)."""
    marks = [tag("span", tag("i", class_=f"mark {kind}"), text) for kind, text in entries]
    return tag("p", *marks, class_="legend")


def table(head: tuple[str, ...], rows: list[tuple[object, ...]], class_: str | None = None) -> Html:
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("table", top, tag("tbody", *body), class_=class_)


def pairs(rows: list[tuple[str, object]]) -> Html:
    """Names and values in two columns."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


# The frame of every page: one file, its styles within it, no scripts, nothing loaded.

# Even if markup slipped through somewhere, a browser would neither run it nor fetch anything for it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def document(title: str, body: Html, *styles: str) -> str:
    """A whole page; `styles` are further style files beside the common one."""
    style = "".join(read_style(name) for name in ("style.css", *styles))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def read_style(name: str) -> str:
    return (files("arcuate") / "insight" / "report" / name).read_text("utf-8")


# Numbers as a reader wants them: per cent with one decimal, thousands apart, times in words.

MISSING = "–"
SPLITS = {"train": "training", "val": "validation", "dev": "development", "test": "test"}


def number(value: Any) -> float | None:
    """A number that can be drawn, or None for everything else that may stand in a file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        plain = float(value)
    except OverflowError:
        return None
    return plain if math.isfinite(plain) and abs(plain) < 1e100 else None


def whole(value: Any) -> int | None:
    plain = number(value)
    return None if plain is None else int(plain)


def percent(rate: Any, digits: int = 1) -> str:
    plain = number(rate)
    return MISSING if plain is None else f"{100 * plain:.{digits}f}\u202f%"


def count(value: Any) -> str:
    plain = number(value)
    return MISSING if plain is None else f"{round(plain):,}"


def counted(value: int, noun: str) -> str:
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def millions(value: Any) -> str:
    """A parameter count in three digits."""
    plain = number(value)
    if plain is None:
        return MISSING
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if plain >= size:
            return f"{plain / size:.3g}\u202f{unit}"
    return f"{plain:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{1000 * seconds:.0f}\u202fms"
    if seconds < 90:
        return f"{seconds:.0f}\u202fs"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f}\u202fmin"
    hours, rest = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours}\u202fh {rest}\u202fmin"
    return f"{hours / 24:.1f} days"


def short(value: float) -> str:
    """A tick label: 0.003, 12, 20k."""
    if value and abs(value) >= 10_000:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:g}{unit}"
    if value and abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def split_name(split: str) -> str:
    return SPLITS.get(split, split)


# Phonemes as a reader meets them: in articulatory order, with a word in which each is heard.

# Neighbours are alike: front to back for vowels, voiceless beside voiced for consonants.
GROUPS: dict[str, tuple[str, ...]] = {
    "vowels": ("IY", "IH", "EY", "EH", "AE", "AH", "ER", "AA", "AO", "OW", "UH", "UW", "AY", "AW", "OY"),
    "stops": ("P", "B", "T", "D", "K", "G"),
    "affricates": ("CH", "JH"),
    "fricatives": ("F", "V", "TH", "DH", "S", "Z", "SH", "ZH", "HH"),
    "nasals": ("M", "N", "NG"),
    "approximants": ("W", "R", "L", "Y"),
    "silence": (SILENCE_NAME,),
}
ORDER: tuple[str, ...] = tuple(name for group in GROUPS.values() for name in group)

HEARD_IN: dict[str, str] = {
    "IY": "see", "IH": "sit", "EY": "say", "EH": "bed", "AE": "cat", "AH": "cup", "ER": "bird",
    "AA": "hot", "AO": "law", "OW": "go", "UH": "book", "UW": "food", "AY": "my", "AW": "now",
    "OY": "boy", "P": "pen", "B": "ball", "T": "tea", "D": "day", "K": "key", "G": "get",
    "CH": "chair", "JH": "jam", "F": "fish", "V": "very", "TH": "thin", "DH": "this", "S": "sun",
    "Z": "zoo", "SH": "she", "ZH": "vision", "HH": "hat", "M": "man", "N": "no", "NG": "sing",
    "W": "we", "R": "red", "L": "leg", "Y": "yes",
}  # fmt: skip
BOUNDARY = "|"  # how silence, the boundary between words, is drawn where space is short


def spoken(name: str) -> str:
    """`T (tea)`; silence and names outside the alphabet stand for themselves."""
    if name == SILENCE_NAME:
        return "silence"
    return f"{name} ({HEARD_IN[name]})" if name in HEARD_IN else name


def brief(name: str) -> str:
    return BOUNDARY if name == SILENCE_NAME else name
