"""Brain-to-Text '25: `<session>/data_{train,val,test}.hdf5`, one group per trial.

Files are read as foreign: only plain datasets stored inside the file itself are touched, sizes are checked
before anything is allocated, and label lengths come from `seq_len`, never from the padded array.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from arcuate.data.alphabet import BLANK, N_CLASSES
from arcuate.data.readers.source import (
    FILE_ERRORS,
    MAX_TOKENS,
    MAX_VALUES,
    REPLACEMENT,
    FileSummary,
    Problem,
    ReadResult,
    SourceFile,
    UnreadableFile,
    is_safe_name,
    list_folders,
    list_names,
    looks_like_data,
    replace_surrogates,
    summarise_error,
    unreadable,
    unrecognised,
)
from arcuate.data.trial import Split, Trial, trial_id

FILES: dict[str, Split] = {
    "data_train.hdf5": "train",
    "data_val.hdf5": "val",
    "data_test.hdf5": "test",
}
_TRIAL = re.compile(r"trial_(\d{1,9})")
_MAX_ATTRIBUTE = 100_000  # bytes of a text attribute


def is_session(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in FILES)


def list_files(root: Path, only: Path | None = None) -> tuple[list[SourceFile], list[ReadResult]]:
    """All data files of the sessions in this folder, or of one session only, and what was passed over."""
    files: list[SourceFile] = []
    passed: list[ReadResult] = []
    for folder in [only] if only else list_folders(root, passed):
        session = replace_surrogates(folder.name)
        for name in list_names(folder, passed):
            if name in FILES:  # one that cannot be read is said so
                files.append(SourceFile(session, FILES[name], folder / name))
            elif looks_like_data(name):
                passed.append(unrecognised(f"{session}/{name}", f"none of {', '.join(FILES)}"))
    return files, passed


def survey(file: SourceFile) -> FileSummary:
    """Trials and their channel counts; a trial whose bins cannot be looked at counts without channels."""
    channels: Counter[int] = Counter()
    with _open(file) as data:
        names, _ = _trial_names(data)
        for _, name in names:
            try:
                shape = _dataset(_group(data, name), "input_features").shape
                channels[int(shape[1])] += 1
            except (*FILE_ERRORS, IndexError):
                continue
    return FileSummary(len(names), channels)


def read(file: SourceFile) -> Iterator[ReadResult]:
    """The trials of one file in order."""
    with _open(file) as data:
        names, stray = _trial_names(data)
        if stray:
            detail = f"entries that are no trials, left alone: {', '.join(stray[:5])}"
            yield ReadResult(file.id, None, (Problem("unexpected entry", len(stray), detail, "note"),))
        seen: set[int] = set()
        for number, name in names:
            identity = trial_id(file.session, file.split, number)
            if number in seen:
                yield unreadable(identity, f"a second trial with the number {number} ({name})")
                continue
            seen.add(number)
            try:
                yield _read_trial(file, number, _group(data, name))
            except FILE_ERRORS as error:
                yield unreadable(identity, summarise_error(error))


def _open(file: SourceFile) -> h5py.File:
    if not is_safe_name(file.session):
        raise UnreadableFile(f"the session name {file.session!r} cannot be a file name; rename the folder")
    try:
        return h5py.File(file.path, "r")
    except FILE_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error


def _trial_names(data: h5py.File) -> tuple[list[tuple[int, str]], list[str]]:
    """Number and name of every trial, and the other entries; names are read as bytes, for they may be no text."""
    try:
        names = [replace_surrogates(name.decode("utf-8", errors="surrogateescape")) for name in data.id]
    except FILE_ERRORS as error:
        raise UnreadableFile(summarise_error(error)) from error
    matches = [found for name in names if (found := _TRIAL.fullmatch(name))]
    stray = sorted(set(names) - {found[0] for found in matches})
    return sorted((int(found[1]), found[0]) for found in matches), stray


def _read_trial(file: SourceFile, number: int, group: h5py.Group) -> ReadResult:
    problems: list[Problem] = []
    bins = _read_bins(group, problems)
    block = _integer(group, "block_num")
    if block is None:
        problems.append(Problem("no block number", None, "block_num is missing; taken as block 0", "note"))
    session = _text(group, "session")
    if session is not None and session != file.session:
        detail = f"the file says session {session!r}; the folder's name is used"
        problems.append(Problem("session name", None, detail, "note"))
    tokens = _read_tokens(file, group, problems)
    trial = Trial(
        file.session,
        file.split,
        number,
        block or 0,
        bins,
        tokens,
        text=_read_text(group, problems),
        corpus=None,
        mode=None,
    )
    return ReadResult(trial.id, trial, tuple(problems))


def _read_bins(group: h5py.Group, problems: list[Problem]) -> np.ndarray:
    """(T, C) float32, T being the true length where the attribute and the array agree on it."""
    data = _dataset(group, "input_features")
    if data.ndim != 2 or data.dtype.kind not in "fiu":
        raise ValueError(
            f"input_features is {data.dtype} with shape {data.shape}, not numbers (bins, channels)"
        )
    rows, channels = data.shape
    if channels < 1 or rows * channels > MAX_VALUES:
        raise ValueError(f"input_features claims {rows} bins of {channels} channels")
    n_bins = _integer(group, "n_time_steps")
    if n_bins is None:
        problems.append(Problem("time steps", None, "n_time_steps is missing; all bins are taken", "note"))
    elif 0 <= n_bins < rows:
        detail = f"n_time_steps is {n_bins} of {rows} bins; the rest is taken as padding"
        problems.append(Problem("time steps", n_bins, detail, "note"))
        rows = n_bins
    elif n_bins != rows:
        problems.append(Problem("time steps", n_bins, f"n_time_steps is {n_bins} but there are {rows} bins"))
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the quality gate reports
        return np.ascontiguousarray(data[:rows], dtype=np.float32)


def _read_tokens(file: SourceFile, group: h5py.Group, problems: list[Problem]) -> np.ndarray | None:
    """The label at its true length; None where there is none, or none that could be a label."""
    if not _has(group, "seq_class_ids"):
        if file.split != "test":
            problems.append(Problem("no label", None, "the trial has no seq_class_ids"))
        return None
    data = _dataset(group, "seq_class_ids")
    if data.ndim != 1 or data.dtype.kind not in "iu" or data.shape[0] > MAX_TOKENS:
        detail = f"seq_class_ids is {data.dtype} with shape {data.shape}, not a list of class numbers"
        problems.append(Problem("label out of range", None, detail))
        return None
    padded = data[:].astype(np.int64)
    by_padding = int(np.flatnonzero(padded)[-1]) + 1 if padded.any() else 0
    length = _integer(group, "seq_len")
    if length is None:
        detail = f"seq_len is missing; {by_padding} tokens stand before the padding"
        problems.append(Problem("label length", None, detail))
        length = by_padding
    elif not 0 <= length <= len(padded):
        problems.append(Problem("label length", length, f"seq_len is {length} of an array of {len(padded)}"))
        length = by_padding
    elif length != by_padding:
        detail = f"seq_len is {length} but {by_padding} tokens stand before the padding"
        problems.append(Problem("label length", length, detail))
    return valid_label(padded[:length], problems)


def valid_label(label: np.ndarray, problems: list[Problem]) -> np.ndarray | None:
    """A label fit to train on and to score against, else None with the reason recorded."""
    outside = label[(label < 0) | (label >= N_CLASSES)]
    if len(outside):
        detail = (
            f"{len(outside)} of {len(label)} tokens are outside 1…{N_CLASSES - 1}, the first is {outside[0]}"
        )
        problems.append(Problem("label out of range", len(outside), detail))
        return None
    if n_blank := int(np.sum(label == BLANK)):
        problems.append(
            Problem("blank in label", n_blank, f"{n_blank} of {len(label)} tokens are the CTC blank")
        )
        return None
    if not len(label):
        problems.append(Problem("empty label", 0, "the label has no token"))
    return label.astype(np.int32)


def _read_text(group: h5py.Group, problems: list[Problem]) -> str | None:
    """The sentence: the attribute, else the array of character codes; what is no text in it is replaced."""
    text = _text(group, "sentence_label")
    if text is None and _has(group, "transcription"):
        text = _transcription(_dataset(group, "transcription"))
    if text is not None and (n_replaced := text.count(REPLACEMENT)):
        detail = f"{n_replaced} bytes of the sentence are no UTF-8 text; read as {text[:60]!r}"
        problems.append(Problem("text encoding", n_replaced, detail, "note"))
    return text


def _transcription(data: h5py.Dataset) -> str | None:
    if data.ndim != 1 or data.dtype.kind not in "iu" or data.shape[0] > MAX_TOKENS:
        return None
    codes = data[:]
    end = np.flatnonzero(codes == 0)
    codes = codes[: end[0]] if len(end) else codes
    return replace_surrogates("".join(chr(int(code)) for code in codes if 0 < code < 0x110000)).strip()


# --- what may be touched in a foreign file --------------------------------------------------------------


def _group(data: h5py.File, name: str) -> h5py.Group:
    _refuse_link(data, name)
    group = data[name]
    if not isinstance(group, h5py.Group):
        raise ValueError(f"{name} is not a group")
    return group


def _dataset(group: h5py.Group, name: str) -> h5py.Dataset:
    """A plain dataset whose values lie in this very file."""
    _refuse_link(group, name)
    data = group[name]
    if not isinstance(data, h5py.Dataset) or data.shape is None:
        raise ValueError(f"{name} is not an array")
    if data.external or data.is_virtual:
        raise ValueError(f"{name} takes its values from another file, which is refused")
    return data


def _has(group: h5py.Group, name: str) -> bool:
    """Whether the group itself has this entry, without following it anywhere."""
    return bool(group.id.links.exists(name.encode()))


def _refuse_link(group: h5py.Group, name: str) -> None:
    if not _has(group, name):
        raise KeyError(f"{name} is missing")
    if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{name} is a link to elsewhere, which is refused")


def _attribute(group: h5py.Group, name: str) -> Any:
    """A single-valued attribute, or None where it is missing or is not one value."""
    if name not in group.attrs:
        return None
    stored = group.attrs.get_id(name)
    is_plain = stored.dtype.kind in "iufS" or h5py.check_string_dtype(stored.dtype) is not None
    if not is_plain or int(np.prod(stored.shape)) != 1 or stored.dtype.itemsize > _MAX_ATTRIBUTE:
        return None
    value = group.attrs[name]
    return value.reshape(-1)[0] if isinstance(value, np.ndarray) else value


def _integer(group: h5py.Group, name: str) -> int | None:
    value = _attribute(group, name)
    if isinstance(value, bytes):
        value = value.decode("ascii", errors="replace")
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value.strip()) else None
    if isinstance(value, int | float | np.integer | np.floating) and float(value).is_integer():
        return int(value)
    return None


def _text(group: h5py.Group, name: str) -> str | None:
    """A text attribute, written as bytes or as str."""
    value = _attribute(group, name)
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return replace_surrogates(value).replace("\0", "").strip() if isinstance(value, str) else None
