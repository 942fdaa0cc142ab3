"""Phoneme error rate against delay: causal students that are held back, by CTC alone and with a bidirectional teacher.

python benchmarks/latency.py --out runs/latency --seeds 3 [--delays 0 1 2 4 8]
python benchmarks/latency.py --out runs/latency --table [--svg docs/images/latency.svg]

Recipe `tiny-best` on the cohort `choose` of best_recipe.py, with its own number of steps for all students and the
teacher. A student with a delay of d frames is causal, but its frame t is computed from the patches up to t + d
(delayed_encoder.py). `ctc` students have no other loss; `distilled` ones also match the posteriors of a bidirectional
model of the same seed, frame by frame, so that they have d frames of future to imitate a model that sees all of it. The
CPU time of the teacher is not counted.

The algorithmic delay is that of `decoding/delay.py`: smoothing, stride and frames held back. CTC does not fix *when* a
token is emitted, so the time from the end of a phoneme (known for simulated trials) to the bin that completes the frame
with its token is measured as well, over correctly decoded phonemes; the median is negative where a phoneme is
recognised before it ends.

Each finished training adds a line to OUT/results.jsonl and is not repeated, so the command can be stopped at any time.
Seeds are the outer loop. Intervals are over trials and seeds (evaluation/significance.py).
"""

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import best_recipe
import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

from arcuate.data.readers.release import TRUTH_FILE
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import BIN_MS
from arcuate.decoding.delay import model_delay
from arcuate.decoding.hypothesis import token_spans
from arcuate.evaluation.significance import Arm, contrast, difference
from arcuate.evaluation.trials import decode_trials
from arcuate.experiments.recipe import load_recipe
from arcuate.files import append_jsonl, read_jsonl, write_text
from arcuate.insight.charts.base import HEIGHT, alt, colours_by, finish
from arcuate.insight.charts.theme import colour
from arcuate.insight.render import standalone_svg
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.plugins import allow_code

RECIPE, COHORT = "tiny-best", "choose"
ENCODER = "encoder={kind: 'delayed_encoder:DelayedSSM', %s, delay: %d}"

STUDENTS = ("ctc", "distilled")
TEACHER = "teacher"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="in frames")
    parser.add_argument("--steps", type=int, help="of every training; default: those of the recipe")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--svg", type=Path, help="also draw the chart")
    args = parser.parse_args()
    torch.set_num_threads(1)
    allow_code("delayed_encoder")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        store = best_recipe.make_cohort(args.out, COHORT)
        steps = args.steps or load_recipe(RECIPE, []).train.steps
        for seed in range(args.seeds):
            run_one(args.out, store, TEACHER, None, seed, steps)
            for delay in args.delays:
                for kind in STUDENTS:
                    run_one(args.out, store, kind, delay, seed, steps)
    rows = read_results(args.out)
    print(table(rows))
    if args.svg:
        write_text(args.svg, draw(rows))


def read_results(out: Path) -> list[Row]:
    file = out / "results.jsonl"
    return list(read_jsonl(file)) if file.is_file() else []


def run_one(out: Path, store: Path, kind: str, delay: int | None, seed: int, steps: int) -> None:
    """Train and score one student or teacher, unless its line exists; teachers are kept for their students."""
    key = {"kind": kind, "delay": delay, "seed": seed, "steps": steps}
    if any(key.items() <= row.items() for row in read_results(out)):
        return
    teacher = out / f"teacher-{seed}-{steps}"
    run = teacher if kind == TEACHER else out / "work"
    shutil.rmtree(run, ignore_errors=True)
    started = time.process_time()
    n_parameters = best_recipe.train_one(RECIPE, store, run, changes(kind, delay, teacher), steps, seed)
    cpu_seconds = time.process_time() - started
    model = load_model(run / "checkpoints" / "last")
    measured = measure(model, Store.open(store), read_onsets(out / COHORT / "source"))
    row = {**key, "n_parameters": n_parameters, "cpu_seconds": round(cpu_seconds, 1), **measured}
    append_jsonl(out / "results.jsonl", row)
    rate = sum(row["errors"]) / sum(row["lengths"])
    print(f"{kind}, delay {delay}, seed {seed}: {cpu_seconds:.0f} CPU s, PER {rate:.2%}", flush=True)


def changes(kind: str, delay: int | None, teacher: Path) -> list[str]:
    """Changes of the recipe for one training."""
    if kind == TEACHER:
        return ["encoder.bidirectional=true"]
    own = load_recipe(RECIPE, []).encoder.model_dump(exclude={"kind", "bidirectional"})
    encoder = ENCODER % (", ".join(f"{name}: {value}" for name, value in own.items()), delay)
    return [encoder, *([f"loss.distillation.teacher={teacher}@last"] if kind == "distilled" else [])]


def read_onsets(source: Path) -> dict[tuple[str, str, int, int], list[float]]:
    """Onsets in seconds of the phonemes of every simulated trial, by session, split, block and number."""
    rows = read_jsonl(source / TRUTH_FILE)
    return {(r["session"], r["split"], r["block"], r["number"]): r["onsets_s"] for r in rows}


def measure(model: Model, store: Store, onsets: dict[tuple[str, str, int, int], list[float]]) -> Row:
    """Errors and lengths of all val and test trials with labels, algorithmic delay, and emission times in ms."""
    trials = [t for t in store.trials if t.split in ("val", "test") and t.tokens]
    results = decode_trials(model, store, trials, keep_log_probs=True)
    scores = [r.score for r in results if r.score is not None]
    found: Row = {"errors": [s.errors for s in scores], "lengths": [s.length for s in scores]}
    if not model.config.settings.encoder.causal:
        return found
    delay = model_delay(model)
    patch = model.config.settings.front_end.patch
    waited = delay.smoothing_ms + delay.encoder_ms
    lags = []
    for trial, result in zip(trials, results, strict=True):
        key = (trial.session, trial.split, trial.block, trial.number)
        ends = [1000 * end for end in onsets[key][1:]]  # the last phoneme is the silence at the end of the trial
        for i, frame in emitted_frames(trial, result.log_probs):
            if i < len(ends):
                lags.append((frame * patch.stride + patch.bins) * BIN_MS + waited - ends[i])
    quantiles = np.quantile(lags, (0.1, 0.5, 0.9)).round(1).tolist()
    return found | {"delay_ms": delay.total_ms, "lag_ms": quantiles}


def emitted_frames(trial: TrialInfo, log_probs: np.ndarray | None) -> list[tuple[int, int]]:
    """Correctly decoded tokens: index in the reference, and first frame of the token in the greedy output."""
    if log_probs is None or trial.tokens is None:
        raise ValueError("emission times need log-probabilities and a reference")
    spans = token_spans(log_probs)
    blocks = Levenshtein.opcodes(list(trial.tokens), [span.token for span in spans])
    return [
        (op.src_start + k, spans[op.dest_start + k].first)
        for op in blocks
        if op.tag == "equal"
        for k in range(op.src_end - op.src_start)
    ]


def as_arm(rows: Sequence[Row]) -> Arm:
    ordered = sorted(rows, key=lambda row: row["seed"])
    return Arm(np.array([row["errors"] for row in ordered]), np.array(ordered[0]["lengths"], dtype=float))


def groups(rows: Sequence[Row]) -> dict[tuple[str, int | None], list[Row]]:
    """Rows by kind and delay; those of which fewer seeds are finished than of the teacher are left out."""
    found: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["delay"]), []).append(row)
    teachers = {row["seed"] for row in found.get((TEACHER, None), [])}
    return {key: own for key, own in found.items() if {row["seed"] for row in own} == teachers}


def interval(arm: Arm) -> tuple[float, float]:
    found = contrast((arm,), (1.0,))
    return 100 * found.low, 100 * found.high


def table(rows: Sequence[Row]) -> str:
    """PER by kind and delay, and the paired difference between distilled and CTC students of one delay."""
    by_key = groups(rows)
    if not by_key:
        return "no results yet"
    first = next(iter(by_key.values()))
    lines = [
        f"{len(first)} seeds, {first[0]['steps']} steps, {len(first[0]['lengths'])} trials\n",
        "| student | frames held back | algorithmic delay | end of phoneme to token, median (10–90 %) |"
        " PER (95 % interval) | distilled − CTC (95 % interval) | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    order = sorted(by_key, key=lambda k: (k[0] == TEACHER, k[1] if k[1] is not None else 0, k[0]))
    for kind, delay in order:
        own = by_key[kind, delay]
        arm = as_arm(own)
        low, high = interval(arm)
        seconds = np.mean([row["cpu_seconds"] for row in own])
        timing = "whole trial | " if kind == TEACHER else f"{own[0]['delay_ms']:.0f} ms | {describe_lag(own)}"
        change = ""
        if kind == "distilled" and ("ctc", delay) in by_key:
            d = difference(as_arm(by_key["ctc", delay]), arm)
            change = f"{100 * d.estimate:+.2f} ({100 * d.low:+.2f} to {100 * d.high:+.2f})"
        name = "bidirectional teacher" if kind == TEACHER else kind
        lines.append(
            f"| {name} | {'' if delay is None else delay} | {timing} |"
            f" {100 * arm.rate:.2f} % ({low:.2f}–{high:.2f}) | {change} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def describe_lag(rows: Sequence[Row]) -> str:
    low, median, high = np.mean([row["lag_ms"] for row in rows], axis=0)
    return f"{median:.0f} ms ({low:.0f}–{high:.0f})"


def draw(rows: Sequence[Row]) -> str:
    """PER against algorithmic delay, with 95 % intervals; the bidirectional teacher is a horizontal line."""
    by_key = groups(rows)
    names = {"ctc": "CTC alone", "distilled": "CTC and distillation"}
    points = []
    for (kind, _), own in by_key.items():
        if kind in names:
            low, high = interval(arm := as_arm(own))
            shift = 4 if kind == "distilled" else -4  # otherwise the intervals of both kinds would cover each other
            x_ms = own[0]["delay_ms"] + shift
            points.append({"x": x_ms, "per": 100 * arm.rate, "low": low, "high": high, "by": names[kind]})
    teacher = 100 * as_arm(by_key[TEACHER, None]).rate
    bounds = [teacher, *(p[end] for p in points for end in ("low", "high"))]
    x = alt.X("x:Q", title="algorithmic delay, ms").scale(nice=False, padding=18)
    y_scale = alt.Scale(domain=[np.floor(min(bounds)) - 1, np.ceil(max(bounds))], zero=False)
    y = alt.Y("per:Q", title="PER, %").scale(y_scale)
    base = alt.Chart(alt.Data(values=points)).encode(
        x=x,
        color=colours_by("by", {names["ctc"]: "blue", names["distilled"]: "orange"}),
    )
    limit = alt.Chart(alt.Data(values=[{"per": teacher, "text": f"bidirectional teacher, {teacher:.1f} %"}]))
    last = [max((p for p in points if p["by"] == name), key=lambda p: p["x"]) for name in names.values()]
    labels = alt.Chart(alt.Data(values=last)).encode(x=x, y=y)
    above = max(last, key=lambda p: p["per"])["by"]
    texts = [
        labels.transform_filter(f"datum.by == '{name}'")
        .mark_text(align="right", dx=-8, dy=-26 if name == above else 30, color=colour(shade))
        .encode(text="by:N")
        for name, shade in ((names["ctc"], "blue"), (names["distilled"], "orange"))
    ]
    chart = alt.layer(
        limit.mark_rule(strokeDash=[4, 3], color=colour("quiet")).encode(y=y),
        limit.mark_text(align="right", dx=-6, dy=12, color=colour("quiet")).encode(
            y=y, text="text:N", x=alt.value("width")
        ),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_rule(strokeWidth=2, opacity=0.45).encode(y=alt.Y("low:Q").scale(y_scale), y2="high:Q"),
        base.mark_point(size=60, filled=True, opacity=1).encode(y=y, shape="by:N"),
        *texts,
    )
    label = "Phoneme error rate of causal students against algorithmic delay, and of the bidirectional teacher"
    return standalone_svg(finish(chart, "Latency against accuracy", label, HEIGHT))


if __name__ == "__main__":
    main()
