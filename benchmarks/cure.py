"""Closed loop of the doctor over the sabotage suite: is the sabotaged factor named, and does the remedy cure the run?

python benchmarks/cure.py --sabotage runs/sabotage [--arm off] [--cure runs/cured] [--blind]

Reads the run folders that `benchmarks/sabotage.py` left behind. The diagnosis part trains nothing. With --cure, every
run with a remedy is trained again with it (same store, seed and steps) unless that run is finished; faults of the
program stay in place. --blind hides the packaged recipe that the runs are derived from. Runs that ended within 10 % of
the healthy PER in spite of the sabotage are listed apart: there is nothing to diagnose.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import table
from sabotage import COHORTS, patched

from arcuate.doctor import diagnose, run_folder
from arcuate.errors import UserError
from arcuate.experiments import train as train_module
from arcuate.files import read_json, read_jsonl, write_json

WITHIN = 0.10
# Factors of the doctor that name each part of a sabotaged factor.
NAMES = {
    "learning rate": {"learning_rate", "learning_rate_low"},
    "warm-up": {"warmup"},
    "decay": {"schedule"},
    "eps": {"eps"},
    "loss reduction": {"loss_reduction"},
    "gradient clipping": {"clipping"},
    "weight decay": {"weight_decay"},
    "optimizer betas": {"optimizer"},
    "optimizer kind": {"optimizer"},
    "precision": {"precision"},
    "a corrupted batch": {"batches"},
    "corrupted batches": {"batches"},
    "batch size": {"batch_size"},
    "time masks": {"masks"},
    "trained components": {"frozen"},
    "white noise": {"noise"},
    "data order": {"data_order"},
    "non-finite bins": {"data: non-finite bins"},
    "labels": {"data: labels", "data: suspected labels"},
    "a dead session": {"data: dead session"},
    "label lengths": {"data: padded labels"},
}


@dataclass
class Case:
    """One sabotaged run, its diagnosis and its cure."""

    folder: Path
    name: str
    cohort: str
    factor: str
    cure: str
    kind: str  # settings, program or data
    relative: float | None  # PER above the healthy PER; None if it was stopped
    verdict: str
    factors: tuple[str, ...]
    remedy: dict[str, Any]
    message: str
    cured: float | None = None  # the same for the run with the remedy
    cured_error: str | None = None

    @property
    def harmless(self) -> bool:
        return self.relative is not None and self.relative <= WITHIN

    def named(self, n: int) -> bool:
        wanted = set().union(*(NAMES[part] for part in self.factor.split(", ")))
        return bool(wanted & set(self.factors[:n]))


def healthy_levels(root: Path) -> dict[str, float]:
    levels = {}
    for cohort in COHORTS:
        files = sorted((root / cohort / "healthy").glob("seed-*/off/sabotage.json"))
        rates = [read_json(file)["per"] for file in files]
        if rates:
            levels[cohort] = sum(rates) / len(rates)
    return levels


def examine(folder: Path, levels: dict[str, float]) -> Case:
    record = read_json(folder / "sabotage.json")
    diagnosis = diagnose(folder, check_store=True)
    remedy = diagnosis.fix()
    failed = record["error"] is not None or record["per"] is None
    kind = "data" if record["cure"] == "data" else "program" if record["patch"] else "settings"
    return Case(
        folder=folder,
        name=record["name"],
        cohort=record["cohort"],
        factor=record["factor"],
        cure=record["cure"],
        kind=kind,
        relative=None if failed else record["per"] / levels[record["cohort"]] - 1,
        verdict=diagnosis.primary,
        factors=tuple(cause.factor for cause in diagnosis.causes),
        remedy=remedy.overrides,
        message=remedy.message,
    )


def cure(case: Case, out: Path, root: Path, levels: dict[str, float]) -> None:
    """Train the run with its remedy, under the same fault of the program, if there is one."""
    record = read_json(case.folder / "sabotage.json")
    folder = out / case.folder.relative_to(root)
    done = folder / "cure.json"
    if not done.exists() or read_json(done)["remedy"] != json.loads(json.dumps(case.remedy)):
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_num_threads(1)
        store, error = read_json(case.folder / "environment.json")["data"]["path"], None
        with patched(record["patch"]) if record["patch"] else nullcontext():
            try:
                if train_module.train(case.folder, store, folder, overrides=case.remedy).interrupted:
                    raise SystemExit("interrupted")
            except UserError as stopped:
                error = str(stopped)
        rates = [row["per"] for row in read_jsonl(folder / "metrics.jsonl") if row.get("per") is not None]
        write_json(done, {"remedy": case.remedy, "per": rates[-1] if rates else None, "error": error})
    result = read_json(done)
    case.cured_error = result["error"]
    if result["per"] is not None and result["error"] is None:
        case.cured = result["per"] / levels[case.cohort] - 1


def share(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)} ({sum(flags) / len(flags):.0%})" if flags else "–"


def report(cases: Sequence[Case]) -> None:
    rows: list[list[Any]] = []
    for kind in ("settings", "program", "data", "all"):
        members = [c for c in cases if kind in (c.kind, "all")]
        bad = [c for c in members if not c.harmless]
        first, three = [c.named(1) for c in bad], [c.named(3) for c in bad]
        tried = [c for c in bad if c.kind == kind == "settings" and (c.cured is not None or c.cured_error)]
        treated = [c.cured is not None and c.cured <= WITHIN for c in tried]
        rows.append([kind, len(members), len(members) - len(bad), share(first), share(three), share(treated)])
    head = ["fault in", "runs", "harmless", "named first", "among the first three", "cured within 10 %"]
    print(table(head, rows), end="\n\n")
    rows = []
    for name in dict.fromkeys(case.name for case in cases):
        same = [case for case in cases if case.name == name]
        ranks = " ".join("–" if c.harmless else str(_rank(c) or "missed") for c in same)
        before, after = (" ".join(map(_points, v)) for v in zip(*((c.relative, c.cured) for c in same), strict=True))
        shown = next((c for c in same if not c.harmless), same[0])
        remedy = " ".join(f"{k}={v}" for k, v in shown.remedy.items()) or shown.message
        rows.append([name, before, ranks, after, remedy[:160]])
    print(table(["sabotage", "PER above healthy", "named at", "cured: PER above healthy", "remedy"], rows))
    print("missed:", *sorted({c.name for c in cases if not c.harmless and not c.named(3)}))


def _rank(case: Case) -> int | None:
    return next((n for n in range(1, len(case.factors) + 1) if case.named(n)), None)


def _points(value: float | None) -> str:
    return "·" if value is None else f"{100 * value:+.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sabotage", type=Path, required=True, help="folder of benchmarks/sabotage.py")
    parser.add_argument("--arm", default="off", help="off or guard")
    parser.add_argument("--cure", type=Path, help="train the remedies into this folder")
    parser.add_argument("--blind", action="store_true", help="without the packaged recipe of the runs")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    args = parser.parse_args()
    levels = healthy_levels(args.sabotage)
    found = args.sabotage.glob(f"*/*/seed-*/{args.arm}/sabotage.json")
    files = sorted(found, key=lambda file: (file.parts[-3], file.parts[-5], file.parts[-4]))
    folders = [f.parent for f in files if f.parts[-5] in levels and f.parts[-4] != "healthy"]
    folders = [f for f in folders if int(f.parts[-2].removeprefix("seed-")) < args.seeds]
    with patch.object(run_folder, "packaged_parent", lambda recipe: None) if args.blind else nullcontext():
        cases = [examine(folder, levels) for folder in folders]
    if args.cure:
        for case in cases:
            if not case.harmless and case.remedy and case.kind != "data":
                cure(case, args.cure, args.sabotage, levels)
                change = f"{_points(case.relative)} -> {_points(case.cured)}"
                print(f"{case.folder}: {change} {case.cured_error or ''}", flush=True)
    report(cases)


if __name__ == "__main__":
    main()
