"""The theme of charts: the colours and fonts of the pages, which `live/page/theme.css` states, for Vega-Lite.

Charts name colours as CSS variables, so that one chart works on light and dark pages; `resolve` replaces them by the
values of one palette where no style sheet applies, as in a notebook.
"""

import re
from importlib.resources import files
from typing import Any

STYLE_SHEET = (files("arcuate") / "live" / "page" / "theme.css").read_text("utf-8")
LIGHT, DARK = (dict(re.findall(r"--([a-z-]+): (#\w+);", block)) for block in STYLE_SHEET.split("}")[:2])
_FONTS = dict(re.findall(r"--(serif|sans|mono): ([^;]+);", STYLE_SHEET))
SANS, MONO = _FONTS["sans"], _FONTS["mono"]
SERIES = ("blue", "orange", "purple", "teal", "gold", "train", "ink", "rose")  # colours of runs and groups, in order
_VARIABLE = re.compile(r"var\(--([a-z-]+)\)")


def colour(name: str) -> str:
    """A colour of the theme by name, as a CSS variable."""
    if name not in LIGHT:
        raise KeyError(name)
    return f"var(--{name})"


def resolve(text: str, palette: dict[str, str] = LIGHT) -> str:
    """Text with the colours of one palette in place of CSS variables."""
    return _VARIABLE.sub(lambda match: palette.get(match[1], match[0]), text)


def config(legend: bool) -> dict[str, Any]:
    """The Vega-Lite configuration; pages have legends of their own outside the charts."""
    ink, quiet, line = colour("ink"), colour("quiet"), colour("line")
    return {
        "font": SANS,
        "background": "transparent" if not legend else colour("paper"),
        "view": {"stroke": None},
        "axis": {
            "labelColor": ink, "labelFontSize": 12, "titleColor": quiet, "titleFontSize": 12,
            "titleFontWeight": "normal", "gridColor": line, "domainColor": quiet, "tickColor": quiet,
            "labelLimit": 260,
        },
        "axisX": {"grid": False, "titleAnchor": "end", "titlePadding": 8},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "legend": {"disable": not legend, "labelColor": ink, "titleColor": quiet, "orient": "top", "title": None},
        "title": {"color": ink, "font": SANS, "fontSize": 14, "anchor": "start"},
        "text": {"color": ink, "fontSize": 12},
    }  # fmt: skip
