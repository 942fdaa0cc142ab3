"""Token alphabets: the classes of a store and of the models trained on it, in the order of their indices.

Class 0 of every alphabet is the CTC blank (and the padding of label arrays). Both speech benchmarks use 41 classes:
1–39 are the ARPAbet phonemes in alphabetical order, and 40 is silence, the boundary between words. Handwriting data
sets use characters, in which > stands for the space and ~ for the full stop.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

PHONEMES: tuple[str, ...] = tuple(
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH".split()
)
# Names of the two special classes: first the name used here, then the names used by third-party decoders.
BLANK_NAMES = ("BLANK", "<ctc>", "<blank>", "<pad>", "_")
BOUNDARY_NAMES = ("SIL", "|", ">", "<space>", " ")
BLANK_NAME, SILENCE_NAME = BLANK_NAMES[0], BOUNDARY_NAMES[0]
CLASSES: tuple[str, ...] = (BLANK_NAME, *PHONEMES, SILENCE_NAME)
N_CLASSES = len(CLASSES)
BLANK, SILENCE = 0, N_CLASSES - 1
# Neighbours are similar: vowels from front to back, voiceless consonants next to voiced ones.
PHONEME_GROUPS: dict[str, tuple[str, ...]] = {
    "vowels": ("IY", "IH", "EY", "EH", "AE", "AH", "ER", "AA", "AO", "OW", "UH", "UW", "AY", "AW", "OY"),
    "stops": ("P", "B", "T", "D", "K", "G"),
    "affricates": ("CH", "JH"),
    "fricatives": ("F", "V", "TH", "DH", "S", "Z", "SH", "ZH", "HH"),
    "nasals": ("M", "N", "NG"),
    "approximants": ("W", "R", "L", "Y"),
    "silence": (SILENCE_NAME,),
}
PHONEME_ORDER: tuple[str, ...] = tuple(name for group in PHONEME_GROUPS.values() for name in group)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE, FULL_STOP = BOUNDARY_NAMES[2], "~"  # as the handwriting data sets write them
# Characters of the handwriting data sets of participant T5, word boundary last as in CLASSES.
CHARACTERS: tuple[str, ...] = (BLANK_NAME, *_LETTERS, ",", "'", FULL_STOP, "?", SPACE)
PUNCTUATION = frozenset({",", FULL_STOP, ".", "?", "!", ";", ":"})
ALPHABETS: dict[str, tuple[str, ...]] = {"phonemes": CLASSES, "characters": CHARACTERS}
_MAX_CLASSES = 10_000


def encode(names: Iterable[str], classes: Sequence[str] = CLASSES) -> list[int]:
    """Token names to class indices; a name outside the alphabet raises KeyError."""
    index = {name: i for i, name in enumerate(classes)}
    return [index[name] for name in names]


def token_names(tokens: Iterable[int], classes: Sequence[str] = CLASSES) -> list[str]:
    """Class indices to token names."""
    return [classes[int(token)] for token in tokens]


def token_unit(classes: Sequence[str]) -> str:
    """Name of the tokens of an alphabet: phoneme, character or token."""
    if tuple(classes) == CLASSES:
        return "phoneme"
    edge = boundary_index(classes)
    inner = classes[1:edge] if edge > 0 else classes[1:]
    return "character" if all(len(name) == 1 for name in inner) else "token"


def error_rate_name(classes: Sequence[str]) -> str:
    """Abbreviation of the error rate over tokens of the alphabet."""
    return {"phoneme": "PER", "character": "CER"}.get(token_unit(classes), "TER")


def recorded_classes(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """The alphabet in an environment.json; runs of earlier versions do not name it and have phonemes."""
    data = environment.get("data")
    names = data.get("classes") if isinstance(data, Mapping) else None
    try:
        return check_alphabet(names) if isinstance(names, list) else CLASSES
    except (ValueError, TypeError, AttributeError):
        return CLASSES


def punctuation_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Classes of a character alphabet that are not part of any word."""
    return tuple(name for name in classes if name in PUNCTUATION)


def token_groups(classes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tokens of an alphabet by kind, in the order in which charts show them."""
    if tuple(classes) == CLASSES:
        return PHONEME_GROUPS
    marks = punctuation_classes(classes)
    edge = (classes[boundary_index(classes)],) if boundary_index(classes) > 0 else ()
    plain = tuple(name for name in classes[1:] if name not in (*marks, *edge))
    groups = {"tokens": plain, "marks": marks, "boundary": edge}
    return {name: members for name, members in groups.items() if members}


def check_alphabet(classes: Sequence[str]) -> tuple[str, ...]:
    """The classes as a tuple; raises ValueError unless they are distinct names with the blank first."""
    names = tuple(classes)
    if not 2 <= len(names) <= _MAX_CLASSES or len(set(names)) != len(names):
        raise ValueError(f"an alphabet has 2 to {_MAX_CLASSES} distinct classes, not {len(names)}")
    if names[0] not in BLANK_NAMES:
        raise ValueError(f"the first class of an alphabet is the blank, named {BLANK_NAME}, not {names[0]!r}")
    for name in names:
        if not 1 <= len(name) <= 40 or not name.isprintable():
            raise ValueError(f"the class name {name!r} is not a printable text of 1 to 40 characters")
    return names


def boundary_index(classes: Sequence[str]) -> int:
    """Index of the word-boundary class in search order, in which it comes last; -1 if there is none."""
    return len(classes) - 1 if classes[-1] in BOUNDARY_NAMES else -1


def min_frames(tokens: Sequence[int]) -> int:
    """Fewest frames on which CTC can align these tokens: one each, plus a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))
