"""Files of frame scores: .npz, .npy with JSON, .mat, and pickles of the Brain-to-Text '25 programs.

Log-probabilities are kept, logits become log-probabilities by a softmax over the classes. Every format is read into
entries by name, whose values are given per trial, per batch, or for all trials together. What a file does not say is
found or asked for: the order of its classes from its texts or probabilities, and the lengths of its trials from the
number of bins; padding is never decoded. No file is trusted: pickles go through `arcuate.data.unpickle`, MATLAB files
are checked before they are loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import (
    BLANK_NAME,
    CHARACTERS,
    CLASSES,
    PHONEMES,
    SILENCE_NAME,
    boundary_index,
    token_names,
)
from arcuate.data.readers.b2t24 import load_mat
from arcuate.data.readers.source import UnreadableFile
from arcuate.data.text import text_to_tokens
from arcuate.data.unpickle import load_pickle
from arcuate.data.watched import call_watched
from arcuate.decoding.class_order import search_order
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError, check_resources
from arcuate.files import read_json, read_npy, read_npz, save_npz
from arcuate.progress import counted

# Silence is the second class of the '25 language model, and the last class of the '25 acoustic model.
_LM_ORDER = (BLANK_NAME, SILENCE_NAME, *PHONEMES)
_ORDERS: dict[int, tuple[tuple[str, ...], ...]] = {len(CLASSES): (CLASSES, _LM_ORDER), len(CHARACTERS): (CHARACTERS,)}
_PATCHES = ((14, 4), (32, 4), (1, 1))  # bins and stride of published models: '25, '24, and no patches
# Names of an entry, those of this program first, then of phoneme-to-words-lm and the '25 trainer.
_LENGTHS = ("lengths", "adjusted_lens", "adjusted_len")
_TEXTS = ("texts", "text", "sentences", "cue_sentence", "sentence_label", "transcription", "transcriptions")
_BINS = "n_time_steps"
_DECODED = "decoded_phonemes_raw"
_ENTRIES = ("logp", "logits", *_LENGTHS, _BINS, "classes", "trials", *_TEXTS)
_MAX_LOGIT = 1e30
_MAX_TRIALS = 1_000_000
_N_COMPARED = 50  # trials whose greedy output is compared with their texts
_CLEAR = 2.0  # ratio between the probabilities of two classes, one of which is silence
_DIFFERENCE = 0.9  # largest ratio between the edit distances under the right and the wrong order


@dataclass(frozen=True, eq=False)
class FrameLogProbs:
    """The frames of several trials, with classes in search order: blank first, word boundary last."""

    classes: tuple[str, ...]
    trials: tuple[np.ndarray, ...]  # (F, V) each
    ids: tuple[str, ...] | None  # ids of the trials, if the file has them
    name: str
    texts: tuple[str | None, ...] | None = None  # sentences, if the file has them
    order: str = "named in the file"  # where the order of the classes in the file is known from
    lengths: str = "lengths in the file"  # where the number of frames of each trial is known from

    @property
    def boundary(self) -> int:
        """Class index of the word boundary, or -1."""
        return boundary_index(self.classes)

    def summary(self, n_references: int) -> str:
        """What was read, in one sentence."""
        return (
            f"{self.name}: {counted(len(self.trials), 'trial')}, {sum(map(len, self.trials)):,} frames of"
            f" {len(self.classes)} classes ({self.order}); {self.lengths};"
            f" {counted(n_references, 'reference')}"
        )


def read_frames(
    path: str | Path, texts: Callable[[int, tuple[str, ...] | None], Sequence[str | None]] | None = None
) -> FrameLogProbs:
    """Read frame scores of any supported format.

    `texts` returns reference texts for a number of trials and their ids, if the file has ids; they tell the order of
    classes that are not named.
    """
    path = Path(path)
    readers = {".npz": _read_npz, ".npy": _read_npy, ".mat": _read_mat, ".pkl": _read_pickle, ".pickle": _read_pickle}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is not a file of frame scores; expected {', '.join(readers)}")
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; write frame log-probabilities with: arcuate evaluate RUN --scores FILE"
        )
    return _assemble(path, reader(path), texts)


def write_frames(path: Path, frames: FrameLogProbs) -> None:
    """Write an .npz file as float16: `logp` (all frames, V), `lengths`, `classes` and `trials`."""
    trials = frames.trials
    logp = np.concatenate(trials) if trials else np.zeros((0, len(frames.classes)), np.float32)
    arrays: dict[str, np.ndarray] = {
        "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
        "lengths": np.array([len(trial) for trial in trials], dtype=np.int32),
        "classes": np.array(frames.classes, dtype=np.str_),
        "trials": np.array(frames.ids or (), dtype=np.str_),
    }
    save_npz(path, arrays)


def check_unique_ids(where: str, ids: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(f"{where}: trial {name!r} occurs twice; keep one of the two")
        seen.add(name)


# --- formats: entries by name -----------------------------------------------------------------------------


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        arrays = read_npz(path, _ENTRIES)
    except (OSError, ValueError) as error:
        check_resources(error, path)
        raise UserError(f"{path} is not a readable .npz file of frame log-probabilities: {error}") from None
    if "logp" not in arrays and "logits" not in arrays:
        raise UserError(f"{path} has neither `logp` nor `logits`; see docs/decoding.md for its layout")
    entries: dict[str, Any] = dict(arrays)
    if "trials" in arrays and not len(arrays["trials"]):  # written without ids
        del entries["trials"]
    return entries


def _read_npy(path: Path) -> dict[str, Any]:
    """An array (trials, frames, classes) or (all frames, classes), with lengths and names in a JSON file."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise UserError(f"{path} needs {beside.name} beside it, with lengths and optionally classes, trials and texts")
    about = {key: value for key, value in read_json(beside).items() if key in _ENTRIES}
    try:
        return {**about, "logits": read_npy(path)}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _read_mat(path: Path) -> dict[str, Any]:
    """Variables `logits` (one cell per trial, or an array with `lengths`) and optionally `classes`, `texts`."""
    try:
        entries: dict[str, Any] = dict(call_watched(path, load_mat, path, _ENTRIES))
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if "logits" not in entries:
        raise UserError(f"{path} has no variable logits")
    for key, value in entries.items():
        if key in ("classes", "trials", *_TEXTS) and value.dtype.kind in "OU":
            cells = [np.asarray(cell).ravel() for cell in value.ravel()]
            entries[key] = [str(cell[0]).strip() if len(cell) else "" for cell in cells]
        elif value.dtype == object:
            entries[key] = [np.asarray(cell) for cell in value.ravel()]
        elif key in (*_LENGTHS, _BINS):
            entries[key] = value.ravel()
    return entries


def _read_pickle(path: Path) -> dict[str, Any]:
    """A dict of lists with one entry per trial or batch, or a list of dicts, such as t15_copyTask.pkl."""
    content = load_pickle(path)
    if isinstance(content, list) and content and all(isinstance(row, Mapping) for row in content):
        content = {key: [row.get(key) for row in content] for key in content[0]}
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a dict of lists with one entry per trial")
    key = next((name for name in content if isinstance(name, str) and "logit" in name.lower()), None)
    if key is None or not isinstance(content[key], list | tuple | np.ndarray):
        known = ", ".join(str(name) for name in list(content)[:12])
        raise UserError(f"{path} has no entry with logits; it has {known}")
    entries = {name: content[name] for name in (*_ENTRIES[2:], _DECODED) if content.get(name) is not None}
    return {**entries, "logits": content[key]}


# --- entries to trials ------------------------------------------------------------------------------------


def _assemble(
    path: Path,
    entries: dict[str, Any],
    texts_of: Callable[[int, tuple[str, ...] | None], Sequence[str | None]] | None,
) -> FrameLogProbs:
    is_log_prob = "logp" in entries
    scores = entries.pop("logp" if is_log_prob else "logits")
    joined = isinstance(scores, np.ndarray) and scores.ndim == 2 and scores.dtype != object
    parts = [scores] if joined else _arrays(path, scores)
    if any(part.ndim == 3 for part in parts) and isinstance(scores, list | tuple):  # batches
        sizes = [len(part) if part.ndim == 3 else 1 for part in parts]
        entries = {
            key: _unbatch(value, sizes) if key not in ("classes", "trials") else value for key, value in entries.items()
        }
        parts = [row for part in parts for row in (part if part.ndim == 3 else part[None])]
    name = next((name for name in _LENGTHS if name in entries), None)
    lengths, said = None if name is None else _integers(path, name, entries[name]), f"lengths from `{name}`"
    if joined and lengths is not None:
        parts = _split(path, parts[0], lengths)
    elif lengths is None and _BINS in entries:
        lengths, said = _from_bins(path, parts, _integers(path, _BINS, entries[_BINS])), f"lengths from `{_BINS}`"
    if is_log_prob and lengths is None:
        raise UserError(f"{path} lacks lengths; see docs/decoding.md for its layout")
    if (not is_log_prob and not parts) or len(parts) > _MAX_TRIALS:
        raise UserError(f"{path} has {len(parts)} trials; expected at least one")
    if lengths is None:
        _check_no_padding(path, parts)
        said = "no lengths in the file, all frames are decoded"
    elif not joined:
        if len(lengths) != len(parts) or any(n > len(part) for n, part in zip(lengths, parts, strict=True)):
            raise UserError(
                f"{path}: {len(lengths)} lengths do not fit {len(parts)} trials of up to"
                f" {max(map(len, parts), default=0)} frames"
            )
        parts = [part[:n] for n, part in zip(lengths, parts, strict=True)]
    trials = [_check_trial(path, i, part, is_log_prob) for i, part in enumerate(parts)]
    if len(widths := {trial.shape[1] for trial in trials} or {np.shape(scores)[1]}) > 1:
        raise UserError(f"{path}: trials have different numbers of classes, {sorted(widths)[:4]}")
    return _named(path, trials, widths.pop(), entries, said, texts_of)


def _named(
    path: Path,
    trials: Sequence[np.ndarray],
    n_classes: int,
    entries: Mapping[str, Any],
    lengths: str,
    texts_of: Callable[[int, tuple[str, ...] | None], Sequence[str | None]] | None,
) -> FrameLogProbs:
    """Trials in search order, with their ids and texts."""
    ids = texts = None
    if entries.get("trials") is not None:
        ids = tuple(str(name) for name in _listed(path, "trials", entries["trials"], len(trials)))
        check_unique_ids(f"{path}, trials", ids)
    if (key := next((name for name in _TEXTS if entries.get(name) is not None), None)) is not None:
        texts = tuple(_text(value) for value in _listed(path, key, entries[key], len(trials)))
    if entries.get("classes") is not None:
        names, said = tuple(map(str, _listed(path, "classes", entries["classes"], n_classes))), "named in the file"
    else:
        given = texts if texts_of is None else texts_of(len(trials), ids)
        names, said = _find_order(path, n_classes, trials, given, entries.get(_DECODED))
    order = search_order(names, str(path))
    in_order = tuple(order(frames) for frames in trials)
    return FrameLogProbs(order.classes, in_order, ids, path.name, texts, said, lengths)


def _arrays(path: Path, values: Any) -> list[np.ndarray]:
    if not isinstance(values, list | tuple | np.ndarray):
        raise UserError(f"{path}: logits are a {type(values).__name__}, expected arrays of frames and classes")
    found = []
    for number, value in enumerate(values):
        try:
            found.append(np.asarray(value))
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{path}, trial {number}: logits are not an array of frames and classes") from None
    return found


def _unbatch(values: Any, sizes: Sequence[int]) -> Any:
    """Values per trial from values per batch; unchanged if they are not given per batch."""
    if not isinstance(values, list | tuple | np.ndarray) or len(values) != len(sizes):
        return values
    rows: list[Any] = []
    for value, n in zip(values, sizes, strict=True):
        nested = isinstance(value, list | tuple | np.ndarray) and np.ndim(value) > 0 and len(value) == n
        rows += list(value) if nested and not (n == 1 and isinstance(value[0], str)) else [value] * n
    return rows


def _integers(path: Path, name: str, values: Any) -> list[int]:
    try:
        found = np.array([np.asarray(value).item() for value in values])
    except (ValueError, TypeError, OverflowError):
        found = np.array([np.nan])
    whole = found.dtype.kind in "iu" or (
        found.dtype.kind == "f" and bool(np.isfinite(found).all() and not (found % 1).any())
    )
    if len(found) and (not whole or found.min() < 0):
        raise UserError(f"{path}: {name} must be non-negative integers, one for each trial")
    return [int(value) for value in found.tolist()]


def _split(path: Path, frames: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Trials of joined frames (all frames, V)."""
    if sum(lengths) != len(frames):
        raise UserError(f"{path}: lengths add up to {sum(lengths)}, but there are {len(frames)} frames")
    return np.split(frames, np.cumsum(lengths, dtype=np.int64)[:-1]) if len(lengths) else []


def _from_bins(path: Path, parts: Sequence[np.ndarray], bins: Sequence[int]) -> list[int]:
    """Frames of every trial from its bins, by the patches of a published model that explain the padded lengths."""
    padded = [len(part) for part in parts]
    if len(bins) == len(padded):
        for size, stride in _PATCHES:
            frames = [max(0, (n - size) // stride + 1) for n in bins]
            longest: dict[int, int] = {}
            for n, length in zip(frames, padded, strict=True):
                longest[length] = max(longest.get(length, 0), n)
            if all(length == n for length, n in longest.items()):
                return frames
    raise UserError(
        f"{path}: the number of frames does not follow from `{_BINS}` by the patches of a published model; store the"
        " frames of every trial as `lengths`"
    )


def _check_no_padding(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Refuse trials without lengths whose last frames are equal, because they are probably padding."""
    for number, part in enumerate(parts):
        if part.ndim != 2 or len(part) < 2:
            continue
        differs = np.flatnonzero((part != part[-1]).any(axis=1))
        n_equal = len(part) - 1 - (int(differs[-1]) if len(differs) else -1)
        if n_equal > 1:
            raise UserError(
                f"{path}, trial {number}: the last {n_equal} of {len(part)} frames are equal, as in padding, and the"
                " file has no lengths; store the frames of every trial as `lengths`"
            )


def _check_trial(path: Path, number: int, values: np.ndarray, is_log_prob: bool) -> np.ndarray:
    if values.ndim != 2 or values.dtype.kind not in ("f" if is_log_prob else "fiu") or values.shape[1] < 2:
        raise UserError(f"{path}, trial {number}: scores are {values.dtype} with shape {values.shape}, expected (F, V)")
    if is_log_prob:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN
        frames = np.asarray(values, np.float64)
    if not np.isfinite(frames).all():
        raise UserError(f"{path}, trial {number}: logits contain NaN or infinity; check the model that wrote them")
    if len(frames) and np.abs(frames).max() > _MAX_LOGIT:  # their differences would be infinite in float32
        raise UserError(
            f"{path}, trial {number}: logits reach {np.abs(frames).max():.3g}, at most {_MAX_LOGIT:g} is expected;"
            " check the model that wrote them"
        )
    shifted = frames - frames.max(axis=1, keepdims=True) if len(frames) else frames
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


# --- what a file does not name -----------------------------------------------------------------------------


def _find_order(
    path: Path,
    n_classes: int,
    trials: Sequence[np.ndarray],
    texts: Sequence[str | None] | None,
    decoded: Any,
) -> tuple[tuple[str, ...], str]:
    """The order of classes without names, and what tells it: phonemes decoded online, texts, or probabilities."""
    orders = _ORDERS.get(n_classes, ())
    if not orders:
        raise UserError(f"{path} does not name its {n_classes} classes; store them as `classes`")
    if len(orders) == 1:
        return orders[0], "the known order"
    expected = [_plain(names) for names in decoded] if isinstance(decoded, list | tuple) else []
    said = "order found from the phonemes decoded online"
    if not any(expected) and texts is not None:
        expected = [_plain(token_names(text_to_tokens(text)[0])) if text else [] for text in texts]
        said = "order found from the references"
    pairs = [(frames, names) for frames, names in zip(trials, expected, strict=False) if names][:_N_COMPARED]
    if pairs:
        distances = [
            sum(Levenshtein.distance(_plain(token_names(greedy(p), order)), names) for p, names in pairs)
            for order in orders
        ]
        if min(distances) <= _DIFFERENCE * max(distances) and max(distances) > 0:
            return orders[int(np.argmin(distances))], said
    elif trials:
        # The most frequent class after the blank is silence: it follows every word.
        total = np.sum([np.exp(frames, dtype=np.float64).sum(axis=0) for frames in trials], axis=0)
        shares = [float(total[order.index(SILENCE_NAME)]) for order in orders]
        if max(shares) > _CLEAR * min(shares) > 0:
            return orders[int(np.argmax(shares))], "order found from the probability of silence"
    raise UserError(
        f"{path} does not name its {n_classes} classes, and whether silence is the second or the last of them cannot be"
        " told from its texts or probabilities; store the names as `classes`"
    )


def _plain(names: Any) -> list[str]:
    if not isinstance(names, list | tuple | np.ndarray):
        return []
    return [str(name) for name in names if str(name) not in (SILENCE_NAME, BLANK_NAME)]


def _text(value: Any) -> str | None:
    """A sentence: text, or its character codes up to the first 0."""
    if isinstance(value, np.ndarray | list | tuple) and np.asarray(value).dtype.kind in "iuf":
        codes = np.asarray(value).ravel()
        codes = codes[: int(np.argmax(codes == 0))] if (codes == 0).any() else codes
        return "".join(chr(int(code)) for code in codes if 0 < code < 0x110000) or None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace") or None
    return None if value is None else str(value) or None


def _listed(path: Path, what: str, values: Any, n: int) -> list[Any]:
    if not isinstance(values, list | tuple | np.ndarray) or len(values) != n:
        found = len(values) if isinstance(values, list | tuple | np.ndarray) else type(values).__name__
        raise UserError(f"{path}: {what} must be a list of {n} names, not {found}")
    return list(values)
