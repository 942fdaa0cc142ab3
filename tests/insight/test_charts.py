"""Charts outside a page: what notebooks get."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert

from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.insight.charts.base import for_notebook
from arcuate.insight.charts.curves import (
    Line,
    ValueAxis,
    best_mark,
    line_chart,
    plot_curves,
    thin_curve,
)
from arcuate.insight.charts.formats import short_session_names
from arcuate.insight.charts.images import pool
from arcuate.insight.charts.plots import Rate, session_chart
from arcuate.insight.charts.theme import DARK, LIGHT, colour, resolve
from arcuate.insight.compare import compare
from arcuate.insight.render import environment, make_figure, standalone_svg
from support.fabricate_runs import make_run


def draw(chart: Any) -> str:
    """The chart drawn by Vega; it has no colour variables left, which only a page defines."""
    svg = str(vl_convert.vegalite_to_svg(chart.to_dict()))
    assert "var(--" not in svg and "NaN" not in svg
    return svg


def test_runs_diagnoses_and_comparisons_are_plotted(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", per=0.3), make_run(tmp_path / "b", ["schedule.peak_lr=0.001"], per=0.2, seed=1)
    svg = draw(plot_curves(a))
    assert "PER on validation" in svg and "Training loss" in svg
    assert all(f">{name}</text>" in draw(plot_curves(a, b)) for name in "ab")  # the legend
    assert "best 30.2" in draw(diagnose(a.path).plot())
    assert "Difference from a" in draw(compare(a, b).plot())


def test_a_run_without_a_log_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    run.metrics_file.write_text("")
    with pytest.raises(UserError, match="nothing to plot"):
        plot_curves(run)


def test_light_and_dark_charts_differ_in_colours_only() -> None:
    lines = [Line("a", "blue", thin_curve(range(20), np.linspace(1, 0.1, 20).tolist()))]
    chart = line_chart(lines, ValueAxis(percent=True), title="t", label="l")
    light, dark = (json.dumps(for_notebook(chart, dark=dark).to_dict()) for dark in (False, True))
    assert LIGHT["blue"] in light and DARK["blue"] in dark
    for name in sorted(LIGHT, key=lambda n: -len(n)):
        light, dark = light.replace(LIGHT[name], name), dark.replace(DARK[name], name)
    assert light == dark


def test_palettes_have_the_same_names_and_unknown_ones_are_refused() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert resolve(f"fill: {colour('teal')}") == f"fill: {LIGHT['teal']}"
    with pytest.raises(KeyError):
        colour("mauve")


def test_gaps_and_lone_points_are_drawn() -> None:
    values = [1.0, None, 0.5, None, 0.25, 0.2]
    lines = [Line("a", "blue", thin_curve(range(6), values))]
    figure = make_figure(line_chart(lines, ValueAxis(), title="t", label="l"))
    rows = figure.spec["data"]["values"]
    assert [row["step"] for row in rows if row.get("dot")] == [0.0, 2.0]


def test_dots_are_drawn_on_their_own_line_only() -> None:
    points = thin_curve([0, 1, 2], [0.0, 0.5, 1.0])
    lines = [Line("diagonal", "ink", points, dash=True), Line("words", "blue", points, dots=True)]
    spec = make_figure(line_chart(lines, ValueAxis(), title="t", label="l")).spec
    assert {row["series"] for row in spec["data"]["values"] if row.get("dot")} == {"words"}


def test_labels_of_steps_are_above_the_chart_and_joined_at_one_step() -> None:
    lines = [Line("a", "blue", thin_curve([0, 100], [1.0, 0.5]))]
    marks = [(50, "exploded"), (50, "collapsed"), (10, "degraded")]
    svg = standalone_svg(line_chart(lines, ValueAxis(), title="t", label="l", marks=marks))
    heights = re.findall(r"translate\([\d.]+,(-?[\d.]+)\)[^>]*>([^<]* from [^<]*)<", svg)
    assert [text for _, text in heights] == ["exploded, collapsed from 50", "degraded from 10"]
    assert all(float(height) < 0 for height, _ in heights)


@pytest.mark.parametrize(("domain", "most"), [((0.2, 1.0), 9), ((0.1, 1e5), 7)])
def test_logarithmic_axes_have_few_lines(domain: tuple[float, float], most: int) -> None:
    values = [*domain, domain[0] * 2]
    lines = [Line("a", "blue", thin_curve([0, 1, 2], values))]
    y = ValueAxis(log=True, domain=domain)
    svg = standalone_svg(line_chart(lines, y, title="t", label="l"))
    grids = [group.count("<line") for group in re.findall(r"role-axis-grid.*?</g>", svg, re.S)]
    assert grids and 2 <= max(grids) <= most


def test_linked_charts_know_the_session() -> None:
    sessions = ["sim.2023.08.11", "sim.2023.08.13"]
    rates = [Rate(s, 0.1 * i, 0.0, 0.3) for i, s in enumerate(sessions, start=1)]
    chart = session_chart(rates, short_session_names(sessions), title="t", label="l", overall=0.15)
    spec = make_figure(chart).spec
    assert {param["name"] for param in spec["params"]} == {"session"}
    assert "session === ''" in json.dumps(spec)


def test_session_labels_are_short_and_unique() -> None:
    assert short_session_names(["t15.a", "t15.b"]) == {"t15.a": "a", "t15.b": "b"}
    assert short_session_names(["t12.a", "t15.a"]) == {"t12.a": "t12.a", "t15.a": "t15.a"}
    long = ["x" * 20 + "1", "x" * 20 + "2"]
    assert len(set(short_session_names(long).values())) == 2


def test_pooling_keeps_the_mean() -> None:
    values = np.arange(60.0).reshape(6, 10)
    pooled = pool(values, 3, 5)
    assert pooled.shape == (3, 5)
    assert pooled.mean() == pytest.approx(values.mean())


def test_steps_beyond_the_integers_of_javascript_are_drawn() -> None:
    lines = [Line("a", "blue", thin_curve([1.0, 5.7e22], [1.0, 0.5]))]
    y = ValueAxis(percent=True)
    layers, marks = best_mark(5.7e22, 0.5, y, 5.7e22, 1.0), [(57 * 10**21, "event")]
    chart = line_chart(lines, y, title="t", label="l", layers=layers, marks=marks)
    assert "event" in standalone_svg(chart)


def test_marked_text_is_escaped() -> None:
    template = environment().from_string("{{ text|marked }}")
    shown = template.render(text="try `a<b`, train.clip_norm=<i> or **5 %** <u>")
    assert shown == ("try <code>a&lt;b</code>, <code>train.clip_norm=&lt;i&gt;</code> or <b>5\u202f%</b> &lt;u&gt;")
