"""Exported models against torch: time per frame, size, memory, import and load time.

python benchmarks/export.py --recipe b2t25-gru --channels 512 --sessions 5

Random weights in the shape of a recipe. The three streams (torch, ONNX fp32, ONNX int8) take turns of two seconds of
bins in one process on one thread, and times are CPU times of that thread, so that other programs on the machine hardly
count. With `--turn 1` they take turns bin by bin, and every stream finds the caches filled with the weights of the
others.
`frame` is the time of all bins of a frame; `last bin` is the time from the last bin of a frame to its
log-probabilities, with `precompute` between bins where a stream has it. Memory, import and load time are those of
separate processes that decode one frame.

python benchmarks/export.py --accuracy runs/first-gru runs/second-gru …

compares int8 with fp32 on the validation trials of runs: PER (greedy) and WER, with paired 95 % intervals.

python benchmarks/export.py --start runs/demo --file model.arcx --python RUNTIME_ENV/bin/python

measures the start of a process with words: seconds from its start to the first decoded frame, and its peak memory, for
`StreamingDecoder` on the run and for `Decoder` on the file, each several times in turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arcuate import StreamingDecoder
from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.evaluation.decode import decode
from arcuate.evaluation.significance import score_difference
from arcuate.experiments.export import ExportResult, export, write_export
from arcuate.experiments.recipe import load_recipe
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.io import save_model
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.runtime import Decoder

START = """
import time; started = time.perf_counter()
import json, resource, sys
import numpy as np
{load}
loaded = time.perf_counter()
for _ in range(80):
    if len(decoder.push(np.zeros((1, decoder.n_channels), np.float32)).log_probs):
        break
first = time.perf_counter()
with open("/proc/self/status") as file:
    rss = next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
times = {{"import_s": imported - started, "load_s": loaded - imported, "first_s": first - started}}
times["cpu_s"] = time.process_time()
print(json.dumps({{**times, "rss": rss}}))
"""
LOADERS = {
    "torch": (
        "import torch\ntorch.set_num_threads(1)\nfrom arcuate import StreamingDecoder\n"
        "StreamingDecoder.load\nimported = time.perf_counter()\ndecoder = StreamingDecoder.load({path!r}{options})"
    ),
    "onnx": (
        "from arcuate.runtime import Decoder\nimport onnxruntime\nimported = time.perf_counter()\n"
        "decoder = Decoder.load({path!r})"
    ),
}


def make_model(recipe: str, n_channels: int, n_sessions: int) -> Model:
    torch.manual_seed(0)
    loaded = load_recipe(recipe, ["encoder.bidirectional=false"])
    settings = ModelSettings(**{key: getattr(loaded, key) for key in ModelSettings.model_fields})
    sessions = tuple(f"day{i}" for i in range(n_sessions))
    return Model(ModelConfig(settings=settings, n_channels=n_channels, sessions=sessions, classes=CLASSES)).eval()


def time_streams(
    streams: dict[str, Any], n_channels: int, n_bins: int, turn: int, warm_up: int = 100
) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time per frame and after its last bin, with all streams in turns of `turn` bins.

    The CPU time of the thread does not contain the time in which other programs had the core.
    """
    rng = np.random.default_rng(0)
    total: dict[str, list[float]] = {name: [] for name in streams}
    last: dict[str, list[float]] = {name: [] for name in streams}
    spent = dict.fromkeys(streams, 0.0)
    for first in range(0, warm_up + n_bins, turn):
        rows = rng.normal(0.0, 1.0, (turn, 1, n_channels)).astype(np.float32)
        for name, stream in streams.items():
            if first % 1000 < turn:
                stream.reset()
            for row in rows:
                started = time.thread_time()
                partial = stream.push(row)
                ended = time.thread_time()
                stream.precompute()
                spent[name] += time.thread_time() - started
                if len(partial.log_probs):
                    if first >= warm_up:
                        total[name].append(1000 * spent[name])
                        last[name].append(1000 * (ended - started))
                    spent[name] = 0.0
    quantile = lambda values, q: float(np.percentile(values, q))
    return {
        name: {
            "frame_p50": quantile(total[name], 50),
            "frame_p99": quantile(total[name], 99),
            "last_p50": quantile(last[name], 50),
            "last_p99": quantile(last[name], 99),
        }
        for name in streams
    }


def start_process(kind: str, path: Path, python: str, options: str = "") -> dict[str, float]:
    """Times and peak memory of a process that decodes one frame."""
    load = LOADERS[kind].format(path=str(path), options=options)
    started = time.perf_counter()
    done = subprocess.run([python, "-c", START.format(load=load)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": time.perf_counter() - started}


def median_of(measure: list[Callable[[], dict[str, float]]], n: int) -> list[dict[str, float]]:
    """Medians over n rounds in which all measurements take turns, after one untimed round."""
    rounds = [[one() for one in measure] for _ in range(n + 1)][1:]
    return [{key: statistics.median(r[i][key] for r in rounds) for key in rounds[0][i]} for i in range(len(measure))]


def print_row(name: str, mb: float, timed: dict[str, float] | None, start: dict[str, float] | None) -> None:
    cells = [name, f"{mb:.1f}"]
    if timed is not None:
        cells += [f"{timed[key]:.2f}" for key in ("frame_p50", "frame_p99", "last_p50", "last_p99")]
    if start is not None:
        cells.append(f"{start['rss']:.0f}")
        cells += [f"{start[key]:.2f}" for key in ("import_s", "load_s", "first_s", "cpu_s")]
    print("| " + " | ".join(cells) + " |")


def compare_steps(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = make_model(options.recipe, options.channels, options.sessions)
    known = Statistics(np.zeros(options.channels, np.float32), np.ones(options.channels, np.float32), 1000)
    with tempfile.TemporaryDirectory() as folder:
        run, fp32, int8 = Path(folder) / "run", Path(folder) / "fp32.arcx", Path(folder) / "int8.arcx"
        save_model(run, model)
        write_export(fp32, model, None)
        write_export(int8, model, None, int8=True)
        streams = {
            "torch": StreamingDecoder(TorchModel(model), None, None, known),
            "ONNX fp32": Decoder.load(fp32, statistics=known),
            "ONNX int8": Decoder.load(int8, statistics=known),
        }
        n_bins = options.frames * model.config.settings.front_end.patch.stride
        timed = time_streams(streams, options.channels, n_bins, options.turn)
        del streams
        processes: list[Callable[[], dict[str, float]]] = [
            lambda: start_process("torch", run, options.python, ", lm=None"),
            lambda: start_process("onnx", fp32, options.python),
            lambda: start_process("onnx", int8, options.python),
        ]
        starts = median_of(processes, options.rounds) if options.rounds else [None, None, None]
        sizes = [sum(f.stat().st_size for f in run.iterdir()), fp32.stat().st_size, int8.stat().st_size]
    columns = ["MB", "frame p50 ms", "p99", "last bin p50 ms", "p99"]
    columns += ["RSS MB", "import s", "load s", "first frame s", "CPU s"] if options.rounds else []
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for (name, times), size, start in zip(timed.items(), sizes, starts, strict=True):
        print_row(name, size / 1e6, times, start)


def compare_starts(options: argparse.Namespace) -> None:
    found = median_of(
        [
            lambda: start_process("torch", options.start, sys.executable, ", head='ctc'"),
            lambda: start_process("onnx", options.file, options.python),
        ],
        options.rounds,
    )
    print("| | MB | RSS MB | import s | load s | first frame s | CPU s |\n|---|---|---|---|---|---|---|")
    print_row("torch, StreamingDecoder", 0.0, None, found[0])
    print_row("runtime.Decoder", options.file.stat().st_size / 1e6, None, found[1])


def compare_accuracy(options: argparse.Namespace) -> None:
    """PER and WER of int8 and fp32 exports on the same trials."""
    print("| run | trials | PER fp32 | PER int8 | difference (points) | WER fp32 | WER int8 | difference (points) |")
    print("|---|---|---|---|---|---|---|---|")
    for run in options.accuracy:
        with tempfile.TemporaryDirectory() as folder:
            results = {}
            for precision in ("fp32", "int8"):
                path = Path(folder) / f"{precision}.arcx"
                found = export(run, path, int8=precision == "int8")
                results[precision] = decode(path, data=Run(run).data()["path"], beam=options.beam, n_best=1)
        assert isinstance(found, ExportResult) and found.int8 is not None
        phonemes, words = found.int8, {name: [t.word_errors for t in r] for name, r in results.items()}
        scored = {name: [s for s in scores if s is not None] for name, scores in words.items()}
        change = score_difference(scored["int8"], scored["fp32"])
        assert change is not None
        cells = [run.name, str(phonemes.n_trials), percent(phonemes.per_fp32), percent(phonemes.per_int8)]
        cells.append(interval(phonemes.difference, phonemes.low, phonemes.high))
        cells += [percent(results["fp32"].wer), percent(results["int8"].wer)]
        cells.append(interval(change.rate, change.low, change.high))
        print("| " + " | ".join(cells) + " |", flush=True)


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.2f} %"


def interval(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="b2t25-gru")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--turn", type=int, default=100, help="bins after which the next stream takes its turn")
    parser.add_argument("--rounds", type=int, default=3, help="processes started per arm; 0: only the time per frame")
    parser.add_argument("--accuracy", type=Path, nargs="+", help="run folders to compare int8 with fp32 on")
    parser.add_argument("--beam", type=int, default=100, help="with --accuracy: beam of the word search")
    parser.add_argument("--start", type=Path, help="run folder whose start is compared with that of --file")
    parser.add_argument("--file", type=Path, help="exported model with words")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment of the runtime")
    options = parser.parse_args()
    if options.accuracy:
        compare_accuracy(options)
    elif options.start is not None:
        compare_starts(options)
    else:
        compare_steps(options)


if __name__ == "__main__":
    main()
