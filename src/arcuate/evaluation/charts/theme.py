"""The theme of all pages and charts: colours for light and dark screens, type, and the Vega-Lite configuration.

Charts name colours as CSS variables, so that one chart works on light and dark pages; `resolve` replaces them by the
values of one palette where no style sheet applies, as in a notebook. The hues stay distinguishable with a colour
vision deficiency, and pages mark every distinction by a shape, a sign or a label as well.
"""

import re
from typing import Any

LIGHT = {
    "paper": "#fcfbf8", "card": "#ffffff", "ink": "#1b1f26", "quiet": "#5a6270", "pale": "#83878e",
    "line": "#e3dfd6", "ground": "#f3f0e9", "blue": "#1d5fa6", "train": "#8a8f99", "orange": "#b4470b",
    "purple": "#8a3f86", "teal": "#0b7269", "gold": "#8a6100", "rose": "#b03a5b", "heat": "#12406e",
    "sub-ground": "#fce9de", "ins-ground": "#e1edf9", "del-ground": "#f5e6f4",
}  # fmt: skip
DARK = {
    "paper": "#14171c", "card": "#1b1f26", "ink": "#e9e7e1", "quiet": "#a0a8b5", "pale": "#757d89",
    "line": "#323843", "ground": "#20252d", "blue": "#79b3f0", "train": "#8d95a3", "orange": "#ff9a62",
    "purple": "#dd9ad8", "teal": "#4fc4b5", "gold": "#e0b04a", "rose": "#f08aa6", "heat": "#8cc4ff",
    "sub-ground": "#43291a", "ins-ground": "#1b344f", "del-ground": "#3f2640",
}  # fmt: skip
SERIES = ("blue", "orange", "purple", "teal", "gold", "train", "ink", "rose")  # colours of runs and groups, in order
SERIF = '"Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", Georgia, "Liberation Serif", serif'
SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, Inter, "Helvetica Neue", Arial, "Liberation Sans", sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace'
_VARIABLE = re.compile(r"var\(--([a-z-]+)\)")


def colour(name: str) -> str:
    """A colour of the theme by name, as a CSS variable."""
    if name not in LIGHT:
        raise KeyError(name)
    return f"var(--{name})"


def resolve(text: str, palette: dict[str, str] = LIGHT) -> str:
    """Text with the colours of one palette in place of CSS variables."""
    return _VARIABLE.sub(lambda match: palette.get(match[1], match[0]), text)


def style_sheet(switchable: bool = False) -> str:
    """The CSS variables for light and dark screens; if `switchable`, the attribute data-theme overrides the setting."""
    fonts = f"--serif: {SERIF}; --sans: {SANS}; --mono: {MONO};"
    dark = f"{{ {_declarations(DARK)} color-scheme: dark; }}"
    root = ":root:not([data-theme=light])" if switchable else ":root"
    return (
        f":root {{ {_declarations(LIGHT)} {fonts} color-scheme: light; }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {root} {dark} }}\n"
    ) + (f":root[data-theme=dark] {dark}\n" if switchable else "")


def _declarations(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in palette.items())


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
