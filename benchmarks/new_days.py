"""New sessions of simulated cohorts: unadapted, adapted online, calibrated; and sessions without drift.

python benchmarks/new_days.py --out runs/new-days --seeds 0 1 2

Per seed: six sessions of 250 trials at --difficulty real to train `tiny` on, and one session each 5 and 8 days after
the last; --kind ssm and --kind transformer train the other small encoders on the same sessions. Results that exist
in --out are not computed again, so the command can be stopped and repeated.
"""

import argparse
from pathlib import Path
from typing import Any

from common import arcuate, percent
from encoders import ALONE, RECIPES

from arcuate.experiments.recipe import run_recipe
from arcuate.files import read_json
from arcuate.run import Run

LATER = (5, 8)


def cohort(out: Path, kind: str, seed: int) -> tuple[Path, Path]:
    """Store and run of one seed, created if missing."""
    source, store, run = out / f"source-{seed}", out / f"store-{seed}", out / f"{RECIPES[kind]}-{seed}"
    if not (store / "manifest.json").exists():
        size = ("--sessions", 6, "--trials", 250, "--electrodes", 64, "--difficulty", "real")
        arcuate("simulate", source, *size, "--later", ",".join(map(str, LATER)), "--seed", seed, "--force")
        arcuate("prepare", source, store, "--force")
    if not finished(run):
        arcuate(
            *("train", RECIPES[kind], "--data", store, "--run", run, "--resume"),
            *("data.max_sessions=6", f"train.seed={seed}", f"data.seed={seed + 1}"),
            *(ALONE if kind == "ssm" else ()),
        )
    return store, run


def finished(run: Path) -> bool:
    rows = Run(run).metrics() if run.is_dir() else []
    return bool(rows) and rows[-1]["step"] >= run_recipe(Run(run)).train.steps


def evaluate(store: Path, run: Path, split: str, label: str, *words: object) -> dict[str, Any]:
    """Summary of an evaluation, computed if missing."""
    file = run / "results" / f"{split}.{label}.json"
    if not file.exists():
        arcuate("evaluate", run, "--data", store, "--split", split, "--label", label, "--json", *words)
    return read_json(file)


def calibrate(store: Path, run: Path, session: str, n: int = 20) -> tuple[dict[str, Any], Path]:
    folder = run.with_name(f"{run.name}-{session}")
    if not (folder / "calibration.json").exists():
        arcuate(
            *("calibrate", run, "--data", store, "--session", session, "--sentences", n, "--out", folder),
            *("--curve", "5,10,20", "--json"),
        )
    return read_json(folder / "calibration.json"), folder


def measure(out: Path, kind: str, seed: int) -> dict[str, Any]:
    store, run = cohort(out, kind, seed)
    days = read_json(store / "manifest.json")["sessions"]
    new, known = [entry["name"] for entry in days[6:]], [entry["name"] for entry in days[:6]]
    adapted = evaluate(store, run, "train", "adapted", "--adapt")
    result: dict[str, Any] = {"seed": seed, "known": evaluate(store, run, "val", "known")["per"], "days": {}}
    for gap, session in reversed(list(zip(LATER, new, strict=True))):
        entry: dict[str, Any] = {"session": session, "adapted": pooled(adapted, [session])}
        curve, folder = calibrate(store, run, session)
        rows = evaluate(store, folder, "val", "known")["per_by_session"]
        entry |= {"curve": curve["curve"], "calibrated_known": mean([rows[name] for name in known])}
        result["days"][gap] = entry
    result["still"] = pooled(evaluate(store, run, "val", "still", "--adapt"), known)
    return result


def pooled(found: dict[str, Any], sessions: list[str]) -> dict[str, Any]:
    """Means over sessions, which have equally many trials."""
    rows = [row for row in found["sessions"] if row["session"] in sessions]
    return {name: mean([row[name] for row in rows]) for name in ("per", "per_unadapted", "seconds_per_trial")}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, means over seeds."""
    lines = ["| | 5 days later | 8 days later | sessions without drift | ms per trial |", "|---|---|---|---|---|"]
    found = [*([r["days"][gap]["adapted"] for r in results] for gap in LATER), [r["still"] for r in results]]
    plain = [percent(mean([entry["per_unadapted"] for entry in entries])) for entries in found]
    lines.append(f"| unadapted | {' | '.join(plain)} | |")
    spent = mean([1000 * entry["seconds_per_trial"] for entries in found[:2] for entry in entries])
    lines.append(f"| one-step | {' | '.join(map(change, found))} | {spent:.0f} |")
    floor = mean([r["known"] for r in results])
    for n in (0, 5, 10, 20):
        cells = [sentences(results, gap, n, floor) for gap in LATER]
        lines.append(f"| {n} calibration sentences | {cells[0]} | {cells[1]} | | |")
    cells = [percent(mean([r["days"][gap]["calibrated_known"] for r in results])) for gap in LATER]
    lines.append(f"| known sessions, after calibration with 20 | {cells[0]} | {cells[1]} | | |")
    return "\n".join(lines) + "\n"


def sentences(results: list[dict[str, Any]], gap: int, n: int, floor: float) -> str:
    """Error rate after n sentences, and the fraction of the gap to known sessions that they close."""
    curves = [r["days"][gap]["curve"] for r in results]
    before, after = (mean([p["per"] for curve in curves for p in curve if p["sentences"] == m]) for m in (0, n))
    closed = f" ({100 * (before - after) / (before - floor):.0f} % of the gap)" if n else ""
    return f"{percent(after)}{closed}"


def change(found: list[dict[str, Any]]) -> str:
    before, after = mean([f["per_unadapted"] for f in found]), mean([f["per"] for f in found])
    return f"{percent(after)} ({100 * (after - before) / before:+.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of cohorts and runs")
    parser.add_argument("--kind", choices=RECIPES, default="gru", help="of encoder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    results = [measure(args.out, args.kind, seed) for seed in args.seeds]
    print(table(results))


if __name__ == "__main__":
    main()
