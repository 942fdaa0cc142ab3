"""FALCON H2 (handwriting): the streaming decoder with the interface of the `falcon_challenge` package.

The evaluator calls `reset` at the start of a session, `predict` for every bin, and `on_done` after every bin that ends
a trial, which returns the decoded characters. In them > stands for a space and ~ for a full stop.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import FULL_STOP, SPACE, token_names
from arcuate.data.trial import days_between, nearest_session, session_date
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.load import load
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.files import fields_to_dict
from arcuate.run import open_run

_PHASES = ("minival", "test")
_HELD_IN_SESSIONS = 21  # the evaluator requires all of them


@dataclass(frozen=True)
class FalconResult:
    """Metrics of the official evaluator."""

    run: str
    phase: str
    wer: float
    cer: float
    held_out_wer: float | None
    held_out_cer: float | None
    normalised_latency: float  # wall time of the decoder / duration of the recording
    n_files: int

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def _import_falcon() -> Any:
    try:
        from falcon_challenge import config, evaluator, interface
    except ImportError as error:
        raise UserError(
            f"the FALCON evaluator is missing ({error.name}); install it with: pip install 'arcuate[falcon]'"
        ) from None
    return config, evaluator, interface


def make_falcon_decoder(
    run: str | Path,
    *,
    lm: str | None = None,
    lexicon: str = "default",
    decoding: DecodingConfig | str | Path | None = None,
    checkpoint: str = "best",
) -> Any:
    """A `falcon_challenge.interface.BCIDecoder` of a run trained on characters: task H2 and batches of one.

    Without `lm` the most probable characters are returned; with one, words over a spelled lexicon.
    """
    config, _, interface = _import_falcon()
    options = SearchOptions(lm=lm or "none", lexicon=lexicon, config=decoding)
    decoder = load(f"{run}@{checkpoint}", options)
    task = config.FalconConfig(config.FalconTask.h2)

    class FalconDecoder(interface.BCIDecoder):  # type: ignore[name-defined]
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
            return falcon_text(self.decoder.finish(), self.decoder.layout.classes)

    return FalconDecoder()


def choose_session(name: str, known: Sequence[str]) -> str:
    """Choose the session of a model for a file name: that of the same date, else the nearest one in time."""
    recorded = session_date(name)
    if recorded is None:
        return known[-1]
    wanted = f"t5.{recorded:%Y.%m.%d}"
    same_day = [session for session in known if days_between(session, wanted) == 0]
    return same_day[0] if same_day else nearest_session(wanted, known)


def falcon_text(hypothesis: Hypothesis, classes: Sequence[str]) -> str:
    """Format a hypothesis for the evaluator: characters without blanks, > between words."""
    if hypothesis.words:
        return SPACE.join(hypothesis.words)
    return "".join(token_names(hypothesis.tokens, classes)).replace(".", FULL_STOP)


def evaluate_falcon(
    run: str | Path,
    data: str | Path,
    *,
    phase: str = "minival",
    lm: str | None = None,
    lexicon: str = "default",
    config: DecodingConfig | str | Path | None = None,
    checkpoint: str = "best",
) -> FalconResult:
    """Run the official evaluator of FALCON H2 on the files in `data`, the folder 000950 or its parent."""
    if phase not in _PHASES:
        raise UserError(f"--phase {phase!r} is unknown; choose {' or '.join(_PHASES)}")
    root = Path(data)
    if not root.is_dir():
        raise UserError(f"no folder {data}; give the folder of the FALCON H2 files")
    open_run(run)
    pattern = "*/*minival/*val*.nwb" if phase == "minival" else "*/eval/*val*.nwb"
    if root.name in ("000950", "h2") and next(root.glob(pattern), None) is None:  # the release itself, not its parent
        root = root.parent
    files = sorted(root.glob(pattern))
    held_in = [file for file in files if "held-in" in file.name or "held_in" in file.name]
    if len(held_in) < _HELD_IN_SESSIONS:
        raise UserError(
            f"{data} has {len(held_in)} held-in {phase} files; the evaluator needs all {_HELD_IN_SESSIONS}: download"
            " DANDI 000950, or simulate with --layout falcon-h2 --sessions 26"
        )
    _, evaluator, _ = _import_falcon()
    decoder = make_falcon_decoder(run, lm=lm, lexicon=lexicon, decoding=config, checkpoint=checkpoint)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        environment = {
            "EVAL_DATA_PATH": str(root),
            "PREDICTION_PATH_LOCAL": f"{folder}/predictions.pkl",
            "GT_PATH": f"{folder}/truth.pkl",
        }
        with _environment(environment):
            made = evaluator.FalconEvaluator(eval_remote=False, split="h2", dataloader_workers=0)
            outcome = made.evaluate(decoder, phase)
    values = outcome["result"][0][f"{phase}_split_h2"]
    held_out = [None if (v := values.get(f"Held Out {name}")) is None else float(v) for name in ("WER", "CER")]
    return FalconResult(
        run=Path(run).name,
        phase=phase,
        wer=float(values["Held In WER"]),
        cer=float(values["Held In CER"]),
        held_out_wer=held_out[0],
        held_out_cer=held_out[1],
        normalised_latency=float(values["Normalized Latency"]),
        n_files=len(files),
    )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    """Set the environment variables that the evaluator reads, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
