"""Files of frame scores: .npz, .npy with JSON, .mat, or the copy-task pickle of participant T15.

Log-probabilities are kept, logits become log-probabilities by a softmax over the classes. No file is trusted: pickles
go through `arcuate.data.unpickle`, MATLAB files are checked before they are loaded.
"""

from collections.abc import Mapping, Sequence
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
from arcuate.data.unpickle import load_pickle
from arcuate.data.watched import call_watched
from arcuate.decoding.class_order import search_order
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError, check_resources
from arcuate.files import read_json, read_npy, read_npz, save_npz

# Silence is the second class of the '25 language model, and the last class of the '25 acoustic model.
_LM_ORDER = (BLANK_NAME, SILENCE_NAME, *PHONEMES)
_ORDERS: dict[int, tuple[tuple[str, ...], ...]] = {len(CLASSES): (CLASSES, _LM_ORDER), len(CHARACTERS): (CHARACTERS,)}
_MAX_LOGIT = 1e30
_MAX_TRIALS = 1_000_000


@dataclass(frozen=True, eq=False)
class FrameLogProbs:
    """The frames of several trials, with classes in search order: blank first, word boundary last."""

    classes: tuple[str, ...]
    trials: tuple[np.ndarray, ...]  # (F, V) each
    ids: tuple[str, ...] | None  # ids of the trials, if the file has them
    name: str
    texts: tuple[str | None, ...] | None = None  # sentences, if the file has them

    @property
    def boundary(self) -> int:
        """Class index of the word boundary, or -1."""
        return boundary_index(self.classes)


def read_frames(path: str | Path) -> FrameLogProbs:
    """Read frame scores of any supported format."""
    path = Path(path)
    readers = {".npz": _read_npz, ".npy": _read_npy, ".mat": _read_mat, ".pkl": _read_pickle, ".pickle": _read_pickle}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path} is not a file of frame scores; expected {', '.join(readers)}")
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; write frame log-probabilities with: arcuate evaluate RUN --scores FILE"
        )
    return reader(path)


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


def _read_npz(path: Path) -> FrameLogProbs:
    """Log-probabilities `logp` or unnormalised `logits`, with `lengths`; optionally `classes`, `trials`, `texts`."""
    try:
        arrays = read_npz(path, ("logp", "logits", "lengths", "classes", "trials", "texts"))
    except (OSError, ValueError) as error:
        check_resources(error, path)
        raise UserError(f"{path} is not a readable .npz file of frame log-probabilities: {error}") from None
    if "logp" not in arrays and "logits" not in arrays:
        raise UserError(f"{path} has neither `logp` nor `logits`; see docs/decoding.md for its layout")
    names: dict[str, Any] = {key: arrays[key].tolist() for key in ("classes", "trials", "texts") if key in arrays}
    if "logp" not in arrays:
        return _build(path, arrays["logits"], arrays.get("lengths"), names)
    if "lengths" not in arrays:
        raise UserError(f"{path} lacks lengths; see docs/decoding.md for its layout")
    logp = arrays["logp"]
    if logp.ndim != 2 or logp.dtype.kind != "f":
        raise UserError(f"{path}: logp must be a floating-point array (frames, classes), not {logp.dtype}")
    trials = _split(path, logp, arrays["lengths"])
    if "classes" not in names and logp.shape[1] != len(CLASSES):
        raise UserError(f"{path} does not name its {logp.shape[1]} classes; store them as `classes`")
    if len(classes := names.get("classes", CLASSES)) != logp.shape[1]:
        raise UserError(f"{path}: {logp.shape[1]} columns need as many distinct class names, not {classes}")
    if not names.get("trials", [1]):  # written without ids
        del names["trials"]
    return _named(path, trials, classes, names)


def _split(path: Path, frames: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Trials of joined frames (all frames, V)."""
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0):
        raise UserError(f"{path}: lengths must be non-negative integers, the number of frames of each trial")
    n_frames = sum(lengths.tolist())  # Python integers do not overflow
    if n_frames != len(frames):
        raise UserError(f"{path}: lengths add up to {n_frames}, but there are {len(frames)} frames")
    return np.split(frames, np.cumsum(lengths, dtype=np.int64)[:-1]) if len(lengths) else []


def _read_npy(path: Path) -> FrameLogProbs:
    """An array (trials, frames, classes) or (all frames, classes), with lengths and names in a JSON file."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise UserError(f"{path} needs {beside.name} beside it, with lengths and optionally classes, trials and texts")
    about = read_json(beside)
    try:
        logits = read_npy(path)
        lengths = np.array(about.get("lengths"), dtype=np.int64) if "lengths" in about else None
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} or {beside.name} cannot be read: {error}") from None
    return _build(path, logits, lengths, about)


def _read_mat(path: Path) -> FrameLogProbs:
    """Variables `logits` (one cell per trial, or an array with `lengths`) and optionally `classes`, `texts`."""
    try:
        stored = call_watched(path, load_mat, path, ("logits", "lengths", "classes", "trials", "texts", "sentences"))
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if "logits" not in stored:
        raise UserError(f"{path} has no variable logits")
    names: dict[str, Any] = {}
    for key, name in (("classes", "classes"), ("trials", "trials"), ("texts", "texts"), ("sentences", "texts")):
        if key in stored and stored[key].dtype.kind in "OU":
            cells = [np.asarray(cell).ravel() for cell in stored[key].ravel()]
            names[name] = [str(cell[0]).strip() if len(cell) else "" for cell in cells]
    logits = stored["logits"]
    if logits.dtype == object:
        return _join(path, [np.asarray(cell) for cell in logits.ravel()], names)
    lengths = stored["lengths"].ravel().astype(np.int64) if "lengths" in stored else None
    return _build(path, logits, lengths, names)


def _read_pickle(path: Path) -> FrameLogProbs:
    """A dict of lists with one entry per trial, or a list of dicts, such as t15_copyTask.pkl."""
    content = load_pickle(path)
    if isinstance(content, list) and content and all(isinstance(row, Mapping) for row in content):
        content = {key: [row.get(key) for row in content] for key in content[0]}
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a dict of lists with one entry per trial")
    key = next((name for name in content if isinstance(name, str) and "logit" in name.lower()), None)
    if key is None or not isinstance(content[key], list | tuple | np.ndarray):
        known = ", ".join(str(name) for name in list(content)[:12])
        raise UserError(f"{path} has no entry with logits; it has {known}")
    logits = [_as_array(path, i, part) for i, part in enumerate(content[key])]
    names: dict[str, Any] = {}
    texts = next((content[n] for n in ("cue_sentence", "sentence_label", "texts", "text") if n in content), None)
    if isinstance(texts, list | tuple | np.ndarray):
        names["texts"] = [None if text is None else str(text) for text in texts]
    decoded = content.get("decoded_phonemes_raw")
    return _join(path, logits, names, decoded if isinstance(decoded, list | tuple) else None)


def _as_array(path: Path, number: int, part: Any) -> np.ndarray:
    try:
        return np.asarray(part)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{path}, trial {number}: logits are not an array of frames and classes") from None


def _build(
    path: Path,
    logits: np.ndarray,
    lengths: np.ndarray | None,
    names: Mapping[str, Any],
) -> FrameLogProbs:
    """One array of all trials, padded (trials, frames, classes) or joined (frames, classes)."""
    if logits.dtype.kind not in "fiu" or logits.ndim not in (2, 3):
        raise UserError(f"{path}: logits are {logits.dtype} with shape {logits.shape}, expected 2 or 3 axes of numbers")
    if logits.ndim == 2:
        return _join(path, _split(path, logits, np.array([len(logits)]) if lengths is None else lengths), names)
    if lengths is None:
        lengths = np.full(len(logits), logits.shape[1])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0):
        raise UserError(f"{path}: lengths must be non-negative integers, the number of frames of each trial")
    if len(lengths) != len(logits) or (len(lengths) and lengths.max() > logits.shape[1]):
        raise UserError(f"{path}: {len(lengths)} lengths do not fit logits of shape {logits.shape}")
    return _join(path, [row[:n] for row, n in zip(logits, lengths.tolist(), strict=True)], names)


def _join(
    path: Path,
    logits: Sequence[np.ndarray],
    names: Mapping[str, Any],
    decoded: Sequence[Any] | None = None,
) -> FrameLogProbs:
    """Convert the logits of trials to log-probabilities, with the classes in search order."""
    if not logits or len(logits) > _MAX_TRIALS:
        raise UserError(f"{path} has {len(logits)} trials; expected at least one")
    parts = [_log_softmax(path, i, part) for i, part in enumerate(logits)]
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        raise UserError(f"{path}: trials have different numbers of classes, {sorted(widths)[:4]}")
    classes = _class_names(path, names.get("classes"), widths.pop(), parts, decoded)
    return _named(path, parts, classes, names)


def _named(path: Path, trials: Sequence[np.ndarray], classes: Sequence[str], names: Mapping[str, Any]) -> FrameLogProbs:
    """Trials in search order, with their ids and texts."""
    order, ids, texts = search_order(classes, str(path)), None, None
    if names.get("trials") is not None:
        ids = tuple(str(name) for name in _listed(path, "trials", names["trials"], len(trials)))
        check_unique_ids(f"{path}, trials", ids)
    if names.get("texts") is not None:
        listed = _listed(path, "texts", names["texts"], len(trials))
        texts = tuple(None if text is None else str(text) or None for text in listed)
    return FrameLogProbs(order.classes, tuple(order(frames) for frames in trials), ids, path.name, texts)


def _log_softmax(path: Path, number: int, logits: np.ndarray) -> np.ndarray:
    values = logits[0] if logits.ndim == 3 and len(logits) == 1 else logits
    if values.ndim != 2 or values.dtype.kind not in "fiu" or values.shape[1] < 2:
        raise UserError(f"{path}, trial {number}: logits are {values.dtype} with shape {values.shape}, expected (F, V)")
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


def _class_names(
    path: Path, stated: Any, n_classes: int, parts: Sequence[np.ndarray], decoded: Sequence[Any] | None
) -> tuple[str, ...]:
    """The classes in the file, or the known class order whose greedy output best matches the phonemes in the file."""
    if stated is not None:
        return tuple(str(name) for name in _listed(path, "classes", stated, n_classes))
    orders = _ORDERS.get(n_classes, ())
    if not orders:
        raise UserError(f"{path} does not name its {n_classes} classes; store them as classes")
    if decoded is None or len(orders) == 1:
        return orders[0]

    def distance(order: tuple[str, ...]) -> int:
        pairs = list(zip(parts, decoded, strict=False))[:50]
        return sum(Levenshtein.distance(_plain(token_names(greedy(p), order)), _plain(names)) for p, names in pairs)

    return min(orders, key=distance)


def _plain(names: Any) -> list[str]:
    if not isinstance(names, list | tuple | np.ndarray):
        return []
    return [str(name) for name in names if str(name) not in (SILENCE_NAME, BLANK_NAME)]


def _listed(path: Path, what: str, values: Any, n: int) -> list[Any]:
    if not isinstance(values, list | tuple) or len(values) != n:
        found = len(values) if isinstance(values, list | tuple) else type(values).__name__
        raise UserError(f"{path}: {what} must be a list of {n} names, not {found}")
    return list(values)
