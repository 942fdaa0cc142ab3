"""Brain-to-Text '25: `<session>/data_{train,val,test}.hdf5`, one group per trial.

Files are untrusted: only plain datasets stored inside the file itself are read, sizes are checked before memory is
allocated, and label lengths come from `seq_len`, never from the padded array.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from arcuate.data.alphabet import BLANK, N_CLASSES
from arcuate.data.readers.hdf5 import Budget, has_entry, open_dataset, open_group, read_attribute
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
from arcuate.data.trial import Trial, trial_id
from arcuate.errors import check_resources

_TRIAL = re.compile(r"trial_(\d{1,9})")
_MAX_TOKENS = 100_000


class B2T25:
    """Reader of Brain-to-Text '25."""

    layout = "b2t25"

    def find_source(self, path: Path) -> Source:
        return find_release(path, self.layout)

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one file in order."""
        with _open(file) as data:
            names, stray = _trial_names(data)
            if stray:
                detail = f"entries that are not trials, ignored: {', '.join(stray[:5])}"
                yield ReadResult(file.id, None, (Problem("unexpected entry", len(stray), detail, "note"),))
            seen: set[int] = set()
            budget = Budget(file.path.stat().st_size)
            for number, name in names:
                identity = trial_id(file.session, file.split, number)
                if number in seen:
                    yield unreadable(identity, f"duplicate trial number {number} ({name})")
                    continue
                seen.add(number)
                try:
                    yield _read_trial(file, number, open_group(data, name), budget)
                except FILE_ERRORS as error:
                    yield unreadable(identity, summarise_error(error))


def _open(file: SourceFile) -> h5py.File:
    if not is_safe_name(file.session):
        raise UnreadableFile(f"the session name {file.session!r} is not a valid file name; rename the folder")
    try:
        return h5py.File(file.path, "r")
    except FILE_ERRORS as error:
        check_resources(error, file.path)
        raise UnreadableFile(summarise_error(error)) from error


def _trial_names(data: h5py.File) -> tuple[list[tuple[int, str]], list[str]]:
    """Number and name of every trial, and the other entries; names are read as bytes: they may not be UTF-8."""
    try:
        names = [replace_surrogates(name.decode("utf-8", errors="surrogateescape")) for name in data.id]
    except FILE_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    matches = [found for name in names if (found := _TRIAL.fullmatch(name))]
    stray = sorted(set(names) - {found[0] for found in matches})
    return sorted((int(found[1]), found[0]) for found in matches), stray


def _read_trial(file: SourceFile, number: int, group: h5py.Group, budget: Budget) -> ReadResult:
    problems: list[Problem] = []
    bins = _read_bins(group, problems, budget)
    block = _integer_attribute(group, "block_num")
    if block is None:
        problems.append(Problem("no block number", None, "block_num is missing; block 0 is assumed", "note"))
    session = _text_attribute(group, "session")
    if session is not None and session != file.session:
        detail = f"the file has session {session!r}; the name of the folder is used"
        problems.append(Problem("session name", None, detail, "note"))
    tokens = _read_tokens(file, group, problems)
    text = _read_text(group, problems)
    trial = Trial(file.session, file.split, number, block or 0, bins, tokens, text)
    return ReadResult(trial.id, trial, tuple(problems))


def _read_bins(group: h5py.Group, problems: list[Problem], budget: Budget) -> np.ndarray:
    """Bins (T, C) float32; T is `n_time_steps` unless it exceeds the array."""
    data = open_dataset(group, "input_features")
    if data.ndim != 2 or data.dtype.kind not in "fiu":
        raise ValueError(f"input_features is {data.dtype} with shape {data.shape}, expected numbers (bins, channels)")
    rows, channels = data.shape
    if channels < 1 or rows * channels > MAX_VALUES:
        raise ValueError(f"input_features has an invalid size: {rows} bins of {channels} channels")
    n_bins = _integer_attribute(group, "n_time_steps")
    if n_bins is None:
        problems.append(Problem("time steps", None, "n_time_steps is missing; all bins are used", "note"))
    elif 0 <= n_bins < rows:
        detail = f"n_time_steps is {n_bins} of {rows} bins; the rest is treated as padding"
        problems.append(Problem("time steps", n_bins, detail, "note"))
        rows = n_bins
    elif n_bins != rows:
        problems.append(Problem("time steps", n_bins, f"n_time_steps is {n_bins} but there are {rows} bins"))
    budget.spend(rows * channels * data.dtype.itemsize)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the quality checks report
        return np.ascontiguousarray(data[:rows], dtype=np.float32)


def _read_tokens(file: SourceFile, group: h5py.Group, problems: list[Problem]) -> np.ndarray | None:
    """The label at its true length; None if it is missing or invalid."""
    if not has_entry(group, "seq_class_ids"):
        if file.split != "test":
            problems.append(Problem(NO_LABEL, None, "the trial has no seq_class_ids"))
        return None
    data = open_dataset(group, "seq_class_ids")
    if data.ndim != 1 or data.dtype.kind not in "iu" or data.shape[0] > _MAX_TOKENS:
        detail = f"seq_class_ids is {data.dtype} with shape {data.shape}, expected a list of class indices"
        problems.append(Problem("label out of range", None, detail))
        return None
    padded = data[:].astype(np.int64)
    by_padding = int(np.flatnonzero(padded)[-1]) + 1 if padded.any() else 0
    length = _integer_attribute(group, "seq_len")
    if length is None:
        detail = f"seq_len is missing; there are {by_padding} tokens before the padding"
        problems.append(Problem("label length", None, detail))
        length = by_padding
    elif not 0 <= length <= len(padded):
        problems.append(Problem("label length", length, f"seq_len is {length} but the array has {len(padded)}"))
        length = by_padding
    elif length != by_padding:
        detail = f"seq_len is {length} but there are {by_padding} tokens before the padding"
        problems.append(Problem("label length", length, detail))
    return _check_label(padded[:length], problems)


def _check_label(label: np.ndarray, problems: list[Problem]) -> np.ndarray | None:
    """The label as int32, or None with the reason added to `problems`."""
    outside = label[(label < 0) | (label >= N_CLASSES)]
    if len(outside):
        detail = f"{len(outside)} of {len(label)} tokens are outside 1…{N_CLASSES - 1}, the first is {outside[0]}"
        problems.append(Problem("label out of range", len(outside), detail))
        return None
    if n_blank := int(np.sum(label == BLANK)):
        problems.append(Problem("blank in label", n_blank, f"{n_blank} of {len(label)} tokens are the CTC blank"))
        return None
    if not len(label):
        problems.append(Problem("empty label", 0, "the label has no token"))
    return label.astype(np.int32)


def _read_text(group: h5py.Group, problems: list[Problem]) -> str | None:
    """The sentence: the attribute, else the array of character codes."""
    text = _text_attribute(group, "sentence_label")
    if text is None and has_entry(group, "transcription"):
        text = _decode_transcription(open_dataset(group, "transcription"))
    if text is not None and (n_replaced := text.count(REPLACEMENT)):
        detail = f"{n_replaced} bytes of the sentence are not UTF-8; read as {text[:60]!r}"
        problems.append(Problem("text encoding", n_replaced, detail, "note"))
    return text


def _decode_transcription(data: h5py.Dataset) -> str | None:
    if data.ndim != 1 or data.dtype.kind not in "iu" or data.shape[0] > _MAX_TOKENS:
        return None
    codes = data[:]
    end = np.flatnonzero(codes == 0)
    codes = codes[: end[0]] if len(end) else codes
    return replace_surrogates("".join(chr(int(code)) for code in codes if 0 < code < 0x110000)).strip()


def _integer_attribute(group: h5py.Group, name: str) -> int | None:
    value = read_attribute(group, name)
    if isinstance(value, bytes):
        value = value.decode("ascii", errors="replace")
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value.strip()) else None
    if isinstance(value, int | float | np.integer | np.floating) and float(value).is_integer():
        return int(value)
    return None


def _text_attribute(group: h5py.Group, name: str) -> str | None:
    """A text attribute, written as bytes or as str."""
    value = read_attribute(group, name)
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return replace_surrogates(value).replace("\0", "").strip() if isinstance(value, str) else None
