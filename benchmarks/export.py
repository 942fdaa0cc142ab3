"""Exported models against torch: time per frame, size, and the start of a process.

python benchmarks/export.py --recipe b2t25-gru --channels 512 --sessions 5

Random weights in the shape of a recipe. The three streams (torch, ONNX fp32, ONNX int8) take turns of two seconds of
bins in one process on one thread, and times are CPU times of that thread, so that other programs on the machine hardly
count. `frame` is the time of all bins of a frame; `last bin` is the time from the last bin of a frame to its
log-probabilities, with `precompute` between bins where a stream has it.

python benchmarks/export.py --start runs/demo --file model.arcx --python RUNTIME_ENV/bin/python

Seconds and peak memory of a process with words that decodes one frame, for the run with torch and for the file.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Cost, child, table

from arcuate import StreamingDecoder
from arcuate.data.alphabet import CLASSES
from arcuate.data.statistics import Statistics
from arcuate.experiments.export import write_export
from arcuate.experiments.recipe import load_recipe
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.io import save_model
from arcuate.models.model import Model
from arcuate.runtime import Decoder

START = """
import numpy as np
from {module} import {kind}
decoder = {kind}.load({path!r})
while not len(decoder.push(np.zeros((1, decoder.n_channels), np.float32)).log_probs):
    pass
"""
TURN = 100  # bins after which the next stream takes its turn


def make_model(recipe: str, n_channels: int, n_sessions: int) -> Model:
    torch.manual_seed(0)
    loaded = load_recipe(recipe, ["encoder.bidirectional=false"])
    settings = ModelSettings(**{key: getattr(loaded, key) for key in ModelSettings.model_fields})
    sessions = tuple(f"day{i}" for i in range(n_sessions))
    return Model(ModelConfig(settings=settings, n_channels=n_channels, sessions=sessions, classes=CLASSES)).eval()


def time_streams(streams: dict[str, Any], n_channels: int, n_bins: int, warm_up: int = 100) -> dict[str, list[float]]:
    """Milliseconds of CPU time per frame and after its last bin: p50 and p99 of each."""
    rng = np.random.default_rng(0)
    total: dict[str, list[float]] = {name: [] for name in streams}
    last: dict[str, list[float]] = {name: [] for name in streams}
    spent = dict.fromkeys(streams, 0.0)
    for first in range(0, warm_up + n_bins, TURN):
        rows = rng.normal(0.0, 1.0, (TURN, 1, n_channels)).astype(np.float32)
        for name, stream in streams.items():
            if first % 1000 < TURN:
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
    return {name: [*np.percentile(total[name], (50, 99)), *np.percentile(last[name], (50, 99))] for name in streams}


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
        timed = time_streams(streams, options.channels, n_bins)
        sizes = [sum(f.stat().st_size for f in run.iterdir()), fp32.stat().st_size, int8.stat().st_size]
    columns = ["", "MB", "frame p50 ms", "p99", "last bin p50 ms", "p99"]
    cells = [[f"{value:.2f}" for value in times] for times in timed.values()]
    print(table(columns, [[n, f"{s / 1e6:.1f}", *c] for n, s, c in zip(timed, sizes, cells, strict=True)]))


def compare_starts(options: argparse.Namespace) -> None:
    """Medians of three starts, in turns after one that fills the file cache."""
    arms = {
        "torch": (sys.executable, "arcuate", "StreamingDecoder", options.start),
        "runtime": (options.python, "arcuate.runtime", "Decoder", options.file),
    }

    def start(python: str, module: str, kind: str, path: Path) -> Cost:
        return child(python, "-c", START.format(module=module, kind=kind, path=str(path)))

    rounds = [{name: start(*arm) for name, arm in arms.items()} for _ in range(4)][1:]
    middle = lambda name, field: f"{statistics.median(getattr(costs[name], field) for costs in rounds):.2f}"
    fields = ("seconds", "cpu_s", "peak_mb")
    print(table(["", *fields], [[name, *(middle(name, field) for field in fields)] for name in arms]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="b2t25-gru")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--start", type=Path, help="run folder whose start is compared with that of --file")
    parser.add_argument("--file", type=Path, help="exported model with words")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment of the runtime")
    options = parser.parse_args()
    if options.start is not None:
        compare_starts(options)
    else:
        compare_steps(options)


if __name__ == "__main__":
    main()
