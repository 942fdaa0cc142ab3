"""Spoken form of numbers and non-ASCII letters in label text.

The official label preparation drops every character outside a to z, so that "1984." would be labelled as silence. Text
of plain letters and punctuation is returned unchanged, and its labels stay those of the official preparation.
"""

import re
import unicodedata
from dataclasses import dataclass

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
).split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ("", " thousand", " million", " billion", " trillion")
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
_CURRENCIES = {"$": "dollar", "£": "pound", "€": "euro"}
_MAX_DIGITS = 15

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
    if text.isascii() and not any(c.isdigit() for c in text):
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
    if len(whole) > _MAX_DIGITS:
        words = " ".join(_ONES[int(digit)] for digit in whole)  # a code or telephone number
    elif found["minutes"]:
        minutes = int(found["minutes"])
        words = f"{number_words(int(whole))} {'' if minutes >= 10 else 'oh '}{number_words(minutes)}"
        words = number_words(int(whole)) + " o'clock" if not minutes else words
    elif _is_year(found):
        words = _year_words(int(whole))
    elif whole.startswith("0") and len(whole) > 1:
        words = " ".join(_ONES[int(digit)] for digit in whole)
    else:
        words = number_words(int(whole))
    if decimals:
        words += " point " + " ".join(_ONES[int(digit)] for digit in decimals)
    if found["ordinal"]:
        words = _ordinal(words)
    if found["currency"]:
        words += f" {_CURRENCIES[found['currency']]}" + ("" if words == "one" else "s")
    sign = "minus " if found["sign"] else ""
    return f"{_gap(found, -1)}{sign}{words}{' percent' if found['percent'] else ''}{_gap(found, 1)}"


def _gap(found: re.Match[str], side: int) -> str:
    """A space where a number touches a letter, as in "4x"; a hyphen ("twenty-1") separates words already."""
    at = found.start() - 1 if side < 0 else found.end()
    return " " if 0 <= at < len(found.string) and found.string[at].isalnum() else ""


def _is_year(found: re.Match[str]) -> bool:
    plain = not any(found[part] for part in ("sign", "currency", "decimals", "percent", "ordinal"))
    return plain and len(found["whole"]) == 4 and (1100 <= int(found["whole"]) < 2000 or found["whole"][:2] == "20")


def _year_words(year: int) -> str:
    century, rest = divmod(year, 100)
    if year in range(2000, 2010):
        return number_words(year)
    if not rest:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


def number_words(number: int) -> str:
    """A non-negative integer below 10^15 in words, as in "one hundred twenty-three"."""
    if number < 20:
        return _ONES[number]
    groups = []
    for scale in _SCALES:
        number, group = divmod(number, 1000)
        if group:
            groups.append(_below_thousand(group) + scale)
    return " ".join(reversed(groups))


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = [f"{_ONES[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append(_TENS[tens] + (f"-{_ONES[ones]}" if ones else ""))
    elif rest:
        words.append(_ONES[rest])
    return " ".join(words)


def _ordinal(words: str) -> str:
    head, mark, last = re.fullmatch(r"(.*?)([ -]?)([a-z]+)", words).groups()  # type: ignore[union-attr]
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return head + mark + _ORDINALS.get(last, regular)
