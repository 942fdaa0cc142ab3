"""Accuracy of the doctor on labelled real logs, with confusion table and false alarms.

    python benchmarks/doctor_accuracy.py --logs /path/to/logs [--dialects] [--json]

The folder holds labels.csv (file, dataset, primary, secondary, evidence) and runs/, and raw/ with manifest.csv
(file, primary, secondary, role). A verdict is correct if it is the primary or a secondary verdict of the label. Runs
whose labels have the same comment are similar and form a group. `--dialects` also diagnoses every log of runs/ in other
formats (exports of trackers, printed text).
"""

import argparse
import csv
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from doctor_dialects import DIALECTS, thinned

from arcuate.doctor import VERDICTS, diagnose
from arcuate.doctor.read import read_logs
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
                cases[path] = Case(path, _listed(r), f"{r['format']} {r['primary']}")
    return list(cases.values())


def _listed(row: dict[str, str]) -> tuple[str, ...]:
    return (row["primary"], *(v for v in row["secondary"].split(";") if v))


def judge(cases: Iterable[Case]) -> list[Judged]:
    judged = []
    for case in cases:
        try:
            judged.append(Judged(case, diagnose(case.path, allow_pickle=True).primary))
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


def in_dialects(cases: Sequence[Case]) -> None:
    """The verdict on the same values in other formats, against the label and the verdict on the original."""
    print("\n| format | logs | correct | same verdict as the original |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        originals = [
            (case, log, diagnose(case.path).primary) for case in cases for log in read_logs(case.path).logs[:1]
        ]
        originals = [(c, log, v) for c, log, v in originals if len(log.per) and not thinned(log)]
        for name, write in DIALECTS.items():
            right = same = 0
            for case, log, verdict in originals:
                path = Path(folder) / f"{case.path.stem}-{name}"
                write(log, path)
                found = judge([Case(path, case.listed, case.group)])[0].verdict
                right, same = right + (found in case.listed), same + (found == verdict)
                if found != verdict:
                    print(f"  {case.path.name} {name}: {found} instead of {verdict}")
            print(f"| {name} | {len(originals)} | {right} | {same} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--dialects", action="store_true", help="also judge every log in other formats")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object instead")
    options = parser.parse_args()
    sets = {"normalised": judge(normalised(options.logs)), "raw": judge(raw(options.logs))}
    if options.json:
        print(json.dumps({name: summary(judged) for name, judged in sets.items()}))
        return
    for name, judged in sets.items():
        show(name, judged)
    if options.dialects:
        in_dialects(normalised(options.logs))


if __name__ == "__main__":
    main()
