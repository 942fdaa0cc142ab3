"""Confidence of decoded words in the report: reliability diagram, and errors against coverage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arcuate.files import finite_int, finite_number
from arcuate.insight.charts import curves
from arcuate.insight.charts.curves import Curve, Line, ValueAxis
from arcuate.insight.charts.formats import count, percent
from arcuate.insight.render import Figure, LegendEntry, Measured, make_figure
from arcuate.insight.report.run_data import RunData

_Points = list[tuple[float, float]]


@dataclass(frozen=True)
class _Bin:
    confidence: float  # mean
    accuracy: float
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson 1927)."""
        z2 = 1.96**2
        centre = (self.accuracy + z2 / (2 * self.n)) / (1 + z2 / self.n)
        spread = math.sqrt(z2 * (self.accuracy * (1 - self.accuracy) / self.n + z2 / (4 * self.n**2)))
        half = spread / (1 + z2 / self.n)
        return max(0.0, centre - half), min(1.0, centre + half)


def confidence_section(data: RunData) -> Measured | None:
    """Calibration of the word confidences of the latest decoding; None if it was not measured."""
    measured = data.words.summary.get("confidence") if data.words else None
    if not isinstance(measured, Mapping) or not isinstance(measured.get("words"), Mapping):
        return None
    words = measured["words"]
    ece, auroc, n = (finite_number(words.get(name)) for name in ("ece", "auroc", "n"))
    reliability, risk = _reliability_bins(words.get("bins")), _pairs(words.get("risk_coverage"))
    if ece is None or n is None or not reliability:
        return None
    ranking = (
        ""
        if auroc is None
        else f"; a correct word has a higher confidence than an incorrect one in {percent(auroc)} of pairs (AUROC)"
    )
    lead = (
        f"Confidence is the probability that a decoded word is correct. Over {count(n)} words it differs from the"
        f" share of correct words by {percent(ece)} on average (ECE){ranking}. {_accepted_text(measured)}"
    )
    return Measured(lead, tuple(_figures(reliability, risk)))


def _accepted_text(measured: Mapping[str, Any]) -> str:
    share, accuracy = (finite_number(measured.get(name)) for name in ("accepted_share", "accepted_accuracy"))
    target = finite_number(measured.get("target_accuracy", measured.get("promised")))  # name in earlier versions
    if share is None or accuracy is None or target is None:
        return ""
    return (
        f"{percent(share)} of the words are accepted, because their confidence is above the threshold for a target"
        f" accuracy of {percent(target)}; {percent(accuracy)} of these are correct."
    )


def _figures(reliability: Sequence[_Bin], risk: _Points) -> list[Figure]:
    share = ValueAxis(percent=True, domain=(0.0, 1.04))  # room for the dots at 100 %
    diagonal = Line("perfect calibration", "ink", Curve.through([(0.0, 0.0), (100.0, 1.0)]), dash=True)
    low, high = zip(*(b.interval for b in reliability), strict=True)
    steps, accuracy = tuple(100 * b.confidence for b in reliability), tuple(b.accuracy for b in reliability)
    found = Line("words", "blue", Curve(steps, accuracy, low, high, 0), dots=True)
    chart = curves.line_chart(
        [diagonal, found],
        share,
        title="Accuracy of words by confidence",
        label="Reliability diagram: "
        + ", ".join(f"{b.confidence:.0%} confidence {b.accuracy:.0%} correct" for b in reliability),
        x_title="confidence, %",
    )
    legend = [
        LegendEntry("words in ten bins, 95\u202f% interval", "blue", "dot"),
        LegendEntry("perfect calibration", "ink", "limit"),
    ]
    figures = [make_figure(chart, caption="Below the dashed line, confidences are too high.", legend=legend)]
    if risk:
        line = Line("wrong words", "orange", Curve.through((100 * x, y) for x, y in risk))
        chart = curves.line_chart(
            [line],
            ValueAxis(percent=True),
            title="Wrong words among the most confident",
            label=f"From {risk[0][1]:.1%} wrong at {risk[0][0]:.0%} coverage to {risk[-1][1]:.1%} of all words.",
            x_title="coverage, % of words",
        )
        figures.append(make_figure(chart, caption="Error rate if only the most confident share of words is kept."))
    return figures


def _reliability_bins(bins: Any) -> list[_Bin]:
    """The bins with words; [] for anything else a file may contain."""
    found: list[_Bin] = []
    for row in bins if isinstance(bins, list) else ():
        n = finite_int(row.get("n")) if isinstance(row, Mapping) else None
        if n is not None and n > 0:
            confidence, accuracy = finite_number(row.get("confidence")), finite_number(row.get("accuracy"))
            if confidence is not None and accuracy is not None and 0.0 <= accuracy <= 1.0:
                found.append(_Bin(confidence, accuracy, n))
    return found


def _pairs(curve: Any) -> _Points:
    pairs = [tuple(map(finite_number, p)) for p in curve if isinstance(p, list)] if isinstance(curve, list) else []
    return [(p[0], p[1]) for p in pairs if len(p) == 2 and p[0] is not None and p[1] is not None]
