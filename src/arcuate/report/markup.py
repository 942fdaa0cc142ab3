"""HTML and SVG as nested calls. Text is escaped unless it is already markup, so nothing in a run folder can
become part of the page by accident."""

import html
import re

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
