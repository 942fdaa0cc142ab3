"""Error rates of a stream with the statistics of offline evaluation, with running ones, and without a start value.

python benchmarks/live_statistics.py --run runs/demo
"""

import argparse
import json
from pathlib import Path

from arcuate.evaluation.metrics import score_text, total
from arcuate.live.decoder import StreamingDecoder
from arcuate.live.sources.replay import open_replay, seed_statistics
from arcuate.run import open_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--split", default="val")
    options = parser.parse_args()
    run = open_run(options.run).path
    decoder = StreamingDecoder.load(run)
    replay = open_replay(run, decoder, None, options.split, None)
    trials = [info for info in replay.trials if info.text]
    for kind in ("stored", "running", "empty"):
        stream = decoder.stream()
        if kind == "running":
            seed_statistics(run, stream, None)
        scores = []
        for info in trials:
            stream.reset(info.session, replay.statistics(info) if kind == "stored" else None)
            stream.push(replay.store.read_bins(info))
            scores.append(score_text(info.text or "", stream.finish().text or "").words)
        found = total(scores)
        first = total(scores[:5])
        result = {"statistics": kind, "wer": found.rate, "wer_of_the_first_5": first.rate, "n_trials": len(scores)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
