"""Live decoding: time per frame at full size, small models, many streams.

python benchmarks/live.py full --scores ../shared/real/words/t15/dev.npz     # b2t25-gru, 5 x 768, 600 s in real time
python benchmarks/live.py streams --run runs/demo                             # eight streams at once in real time

On a busy machine wall time includes other programs: `--first` (as root) gives this one real-time priority.

`full` has random weights, because its time does not depend on their values; its search gets real frame scores of T15,
one per frame of the model, because the time of the search depends on them. Lexicon 126,052 words, 3-gram, beam 200.
"""

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arcuate import StreamingDecoder
from arcuate.data.alphabet import CLASSES
from arcuate.data.store import Store
from arcuate.data.trial import BIN_SECONDS
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.load import load_search
from arcuate.decoding.options import SearchOptions
from arcuate.experiments.recipe import load_recipe
from arcuate.live.bench import FrameTimings, Sentence, push_bin, replay_sentences, time_stream, wait_until
from arcuate.live.sources.replay import ReplayTrials, select_trials
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.interfaces import Outputs
from arcuate.models.model import Model, StreamState
from arcuate.run import Run


class ScriptedModel(Model):
    """A model that computes its output and then replaces it by given frames."""

    script: Iterator[np.ndarray]

    def _stream_outputs(self, frames: torch.Tensor, state: StreamState) -> Outputs:
        outputs = super()._stream_outputs(frames, state)
        frames_out = [next(self.script) for _ in range(frames.shape[1])]
        if not frames_out:
            return outputs
        return replace(outputs, log_probs={"ctc": torch.from_numpy(np.stack(frames_out))[None]})


def full_model(script: Iterator[np.ndarray]) -> ScriptedModel:
    recipe = load_recipe("b2t25-gru", [])
    settings = ModelSettings(front_end=recipe.front_end, encoder=recipe.encoder)
    sessions = tuple(f"session{i}" for i in range(45))
    torch.manual_seed(0)
    model = ScriptedModel(ModelConfig(settings=settings, n_channels=512, sessions=sessions, classes=CLASSES)).eval()
    model.script = script
    return model


def full(args: argparse.Namespace) -> dict[str, Any]:
    """Sentences as long as real ones: the model gets the number of bins that gives as many frames."""
    scores = read_frames(args.scores)
    script: list[np.ndarray] = []
    even = np.full(len(CLASSES), -np.log(len(CLASSES)), np.float32)
    model = full_model(script.pop(0) if script else even for _ in itertools.count())
    decoder = StreamingDecoder(TorchModel(model), load_search(CLASSES, SearchOptions(beam=200)))
    decoder.warm_up()
    rng = np.random.default_rng(0)

    def sentences() -> Iterator[Sentence]:
        for frames in itertools.cycle(scores.trials):
            bins = rng.normal(size=(14 + 4 * (len(frames) - 1), 512)).astype(np.float32)

            def begin(frames: np.ndarray = frames) -> None:
                script[:] = list(frames)
                decoder.reset()

            yield Sentence(bins, begin)

    go_first(args)
    timings = [time_stream(decoder, sentences(), args.seconds, real_time=not args.fast) for _ in range(args.repeat)]
    least = 1000 * np.min([found.cpu for found in timings], axis=0)  # of each frame, over the repetitions
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **timings[-1].summary(80.0),
        "repetitions": args.repeat,
        "least_cpu_ms": {f"p{q}": float(np.percentile(least, q)) for q in (50, 99, 100)},
    }


def go_first(args: argparse.Namespace) -> None:
    """Pin this process to one core with real-time priority; called after loading."""
    if args.first:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def open_both(run: Path) -> tuple[StreamingDecoder, ReplayTrials]:
    decoder = StreamingDecoder.load(run)
    layout = decoder.layout
    store = Store.open(Path(str(Run(run).data()["path"])))
    return decoder, select_trials(store, decoder.sessions, layout.normalise, layout.log1p)


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Several streams of one set of weights, bin after bin in turn, all in real time."""
    first, prepared = open_both(args.run)
    decoders = [first.stream() for _ in range(args.streams)]
    feeds = [itertools.islice(replay_sentences(d, prepared), k, None) for k, d in enumerate(decoders)]
    left: list[list[np.ndarray]] = [[] for _ in decoders]
    found, due = FrameTimings(), time.perf_counter()
    gc.collect()
    gc.freeze()
    if args.first:  # all cores
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    for _ in range(round(args.seconds / BIN_SECONDS)):
        due += BIN_SECONDS
        found.n_late += wait_until(due)
        for k, decoder in enumerate(decoders):
            if not left[k]:
                decoder.finish()
                sentence = next(feeds[k])
                sentence.start()
                left[k] = list(sentence.bins)
            push_bin(decoder, left[k].pop(0), found)
    return {"streams": args.streams, **found.summary(80.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["full", "streams"])
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--scores", type=Path, default=Path("../shared/real/words/t15/dev.npz"))
    parser.add_argument("--seconds", type=float, help="of recording")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument(
        "--first", action="store_true", help="on a busy machine, as root: one core, before all other programs"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="full: the same frames again; what a busy machine adds goes"
    )
    parser.add_argument("--fast", action="store_true", help="not in real time")
    args = parser.parse_args()
    args.seconds = args.seconds or {"full": 600.0}.get(args.what, 60.0)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    result = globals()[args.what](args)
    print(json.dumps({"what": args.what, **result, "load_before": load, "load_after": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
