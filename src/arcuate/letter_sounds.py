"""Letter-to-sound rules for English: for a word that no dictionary entry and no ending explains."""

import re

# Longest match first, read left to right: letters, optional condition on what follows, phonemes.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("tion", "", "SH AH N"),
    ("sion", "", "ZH AH N"),
    ("tious", "", "SH AH S"),
    ("cious", "", "SH AH S"),
    ("ture", "", "CH ER"),
    ("ough", "", "AH F"),
    ("augh", "", "AO"),
    ("eigh", "", "EY"),
    ("ight", "", "AY T"),
    ("ould", "", "UH D"),
    ("tch", "", "CH"),
    ("dge", "", "JH"),
    ("sch", "", "SH"),
    ("igh", "", "AY"),
    ("air", "", "EH R"),
    ("are", "$", "EH R"),
    ("ear", "", "IH R"),
    ("eer", "", "IH R"),
    ("ore", "$", "AO R"),
    ("our", "", "AO R"),
    ("oor", "", "AO R"),
    ("ire", "$", "AY ER"),
    ("ous", "$", "AH S"),
    ("que", "$", "K"),
    ("ch", "", "CH"),
    ("sh", "", "SH"),
    ("th", "", "TH"),
    ("ph", "", "F"),
    ("wh", "", "W"),
    ("gh", "", "G"),
    ("kn", "", "N"),
    ("wr", "", "R"),
    ("ck", "", "K"),
    ("qu", "", "K W"),
    ("ng", "", "NG"),
    ("sc", "[eiy]", "S"),
    ("cc", "[eiy]", "K S"),
    ("ai", "", "EY"),
    ("ay", "", "EY"),
    ("ea", "", "IY"),
    ("ee", "", "IY"),
    ("ei", "", "IY"),
    ("ey", "", "IY"),
    ("ie", "", "IY"),
    ("oa", "", "OW"),
    ("oe", "", "OW"),
    ("oi", "", "OY"),
    ("oy", "", "OY"),
    ("oo", "", "UW"),
    ("ou", "", "AW"),
    ("ow", "$", "OW"),
    ("ow", "", "AW"),
    ("au", "", "AO"),
    ("aw", "", "AO"),
    ("ew", "", "UW"),
    ("ue", "$", "UW"),
    ("ui", "", "UW"),
    ("ar", "", "AA R"),
    ("er", "", "ER"),
    ("ir", "", "ER"),
    ("ur", "", "ER"),
    ("yr", "", "ER"),
    ("or", "", "AO R"),
    ("al", "l", "AO"),
    ("le", "$", "AH L"),
    ("a", "[^aeiouywx]e$", "EY"),
    ("e", "[^aeiouywx]e$", "IY"),
    ("i", "[^aeiouywx]e$", "AY"),
    ("o", "[^aeiouywx]e$", "OW"),
    ("u", "[^aeiouywx]e$", "UW"),
    ("c", "[eiy]", "S"),
    ("g", "[eiy]", "JH"),
    ("e", "$", ""),
    ("a", "$", "AH"),
    ("i", "$", "IY"),
    ("o", "$", "OW"),
    ("u", "$", "UW"),
    ("y", "$", "IY"),
    ("y", "[aeiou]", "Y"),
    ("a", "", "AE"),
    ("b", "", "B"),
    ("c", "", "K"),
    ("d", "", "D"),
    ("e", "", "EH"),
    ("f", "", "F"),
    ("g", "", "G"),
    ("h", "", "HH"),
    ("i", "", "IH"),
    ("j", "", "JH"),
    ("k", "", "K"),
    ("l", "", "L"),
    ("m", "", "M"),
    ("n", "", "N"),
    ("o", "", "AA"),
    ("p", "", "P"),
    ("q", "", "K"),
    ("r", "", "R"),
    ("s", "", "S"),
    ("t", "", "T"),
    ("u", "", "AH"),
    ("v", "", "V"),
    ("w", "", "W"),
    ("x", "", "K S"),
    ("y", "", "IH"),
    ("z", "", "Z"),
)
_COMPILED = tuple(
    (re.compile(letters + (f"(?={after})" if after else "")), tuple(phones.split()))
    for letters, after, phones in _RULES
)
_DOUBLED = re.compile(r"([bdfgklmnprstvz])\1")


def spell_out(word: str) -> tuple[str, ...]:
    """Phonemes of a lower-case word by rule; never empty for a word with letters."""
    letters = _DOUBLED.sub(r"\1", word)
    phones: list[str] = []
    at = 0
    while at < len(letters):
        for pattern, sounds in _COMPILED:
            if found := pattern.match(letters, at):
                phones.extend(sounds)
                at = found.end()
                break
        else:
            raise ValueError(f"no rule for {letters[at]!r} in {word!r}")
    return tuple(phones) or ("AH",)
