"""Frame scores as searches accept them: natural-log probabilities that add up to one, every frame."""

from collections.abc import Sequence

import numpy as np

from arcuate.errors import UserError

TOLERANCE = 0.02  # of a frame's sum, in nat: float16 files stay within 0.001


def check_frames(log_probs: np.ndarray, classes: Sequence[str], where: str = "") -> np.ndarray:
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
            f"{trial}frame {bad} contains NaN, +inf or nothing but -inf; check the model's output"
        )
    sums = highest + np.log(np.exp(frames - highest[:, None]).sum(axis=1))  # (F,)
    worst = int(np.abs(sums).argmax())
    if abs(float(sums[worst])) > TOLERANCE:
        raise UserError(
            f"{trial}the probabilities of frame {worst} add up to {float(np.exp(min(sums[worst], 80))):.3g},"
            " not 1; give natural-log probabilities (log-softmax), not logits, probabilities or log10"
        )
    return frames
