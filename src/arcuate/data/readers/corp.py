"""CORP handwriting files (Fan et al. 2023): one .mat file per session with `tx_feats`, `sentences` and `blocks`.

Each is a cell array with one cell per trial: threshold crossings (bins of 20 ms, channels), the cued sentence in which
> stands for a space and ~ for a full stop, and the block number. The files state no splits: the last tenth of the
trials of a session is for test and the tenth before it for validation. Other variables are not read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import CHARACTERS, FULL_STOP, SPACE
from arcuate.data.readers.b2t24 import list_mat, load_mat
from arcuate.data.readers.nwb import list_data_files, session_of_name
from arcuate.data.readers.source import (
    MAX_VALUES,
    FileSummary,
    Problem,
    ReadResult,
    Source,
    SourceFile,
    UnreadableFile,
    unreadable,
)
from arcuate.data.text import text_to_characters
from arcuate.data.trial import SPLITS, Split, Trial, session_order, trial_id

_VARIABLES = ("tx_feats", "sentences", "blocks")
_FRACTION = 0.1  # fraction of the trials of a session for validation, and for test
_MAX_TRIALS = 100_000


class CorpReader:
    """Reader of CORP sessions."""

    layout = "corp"

    def find_source(self, path: Path) -> Source:
        """All .mat files at or below `path`, one session each."""
        files = [SourceFile(session_of_name(p.stem), s, p) for p in list_data_files(path, (".mat",)) for s in SPLITS]
        files.sort(key=lambda file: (session_order(file.session), SPLITS.index(file.split)))
        return Source(self.layout, path, tuple(dict.fromkeys(files)), classes=CHARACTERS)

    def summarise_file(self, file: SourceFile) -> FileSummary:
        """Number of trials of the split; the number of channels is found by reading them."""
        shapes = list_mat(file.path)
        missing = [name for name in _VARIABLES if name not in shapes]
        if missing:
            raise UnreadableFile(f"it has no variable {missing[0]}; its variables are {', '.join(sorted(shapes))}")
        n_trials = int(np.prod(shapes["tx_feats"]))
        if n_trials > _MAX_TRIALS:
            raise UnreadableFile(f"tx_feats has {n_trials} trials, expected at most {_MAX_TRIALS}")
        return FileSummary(len(_rows(n_trials, file.split)), {})

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one split in order."""
        stored = load_mat(file.path, _VARIABLES)
        cells = {name: _cells(stored, name) for name in _VARIABLES}
        lengths = {name: len(values) for name, values in cells.items()}
        if len(set(lengths.values())) > 1:
            raise UnreadableFile(f"the variables have different numbers of trials: {lengths}")
        for number, row in enumerate(_rows(lengths["tx_feats"], file.split)):
            yield _read_trial(file, number, *(cells[name][row] for name in _VARIABLES))


def _rows(n_trials: int, split: Split) -> range:
    n = round(_FRACTION * n_trials)
    ends = {"train": (0, n_trials - 2 * n), "val": (n_trials - 2 * n, n_trials - n), "test": (n_trials - n, n_trials)}
    return range(*ends[split])


def _cells(stored: dict[str, np.ndarray], name: str) -> list[Any]:
    if name not in stored or stored[name].dtype != object:
        raise UnreadableFile(f"{name} is not a cell array with one cell per trial")
    return list(stored[name].ravel())


def _read_trial(file: SourceFile, number: int, bins: Any, sentence: Any, block: Any) -> ReadResult:
    identity = trial_id(file.session, file.split, number)
    values = np.asarray(bins)
    if values.ndim != 2 or values.dtype.kind not in "fiu" or not values.shape[1] or values.size > MAX_VALUES:
        return unreadable(identity, f"tx_feats is {values.dtype} with shape {values.shape}, expected (bins, channels)")
    words, numbers = np.asarray(sentence).ravel(), np.asarray(block).ravel()
    cue = str(words[0]) if len(words) and words.dtype.kind == "U" else None
    problems: list[Problem] = []
    is_number = len(numbers) and numbers.dtype.kind in "fiu" and np.isfinite(numbers[0])
    if not is_number:
        problems.append(Problem("no block number", None, "block 0 is assumed", "note"))
    text = None if cue is None else cue.replace(SPACE, " ").replace(FULL_STOP, ".").strip()
    tokens: np.ndarray | None = None
    if text is None:
        problems.append(Problem("no label", None, "the trial has no sentence"))
    else:
        characters, missing = text_to_characters(text, CHARACTERS)
        tokens = np.array(characters, np.int32)
        if missing:
            problems.append(Problem("unknown characters", len(missing), " ".join(missing)[:200], "note"))
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(values, dtype=np.float32)
    number_of_block = int(numbers[0]) if is_number else 0
    trial = Trial(file.session, file.split, number, number_of_block, features, tokens, text)
    return ReadResult(identity, trial, tuple(problems))
