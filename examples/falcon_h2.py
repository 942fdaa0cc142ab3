"""Score a handwriting model with the official evaluator of FALCON H2: python falcon_h2.py RUN FOLDER [--phase test]

FOLDER has the files of DANDI 000950. Needs the evaluator: pip install falcon-challenge. `make_decoder` returns the
`BCIDecoder` for a submission. The evaluator calls `reset` at the start of a session, `predict` for every bin, and
`on_done` after every bin that ends a trial, which returns the decoded characters: > is a space and ~ a full stop.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate import SearchOptions, StreamingDecoder
from arcuate.data.trial import days_between, nearest_session, session_date

SPACE, FULL_STOP = ">", "~"
HELD_IN_SESSIONS = 21  # the evaluator needs all of them


def make_decoder(run: str | Path, lm: str = "none") -> Any:
    """Decoder of a run trained on characters: the most probable characters, or words with a language model."""
    from falcon_challenge import config, interface

    decoder = StreamingDecoder.load(run, SearchOptions(lm=lm))
    task = config.FalconConfig(config.FalconTask.h2)

    class FalconDecoder(interface.BCIDecoder):
        """Decodes a stream of bins, sentence by sentence."""

        def __init__(self) -> None:
            super().__init__(task, batch_size=1)
            self.decoder = decoder

        def reset(self, dataset_tags: Sequence[str | Path] = ("",)) -> None:
            """Use the layer of the session in the file name, or of the nearest one in time."""
            self.decoder.reset(choose_session(Path(str(dataset_tags[0])).stem, self.decoder.sessions))

        def predict(self, neural_observations: np.ndarray) -> np.ndarray:
            self.decoder.push(np.asarray(neural_observations, np.float32))
            return np.zeros((self.batch_size, self._task_config.out_dim), np.float32)

        def observe(self, neural_observations: np.ndarray) -> None:
            """Bins outside of trials are not decoded."""

        def on_done(self, dones: np.ndarray) -> str:
            best = self.decoder.finish()
            if best.words:
                return SPACE.join(best.words)
            return "".join(self.decoder.classes[token] for token in best.tokens).replace(".", FULL_STOP)

    return FalconDecoder()


def choose_session(name: str, known: Sequence[str]) -> str:
    """Choose the session of a model for a file name: that of the same date, else the nearest one in time."""
    recorded = session_date(name)
    if recorded is None:
        return known[-1]
    wanted = f"t5.{recorded:%Y.%m.%d}"
    same_day = [session for session in known if days_between(session, wanted) == 0]
    return same_day[0] if same_day else nearest_session(wanted, known)


def evaluate(run: str | Path, data: Path, phase: str = "minival", lm: str = "none") -> dict[str, float]:
    """Metrics of the official evaluator on the files in `data`, the folder 000950 or its parent."""
    from falcon_challenge import evaluator

    pattern = "*/*minival/*val*.nwb" if phase == "minival" else "*/eval/*val*.nwb"
    inside = data.name in ("000950", "h2") and next(data.glob(pattern), None) is None  # the release, not its parent
    root = data.parent if inside else data
    files = [file for file in root.glob(pattern) if "held-in" in file.name or "held_in" in file.name]
    if len(files) < HELD_IN_SESSIONS:
        sys.exit(f"{data} has {len(files)} held-in {phase} files; the evaluator needs all {HELD_IN_SESSIONS}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVAL_DATA_PATH"] = str(root)
        os.environ["PREDICTION_PATH_LOCAL"] = f"{folder}/predictions.pkl"
        os.environ["GT_PATH"] = f"{folder}/truth.pkl"
        made = evaluator.FalconEvaluator(eval_remote=False, split="h2", dataloader_workers=0)
        outcome = made.evaluate(make_decoder(run, lm), phase)
    found: dict[str, float] = outcome["result"][0][f"{phase}_split_h2"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run trained on characters, such as with the recipe falcon-h2-gru")
    parser.add_argument("data", type=Path, help="folder of the FALCON H2 files")
    parser.add_argument("--phase", choices=["minival", "test"], default="minival")
    parser.add_argument("--lm", default="none", help="language model that decodes words; default: characters only")
    args = parser.parse_args()
    print(json.dumps(evaluate(args.run, args.data, args.phase, args.lm)))


if __name__ == "__main__":
    main()
