"""Brain-to-Text '24: `{train,test,competitionHoldOut}/<session>.mat`, one cell per trial.

As in the literature, `test` is the validation split and `competitionHoldOut` the test split, whose sentences are
placeholders and are dropped. Labels are derived from the text by `arcuate.data.text`.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat, whosmat
from scipy.io.matlab import MatReadError

from arcuate.data.alphabet import SILENCE
from arcuate.data.readers.hdf5 import Budget
from arcuate.data.readers.release import find_release
from arcuate.data.readers.source import (
    FILE_ERRORS,
    MAX_VALUES,
    NO_LABEL,
    REPLACEMENT,
    Problem,
    ReadResult,
    Source,
    SourceFile,
    UnreadableFile,
    is_safe_name,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.spelling import spell_out
from arcuate.data.text import text_to_tokens
from arcuate.data.trial import Trial, trial_id
from arcuate.errors import UserError, check_resources

DEFAULT_FEATURES = "tx1+spikePow:6v"
_KNOWN_FEATURES = ("tx1", "tx2", "tx3", "tx4", "spikePow")
_AREAS = ("6v", "44", "all")
_MAT_ERRORS = (*FILE_ERRORS, AttributeError, IndexError, NameError, struct.error, zlib.error, MatReadError)


@dataclass(frozen=True)
class Features:
    """Variables that form the channels, and the half of their columns to use (area 6v first, area 44 second)."""

    names: tuple[str, ...]
    area: str
    text: str  # as given

    def columns(self, n_columns: int) -> slice:
        half = n_columns // 2
        return {"6v": slice(0, half), "44": slice(half, None), "all": slice(None)}[self.area]


def parse_features(text: str) -> Features:
    """Parse a selection such as "tx1+spikePow:6v"; raises UserError with the known features."""
    names, _, area = text.partition(":")
    chosen = tuple(name.strip() for name in names.split("+"))
    area = area.strip() or "6v"
    unknown = [name for name in chosen if name not in _KNOWN_FEATURES]
    if unknown or area not in _AREAS or len(set(chosen)) != len(chosen):
        raise UserError(
            f"unknown features {text!r}: join some of {', '.join(_KNOWN_FEATURES)} with + and append"
            f" :{', :'.join(_AREAS)}, as in {DEFAULT_FEATURES}"
        )
    return Features(chosen, area, text)


class B2T24:
    """Reader of Brain-to-Text '24."""

    layout = "b2t24"

    def __init__(self, features: str = DEFAULT_FEATURES) -> None:
        self.features = parse_features(features)

    def find_source(self, path: Path) -> Source:
        return find_release(path, self.layout)

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one file in order; the complete file is held in memory."""
        chosen = self.features
        data = _load(file, chosen)
        arrays = [data[name] for name in chosen.names]
        texts, blocks = data["sentenceText"], data["blockIdx"]
        budget = Budget(file.path.stat().st_size)
        for number in range(len(arrays[0])):
            identity = trial_id(file.session, file.split, number)
            try:
                bins = _read_bins([array[number] for array in arrays], chosen)
                budget.spend(bins.nbytes)
            except FILE_ERRORS as error:
                yield unreadable(identity, summarise_error(error))
                continue
            for array in arrays:
                array[number] = None  # release the memory
            yield _make_trial(file, number, bins, texts[number] if texts else None, blocks[number] if blocks else None)


def _make_trial(file: SourceFile, number: int, bins: np.ndarray, text: str | None, block: int | None) -> ReadResult:
    problems: list[Problem] = []
    if block is None:
        problems.append(Problem("no block number", None, "blockIdx is missing; block 0 is assumed", "note"))
    tokens: np.ndarray | None = None
    if file.split == "test":
        text = None  # placeholder in the release
    elif not text:
        problems.append(Problem(NO_LABEL, None, "the trial has no sentence"))
        text = None
    else:
        if n_replaced := text.count(REPLACEMENT):
            detail = f"{n_replaced} characters could not be decoded, so the label may be wrong: {text[:60]!r}"
            problems.append(Problem("text encoding", n_replaced, detail))
        label, unknown = text_to_tokens(text)
        tokens = np.asarray(label, dtype=np.int32)
        problems.extend(_spelling_problems(text, label))
        if unknown:
            detail = f"pronounced by letter-to-sound rules: {', '.join(unknown)}"
            problems.append(Problem("unknown words", len(unknown), detail, "note"))
    trial = Trial(file.session, file.split, number, block or 0, bins, tokens, text)
    return ReadResult(trial.id, trial, tuple(problems))


def _spelling_problems(text: str, label: list[int]) -> Iterator[Problem]:
    """Problems of a label whose text contains digits or symbols."""
    spelling = spell_out(text)
    if spelling.changed:
        yield Problem("spelled out", None, f"labelled as {spelling.text[:80]!r}", "note")
    if unspoken := spelling.unspoken.replace(REPLACEMENT, ""):
        detail = f"no pronunciation for {unspoken[:20]!r}, so the label may be wrong: {text[:60]!r}"
        yield Problem("unspoken text", len(unspoken), detail)
    if set(label) <= {SILENCE}:
        yield Problem("empty label", 0, f"the sentence {text[:60]!r} has no phonemes")


def _read_bins(cells: list[Any], features: Features) -> np.ndarray:
    """Bins (T, C) float32: the selected columns of all features."""
    parts: list[np.ndarray] = []
    for name, cell in zip(features.names, cells, strict=True):
        if not isinstance(cell, np.ndarray) or cell.ndim != 2 or cell.dtype.kind not in "fiu":
            raise ValueError(f"{name} is not a numeric array (bins, channels)")
        if cell.size > MAX_VALUES or (features.area != "all" and cell.shape[1] % 2):
            raise ValueError(
                f"{name} has {cell.shape[0]} bins of {cell.shape[1]} channels: too large or not divisible by 2"
            )
        parts.append(cell[:, features.columns(cell.shape[1])])
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"{' and '.join(features.names)} differ in length: {[len(part) for part in parts]}")
    with np.errstate(over="ignore"):
        bins = np.concatenate([part.astype(np.float32) for part in parts], axis=1)
    if not bins.shape[1]:
        raise ValueError("the trial has no channels")
    return np.ascontiguousarray(bins)


# --- loading the file -------------------------------------------------------------------------------------


def _load(file: SourceFile, features: Features) -> dict[str, list[Any]]:
    """Cells, sentences and block numbers, one entry per trial."""
    if not is_safe_name(file.session):
        raise UnreadableFile(f"the session name {file.session!r} is not a valid file name; rename the file")
    stored = load_mat(file.path, (*features.names, "sentenceText", "blockIdx"))
    data: dict[str, list[Any]] = {}
    if missing := [name for name in features.names if name not in stored]:
        known = ", ".join(sorted(variable for variable, *_ in whosmat(file.path))) or "none"
        raise UnreadableFile(f"it has no variable {missing[0]}; its variables are {known}")
    for name in features.names:
        if stored[name].dtype != object:
            raise UnreadableFile(f"{name} is not a cell array with one cell per trial")
        data[name] = list(stored[name].ravel())
    data["sentenceText"] = _parse_sentences(stored.get("sentenceText"))
    data["blockIdx"] = _parse_blocks(stored.get("blockIdx"))
    n_trials = len(data[features.names[0]])
    for name, values in data.items():
        if len(values) != n_trials and (values or name in features.names):
            raise UnreadableFile(f"{features.names[0]} has {n_trials} trials but {name} has {len(values)}")
    return data


def load_mat(path: Path, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Variables of a MATLAB 5 file; raises `UnreadableFile`. Called in a watched child, because scipy may crash."""
    try:
        with path.open("rb") as stream:
            head = stream.read(520)
        if head[:8] == b"\x89HDF\r\n\x1a\n" or head[512:520] == b"\x89HDF\r\n\x1a\n" or head.startswith(b"MATLAB 7.3"):
            raise UnreadableFile("it is a MATLAB 7.3 file; save it again in MATLAB with save(..., '-v7')")
        if head[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
            raise UnreadableFile("it is not a MATLAB 5 file")
        stored = loadmat(path, variable_names=tuple(wanted))
    except _MAT_ERRORS as error:
        check_resources(error, path)
        raise UnreadableFile(summarise_error(error)) from error
    return {name: stored[name] for name in wanted if isinstance(stored.get(name), np.ndarray)}


def _parse_sentences(stored: Any) -> list[Any]:
    """Sentences from a padded character array or a cell array; an empty list if there are none."""
    if not isinstance(stored, np.ndarray):
        return []
    flat = [np.asarray(cell).ravel() for cell in stored.ravel()]
    return [replace_surrogates(str(cell[0])).replace("\0", "").strip() if len(cell) else "" for cell in flat]


def _parse_blocks(stored: Any) -> list[Any]:
    if not isinstance(stored, np.ndarray) or stored.dtype.kind not in "fiu":
        return []
    return [int(value) if np.isfinite(value) else None for value in stored.ravel()]
