"""Robustness of the verdicts: labelled logs thinned, truncated, with noise, rescaled, or without some quantities.

    python benchmarks/doctor_robustness.py --logs /path/to/logs [--only NAME…]

No modification should change the verdict (a log without its last evaluation, with every second one, with one per cent
of noise, with another step unit, without gradient norms). Each modified log is written as a file and diagnosed again.
Prints how many verdicts the label still lists, how many are unchanged, and every run whose verdict changed.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from doctor_accuracy import Case, normalised

from arcuate.doctor import diagnose
from arcuate.doctor.formats import read_logs
from arcuate.doctor.log_table import Series, TrainingLog

Change = Callable[[TrainingLog], TrainingLog]
PARTS = ("per", "val_loss", "train_loss", "grad_norm", "lr")
HELD = ("per", "val_loss")


def each(log: TrainingLog, change: Callable[[Series], Series], parts: tuple[str, ...] = PARTS) -> TrainingLog:
    changed: dict[str, Any] = {p: change(s) for p in parts if len(s := getattr(log, p))}
    return replace(log, **changed)


def chosen(series: Series, kept: np.ndarray) -> Series:
    return Series(series.steps[kept], series.values[kept], series.unit)


def every(n: int) -> Change:
    """Every n-th evaluation and the last one; a log with too few of them is left unchanged."""

    def thin(series: Series) -> Series:
        return chosen(series, (len(series) - 1 - np.arange(len(series))) % n == 0)

    return lambda log: each(log, thin, HELD) if len(log.judged) >= 8 * n else log


def shorter(share: float, least: int) -> Change:
    """Without its last evaluations; a log that would become too short is left unchanged."""

    def cut(log: TrainingLog) -> TrainingLog:
        n = max(least, round(share * len(log.judged)))
        if len(log.judged) - n < 8:
            return log
        end = log.judged.steps[-1 - n]
        return each(log, lambda s: s.between(-np.inf, end))

    return cut


def noisy(sd: float, seed: int) -> Change:
    def shake(log: TrainingLog) -> TrainingLog:
        draw = np.random.default_rng(seed)
        shaken = lambda s: Series(s.steps, s.values * (1 + sd * draw.standard_normal(len(s))), s.unit)
        return each(log, shaken, ("per",))

    return shake


def scaled(factor: float) -> Change:
    return lambda log: each(log, lambda s: Series(s.steps, s.values * factor, s.unit), ("per",))


def stretched(factor: float) -> Change:
    return lambda log: each(log, lambda s: Series(np.round(s.steps * factor), s.values, s.unit))


def numbered(log: TrainingLog) -> TrainingLog:
    """Steps replaced by the numbers 0, 1, 2… of the evaluations, on all axes."""
    at = log.judged.steps
    if len(at) < 2:
        return log
    return each(log, lambda s: Series(np.interp(s.steps, at, np.arange(len(at))).round(3), s.values, s.unit))


def rounded(digits: int) -> Change:
    return lambda log: each(log, lambda s: Series(s.steps, s.values.round(digits), s.unit), ("per",))


def without(*parts: str) -> Change:
    gone: dict[str, Any] = dict.fromkeys(parts, Series())
    return lambda log: replace(log, **gone)


def headless(log: TrainingLog) -> TrainingLog:
    """Without the first evaluation, that of the untrained model."""
    return each(log, lambda s: chosen(s, np.arange(len(s)) > 0), HELD) if len(log.judged) > 8 else log


def last_raised(share: float) -> Change:
    """With a slightly worse last evaluation."""

    def raised(series: Series) -> Series:
        values = series.values.copy()
        values[-1] *= 1 + share
        return Series(series.steps, values, series.unit)

    return lambda log: each(log, raised, ("per",)) if len(log.per) > 8 else log


CHANGES: dict[str, Change] = {
    "as it is": lambda log: log,
    "every 2nd evaluation": every(2),
    "every 3rd evaluation": every(3),
    "every 5th evaluation": every(5),
    "without the last": shorter(0, 1),
    "without the last 3": shorter(0, 3),
    "without the last 5 %": shorter(0.05, 1),
    "without the last 10 %": shorter(0.1, 1),
    "without the first": headless,
    "noise 0.5 %": noisy(0.005, 1),
    "noise 1 %": noisy(0.01, 2),
    "noise 2 %": noisy(0.02, 3),
    "last one 3 % worse": last_raised(0.03),
    "PER 3 % higher": scaled(1.03),
    "PER 3 % lower": scaled(0.97),
    "PER 8 % higher": scaled(1.08),
    "PER 8 % lower": scaled(0.92),
    "3 digits": rounded(3),
    "2 digits": rounded(2),
    "half the steps": stretched(0.5),
    "twice the steps": stretched(2),
    "evaluations numbered": numbered,
    "no gradient norm": without("grad_norm"),
    "no training loss": without("train_loss"),
    "no learning rate": without("lr"),
    "no validation loss": without("val_loss"),
    "loss alone": without("per", "grad_norm", "lr"),
    "PER alone": without("val_loss", "train_loss", "grad_norm", "lr"),
}


def write(log: TrainingLog, path: Path) -> None:
    """One row per step with all quantities logged at it."""
    names = dict(zip(PARTS, ("val/per", "val/loss", "train/loss", "grad_norm", "lr"), strict=True))
    rows: dict[float, dict[str, float]] = {}
    for part, name in names.items():
        series = getattr(log, part)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            rows.setdefault(step, {"step": step})[name] = value
    path.write_text("".join(json.dumps(rows[step]) + "\n" for step in sorted(rows)), "utf-8")


def study(cases: list[Case], names: list[str]) -> None:
    logs = [(case, read_logs(case.path).logs[0]) for case in cases]
    logs = [(case, log) for case, log in logs if len(log.judged) and np.all(np.diff(log.judged.steps) > 0)]
    before: dict[Path, str] = {}
    moved: list[str] = []
    print("| change | logs | listed verdict | same verdict | false alarms |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            right = same = alarms = n = 0
            for case, log in logs:
                changed = CHANGES[name](log)
                if (name != "as it is" and changed is log) or not len(changed.judged):
                    continue
                path = Path(folder) / "log.jsonl"
                write(changed, path)
                diagnosis = diagnose(path)
                before.setdefault(case.path, diagnosis.primary)
                n, right = n + 1, right + (diagnosis.primary in case.listed)
                same += diagnosis.primary == before[case.path]
                alarms += case.listed[0] == "healthy" and diagnosis.primary not in case.listed
                if diagnosis.primary != before[case.path]:
                    mark = "" if diagnosis.primary in case.listed else " (not listed)"
                    moved.append(
                        f"{case.path.name}, {name}: {diagnosis.primary} instead of {before[case.path]}{mark}"
                        f"; label {', '.join(case.listed)}; {diagnosis.evidence[0]}"
                    )
            print(f"| {name} | {n} | {right} | {same} | {alarms} |", flush=True)
    print("\n" + "\n".join(moved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES))
    options = parser.parse_args()
    study(normalised(options.logs), ["as it is", *(n for n in options.only if n != "as it is")])


if __name__ == "__main__":
    main()
