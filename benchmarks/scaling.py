"""Scaling efficiency of one against two processes on a CPU, one thread each, on the same global batch.

python benchmarks/scaling.py --data data/demo/store [--recipe tiny] [--steps 60] [--repeats 3] [--json] [key=value …]

Both are trained in turns. Efficiency by the clock is time of one process / (2 × time of two); it needs two idle cores.
Efficiency by CPU time is CPU time of one process / CPU time of both: what communication, copies of the weights and
uneven parts cost, also on a machine that is busy with other programs. Starting is not included in either.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def train(n_processes: int, recipe: str, data: Path, run: Path, overrides: list[str]) -> tuple[float, float]:
    """Median seconds per step in the rows of metrics.jsonl, and CPU seconds of all processes."""
    arguments = ["arcuate", "train", recipe, "--data", str(data), "--run", str(run), *overrides]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={n_processes}", "-m", "--"]
    command = [sys.executable, "-m", *(launcher if n_processes > 1 else []), *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["cost"]["seconds_per_step"] for row in rows if row["split"] == "train"]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return statistics.median(seconds[1:] or seconds), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of the recipe")
    parser.add_argument("--data", type=Path, required=True, help="a prepared store")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    by_clock, by_cpu, step_s = [], [], {1: [], 2: []}  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            clock, cpu = {}, {}
            for n in (1, 2) if repeat % 2 else (2, 1):
                used = {}
                for steps in (1, 1 + arguments.steps):  # the difference is free of the time to start
                    few = [f"train.steps={steps}", "train.log_every=10", "train.validate_every=99999999"]
                    few += ["train.checkpoint_every=99999999", "data.workers=0", "runtime.compile=false"]
                    run = Path(folder) / f"{repeat}-{n}-{steps}"
                    overrides = [*few, *arguments.overrides]
                    clock[n], used[steps] = train(n, arguments.recipe, arguments.data, run, overrides)
                cpu[n] = (used[1 + arguments.steps] - used[1]) / arguments.steps
                step_s[n].append(clock[n])
            by_clock.append(clock[1] / (2 * clock[2]))
            by_cpu.append(cpu[1] / cpu[2])
    result = {
        "seconds_per_step": {str(n): statistics.median(values) for n, values in step_s.items()},
        "efficiency_by_clock": statistics.median(by_clock),
        "efficiency_by_cpu_time": statistics.median(by_cpu),
        "all_by_clock": by_clock,
        "all_by_cpu_time": by_cpu,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for n, seconds in result["seconds_per_step"].items():
        print(f"{n} processes: {1000 * seconds:.1f} ms per step")
    print(f"efficiency of two processes: {result['efficiency_by_clock']:.2f} by the clock,")
    print(f"{result['efficiency_by_cpu_time']:.2f} by CPU time (medians of {arguments.repeats})")


if __name__ == "__main__":
    main()
