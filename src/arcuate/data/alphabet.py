"""The token alphabet: which class index means which phoneme. Nobody else decides this.

Both benchmarks use 41 classes: 0 is the CTC blank (and the padding of label arrays), 1–39 are the ARPAbet
phonemes in alphabetical order, 40 is silence, the boundary between words.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

BLANK = 0
PHONEMES: tuple[str, ...] = tuple(
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()
)
CLASSES: tuple[str, ...] = ("BLANK", *PHONEMES, "SIL")
SILENCE = len(CLASSES) - 1
N_CLASSES = len(CLASSES)
INDEX: dict[str, int] = {name: i for i, name in enumerate(CLASSES)}


def encode(names: Iterable[str]) -> list[int]:
    """Phoneme names to class indices; a name outside the alphabet raises KeyError."""
    return [INDEX[name] for name in names]


def names(tokens: Iterable[int]) -> list[str]:
    """Class indices to phoneme names."""
    return [CLASSES[int(token)] for token in tokens]


def min_frames(tokens: Sequence[int]) -> int:
    """Fewest frames on which CTC can align these tokens: one each, plus a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))
