"""What the benchmarks share: CPU time in turns, the cost of a child process, and Markdown tables."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def in_turns(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each piece of work; they alternate, so that a busy machine affects all alike.

    One more repetition comes first and does not count: it allocates and compiles.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, run in work.items():
            started = time.process_time()
            run()
            if repeat:
                seconds[name].append(time.process_time() - started)
    return seconds


@dataclass(frozen=True)
class Cost:
    """Output of a child process, and what it used."""

    output: str
    seconds: float
    cpu_s: float
    peak_mb: float


def child(*command: object, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command in a process of its own; a failure ends the benchmark."""
    started = time.perf_counter()
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(output, time.perf_counter() - started, cpu_s, used.ru_maxrss / 1024)


def arcuate(*words: object) -> Cost:
    return child(sys.executable, "-m", "arcuate", *words)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def percent(rate: float | None, digits: int = 1) -> str:
    return "–" if rate is None else f"{100 * rate:.{digits}f} %"
