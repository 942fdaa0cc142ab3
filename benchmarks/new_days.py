"""New sessions of simulated cohorts: unadapted, adapted online, calibrated; and sessions without drift.

python benchmarks/new_days.py --out runs/new-days --seeds 0 1 2 --table table.md

Per seed: six sessions of 250 trials at --difficulty real to train `tiny` on, and one session each 5 and 8 days after
the last; --kind ssm and --kind transformer train the other small encoders on the same sessions. Results that exist
in --out are not computed again, so the command can be stopped and repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from encoders import ALONE, RECIPES
from matplotlib import pyplot as plt

from arcuate.experiments.recipe import run_recipe
from arcuate.files import read_json
from arcuate.run import Run

METHODS = ("statistics", "one-step", "replay", "entropy")
LATER = (5, 8)
COLOURS = {"statistics": "#8a6100", "one-step": "#1d5fa6", "replay": "#0b7269", "entropy": "#8a3f86"}


def arcuate(*words: object) -> None:
    print("arcuate", *words, flush=True)
    subprocess.run([sys.executable, "-m", "arcuate", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


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
            *("calibrate", run, "--data", store, "--session", session, "--sentences", n, "--run", folder),
            *("--curve", "5,10,20", "--json"),
        )
    return read_json(folder / "calibration.json"), folder


def measure(
    out: Path, kind: str, seed: int, methods: tuple[str, ...], lm: str | None, calibrated: tuple[int, ...]
) -> dict[str, Any]:
    store, run = cohort(out, kind, seed)
    days = read_json(store / "manifest.json")["sessions"]
    new = [entry["name"] for entry in days[6:]]
    known = [word for entry in days[:6] for word in ("--session", entry["name"])]
    result: dict[str, Any] = {"seed": seed, "known": evaluate(store, run, "val", "known")["per"], "days": {}}
    arms: list[tuple[str, tuple[str, ...]]] = [(method, (method,)) for method in methods]
    if lm is not None:
        arms.append(("one-step, words", ("one-step", "--lm", lm)))
    for gap, session in reversed(list(zip(LATER, new, strict=True))):
        entry: dict[str, Any] = {"session": session, "adapted": {}}
        for name, words in arms:
            label = f"{session.replace('.', '-')}-{name.replace(', ', '-')}"
            found = evaluate(store, run, "train", label, "--session", session, "--adapt", *words)
            entry["unadapted"] = found["per_unadapted"]
            entry["adapted"][name] = cost(found)
        if gap in calibrated:
            curve, folder = calibrate(store, run, session)
            entry["curve"] = curve["curve"]
            entry["calibrated_known"] = evaluate(store, folder, "val", "known", "--adapt", "none", *known)["per"]
        result["days"][gap] = entry
    result["still"] = {
        name: cost(evaluate(store, run, "val", f"still-{name.replace(', ', '-')}", *known, "--adapt", *words))
        for name, words in arms
    }
    return result


def cost(found: dict[str, Any]) -> dict[str, Any]:
    names = (
        "per",
        "per_unadapted",
        "difference_low",
        "difference_high",
        "p",
        "seconds_per_trial",
        "peak_rss_mb",
    )
    return {name: found[name] for name in names} | {"n_fallbacks": sum(d["n_fallbacks"] for d in found["sessions"])}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown, means over seeds."""
    arms = list(results[0]["still"])
    lines = ["| | 5 days later | 8 days later | sessions without drift | ms per trial |", "|---|---|---|---|---|"]
    plain = [percent(mean([r["days"][g]["unadapted"] for r in results])) for g in LATER]
    still = percent(mean([r["still"][arms[0]]["per_unadapted"] for r in results]))
    lines.append(f"| unadapted | {plain[0]} | {plain[1]} | {still} | |")
    for arm in arms:
        found = {gap: [r["days"][gap]["adapted"][arm] for r in results] for gap in LATER}
        spent = mean([1000 * f["seconds_per_trial"] for gap in LATER for f in found[gap]])
        cells = [change(found[gap]) for gap in LATER] + [change([r["still"][arm] for r in results])]
        lines.append(f"| {arm} | {' | '.join(cells)} | {spent:.0f} |")
    floor = mean([r["known"] for r in results])
    for n in (0, 5, 10, 20):
        cells = [sentences(results, gap, n, floor) for gap in LATER]
        lines.append(f"| {n} calibration sentences | {cells[0]} | {cells[1]} | | |")
    kept = [[r["days"][g]["calibrated_known"] for r in results if "curve" in r["days"][g]] for g in LATER]
    cells = [percent(mean(values)) if values else "–" for values in kept]
    lines.append(f"| known sessions, after calibration with 20 | {cells[0]} | {cells[1]} | | |")
    return "\n".join(lines) + "\n"


def sentences(results: list[dict[str, Any]], gap: int, n: int, floor: float) -> str:
    """Error rate after n sentences, and the fraction of the gap to known sessions that they close."""
    curves = [r["days"][gap]["curve"] for r in results if "curve" in r["days"][gap]]
    if not curves:
        return "–"
    before, after = (mean([p["per"] for curve in curves for p in curve if p["sentences"] == m]) for m in (0, n))
    closed = f" ({100 * (before - after) / (before - floor):.0f} % of the gap)" if n else ""
    return f"{percent(after)}{closed}"


def change(found: list[dict[str, Any]]) -> str:
    before, after = mean([f["per_unadapted"] for f in found]), mean([f["per"] for f in found])
    return f"{percent(after)} ({100 * (after - before) / before:+.1f} %)"


def percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "arcuate"
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    floor = 100 * mean([r["known"] for r in results])
    for gap, colour in zip(LATER, ("#1d5fa6", "#b4470b"), strict=True):
        points = [r["days"][gap]["curve"] for r in results if "curve" in r["days"][gap]]
        if not points:
            continue
        at = [p["sentences"] for p in points[0]]
        rates = [100 * mean([curve[i]["per"] for curve in points]) for i in range(len(at))]
        bands = [[100 * mean([c[i][k] for c in points]) for i in range(len(at))] for k in ("low", "high")]
        axes[0].plot(at, rates, marker="o", color=colour, label=f"{gap} days later")
        axes[0].fill_between(at, *bands, color=colour, alpha=0.2, linewidth=0)
    axes[0].set(
        xlabel="calibration sentences",
        ylabel="PER of the remaining trials, %",
        ylim=(0, None),
        xticks=(0, 5, 10, 20),
    )
    for i, arm in enumerate(results[0]["still"]):
        for gap, place in zip(LATER, (0, 1), strict=True):
            rate = 100 * mean([r["days"][gap]["adapted"][arm]["per"] for r in results])
            colour = COLOURS.get(arm, "#5a6270")
            x = place + 0.14 * (i + 1)
            axes[1].bar(x, rate, 0.13, color=colour, label=arm if place == 0 else None)
    for gap, place in zip(LATER, (0, 1), strict=True):
        rate = 100 * mean([r["days"][gap]["unadapted"] for r in results])
        axes[1].bar(place, rate, 0.13, color="#8a8f99", label="unadapted" if place == 0 else None)
    axes[1].set(
        xticks=[place + 0.07 * len(results[0]["still"]) for place in (0, 1)],
        xticklabels=[f"{gap} days later" for gap in LATER],
        title="without labels",
    )
    axes[0].set_title("with labels")
    for ax in axes:
        ax.axhline(
            floor,
            color="#1b1f26",
            linestyle="--",
            linewidth=1,
            label="training sessions" if ax is axes[0] else None,
        )
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of cohorts and runs")
    parser.add_argument("--kind", choices=RECIPES, default="gru", help="of encoder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--calibrate", type=int, nargs="+", default=list(LATER), help="days later to calibrate on")
    parser.add_argument("--lm", help="also learn from words, through this language model")
    parser.add_argument("--table", type=Path, help="Markdown to write")
    args = parser.parse_args()
    arms = tuple(args.methods), args.lm, tuple(args.calibrate)
    results = [measure(args.out, args.kind, seed, *arms) for seed in args.seeds]
    (args.out / f"new_days.{args.kind}.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print(text)
    if args.table:
        args.table.write_text(text)


if __name__ == "__main__":
    main()
