"""Curves of one run: quantities over training steps, the calibration curve, and the confidence of decoded words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from arcuate.evaluation.floor import read_floor
from arcuate.files import finite_int, finite_number, read_json
from arcuate.insight.charts import curves
from arcuate.insight.charts.curves import Curve, Line, ValueAxis, curve_of
from arcuate.insight.charts.formats import MISSING, confidence_text, count, percent, split_name
from arcuate.insight.render import Figure, LegendEntry, Measured, line_figure, make_figure
from arcuate.insight.run_data import Results, RunData
from arcuate.progress import counted

_VALIDATION_COLOURS = ("blue", "orange", "purple")


def learning_curves(data: RunData, results: Results | None) -> list[Figure]:
    """The charts for which the log has values."""
    train, lr, session_lr = (curve_of(data.training, key) for key in ("loss", "lr", "lr_session"))
    losses = [Line("training", "train", train), *_validation_lines(data, "loss")]
    rates = [Line("all weights", "blue", lr), Line("session layers", "orange", session_lr)]
    if session_lr.median == lr.median:
        rates = [Line("all weights, including session layers", "blue", lr)]
    figures = (
        _figure(data, "Loss", losses, curves.loss_axis(_values(losses))),
        _error_figure(data, results),
        _figure(data, "Word error rate", _validation_lines(data, "wer"), ValueAxis(percent=True)),
        _figure(data, "Learning rate", rates, ValueAxis()),
        _gradient_figure(data),
    )
    return [figure for figure in figures if figure]


def _error_figure(data: RunData, results: Results | None) -> Figure | None:
    lines, best = _validation_lines(data, "per"), data.best
    if best is None:
        return _figure(data, data.rate_title, lines, ValueAxis(percent=True))
    y = ValueAxis(percent=True)
    entries = [LegendEntry(f"best, step {count(best.step)}", "blue", "ring")]
    layers = curves.best_mark(best.step, best.rate, y, float(data.last_step or 1), max([*_values(lines), best.rate]))
    measured = read_floor(data.run, results.split if results else "val")
    if measured is not None and (floor := measured.per) is not None:
        name = f"floor without neural information, {percent(floor)}"
        entries.append(LegendEntry(name, "ink", "limit"))
        layers = [*layers, curves.limit_rule(floor, y, name)]
    return _figure(data, data.rate_title, lines, y, layers, entries)


def _gradient_figure(data: RunData) -> Figure | None:
    norms = curve_of(data.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > curves.SMALLEST]
    if not positive:
        return None
    limit = (data.recipe.train.clip_norm if data.recipe else None) or 0.0
    clipped = limit > curves.SMALLEST
    y = ValueAxis(log=True, domain=curves.log_domain([*positive, *([limit] if clipped else [])]))
    lines = [Line("before clipping" if clipped else "not clipped", "train", norms)]
    entries = [LegendEntry("maximum", "train", "band")]
    entries += [LegendEntry(f"clipped to {limit:g}", "ink", "limit")] if clipped else []
    layers = [curves.limit_rule(limit, y, f"clipped to {limit:g}")] if clipped else []
    return _figure(data, "Gradient norm", lines, y, layers, entries)


def _validation_lines(data: RunData, quantity: str) -> list[Line]:
    splits = zip(_VALIDATION_COLOURS, data.validation.items(), strict=False)
    return [Line(split_name(split), colour, curve_of(rows, quantity)) for colour, (split, rows) in splits]


def _values(lines: Sequence[Line]) -> list[float]:
    return [v for line in lines for v in line.curve.values]


def _figure(
    data: RunData,
    title: str,
    lines: Sequence[Line],
    y: ValueAxis,
    layers: Sequence[Any] = (),
    entries: Sequence[LegendEntry] = (),
) -> Figure | None:
    """The lines that have values with their legend; `layers` and `entries` are added after them."""
    values, shown = _values(lines), [line for line in lines if line.curve.values]
    if not values:
        return None
    bounds = [percent(v) if y.percent else f"{v:.3g}" for v in (min(values), max(values))]
    n_missing = sum(line.curve.n_missing for line in lines)
    return line_figure(
        shown,
        y,
        entries=entries,
        caption=f"{counted(n_missing, 'logged value')} not finite; shown as gaps." if n_missing else None,
        title=title,
        label=f"{title} over steps; lowest {bounds[0]}, highest {bounds[1]}",
        last=float(data.last_step or 1),
        layers=layers,
    )


# --- Calibration: error rate against the number of calibration sentences ---------------------------------


def read_calibration(data: RunData) -> Measured | None:
    """The curve that `arcuate calibrate` writes into a run folder; None for other runs."""
    if not data.run.calibration_file.is_file():
        return None
    calibration = read_json(data.run.calibration_file)
    rows = calibration.get("curve")
    points = [
        (sentences, rate, finite_number(row.get("low")), finite_number(row.get("high")), row.get("n_trials"))
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping)
        and (sentences := finite_int(row.get("sentences"))) is not None
        and (rate := finite_number(row.get("per"))) is not None
    ]
    points.sort(key=lambda point: point[0])
    session = calibration.get("session", MISSING)
    lead = (
        f"Calibrated to session {session} from {calibration.get('parent', MISSING)} with"
        f" {counted(finite_int(calibration.get('sentences')) or 0, 'sentence')}; the session layer was initialised"
        f" from {calibration.get('initialised_from', MISSING)}."
    )
    if not points:
        return Measured(lead)
    per, (first, last) = tuple(rate for _, rate, *_ in points), (points[0], points[-1])
    low, high = (tuple(point[i] for point in points) for i in (2, 3))
    measured_on = counted(finite_int(last[4]) or 0, "sentence")
    chart = curves.line_chart(
        [Line("error rate", "blue", Curve(tuple(float(point[0]) for point in points), per, low, high, 0), dots=True)],
        ValueAxis(percent=True),
        title="Error rate on the rest of the session",
        label=f"From {percent(per[0])} with {first[0]} sentences to {percent(per[-1])} with {last[0]}.",
        x_title="calibration sentences",
    )
    caption = f"Measured on the {measured_on} after the calibration block; the band is the 95 % interval."
    without = f"; {percent(per[0])} without" if first[0] == 0 and len(points) > 1 else ""
    headline = (
        f"{data.rate_title} **{percent(per[-1])}**{confidence_text((low[-1], high[-1]))} on {measured_on} of {session},"
        f" after calibration with {counted(last[0], 'sentence')}{without}."
    )
    table = [(n, percent(p), MISSING if a is None else f"{percent(a)} – {percent(b)}") for n, p, a, b, _ in points]
    head = "sentences", "error rate", "95 % interval"
    return Measured(lead, (make_figure(chart, caption=caption),), head, tuple(table), headline)


# --- Confidence of decoded words: reliability diagram, and errors against coverage -----------------------


class _Bin(NamedTuple):
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


def confidence_section(decoded: Results | None) -> Measured | None:
    """Calibration of the word confidences of the latest decoding; None if it was not measured."""
    measured = decoded.summary.get("confidence") if decoded else None
    if not isinstance(measured, Mapping) or not isinstance(measured.get("words"), Mapping):
        return None
    words = measured["words"]
    ece, auroc, n = (finite_number(words.get(name)) for name in ("ece", "auroc", "n"))
    reliability, risk = _reliability_bins(words.get("bins")), _pairs(words.get("risk_coverage"))
    if ece is None or n is None or not reliability:
        return None
    ranking = f"; a correct word has a higher confidence than an incorrect one in {percent(auroc)} of pairs (AUROC)"
    lead = (
        f"Confidence is the probability that a decoded word is correct. Over {count(n)} words it differs from the"
        f" share of correct words by {percent(ece)} on average (ECE){'' if auroc is None else ranking}."
    )
    share, accuracy, target = (
        finite_number(measured.get(name)) for name in ("accepted_share", "accepted_accuracy", "target_accuracy")
    )
    if share is not None and accuracy is not None and target is not None:
        lead += (
            f" {percent(share)} of the words are accepted, because their confidence is above the threshold for a"
            f" target accuracy of {percent(target)}; {percent(accuracy)} of these are correct."
        )
    figures = [_reliability_figure(reliability), *([_risk_figure(risk)] if risk else [])]
    return Measured(lead, tuple(figures))


def _reliability_figure(bins: Sequence[_Bin]) -> Figure:
    diagonal = Line("perfect calibration", "ink", Curve.through([(0.0, 0.0), (100.0, 1.0)]), dash=True)
    low, high = zip(*(b.interval for b in bins), strict=True)
    found = Curve(tuple(100 * b.confidence for b in bins), tuple(b.accuracy for b in bins), low, high, 0)
    texts = ", ".join(f"{b.confidence:.0%} confidence {b.accuracy:.0%} correct" for b in bins)
    chart = curves.line_chart(
        [diagonal, Line("words", "blue", found, dots=True)],
        ValueAxis(percent=True, domain=(0.0, 1.04)),  # room for the dots at 100 %
        title="Accuracy of words by confidence",
        label=f"Reliability diagram: {texts}",
        x_title="confidence, %",
    )
    legend = [
        LegendEntry("words in ten bins, 95\u202f% interval", "blue", "dot"),
        LegendEntry("perfect calibration", "ink", "limit"),
    ]
    return make_figure(chart, caption="Below the dashed line, confidences are too high.", legend=legend)


def _risk_figure(risk: Sequence[tuple[float, float]]) -> Figure:
    chart = curves.line_chart(
        [Line("wrong words", "orange", Curve.through((100 * x, y) for x, y in risk))],
        ValueAxis(percent=True),
        title="Wrong words among the most confident",
        label=f"From {risk[0][1]:.1%} wrong at {risk[0][0]:.0%} coverage to {risk[-1][1]:.1%} of all words.",
        x_title="coverage, % of words",
    )
    return make_figure(chart, caption="Error rate if only the most confident share of words is kept.")


def _reliability_bins(bins: Any) -> list[_Bin]:
    """The bins with words; [] for anything else a file may contain."""
    rows = [row for row in bins if isinstance(row, Mapping)] if isinstance(bins, list) else []
    found = [[finite_number(row.get(key)) for key in ("confidence", "accuracy", "n")] for row in rows]
    return [
        _Bin(confidence, accuracy, int(n))
        for confidence, accuracy, n in found
        if confidence is not None and accuracy is not None and 0.0 <= accuracy <= 1.0 and n is not None and n > 0
    ]


def _pairs(curve: Any) -> list[tuple[float, float]]:
    pairs = [tuple(map(finite_number, p)) for p in curve if isinstance(p, list)] if isinstance(curve, list) else []
    return [(p[0], p[1]) for p in pairs if len(p) == 2 and p[0] is not None and p[1] is not None]
