"""Order of the classes: searches expect the blank first and the word boundary, if there is one, last."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.alphabet import BLANK_NAMES, BOUNDARY_NAMES, CLASSES, boundary_index, punctuation_classes
from arcuate.errors import UserError

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


@dataclass(frozen=True)
class ClassOrder:
    """Maps the columns of a model or a file to the classes of a search."""

    model_classes: tuple[str, ...]
    classes: tuple[str, ...]  # of the search
    columns: tuple[int, ...]  # of the model, in the order of the search
    merged: tuple[int, ...] = ()  # columns whose probabilities are added to that of the boundary

    @property
    def boundary(self) -> int:
        """Class index of the word boundary in the search, or -1."""
        return boundary_index(self.classes)

    @property
    def is_identity(self) -> bool:
        """Whether model and search have the same classes in the same order."""
        return self.classes == self.model_classes

    def __call__(self, log_probs: np.ndarray) -> np.ndarray:
        """Frames (F, V) of the model in the order of the search."""
        if self.is_identity:
            return log_probs
        if not self.merged:
            return log_probs[:, self.columns]
        reordered = np.array(log_probs[:, self.columns], np.float32)
        together = log_probs[:, (self.columns[-1], *self.merged)].astype(np.float32)
        reordered[:, -1] = np.logaddexp.reduce(together, axis=1)
        return reordered


def search_order(classes: Iterable[str], where: str = "the model") -> ClassOrder:
    """The order of the searches for classes in any order; `where` names their origin in error messages."""
    return _order([str(name) for name in classes], where, ())


def word_order(classes: Sequence[str], where: str = "the model") -> ClassOrder:
    """The same for a word search. Words contain no punctuation: its characters are merged into the boundary."""
    return _order(list(classes), where, punctuation_classes(classes) if boundary_index(classes) >= 0 else ())


def _order(names: list[str], where: str, merged: tuple[str, ...]) -> ClassOrder:
    if len(set(names)) != len(names):
        raise UserError(f"{where}: {len(names)} columns need as many distinct class names, not {names}")
    blank = next((name for name in BLANK_NAMES if name in names), None)
    if blank is None:
        raise UserError(f"{where}: none of the classes is the blank; name it {' or '.join(BLANK_NAMES[:3])}")
    edge = next((name for name in BOUNDARY_NAMES if name in names), None)
    special = (blank, edge, *merged)
    rest = [name for name in (CLASSES if set(names) == set(CLASSES) else names) if name not in special]
    ordered = (blank, *rest, *([] if edge is None else [edge]))
    return ClassOrder(tuple(names), ordered, tuple(map(names.index, ordered)), tuple(map(names.index, merged)))
