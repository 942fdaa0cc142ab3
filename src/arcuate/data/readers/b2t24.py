"""Brain-to-Text '24: `{train,test,competitionHoldOut}/<session>.mat`, one cell per trial.

As in the literature, `test` is the validation split and `competitionHoldOut` the test split, whose sentences are
placeholders and are dropped. Labels are derived from the text by `arcuate.data.text`.
"""

import struct
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
from scipy.io.matlab import MatReadError

from arcuate.data.readers.mat_tags import list_variables
from arcuate.data.readers.source import (
    FILE_ERRORS,
    MAX_VALUES,
    REPLACEMENT,
    FileSummary,
    Problem,
    ReadResult,
    SourceFile,
    UnreadableFile,
    is_safe_name,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.text import text_to_tokens
from arcuate.data.trial import Split, Trial, trial_id
from arcuate.errors import UserError

PARTITIONS: dict[str, Split] = {"train": "train", "test": "val", "competitionHoldOut": "test"}
DEFAULT_FEATURES = "tx1+spikePow:6v"
_KNOWN_FEATURES = ("tx1", "tx2", "tx3", "tx4", "spikePow")
_AREAS = ("6v", "44", "all")
_MAX_TRIALS = 100_000
_MAT_ERRORS = (*FILE_ERRORS, AttributeError, IndexError, NameError, struct.error, zlib.error, MatReadError)


@dataclass(frozen=True)
class Features:
    """Variables that form the channels, and the half of their columns to use (area 6v first, area 44 second)."""

    names: tuple[str, ...]
    area: str

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
    return Features(chosen, area)


def recognise(folder: Path, name: str) -> SourceFile | str:
    """The recording with this name in the folder of a partition, or why it is none."""
    if (split := PARTITIONS.get(folder.name)) is None:
        return f"not in one of the folders {', '.join(PARTITIONS)}"
    if not name.endswith(".mat"):
        return "not <session>.mat"
    return SourceFile(replace_surrogates(Path(name).stem), split, folder / name)


def summarise_file(file: SourceFile) -> FileSummary:
    """Number of trials from the size of the cell array; the number of channels would require reading the file."""
    sizes = _count_cells(file)
    if "tx1" not in sizes and "spikePow" not in sizes:
        raise UnreadableFile("it has neither tx1 nor spikePow")
    return FileSummary(sizes.get("tx1", sizes.get("spikePow", 0)), {})


def read_trials(file: SourceFile, features: str = DEFAULT_FEATURES) -> Iterator[ReadResult]:
    """The trials of one file in order; the complete file is held in memory."""
    chosen = parse_features(features)
    data = _load(file, chosen)
    arrays = [data[name] for name in chosen.names]
    texts, blocks = data["sentenceText"], data["blockIdx"]
    for number in range(len(arrays[0])):
        identity = trial_id(file.session, file.split, number)
        try:
            bins = _read_bins([array[number] for array in arrays], chosen)
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
        problems.append(Problem("no label", None, "the trial has no sentence"))
        text = None
    else:
        if n_replaced := text.count(REPLACEMENT):
            detail = f"{n_replaced} characters are not valid text, so the label may be wrong: {text[:60]!r}"
            problems.append(Problem("text encoding", n_replaced, detail))
        label, unknown = text_to_tokens(text)
        tokens = np.asarray(label, dtype=np.int32)
        if unknown:
            detail = f"pronounced by rule: {', '.join(unknown)}"
            problems.append(Problem("unknown words", len(unknown), detail, "note"))
    trial = Trial(file.session, file.split, number, block or 0, bins, tokens, text)
    return ReadResult(trial.id, trial, tuple(problems))


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
    wanted = (*features.names, "sentenceText", "blockIdx")
    sizes = _count_cells(file, wanted)
    for name in features.names:
        if name not in sizes:
            raise UnreadableFile(f"it has no variable {name}; its variables are {', '.join(sorted(sizes)) or 'none'}")
    try:
        stored = scipy.io.loadmat(file.path, variable_names=wanted)
    except _MAT_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    data: dict[str, list[Any]] = {}
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


def _check_header(file: SourceFile) -> None:
    if not is_safe_name(file.session):
        raise UnreadableFile(f"the session name {file.session!r} is not a valid file name; rename the file")
    try:
        with file.path.open("rb") as stream:
            head = stream.read(520)
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    if head[:8] == b"\x89HDF\r\n\x1a\n" or head[512:520] == b"\x89HDF\r\n\x1a\n" or head.startswith(b"MATLAB 7.3"):
        raise UnreadableFile("it is a MATLAB 7.3 file; save it again in MATLAB with save(..., '-v7')")


def _count_cells(file: SourceFile, wanted: Collection[str] = ()) -> dict[str, int]:
    """Number of cells of each variable; the `wanted` ones are checked completely and are safe to load."""
    _check_header(file)
    try:
        sizes = {name: found.size for name, found in list_variables(file.path, wanted).items()}
    except _MAT_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    for name in _KNOWN_FEATURES:
        if sizes.get(name, 0) > _MAX_TRIALS:
            raise UnreadableFile(f"{name} has {sizes[name]} trials, expected at most {_MAX_TRIALS}")
    return sizes


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
