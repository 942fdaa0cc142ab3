"""Code shared by all charts: their type, title, size, colours and tooltips, and the form for notebooks."""

import json
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from arcuate.evaluation.charts import theme
from arcuate.evaluation.charts.theme import colour

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
    specs = []
    for i, chart in enumerate(charts):
        spec = chart.to_dict(validate=False)
        del spec["config"], spec["$schema"]
        spec["width"] = spec["width"] if isinstance(spec.get("width"), int) else 560
        specs.append(_standalone(spec, i))
    whole = specs[0]
    if len(specs) > 1:  # parameters are declared at the top
        whole = {"params": [p for spec in specs for p in spec.pop("params", ())], "vconcat": specs}
    text = json.dumps({**whole, "config": theme.config(legend=True)})
    return alt.Chart.from_dict(json.loads(theme.resolve(text, theme.DARK if dark else theme.LIGHT)))


def _standalone(value: Any, number: int) -> Any:
    """A part of a specification without the parameters that a page sets, and with unique names."""
    if isinstance(value, list):
        return [_standalone(v, number) for v in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _standalone(v, number) for key, v in value.items() if key != "values"}
    if "values" in value:
        kept["values"] = value["values"]
    if "transform" in kept:
        kept["transform"] = [t for t in kept["transform"] if "hidden" not in str(t.get("filter", ""))]
    if "params" in kept:
        kept["params"] = [
            {**p, "name": f"{p['name']}{number}"} if p["name"] == "zoom" else p
            for p in kept["params"]
            if p["name"] != "hidden"
        ]
    return kept


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
