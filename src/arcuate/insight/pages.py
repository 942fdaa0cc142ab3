"""HTML and SVG as nested calls, and the skeleton shared by all pages.

Text is escaped unless it is already markup, so the contents of a run folder cannot become part of the page structure.
A page is one file with inline styles, without scripts and without external resources.
"""

import html
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

# Control characters, lone surrogates and bidirectional overrides are replaced.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")

# Second line of defence: if markup slipped through, the browser would neither run it nor load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

Section = tuple[str, str, "Html"]  # anchor, title, content


class Html(str):
    """A string that is already markup."""

    __slots__ = ()


def escape(text: object) -> Html:
    if isinstance(text, Html):
        return text
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True))


def join(*parts: Html | None) -> Html:
    return Html("".join(part for part in parts if part))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. `class_` becomes `class`, `text_anchor` becomes `text-anchor`; None values are omitted."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children if child is not None)
    return Html(f"<{name}{pairs}>{inner}</{name}>")


def muted(text: object) -> Html:
    """A paragraph in small grey type: a remark, or why a part of the page is missing."""
    return tag("p", text, class_="muted")


def notice(text: object) -> Html:
    return tag("p", text, class_="notice")


def figure(title: str, drawing: Html, caption: object = None, legend: Html | None = None, wide: bool = False) -> Html:
    """A titled drawing; a wide one scrolls sideways on a narrow screen instead of shrinking."""
    if wide:
        drawing = tag("div", drawing, class_="scroll", tabindex="0", role="group", aria_label=title)
    return tag("figure", tag("h3", title), legend, drawing, tag("figcaption", caption) if caption else None)


def legend(*entries: tuple[str, str]) -> Html:
    """Entries of (CSS class of the mark, meaning)."""
    marks = [tag("span", tag("i", class_=f"mark {kind}"), text) for kind, text in entries]
    return tag("p", *marks, class_="legend")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], class_: str | None = None) -> Html:
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("table", top, tag("tbody", *body), class_=class_)


def scroll_table(head: Sequence[str], rows: Iterable[Sequence[object]], class_: str | None = None) -> Html:
    return tag("div", table(head, rows, class_), class_="scroll")


def definition_list(rows: Iterable[tuple[str, object]]) -> Html:
    """Names and values in two columns."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))


def card(title: str, rows: Iterable[tuple[str, object]]) -> Html:
    return tag("section", tag("h3", title), definition_list(rows), class_="card")


def tile(name: str, value: object, *remarks: object, kind: str = "") -> Html:
    """One figure of the headline in a box."""
    return tag(
        "div",
        tag("p", name, class_="name"),
        tag("p", value, class_="value"),
        *(tag("p", remark, class_="below") for remark in remarks if remark),
        class_=f"tile {kind}".strip(),
    )


def page(title: str, header: Html, sections: Sequence[Section], footer: str, *styles: str) -> str:
    """A complete page with a table of contents; `styles` are additional style sheets."""
    links = [tag("a", heading, href=f"#{anchor}") for anchor, heading, _ in sections]
    bodies = [tag("section", tag("h2", heading), content, id=anchor) for anchor, heading, content in sections]
    nav = tag("nav", *links, aria_label="Sections")
    return document(title, join(header, nav, tag("main", *bodies), tag("footer", footer)), *styles)


def document(title: str, body: Html, *styles: str) -> str:
    style = "".join(read_style(name) for name in ("style.css", *styles))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def read_style(name: str) -> str:
    return (files("arcuate") / "insight" / "styles" / name).read_text("utf-8")
