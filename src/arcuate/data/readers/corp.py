"""Handwriting of participant T5 in MATLAB files: CORP (Fan et al. 2023) and the release of Willett et al. 2021.

CORP has one .mat file per session with `tx_feats`, `sentences` and `blocks`. Each is a cell array with one cell per
trial: threshold crossings (bins of 20 ms, channels), the cued sentence in which > stands for a space and ~ for a full
stop, and the block number.

The release of 2021 has one folder per session, of which `sentences.mat` is read: `neuralActivityCube` (sentences, bins
of 10 ms, channels), `numTimeBinsPerSentence`, `sentencePrompt` (spelled as above; # marks a pause and is removed) and
`sentenceBlockNums`, as the authors' code reads them (github.com/fwillett/handwritingBCI). Two bins are summed to 20 ms.

Splits are not read from the files: the last tenth of the trials of a session is for test and the tenth before it
for validation. Other files and variables are not read.
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
    NO_LABEL,
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
from arcuate.errors import UserError

_VARIABLES = ("tx_feats", "sentences", "blocks")
_SENTENCE_VARIABLES = ("neuralActivityCube", "numTimeBinsPerSentence", "sentencePrompt", "sentenceBlockNums")
_MAX_CHANNELS = 65_536
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


class HandwritingReader:
    """Reader of the sentences of the handwriting release of 2021."""

    layout = "handwriting"

    def find_source(self, path: Path) -> Source:
        """All files <session>/sentences.mat at or below `path`."""
        found = [p for p in list_data_files(path, (".mat",)) if p.name == "sentences.mat"]
        if not found:
            raise UserError(f"no <session>/sentences.mat in {path}; give the folder Datasets of the release")
        files = [SourceFile(p.parent.name, split, p) for p in found for split in SPLITS]
        files.sort(key=lambda file: (session_order(file.session), SPLITS.index(file.split)))
        return Source(self.layout, path, tuple(files), classes=CHARACTERS)

    def summarise_file(self, file: SourceFile) -> FileSummary:
        """Number of trials of the split, and channels."""
        shapes = list_mat(file.path)
        cube = shapes.get("neuralActivityCube", ())
        if len(cube) != 3 or not 0 < cube[2] <= _MAX_CHANNELS or cube[0] > _MAX_TRIALS:
            raise UnreadableFile(f"neuralActivityCube has shape {cube}, expected (sentences, bins, channels)")
        n_trials = len(_rows(cube[0], file.split))
        return FileSummary(n_trials, {cube[2]: n_trials} if n_trials else {})

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one split in order, in bins of 20 ms."""
        stored = load_mat(file.path, _SENTENCE_VARIABLES)
        if missing := [name for name in _SENTENCE_VARIABLES if name not in stored]:
            raise UnreadableFile(f"it has no variable {missing[0]}")
        cube, *columns = (stored[name] for name in _SENTENCE_VARIABLES)
        lengths, prompts, blocks = (column.ravel() for column in columns)
        if (
            cube.ndim != 3
            or cube.dtype.kind not in "fiu"
            or any(len(c) != len(cube) for c in (lengths, prompts, blocks))
        ):
            raise UnreadableFile(f"the variables do not describe the same {len(cube)} sentences")
        if lengths.dtype.kind not in "fiu" or prompts.dtype != object:
            raise UnreadableFile("numTimeBinsPerSentence is not numeric, or sentencePrompt is not a cell array")
        for number, row in enumerate(_rows(len(cube), file.split)):
            n_bins = int(np.clip(np.nan_to_num(lengths[row]), 0, cube.shape[1])) // 2
            bins = cube[row, : 2 * n_bins].astype(np.float32).reshape(n_bins, 2, -1).sum(1)
            prompt = np.asarray(prompts[row]).ravel()
            spelled = np.char.replace(prompt, "#", "") if prompt.dtype.kind == "U" else prompt
            yield _read_trial(file, number, bins, spelled, blocks[row])


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
        return unreadable(
            identity, f"the recording is {values.dtype} with shape {values.shape}, expected (bins, channels)"
        )
    words, numbers = np.asarray(sentence).ravel(), np.asarray(block).ravel()
    cue = str(words[0]) if len(words) and words.dtype.kind == "U" else None
    problems: list[Problem] = []
    is_number = len(numbers) and numbers.dtype.kind in "fiu" and np.isfinite(numbers[0])
    if not is_number:
        problems.append(Problem("no block number", None, "block 0 is assumed", "note"))
    text = None if cue is None else cue.replace(SPACE, " ").replace(FULL_STOP, ".").strip()
    tokens: np.ndarray | None = None
    if text is None:
        problems.append(Problem(NO_LABEL, None, "the trial has no sentence"))
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
