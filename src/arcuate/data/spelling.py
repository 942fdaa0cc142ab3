"""Spoken form of numbers and non-ASCII letters in label text.

The official label preparation drops every character outside a to z, so that "1984." would be labelled as silence. Text
of plain letters and punctuation is returned unchanged, and its labels stay those of the official preparation.
"""

import re
import unicodedata
from dataclasses import dataclass

_CURRENCIES = {"$": "dollar", "£": "pound", "€": "euro"}
_MAX_DIGITS = 15
_DIGIT = re.compile(r"\d")

# Letters without a Unicode decomposition, and punctuation with an ASCII equivalent.
_LETTERS = str.maketrans({
    "ß": "ss", "ẞ": "SS", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "đ": "d", "Đ": "D", "ð": "th",
    "Ð": "Th", "ł": "l", "Ł": "L", "þ": "th", "Þ": "Th", "ı": "i", "ħ": "h", "ŋ": "ng", "’": "'", "‘": "'", "ʼ": "'",
    "–": " ", "—": " ", "‐": "-", "‑": "-", "…": " ", "“": '"', "”": '"', "\u00a0": " ",
})  # fmt: skip

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.-])[-−])?(?P<currency>[$£€])?(?P<whole>\d{1,3}(?:,\d{3})+|\d+)"
    r"(?::(?P<minutes>[0-5]\d)(?!\d))?(?:\.(?P<decimals>\d+))?(?:(?P<ordinal>st|nd|rd|th)\b)?(?P<percent>\s?%)?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class Spelling:
    """A text with its numbers and non-ASCII letters spelled out."""

    text: str
    changed: bool
    unspoken: str  # remaining characters that a speaker may pronounce, such as letters of other scripts


def spell_out(text: str) -> Spelling:
    """Spell out numbers in English and replace letters with diacritics by plain ones."""
    if text.isascii() and not _DIGIT.search(text):
        return Spelling(text, False, "")
    plain = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    spelled = _NUMBER.sub(_spell_match, plain)
    unspoken = "".join(
        dict.fromkeys(c for c in spelled if (not c.isascii() and unicodedata.category(c)[0] in "LNS") or c.isdigit())
    )
    return Spelling(spelled, spelled != text, unspoken)


def _spell_match(found: re.Match[str]) -> str:
    whole, decimals = found["whole"].replace(",", ""), found["decimals"]
    number = int(whole)
    if len(whole) > _MAX_DIGITS or (whole.startswith("0") and len(whole) > 1):
        words = " ".join(map(_words, whole))  # a code or telephone number
    elif found["minutes"]:
        minutes = int(found["minutes"])
        past = f"{'oh ' if minutes < 10 else ''}{_words(minutes)}" if minutes else "o'clock"
        words = f"{_words(whole)} {past}"
    elif _is_year(found):
        words = _words(number, "year").replace("oh-", "oh ")
    else:
        words = _words(number, "ordinal" if found["ordinal"] else "cardinal")
    if decimals:
        words += " point " + " ".join(map(_words, decimals))
    if found["currency"]:
        words += f" {_CURRENCIES[found['currency']]}" + ("" if words == "one" else "s")
    sign = "minus " if found["sign"] else ""
    return f"{_gap(found, -1)}{sign}{words}{' percent' if found['percent'] else ''}{_gap(found, 1)}"


def _words(number: int | str, kind: str = "cardinal") -> str:
    """A number in American words: without commas, and without the "and" of "one hundred and five"."""
    from num2words import num2words  # imported for numbers only: most texts have none

    return str(num2words(int(number), to=kind)).replace(",", "").replace(" and ", " ")


def _gap(found: re.Match[str], side: int) -> str:
    """A space where a number touches a letter, as in "4x"; a hyphen ("twenty-1") separates words already."""
    at = found.start() - 1 if side < 0 else found.end()
    return " " if 0 <= at < len(found.string) and found.string[at].isalnum() else ""


def _is_year(found: re.Match[str]) -> bool:
    plain = not any(found[part] for part in ("sign", "currency", "decimals", "percent", "ordinal"))
    return plain and len(found["whole"]) == 4 and (1100 <= int(found["whole"]) < 2000 or found["whole"][:2] == "20")
