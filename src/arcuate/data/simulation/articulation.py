"""Vocal tract model: phonemes to articulator movements, with targets, timing and coarticulation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.data.alphabet import CHARACTERS, SILENCE_NAME
from arcuate.data.trial import BIN_SECONDS

ARTICULATORS = tuple(
    "lip_aperture lip_rounding jaw tip_height tip_front body_height body_front root"
    " lateral rhotic velum voicing airflow closure".split()
)
N_ARTICULATORS = len(ARTICULATORS)
# Time constant of each articulator (s): lips and tongue tip are fast; jaw, velum and larynx are slower.
_TIME_CONSTANTS = np.array(
    [0.026, 0.034, 0.042, 0.022, 0.026, 0.034, 0.034, 0.040, 0.028, 0.030, 0.044, 0.034, 0.026, 0.022]
)

# One gesture per row, in the order of ARTICULATORS; "." = unspecified, determined by the neighbours.
# Heights, fronting and rounding run from -1 to 1; a diphthong or affricate is two gestures in a row.
_GESTURE_TABLE = """
AA   0.9 -0.3  1.0   .    .  -0.9 -0.7 -0.9  .    .   -1.0  1.0 -0.6 -1.0
AE   0.9 -0.5  0.8   .   0.3 -0.6  0.8 -0.3  .    .   -1.0  1.0 -0.6 -1.0
AH   0.4  0.0  0.3   .    .  -0.2  0.0 -0.2  .    .   -1.0  1.0 -0.6 -1.0
AO   0.5  0.8  0.6   .    .  -0.6 -0.8 -0.6  .    .   -1.0  1.0 -0.6 -1.0
AW   0.9 -0.3  0.9   .    .  -0.8 -0.2 -0.6  .    .   -1.0  1.0 -0.6 -1.0
AW   0.1  0.9 -0.2   .    .   0.6 -0.9  0.2  .    .   -1.0  1.0 -0.6 -1.0
AY   0.9 -0.3  0.9   .    .  -0.9 -0.3 -0.7  .    .   -1.0  1.0 -0.6 -1.0
AY   0.3 -0.6 -0.2   .    .   0.7  0.9  0.6  .    .   -1.0  1.0 -0.6 -1.0
B   -1.0  0.0 -0.5   .    .    .    .    .   .    .   -1.0  0.8 -1.0  1.0
CH   0.0  0.5 -0.8  1.0  0.4  0.4  0.3   .   .    .   -1.0 -0.9 -0.7  1.0
CH   0.1  0.5 -0.8  0.7  0.2  0.5  0.3   .   .    .   -1.0 -0.9  0.9 -0.1
D     .    .  -0.5  1.0  0.6   .    .    .   .    .   -1.0  0.8 -1.0  1.0
DH    .    .  -0.3  0.6  1.0   .    .    .   .    .   -1.0  0.8  0.3  0.1
EH   0.6 -0.4  0.5   .    .  -0.1  0.7  0.0  .    .   -1.0  1.0 -0.6 -1.0
ER   0.2  0.4  0.0  0.2 -0.5  0.2  0.0 -0.5  .   1.0  -1.0  1.0 -0.6 -0.8
EY   0.5 -0.5  0.4   .    .   0.2  0.8  0.2  .    .   -1.0  1.0 -0.6 -1.0
EY   0.2 -0.6 -0.2   .    .   0.8  1.0  0.6  .    .   -1.0  1.0 -0.6 -1.0
F   -0.8 -0.6 -0.4   .    .    .    .    .   .    .   -1.0 -0.9  0.9  0.2
G     .    .  -0.4   .    .   1.0 -0.4   .   .    .   -1.0  0.8 -1.0  1.0
HH   0.5   .   0.2   .    .    .    .  -0.2  .    .   -1.0 -1.0  0.6 -0.9
IH   0.3 -0.4  0.0   .    .   0.5  0.6  0.3  .    .   -1.0  1.0 -0.6 -1.0
IY   0.2 -0.8 -0.2   .    .   1.0  1.0  0.8  .    .   -1.0  1.0 -0.6 -1.0
JH   0.0  0.5 -0.8  1.0  0.4  0.4  0.3   .   .    .   -1.0  0.8 -0.8  1.0
JH   0.1  0.5 -0.8  0.7  0.2  0.5  0.3   .   .    .   -1.0  0.8  0.7 -0.1
K     .    .  -0.4   .    .   1.0 -0.4   .   .    .   -1.0 -0.9 -1.0  1.0
L     .    .  -0.1  1.0  0.5 -0.2 -0.3 -0.3 1.0   .   -1.0  1.0 -0.4  0.0
M   -1.0  0.0 -0.4   .    .    .    .    .   .    .    1.0  1.0 -0.4  0.8
N     .    .  -0.4  1.0  0.6   .    .    .   .    .    1.0  1.0 -0.4  0.8
NG    .    .  -0.3   .    .   1.0 -0.4   .   .    .    1.0  1.0 -0.4  0.8
OW   0.3  0.7  0.3   .    .  -0.1 -0.7 -0.2  .    .   -1.0  1.0 -0.6 -1.0
OW   0.0  1.0 -0.1   .    .   0.6 -0.9  0.2  .    .   -1.0  1.0 -0.6 -1.0
OY   0.4  0.9  0.5   .    .  -0.5 -0.8 -0.5  .    .   -1.0  1.0 -0.6 -1.0
OY   0.3 -0.6 -0.2   .    .   0.7  0.9  0.6  .    .   -1.0  1.0 -0.6 -1.0
P   -1.0  0.0 -0.5   .    .    .    .    .   .    .   -1.0 -0.9 -1.0  1.0
R    0.1  0.6 -0.2  0.3 -0.7  0.1 -0.1 -0.6  .   1.0  -1.0  1.0 -0.4 -0.4
S     .  -0.4 -0.9  0.8  0.6   .    .    .   .    .   -1.0 -0.9  1.0  0.1
SH   0.1  0.6 -0.8  0.6  0.1  0.5  0.3   .   .    .   -1.0 -0.9  1.0  0.0
T     .    .  -0.5  1.0  0.6   .    .    .   .    .   -1.0 -0.9 -1.0  1.0
TH    .    .  -0.3  0.6  1.0   .    .    .   .    .   -1.0 -0.9  0.6  0.1
UH   0.2  0.5  0.1   .    .   0.4 -0.5  0.0  .    .   -1.0  1.0 -0.6 -1.0
UW  -0.1  1.0 -0.2   .    .   0.9 -0.7  0.4  .    .   -1.0  1.0 -0.6 -1.0
V   -0.8 -0.6 -0.4   .    .    .    .    .   .    .   -1.0  0.8  0.6  0.2
W   -0.4  1.0 -0.3   .    .   0.8 -0.9  0.0  .    .   -1.0  1.0 -0.4 -0.3
Y    0.1 -0.7 -0.4   .    .   1.0  1.0  0.8  .    .   -1.0  1.0 -0.4 -0.3
Z     .  -0.4 -0.9  0.8  0.6   .    .    .   .    .   -1.0  0.8  0.8  0.1
ZH   0.1  0.6 -0.8  0.6  0.1  0.5  0.3   .   .    .   -1.0  0.8  0.8  0.0
SIL  0.0  0.0  0.0  0.0  0.0  0.0  0.0  0.0 -0.2 -0.2 -0.3 -1.0 -1.0 -0.6
"""

_LONG_VOWELS = frozenset(["AA", "AE", "AO", "AW", "AY", "EH", "ER", "EY", "IY", "OW", "OY", "UW"])
_SHORT_CONSONANTS = frozenset(["B", "D", "DH", "G", "HH", "L", "P", "T", "K", "V", "Y", "R", "W"])


def _parse_gestures() -> dict[str, np.ndarray]:
    """Phoneme name to its gestures, (1 or 2, N_ARTICULATORS); NaN if the phoneme specifies no target."""
    rows: dict[str, list[list[float]]] = {}
    for line in _GESTURE_TABLE.strip().splitlines():
        name, *cells = line.split()
        rows.setdefault(name, []).append([np.nan if cell == "." else float(cell) for cell in cells])
    return {name: np.array(gestures) for name, gestures in rows.items()}


def _character_gestures() -> dict[str, np.ndarray]:
    """Gestures of handwritten characters: three strokes each, arbitrary movements of the same articulators."""
    strokes = {}
    for name in CHARACTERS[1:]:
        rng = np.random.default_rng([7, *name.encode()])
        strokes[name] = rng.uniform(-1.0, 1.0, (3, N_ARTICULATORS))
    return strokes


GESTURES = _parse_gestures() | _character_gestures()
_REST = GESTURES[SILENCE_NAME][0]


@dataclass(frozen=True)
class Timing:
    """Timing of a trial in seconds."""

    per_phoneme: float  # mean, including pauses between words
    before: float  # silence before speech onset
    after: float  # silence after the end of speech


def draw_onsets(names: Sequence[str], timing: Timing, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Onset of every phoneme in bins, (U,) float, and the number of bins of the trial.

    The final silence runs to the end of the trial.
    """
    base = np.array([_relative_duration(name) for name in names])
    durations = base * rng.lognormal(0.0, 0.24, len(names)) * (timing.per_phoneme / BIN_SECONDS)
    pauses = (np.array(names) == SILENCE_NAME) & (rng.random(len(names)) < 0.06)
    durations[pauses] += rng.exponential(0.35 / BIN_SECONDS, int(pauses.sum()))  # hesitations
    onsets = timing.before / BIN_SECONDS + np.concatenate([[0.0], np.cumsum(durations)[:-1]])
    n_bins = int(np.ceil(onsets[-1] + durations[-1] + timing.after / BIN_SECONDS))
    return onsets, n_bins


def _relative_duration(name: str) -> float:
    if name == SILENCE_NAME:
        return 0.95
    return 1.22 if name in _LONG_VOWELS else 0.86 if name in _SHORT_CONSONANTS else 1.02


def articulate(names: Sequence[str], onsets: np.ndarray, n_bins: int) -> np.ndarray:
    """Articulator positions over the trial, (n_bins, N_ARTICULATORS).

    Each articulator follows its targets as a critically damped second-order system, so neighbouring phonemes overlap.
    Where a phoneme specifies no target, the articulator moves between the targets around it.
    """
    starts: list[float] = [0.0]
    targets: list[np.ndarray] = [_REST]
    ends = np.append(onsets[1:], n_bins)
    for name, start, end in zip(names, onsets, ends, strict=True):
        gestures = GESTURES[name]
        for part, gesture in enumerate(gestures):
            starts.append(start + (end - start) * part / len(gestures))
            targets.append(gesture)
    path_targets = _fill_unspecified(np.array(targets))  # (G, K)
    current = np.searchsorted(np.array(starts), np.arange(n_bins) + 0.5, side="right") - 1
    path = path_targets[current] - _REST  # (T, K)
    poles = np.exp(-BIN_SECONDS / _TIME_CONSTANTS)
    return low_pass(low_pass(path, poles), poles) + _REST


def low_pass(target: np.ndarray, pole: np.ndarray | float) -> np.ndarray:
    """First-order low-pass filter along time, (T, K), from rest; applied twice it is critically damped."""
    scaled = (1 - pole) * target
    out = np.empty_like(scaled)
    state = np.zeros_like(scaled[0])
    for t, value in enumerate(scaled):
        state = pole * state + value
        out[t] = state
    return out


def _fill_unspecified(targets: np.ndarray) -> np.ndarray:
    """Replace unspecified targets by a blend of the previous and the next target of the articulator."""
    n, k = targets.shape
    order = np.arange(n)[:, None]
    specified = ~np.isnan(targets)
    last = np.maximum.accumulate(np.where(specified, order, 0), axis=0)
    upcoming = np.minimum.accumulate(np.where(specified, order, n - 1)[::-1], axis=0)[::-1]
    columns = np.broadcast_to(np.arange(k), (n, k))
    before, after = targets[last, columns], targets[upcoming, columns]
    blend = 0.45 * before + 0.55 * np.where(np.isnan(after), before, after)
    return np.where(specified, targets, 0.8 * blend + 0.2 * _REST)
