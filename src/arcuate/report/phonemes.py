"""Phonemes as a reader meets them: in articulatory order, with a word in which each is heard."""

from arcuate.tokens import CLASSES, SILENCE

# Neighbours are alike: front to back for vowels, voiceless beside voiced for consonants.
GROUPS: dict[str, tuple[str, ...]] = {
    "vowels": ("IY", "IH", "EY", "EH", "AE", "AH", "ER", "AA", "AO", "OW", "UH", "UW", "AY", "AW", "OY"),
    "stops": ("P", "B", "T", "D", "K", "G"),
    "affricates": ("CH", "JH"),
    "fricatives": ("F", "V", "TH", "DH", "S", "Z", "SH", "ZH", "HH"),
    "nasals": ("M", "N", "NG"),
    "approximants": ("W", "R", "L", "Y"),
    "silence": (CLASSES[SILENCE],),
}
ORDER: tuple[str, ...] = tuple(name for group in GROUPS.values() for name in group)

HEARD_IN: dict[str, str] = {
    "IY": "see", "IH": "sit", "EY": "say", "EH": "bed", "AE": "cat", "AH": "cup", "ER": "bird",
    "AA": "hot", "AO": "law", "OW": "go", "UH": "book", "UW": "food", "AY": "my", "AW": "now",
    "OY": "boy", "P": "pen", "B": "ball", "T": "tea", "D": "day", "K": "key", "G": "get",
    "CH": "chair", "JH": "jam", "F": "fish", "V": "very", "TH": "thin", "DH": "this", "S": "sun",
    "Z": "zoo", "SH": "she", "ZH": "vision", "HH": "hat", "M": "man", "N": "no", "NG": "sing",
    "W": "we", "R": "red", "L": "leg", "Y": "yes",
}  # fmt: skip
BOUNDARY = "|"  # how silence, the boundary between words, is drawn where space is short


def spoken(name: str) -> str:
    """`T (tea)`; silence and names outside the alphabet stand for themselves."""
    if name == CLASSES[SILENCE]:
        return "silence"
    return f"{name} ({HEARD_IN[name]})" if name in HEARD_IN else name


def brief(name: str) -> str:
    return BOUNDARY if name == CLASSES[SILENCE] else name
