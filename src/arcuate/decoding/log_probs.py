"""Frame scores as searches accept them: natural-log probabilities that add up to one, every frame."""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import BLANK_NAMES, BOUNDARY_NAMES, CLASSES, boundary_index
from arcuate.errors import UserError
from arcuate.run import save_npz

TOLERANCE = 0.02  # of a frame's sum, in nat: float16 files stay within 0.001


def check_log_probs(log_probs: np.ndarray, classes: Sequence[str], where: str = "") -> np.ndarray:
    """The same frames as (F, V) float32, or one sentence that says what is wrong with them."""
    frames = np.ascontiguousarray(log_probs, dtype=np.float32)
    trial = f"{where}: " if where else ""
    if frames.ndim != 2 or frames.shape[1] != len(classes):
        raise UserError(
            f"{trial}frame scores must have shape (frames, {len(classes)}), one column per class,"
            f" not {tuple(frames.shape)}"
        )
    if not len(frames):
        return frames
    highest = frames.max(axis=1)
    if not np.isfinite(highest).all():
        bad = int(np.flatnonzero(~np.isfinite(highest))[0])
        raise UserError(
            f"{trial}frame {bad} contains NaN, +inf or nothing but -inf; check the model that wrote it"
        )
    sums = highest + np.log(np.exp(frames - highest[:, None]).sum(axis=1))  # (F,)
    worst = int(np.abs(sums).argmax())
    if abs(float(sums[worst])) > TOLERANCE:
        raise UserError(
            f"{trial}the probabilities of frame {worst} add up to {float(np.exp(min(sums[worst], 80))):.3g},"
            " not 1; give natural-log probabilities (log-softmax), not logits, probabilities or log10"
        )
    return frames


@dataclass(frozen=True, eq=False)
class FrameLogProbs:
    """The frames of many trials, classes in the order searches expect: blank first, the word boundary last."""

    classes: tuple[str, ...]
    trials: tuple[np.ndarray, ...]  # (F, V) each
    ids: tuple[str, ...] | None  # names of the trials, where the file has them
    name: str

    @property
    def boundary(self) -> int:
        """Class index of the word boundary, -1 where there is none."""
        return boundary_index(self.classes)


def reorder_classes(
    logp: np.ndarray,
    classes: Sequence[str],
    where: str,
    boundary: str | None = None,
    fold: Iterable[str] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Columns in the order searches expect, whatever order they came in; folded classes become boundaries."""
    names = [str(name) for name in classes]
    if len(set(names)) != len(names) or len(names) != logp.shape[1]:
        raise UserError(f"{where}: {logp.shape[1]} columns need as many distinct class names, not {names}")
    blank = next((name for name in BLANK_NAMES if name in names), None)
    if blank is None:
        raise UserError(f"{where}: none of the classes is the blank; call it {' or '.join(BLANK_NAMES[:3])}")
    edge = boundary if boundary is not None else next((b for b in BOUNDARY_NAMES if b in names), None)
    folded = tuple(fold)
    unknown = [name for name in (*folded, *([edge] if edge else [])) if name not in names]
    if unknown:
        raise UserError(f"{where} has no class {unknown[0]!r}; it has {' '.join(names)}")
    if blank == edge or blank in folded:
        raise UserError(
            f"{where}: {blank} is the blank and cannot be the boundary too; set boundary and fold anew"
        )
    if edge in folded:
        raise UserError(f"{where}: fold names {edge}, which is the boundary already; leave it out")
    if folded and edge is None:
        raise UserError(f"{where}: there is no boundary class to fold {' '.join(folded)} into; set boundary")
    if set(names) == set(CLASSES):
        rest = [name for name in CLASSES if name not in (blank, edge, *folded)]
    else:
        rest = [name for name in names if name not in (blank, edge, *folded)]
    order = [names.index(name) for name in (blank, *rest, *([edge] if edge else []))]
    arranged = logp if order == list(range(logp.shape[1])) else logp[:, order]
    if folded:
        columns = [names.index(name) for name in (str(edge), *folded)]
        arranged = np.array(arranged, np.float32)
        arranged[:, -1] = np.logaddexp.reduce(logp[:, columns].astype(np.float32), axis=1)
    last = [edge if edge in BOUNDARY_NAMES else ">"] if edge else []
    return arranged, (blank, *rest, *last)


def read_log_probs(path: Path, boundary: str | None = None, fold: Iterable[str] = ()) -> FrameLogProbs:
    """A file of frame scores: `logp` (sum of frames, V), `lengths`, `classes`, perhaps `trials`."""
    parts = load_parts(path)
    logp, lengths = parts["logp"], parts["lengths"]
    if logp.ndim != 2 or logp.dtype.kind != "f":
        raise UserError(f"{path}: logp must be floating-point numbers (frames, classes), not {logp.dtype}")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (len(lengths) and lengths.min() < 0):
        raise UserError(f"{path}: lengths must be whole numbers, the frames of each trial")
    n_frames = sum(lengths.tolist())  # of Python's numbers, which do not overflow
    if n_frames != len(logp):
        raise UserError(f"{path}: lengths add up to {n_frames}, but logp has {len(logp)} frames")
    if "classes" not in parts and logp.shape[1] != len(CLASSES):
        raise UserError(f"{path} does not name its {logp.shape[1]} classes; store them as `classes`")
    classes = parts.get("classes", np.array(CLASSES))
    arranged, names = reorder_classes(logp, classes.tolist(), str(path), boundary, fold)
    ids = tuple(str(i) for i in parts["trials"].tolist()) if "trials" in parts else None
    if ids is not None and len(ids) != len(lengths):
        raise UserError(f"{path}: {len(ids)} names in `trials` for {len(lengths)} trials")
    check_unique_ids(f"{path}, `trials`", ids or ())
    ends = np.cumsum(lengths, dtype=np.int64)
    trials = tuple(np.split(arranged, ends[:-1])) if len(lengths) else ()
    return FrameLogProbs(names, trials, ids, path.name)


def check_unique_ids(where: str, ids: Sequence[str]) -> None:
    """Trials are told apart by their names."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(f"{where}: trial {name!r} is there twice; keep one of the two")
        seen.add(name)


def load_parts(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file that are needed, none of them a pickle."""
    if not path.is_file():
        raise UserError(
            f"there is no file of frame scores {path}; write one with: arcuate evaluate RUN --scores FILE"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {key: file[key] for key in ("logp", "lengths", "classes", "trials") if key in file}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        why = error if zipfile.is_zipfile(path) else "it is no zip archive of arrays"
        raise UserError(f"{path} is no readable .npz file of frame scores: {why}") from None
    missing = [key for key in ("logp", "lengths") if key not in parts]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}; see docs/decoding.md for its layout")
    return parts


def write_log_probs(path: Path, scores: FrameLogProbs) -> None:
    """Write frame scores in the layout of `read_log_probs`, as float16."""
    logp = np.concatenate(scores.trials) if scores.trials else np.zeros((0, len(scores.classes)), np.float32)
    arrays: dict[str, np.ndarray] = {
        "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
        "lengths": np.array([len(frames) for frames in scores.trials], dtype=np.int32),
        "classes": np.array(scores.classes, dtype=np.str_),
        "trials": np.array(scores.ids or (), dtype=np.str_),
    }
    save_npz(path, arrays)
