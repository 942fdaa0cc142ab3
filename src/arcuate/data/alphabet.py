"""The token alphabet: class indices of blank, phonemes and silence.

Both benchmarks use 41 classes: 0 is the CTC blank (and the padding of label arrays), 1–39 are the ARPAbet phonemes in
alphabetical order, and 40 is silence, the boundary between words.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

PHONEMES: tuple[str, ...] = tuple(
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()
)
# Names of the two special classes; the first is ours, the others are those of third-party decoders.
BLANK_NAMES = ("BLANK", "<ctc>", "<blank>", "<pad>", "_")
BOUNDARY_NAMES = ("SIL", "|", ">", "<space>", " ")
BLANK_NAME, SILENCE_NAME = BLANK_NAMES[0], BOUNDARY_NAMES[0]
CLASSES: tuple[str, ...] = (BLANK_NAME, *PHONEMES, SILENCE_NAME)
N_CLASSES = len(CLASSES)
BLANK, SILENCE = 0, N_CLASSES - 1
_INDEX: dict[str, int] = {name: i for i, name in enumerate(CLASSES)}


def encode(names: Iterable[str]) -> list[int]:
    """Phoneme names to class indices; a name outside the alphabet raises KeyError."""
    return [_INDEX[name] for name in names]


def token_names(tokens: Iterable[int]) -> list[str]:
    """Class indices to phoneme names."""
    return [CLASSES[int(token)] for token in tokens]


def boundary_index(classes: Sequence[str]) -> int:
    """Index of the word-boundary class in search order, in which it comes last; -1 if there is none."""
    return len(classes) - 1 if classes[-1] in BOUNDARY_NAMES else -1


def min_frames(tokens: Sequence[int]) -> int:
    """Fewest frames on which CTC can align these tokens: one each, plus a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))
