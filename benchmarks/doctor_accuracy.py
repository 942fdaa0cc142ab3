"""Accuracy of the doctor on labelled real logs, with confusion table and false alarms.

    python benchmarks/doctor_accuracy.py --logs /path/to/logs [--leave-out] [--json]

The folder holds labels.csv (file, dataset, primary, secondary, evidence) and runs/, raw/ with manifest.csv (file,
primary, secondary, role), and strangers/ with labels.csv: runs of public trainers with one known fault each. A verdict
is correct if it is the primary or a secondary verdict of the label. Runs whose labels have the same comment are similar
and form a group. `--leave-out` chooses the limits of the rules, from half to twice their values, on all groups but one,
and judges that one.

For strangers: is the first cause the fault, does it contradict it, does its advice harm, and how far is the first step
affected from the onset, as a share of the run?
"""

import argparse
import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.doctor import VERDICTS, Diagnosis, diagnose
from arcuate.doctor.diagnose import measure
from arcuate.doctor.formats import read_logs
from arcuate.doctor.rules import Limits, apply_rules
from arcuate.errors import UserError


@dataclass(frozen=True)
class Case:
    path: Path
    listed: tuple[str, ...]  # the label's primary, then its secondary verdicts
    group: str


@dataclass(frozen=True)
class Judged:
    case: Case
    verdict: str

    @property
    def right(self) -> bool:
        return self.verdict in self.case.listed


def normalised(logs: Path) -> list[Case]:
    with (logs / "labels.csv").open(encoding="utf-8", newline="") as file:
        return [
            Case(logs / r["file"], _listed(r), f"{r['dataset']} {r['evidence'].rpartition('|')[2].strip()}")
            for r in csv.DictReader(file)
        ]


def raw(logs: Path) -> list[Case]:
    """Every main file of raw/; files that belong together are one case."""
    cases: dict[Path, Case] = {}
    with (logs / "raw" / "manifest.csv").open(encoding="utf-8", newline="") as file:
        for r in csv.DictReader(file):
            path = logs / "raw" / r["file"]
            if r["role"] != "aux":
                cases[path] = Case(path, _listed(r), r["format"])
    return list(cases.values())


def _listed(row: dict[str, str]) -> tuple[str, ...]:
    return (row["primary"], *(v for v in row["secondary"].split(";") if v))


def judge(cases: Iterable[Case]) -> list[Judged]:
    judged = []
    for case in cases:
        try:
            judged.append(Judged(case, diagnose(case.path).primary))
        except UserError as error:
            print(f"rejected: {case.path.name}: {error}")
            judged.append(Judged(case, "refused"))
    return judged


def summary(judged: Sequence[Judged]) -> dict[str, float | int]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for j in judged:
        groups[j.case.group].append(j.right)
    well = [j for j in judged if j.case.listed[0] == "healthy"]
    return {
        "logs": len(judged),
        "right": sum(j.right for j in judged),
        "accuracy": sum(j.right for j in judged) / len(judged),
        "exactly_primary": sum(j.verdict == j.case.listed[0] for j in judged) / len(judged),
        "groups": len(groups),
        "accuracy_by_group": sum(sum(g) / len(g) for g in groups.values()) / len(groups),
        "healthy": len(well),
        "false_alarms": sum(j.verdict != "healthy" for j in well),
        "false_alarms_unlisted": sum(not j.right for j in well),
    }


def show(title: str, judged: Sequence[Judged]) -> None:
    s = summary(judged)
    print(
        f"\n{title}: {s['right']} of {s['logs']} correct ({100 * s['accuracy']:.1f} %), "
        f"{100 * s['accuracy_by_group']:.1f} % averaged over {s['groups']} groups, "
        f"{100 * s['exactly_primary']:.1f} % exactly the primary"
    )
    print(
        f"false alarms: {s['false_alarms']} of {s['healthy']}, "
        f"with a verdict that the label does not list either: {s['false_alarms_unlisted']}"
    )
    table = Counter((j.case.listed[0], j.verdict) for j in judged)
    verdicts = [v for v in (*VERDICTS, "refused") if any(v == b for _, b in table)]
    print(f"\n| label \\ verdict | {' | '.join(verdicts)} |\n|---|{'---|' * len(verdicts)}")
    for label in VERDICTS:
        if any(label == a for a, _ in table):
            print(f"| {label} | {' | '.join(str(table[label, v] or '') for v in verdicts)} |")
    for j in judged:
        if not j.right:
            print(f"wrong: {j.case.path.name}: verdict {j.verdict}, label {', '.join(j.case.listed)}")


# Runs of public trainers with one known fault each.

_DIRECTIONS = {  # words of advice, as patterns
    "lr_up": r"raise the learning rate|higher learning rate",
    "lr_down": r"lower the learning rate|lower learning rate",
    "clip": r"clip gradients|clip_norm=",
    "regularise": r"raise dropout|add dropout|n_masks=",
    "deregularise": r"lower dropout",
    "longer": r"continue from|twice as many|train longer",
    "data": r"labels|lengths|trials|features|SD of",
    "normalise": r"normalis|SD of the features",
    "trials": r"trials",
}


def directions(diagnosis: Diagnosis, row: dict[str, str]) -> set[str]:
    """What the first advice changes, in words or in settings compared with those of the run."""
    if not diagnosis.causes:
        return set()
    first = diagnosis.causes[0]
    found = {name for name, words in _DIRECTIONS.items() if re.search(words, first.change)}
    pairs = (
        (r"\.(peak_)?lr$", "lr", "lr_up", "lr_down"),
        (r"steps$", "steps", "longer", "shorter"),
        (r"dropout$", "dropout", "regularise", "deregularise"),
        (r"white_noise_sd$", "noise", "regularise", "deregularise"),
        (r"\.eps$", "eps", "lr_down", "lr_up"),
    )
    for key, value in first.settings.items():
        for pattern, column, up, down in pairs:
            if re.search(pattern, key) and row[column] and isinstance(value, (int, float)):
                known = float(row[column])
                found |= {up} if value > 1.05 * known else {down} if value < 0.95 * known else set()
    return found


def onset_error(diagnosis: Diagnosis, row: dict[str, str]) -> float | None:
    """Distance of the first step affected from the onset, as a share of the run; None if either is unknown."""
    if not row["onset"] or diagnosis.since_step is None or not diagnosis.last_step:
        return None
    return abs(diagnosis.since_step / diagnosis.last_step - float(row["onset"]) / float(row["steps"]))


def strangers(logs: Path, show_all: bool = False) -> dict[str, Any]:
    with (logs / "strangers" / "labels.csv").open(encoding="utf-8", newline="") as file:
        labels = list(csv.DictReader(file))
    counts: Counter[str] = Counter()
    errors = []
    for row in labels:
        expected = row["expected"].split(";")
        try:
            diagnosis = diagnose(logs / "strangers" / row["file"])
        except UserError:
            counts["logs"] += 1
            counts["right"] += "refused" in expected
            continue
        first = diagnosis.causes[0] if diagnosis.causes else None
        text = f"{first.factor} {first.cause}" if first else ""
        found = {"right": diagnosis.primary in expected, "flagged": False}
        if row["cause"]:
            counts["with_cause"] += 1
            found["cause"] = bool(re.search(row["cause"], text, re.I))
        if row["fault"].startswith("healthy"):
            counts["healthy"] += 1
            found["flagged"] = not found["right"] or bool(
                re.search(r"lr|regularise", " ".join(directions(diagnosis, row)))
            )
        found["contradicts"] = bool(row["contradicts"] and re.search(row["contradicts"], text, re.I))
        found["harmful"] = bool(directions(diagnosis, row) & set(filter(None, row["harms"].split(";"))))
        counts["logs"] += 1
        counts.update(name for name, value in found.items() if value)
        if (error := onset_error(diagnosis, row)) is not None:
            errors.append(error)
        if show_all:
            wrong = [n for n in ("right", "cause") if not found.get(n, True)]
            wrong += [n for n in ("contradicts", "harmful", "flagged") if found[n]]
            mark = f"; WRONG {', '.join(wrong)}" if wrong else ""
            print(f"{row['file']}: {diagnosis.primary}; {text or 'no cause'}{mark}")
    names = ("logs", "right", "with_cause", "cause", "contradicts", "harmful", "healthy", "flagged")
    return {**{name: counts[name] for name in names}, "onset_error": max(errors, default=None), "onsets": len(errors)}


# Limits of the rules chosen without the group under test.

_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)


def leave_one_out(cases: Sequence[Case], seed: int) -> tuple[int, int]:
    """Correct verdicts on each group with limits chosen on the others: coordinate search from a random start."""
    logs = [(case, read_logs(case.path).logs) for case in cases]
    measured = [(case, measure(found[0])[0]) for case, found in logs if len(found) == 1]
    groups = np.array([case.group for case, _ in measured])
    usual = asdict(Limits())
    draw = np.random.default_rng(seed)
    start = Limits(**{name: value * float(draw.choice(_FACTORS)) for name, value in usual.items()})

    @cache
    def right(limits: Limits) -> np.ndarray:
        return np.array([apply_rules(m, limits)[0].verdict in case.listed for case, m in measured])

    n_right = 0
    for group in dict.fromkeys(groups):
        others, limits = groups != group, start
        for name in 2 * list(usual):
            candidates = [replace(limits, **{name: factor * usual[name]}) for factor in _FACTORS]
            scores = [right(candidate)[others].sum() for candidate in candidates]
            best = [c for c, score in zip(candidates, scores, strict=True) if score == max(scores)]
            limits = best[len(best) // 2]
        n_right += int(right(limits)[~others].sum())
    return n_right, len(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--leave-out", action="store_true", help="choose the limits without the group under test")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead")
    options = parser.parse_args()
    sets = {"normalised": judge(normalised(options.logs)), "raw": judge(raw(options.logs))}
    if options.json:
        figures = {name: summary(judged) for name, judged in sets.items()}
        print(json.dumps({**figures, "strangers": strangers(options.logs)}))
        return
    for name, judged in sets.items():
        show(name, judged)
    print(f"\nstrangers: {strangers(options.logs, show_all=True)}")
    if options.leave_out:
        both = [*normalised(options.logs), *raw(options.logs)]
        results = [leave_one_out(both, seed) for seed in range(3)]
        print(f"\nlimits chosen on other groups: {', '.join(f'{n} of {of} correct' for n, of in results)}")


if __name__ == "__main__":
    main()
