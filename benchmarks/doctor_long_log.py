"""Time and memory of the doctor on logs of ten million lines.

    python benchmarks/doctor_long_log.py [--lines 10000000] [--kinds jsonl csv text wandb]

Writes a synthetic log of each kind into a temporary folder, runs `arcuate doctor` on it in a fresh process, and prints
seconds and the peak resident memory of that process.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from common import arcuate

EVERY = 1000  # training rows between two evaluations


def numbers(n_lines: int) -> Iterator[tuple[int, float, float | None]]:
    """Step and training loss, and at intervals an error rate, which fall as in a healthy run."""
    for step in range(n_lines):
        share = step / n_lines
        loss = 7.0 / (1 + 20 * share) * (1 + 0.1 * ((step * 7919) % 101 - 50) / 50)
        yield step, loss, 0.2 + 0.75 / (1 + 30 * share) if step % EVERY == 0 else None


def jsonl(step: int, loss: float, per: float | None) -> str:
    if per is not None:
        return f'{{"step": {step}, "split": "val", "loss": {loss * 1.1:.5f}, "per": {per:.5f}}}\n'
    return f'{{"step": {step}, "split": "train", "loss": {loss:.5f}, "grad_norm": {loss / 3:.4f}, "lr": 0.02}}\n'


def wandb(step: int, loss: float, per: float | None) -> str:
    found = f', "val/per": {per:.5f}' if per is not None else ""
    return f'{{"_step": {step}, "_runtime": {step / 10:.1f}, "train/loss": {loss:.5f}{found}}}\n'


def csv(step: int, loss: float, per: float | None) -> str:
    return f"{step},{loss:.5f},{'' if per is None else f'{per:.5f}'}\n"


def text(step: int, loss: float, per: float | None) -> str:
    when = f"2025-12-08 06:{step // 60 % 60:02d}:{step % 60:02d},349"
    if per is not None:
        return f"{when}: Val batch {step}: PER (avg): {per:.4f} CTC Loss (avg): {loss * 1.1:.4f} time: 4.1\n"
    return f"{when}: Train batch {step}: loss: {loss:.2f} grad norm: {loss / 3:.2f} time: 0.081\n"


KINDS: dict[str, Callable[[int, float, float | None], str]] = {f.__name__: f for f in (jsonl, wandb, csv, text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    print("| format | lines | size | seconds | CPU seconds | peak memory | verdict |\n|---|---|---|---|---|---|---|")
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log"
            with path.open("w", encoding="utf-8") as file:
                if kind == "csv":
                    file.write("step,train_loss,val_per\n")
                file.writelines(KINDS[kind](*row) for row in numbers(args.lines))
            size = path.stat().st_size / 1024**2
            used = arcuate("doctor", path, "--json")
        cells = [kind, f"{args.lines:,}", f"{size:.0f} MB", f"{used.seconds:.0f}", f"{used.cpu_s:.0f}"]
        print(f"| {' | '.join(cells)} | {used.peak_mb:.0f} MB | {json.loads(used.output)['primary']} |", flush=True)


if __name__ == "__main__":
    main()
