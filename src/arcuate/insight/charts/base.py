"""Code shared by all charts: their type, title, size, colours and tooltips, and the form for notebooks."""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from arcuate.insight.charts import theme
from arcuate.insight.charts.theme import colour

if TYPE_CHECKING:
    import altair as alt

    Chart = alt.Chart | alt.LayerChart
else:
    Chart = Any

    class _Altair:
        """The module altair, imported with the first chart: commands that draw none start without it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("altair"), name)

    alt = _Altair()

HEIGHT = 260
_SIGNIFICANT_DIGITS = 6

Row = dict[str, Any]


def for_notebook(*charts: Chart, dark: bool = False) -> Any:
    """Stack charts vertically with the theme, their own legends and fixed colours, to be shown outside a page."""
    sized = [chart.properties(width=560) if chart.width == "container" else chart for chart in charts]
    whole = sized[0] if len(sized) == 1 else alt.vconcat(*sized)
    spec = json.dumps({**whole.to_dict(validate=False), "config": theme.config(legend=True)})
    return alt.Chart.from_dict(json.loads(theme.resolve(spec, theme.DARK if dark else theme.LIGHT)))


def rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def tooltips(*entries: tuple[str, str] | tuple[str, str, str]) -> list["alt.Tooltip"]:
    """Tooltip lines, each a field with its type, a title and, for numbers, a format."""
    return [alt.Tooltip(field, title=title, format=f[0] if f else alt.Undefined) for field, title, *f in entries]


def colours_by(field: str, names: Mapping[str, str]) -> "alt.Color":
    """Colour by the values of a field; `names` gives the colour of the theme for each."""
    return alt.Color(f"{field}:N").scale(domain=list(names), range=[colour(c) for c in names.values()])


def finish(chart: Any, title: str, label: str, height: int, **parameters: Any) -> Any:
    """Title, description for screen readers, size, and the parameters that the page sets."""
    params = [alt.param(name=name, value=value) for name, value in parameters.items()]
    sized = chart.properties(width="container", height=height, title=title, description=label)
    return sized.add_params(*params) if params else sized
