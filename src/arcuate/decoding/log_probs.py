"""Frame log-probabilities: validation, class order, and the .npz files that hold them.

Searches expect natural-log probabilities that sum to one in every frame, with the blank as the first class and the word
boundary, if there is one, as the last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arcuate.data.alphabet import BLANK_NAMES, BOUNDARY_NAMES, CLASSES, boundary_index, punctuation_classes
from arcuate.errors import UserError, check_resources
from arcuate.files import read_npz, save_npz

if TYPE_CHECKING:
    from arcuate.decoding.config import DecodingConfig

_TOLERANCE = 0.02  # tolerance on the log of a frame's sum, in nats; float16 files stay within 0.001


def check_log_probs(log_probs: np.ndarray, classes: Sequence[str], where: str = "") -> np.ndarray:
    """Return the frames as (F, V) float32; raise UserError if they are not log-probabilities."""
    frames = np.ascontiguousarray(log_probs, dtype=np.float32)
    prefix = f"{where}: " if where else ""
    if frames.ndim != 2 or frames.shape[1] != len(classes):
        raise UserError(
            f"{prefix}frame log-probabilities must have shape (frames, {len(classes)}), one column per class,"
            f" not {tuple(frames.shape)}"
        )
    if not len(frames):
        return frames
    highest = frames.max(axis=1)
    if not np.isfinite(highest).all():
        bad = int(np.flatnonzero(~np.isfinite(highest))[0])
        raise UserError(f"{prefix}frame {bad} contains NaN, +inf or only -inf; check the model that wrote it")
    sums = highest + np.log(np.exp(frames - highest[:, None]).sum(axis=1))  # (F,)
    worst = int(np.abs(sums).argmax())
    if abs(float(sums[worst])) > _TOLERANCE:
        raise UserError(
            f"{prefix}the probabilities of frame {worst} add up to {float(np.exp(min(sums[worst], 80))):.3g},"
            " not 1; give natural-log probabilities (log-softmax), not logits, probabilities or log10"
        )
    return frames


@dataclass(frozen=True, eq=False)
class FrameLogProbs:
    """The frames of several trials, with classes in search order: blank first, word boundary last."""

    classes: tuple[str, ...]
    trials: tuple[np.ndarray, ...]  # (F, V) each
    ids: tuple[str, ...] | None  # ids of the trials, if the file has them
    name: str

    @property
    def boundary(self) -> int:
        """Class index of the word boundary, or -1."""
        return boundary_index(self.classes)


def reorder_classes(
    log_probs: np.ndarray, classes: Sequence[str], where: str, boundary: str | None = None, fold: Iterable[str] = ()
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Reorder the columns for the searches; the classes in `fold` are added to the boundary."""
    names = [str(name) for name in classes]
    if len(set(names)) != len(names) or len(names) != log_probs.shape[1]:
        raise UserError(f"{where}: {log_probs.shape[1]} columns need as many distinct class names, not {names}")
    blank = next((name for name in BLANK_NAMES if name in names), None)
    if blank is None:
        raise UserError(f"{where}: none of the classes is the blank; name it {' or '.join(BLANK_NAMES[:3])}")
    edge = boundary if boundary is not None else next((b for b in BOUNDARY_NAMES if b in names), None)
    folded = tuple(fold)
    unknown = [name for name in (*folded, *([edge] if edge else [])) if name not in names]
    if unknown:
        raise UserError(f"{where} has no class {unknown[0]!r}; it has {' '.join(names)}")
    if blank == edge or blank in folded:
        raise UserError(f"{where}: {blank} is the blank and cannot be the boundary; change boundary or fold")
    if edge in folded:
        raise UserError(f"{where}: fold contains {edge}, which is already the boundary; remove it")
    if folded and edge is None:
        raise UserError(f"{where}: no boundary class to fold {' '.join(folded)} into; set boundary")
    if set(names) == set(CLASSES):
        rest = [name for name in CLASSES if name not in (blank, edge, *folded)]
    else:
        rest = [name for name in names if name not in (blank, edge, *folded)]
    order = [names.index(name) for name in (blank, *rest, *([edge] if edge else []))]
    reordered = log_probs if order == list(range(log_probs.shape[1])) else log_probs[:, order]
    if folded:
        columns = [names.index(name) for name in (str(edge), *folded)]
        reordered = np.array(reordered, np.float32)
        reordered[:, -1] = np.logaddexp.reduce(log_probs[:, columns].astype(np.float32), axis=1)
    last = [edge if edge in BOUNDARY_NAMES else ">"] if edge else []
    return reordered, (blank, *rest, *last)


@dataclass(frozen=True)
class WordColumns:
    """Maps the outputs of a model to the classes of a word search: order, and classes folded into the boundary."""

    model_classes: tuple[str, ...]
    boundary: str | None
    fold: tuple[str, ...]
    classes: tuple[str, ...]  # classes of the search

    def __call__(self, log_probs: np.ndarray) -> np.ndarray:
        return reorder_classes(log_probs, self.model_classes, "the model", self.boundary, self.fold)[0]


def reorder_for_words(classes: Sequence[str], settings: "DecodingConfig") -> WordColumns:
    """Map the outputs of a model to the classes of a word search with these settings.

    Words contain no punctuation: unless `fold` is set, punctuation characters are folded into the boundary.
    """
    fold = settings.fold or (punctuation_classes(classes) if boundary_index(classes) >= 0 else ())
    like = np.zeros((1, len(classes)), np.float32)
    names = reorder_classes(like, classes, "the model", settings.boundary, fold)[1]
    return WordColumns(tuple(classes), settings.boundary, fold, names)


def read_log_probs(path: str | Path, boundary: str | None = None, fold: Iterable[str] = ()) -> FrameLogProbs:
    """Read an .npz file: `logp` (all frames, V), `lengths`, `classes`, optionally `trials`."""
    path = Path(path)
    arrays = _load_arrays(path)
    logp, lengths = arrays["logp"], arrays["lengths"]
    if logp.ndim != 2 or logp.dtype.kind != "f":
        raise UserError(f"{path}: logp must be a floating-point array (frames, classes), not {logp.dtype}")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0):
        raise UserError(f"{path}: lengths must be non-negative integers, the number of frames of each trial")
    n_frames = sum(lengths.tolist())  # Python integers do not overflow
    if n_frames != len(logp):
        raise UserError(f"{path}: lengths add up to {n_frames}, but logp has {len(logp)} frames")
    if "classes" not in arrays and logp.shape[1] != len(CLASSES):
        raise UserError(f"{path} does not name its {logp.shape[1]} classes; store them as `classes`")
    classes = arrays.get("classes", np.array(CLASSES))
    reordered, names = reorder_classes(logp, classes.tolist(), str(path), boundary, fold)
    ids = tuple(str(i) for i in arrays["trials"].tolist()) if "trials" in arrays else None
    if ids is not None and len(ids) != len(lengths):
        raise UserError(f"{path}: {len(ids)} ids in `trials` for {len(lengths)} trials")
    check_unique_ids(f"{path}, `trials`", ids or ())
    ends = np.cumsum(lengths, dtype=np.int64)
    trials = tuple(np.split(reordered, ends[:-1])) if len(lengths) else ()
    return FrameLogProbs(names, trials, ids, path.name)


def check_unique_ids(where: str, ids: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(f"{where}: trial {name!r} occurs twice; keep one of the two")
        seen.add(name)


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Load the known arrays of an .npz file without unpickling."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; write frame log-probabilities with: arcuate evaluate RUN --scores FILE"
        )
    try:
        arrays = read_npz(path, ("logp", "lengths", "classes", "trials"))
    except (OSError, ValueError) as error:
        check_resources(error, path)
        raise UserError(f"{path} is not a readable .npz file of frame log-probabilities: {error}") from None
    missing = [key for key in ("logp", "lengths") if key not in arrays]
    if missing:
        raise UserError(f"{path} lacks {' and '.join(missing)}; see docs/decoding.md for its layout")
    return arrays


def write_log_probs(path: Path, log_probs: FrameLogProbs) -> None:
    """Write an .npz file in the layout of `read_log_probs`, as float16."""
    trials = log_probs.trials
    logp = np.concatenate(trials) if trials else np.zeros((0, len(log_probs.classes)), np.float32)
    arrays: dict[str, np.ndarray] = {
        "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
        "lengths": np.array([len(frames) for frames in trials], dtype=np.int32),
        "classes": np.array(log_probs.classes, dtype=np.str_),
        "trials": np.array(log_probs.ids or (), dtype=np.str_),
    }
    save_npz(path, arrays)
