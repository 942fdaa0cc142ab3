"""Phonemes as displayed in the report: in articulatory order, with an example word each."""

from arcuate.data.alphabet import SILENCE_NAME

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

EXAMPLE_WORDS: dict[str, str] = {
    "IY": "see", "IH": "sit", "EY": "say", "EH": "bed", "AE": "cat", "AH": "cup", "ER": "bird",
    "AA": "hot", "AO": "law", "OW": "go", "UH": "book", "UW": "food", "AY": "my", "AW": "now",
    "OY": "boy", "P": "pen", "B": "ball", "T": "tea", "D": "day", "K": "key", "G": "get",
    "CH": "chair", "JH": "jam", "F": "fish", "V": "very", "TH": "thin", "DH": "this", "S": "sun",
    "Z": "zoo", "SH": "she", "ZH": "vision", "HH": "hat", "M": "man", "N": "no", "NG": "sing",
    "W": "we", "R": "red", "L": "leg", "Y": "yes",
}  # fmt: skip
WORD_BOUNDARY = "|"  # symbol for silence between words where space is short


def with_example(name: str) -> str:
    """`T (tea)`; silence and names outside the alphabet are returned as they are."""
    if name == SILENCE_NAME:
        return "silence"
    return f"{name} ({EXAMPLE_WORDS[name]})" if name in EXAMPLE_WORDS else name


def phoneme_symbol(name: str) -> str:
    return WORD_BOUNDARY if name == SILENCE_NAME else name
