"""Text: normalisation for error rates and labels, and phonemes as the official label preparation gives them.

Words come from the CMU dictionary; a homograph is resolved by its neighbours. Words outside the dictionary are
pronounced from a known stem, as a compound, or by letter-to-sound rules, in lexicons by `g2p_en` where it is installed.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arcuate.data.alphabet import FULL_STOP, PHONEMES, SILENCE_NAME, boundary_index, encode, token_unit
from arcuate.data.spelling import spell_out
from arcuate.errors import UserError
from arcuate.files import find_package_file

_NOT_SPEECH = re.compile(r"[^a-zA-Z\- ']")
_SPACES = re.compile(r" +")


def normalise_text(text: str) -> str:
    """Normalise a sentence for the word error rate: lower-case letters, hyphens, apostrophes, single spaces.

    It is read as its labels are, with typographic marks, numbers and accents spelled out first.
    """
    kept = _spoken_text(text).replace("- ", " ").replace("--", "").replace(" '", "'")
    return _SPACES.sub(" ", kept).strip()


def label_text(text: str) -> str:
    """Normalise a sentence for grapheme-to-phoneme conversion, as in the official label preparation.

    Weaker than `normalise_text`: every space that is kept here becomes one silence in the labels.
    """
    return _spoken_text(text.strip()).replace("--", "")


def _spoken_text(text: str) -> str:
    return _NOT_SPEECH.sub("", spell_out(text).text).lower()


Phonemes = tuple[str, ...]

# Word splitting of the '24 preparation: inner apostrophes and hyphens belong to the word. Any other mark ("maids'")
# is a separate token without phonemes but with a silence, hence the doubled silences in the official labels.
_TOKEN = re.compile(r"[a-z](?:[a-z'\-])+[a-z]|[a-z]+|\S")
_VARIANT = re.compile(r"\(\d+\)$")


@dataclass(frozen=True)
class Pronunciation:
    """Phonemes of a sentence."""

    names: list[str]  # phoneme names, with SIL after every word
    unknown: tuple[str, ...]  # words outside the dictionary, pronounced by rule


def pronounce(text: str) -> Pronunciation:
    """Phoneme names of a sentence, with a silence for every space and one at the end; numbers are spelled out."""
    words = _TOKEN.findall(label_text(text))
    names: list[str] = []
    unknown: list[str] = []
    for position, word in enumerate(words):
        if word[0].isalpha():
            phones = _look_up_in_context(word, words[:position], words[position + 1 :])
            if phones is None:
                unknown.append(word)
                phones = pronounce_by_rule(word)
            names.extend(phones)
        names.append(SILENCE_NAME)
    return Pronunciation(names or [SILENCE_NAME], tuple(dict.fromkeys(unknown)))


def text_to_tokens(text: str) -> tuple[list[int], tuple[str, ...]]:
    """Class indices of a sentence, and its words that are not in the dictionary."""
    pronunciation = pronounce(text)
    return encode(pronunciation.names), pronunciation.unknown


def text_to_characters(text: str, classes: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Class indices of the characters of a sentence, and its characters that the alphabet lacks.

    Numbers are spelled out and letters lower-cased if the alphabet has no such classes; a space is the boundary class.
    """
    index = {name: i for i, name in enumerate(classes)}
    edge = boundary_index(classes)
    if "0" not in index:
        text = spell_out(text).text
    if "A" not in index:
        text = text.lower()
    if "." not in index and FULL_STOP in index:
        text = text.replace(".", FULL_STOP)
    tokens: list[int] = []
    missing: list[str] = []
    for character in _SPACES.sub(" ", text.strip()):
        token = edge if character == " " else index.get(character, -1)
        if token > 0:
            tokens.append(token)
        elif character != " ":
            missing.append(character)
    return tokens, tuple(dict.fromkeys(missing))


def sentence_tokens(text: str, classes: Sequence[str]) -> list[int] | None:
    """Label of a sentence in an alphabet of phonemes or characters; None in any other alphabet."""
    match token_unit(classes):
        case "phoneme":
            return text_to_tokens(text)[0]
        case "character":
            return text_to_characters(text, classes)[0]
        case _:
            return None


@lru_cache(maxsize=1)
def dictionary() -> Mapping[str, tuple[Phonemes, ...]]:
    """Pronunciations by word, in dictionary order; loaded once per process."""
    known: dict[str, tuple[Phonemes, ...]] = {}
    for word, phones in dictionary_entries():
        known[word] = (*known.get(word, ()), tuple(map(sys.intern, phones)))
    return known


def dictionary_entries() -> Iterator[tuple[str, list[str]]]:
    """Words and pronunciations one by one, without the memory of `dictionary`."""
    with _dictionary_path().open(encoding="utf-8") as lines:
        for line in lines:
            word, *phones = line.split()
            yield _VARIANT.sub("", word), phones


def _dictionary_path() -> Path:
    if path := find_package_file("pocketsphinx", "model/en-us/cmudict-en-us.dict"):
        return path
    raise UserError("the pronunciation dictionary is missing; install it with: pip install pocketsphinx")


def look_up(word: str) -> Phonemes | None:
    """The first pronunciation in the dictionary; None if the word is unknown."""
    variants = dictionary().get(word)
    return variants[0] if variants else None


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Homographs: (pronunciation as noun or adjective, as verb).
_HOMOGRAPHS: dict[str, tuple[Phonemes, Phonemes]] = {
    word: (tuple(nominal.split()), tuple(verbal.split()))
    for word, nominal, verbal in (
        ("abuse", "AH B Y UW S", "AH B Y UW Z"),
        ("advocate", "AE D V AH K AH T", "AE D V AH K EY T"),
        ("alternate", "AO L T ER N AH T", "AO L T ER N EY T"),
        ("conflict", "K AA N F L IH K T", "K AH N F L IH K T"),
        ("contrast", "K AA N T R AE S T", "K AH N T R AE S T"),
        ("convict", "K AA N V IH K T", "K AH N V IH K T"),
        ("delegate", "D EH L AH G AH T", "D EH L AH G EY T"),
        ("delegates", "D EH L AH G AH T S", "D EH L AH G EY T S"),
        ("duplicate", "D UW P L AH K AH T", "D UW P L AH K EY T"),
        ("estimate", "EH S T AH M AH T", "EH S T AH M EY T"),
        ("excuse", "IH K S K Y UW S", "IH K S K Y UW Z"),
        ("graduate", "G R AE JH AH W AH T", "G R AE JH AH W EY T"),
        ("misuse", "M IH S Y UW S", "M IH S Y UW Z"),
        ("moderate", "M AA D ER AH T", "M AA D ER EY T"),
        ("object", "AA B JH EH K T", "AH B JH EH K T"),
        ("present", "P R EH Z AH N T", "P R IY Z EH N T"),
        ("project", "P R AA JH EH K T", "P R AH JH EH K T"),
        ("rebel", "R EH B AH L", "R IH B EH L"),
        ("record", "R EH K ER D", "R AH K AO R D"),
        ("refuse", "R EH F Y UW Z", "R AH F Y UW Z"),
        ("separate", "S EH P ER IH T", "S EH P ER EY T"),
        ("use", "Y UW S", "Y UW Z"),
    )
}
_BEFORE_VERB = _words(
    "to will would can could should shall may might must do does did don't doesn't didn't can't couldn't"
    " won't wouldn't shouldn't i you we they who let's please never always cannot i'll you'll we'll they'll"
    " i'd you'd we'd they'd"
)
_ADVERBS = _words("not also just still even only really")
_DETERMINERS = _words("a an the this that these those it them my your his her our their me him us one")


def _look_up_in_context(word: str, before: list[str], after: list[str]) -> Phonemes | None:
    """The first pronunciation in the dictionary; for a homograph, the one that fits its neighbours."""
    if word in _HOMOGRAPHS:
        nominal, verbal = _HOMOGRAPHS[word]
        return verbal if _verb_expected(before, after) else nominal
    return look_up(word)


def _verb_expected(before: list[str], after: list[str]) -> bool:
    context = [word for word in before if word not in _ADVERBS]
    if context and context[-1] != "and":
        return context[-1] in _BEFORE_VERB
    return bool(after) and after[0] in _DETERMINERS  # imperative: "use a pencil"


_SIBILANTS = _words("S Z SH ZH CH JH")
_VOICELESS = _words("P T K F TH")


def pronounce_by_rule(word: str) -> Phonemes:
    """Phonemes of a word outside the dictionary: by its parts, a known stem, a compound or its letters."""
    if "-" in word:
        return tuple(p for part in word.split("-") if part for p in look_up(part) or pronounce_by_rule(part))
    return pronounce_inflected(word) or _pronounce_compound(word) or _pronounce_letters(word)


def _pronounce_letters(word: str) -> Phonemes:
    plain = word.replace("'", "")
    if not any(letter in "aeiouy" for letter in plain):  # acronym: letter names
        return tuple(p for letter in plain for p in look_up(letter + ".") or look_up(letter) or ())
    return apply_letter_rules(plain)


def pronounce_inflected(word: str) -> Phonemes | None:
    """Phonemes of a known stem with a regular ending; None without such a stem."""
    if word.endswith("'s") or word.endswith("s'"):
        stem = look_up(word[:-2] if word.endswith("'s") else word[:-1])
        if stem is None and word.endswith("'s"):
            stem = pronounce_by_rule(word[:-2]) if len(word) > 2 else None
        if stem is None:
            return None
        return stem if word.endswith("s'") else stem + _plural(stem)
    for ending, phonemes, spellings in _ENDINGS:
        if not word.endswith(ending) or len(word) - len(ending) < 2:
            continue
        for cut, restore in spellings:
            root = word[: len(word) - len(cut)]
            for candidate in (root + restore, *_undoubled(root, restore)):
                stem = look_up(candidate) if len(candidate) > 2 else None
                if stem is not None:
                    return stem + (tuple(phonemes.split()) or _suffix(ending, stem))
    return None


# Ending, its phonemes ("": they depend on the stem, see `_suffix`), and pairs (letters to remove, letters to
# restore), tried in order.
_ENDINGS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("ies", "", (("ies", "y"),)),
    ("s", "", (("s", ""), ("es", ""))),
    ("ied", "", (("ied", "y"),)),
    ("ed", "", (("ed", ""), ("d", ""))),
    ("ing", "IH NG", (("ing", ""), ("ing", "e"))),
    ("in", "IH N", (("in", ""), ("in", "e"))),
    ("er", "ER", (("er", ""), ("r", ""))),
    ("ers", "ER Z", (("ers", ""), ("rs", ""))),
    ("est", "AH S T", (("est", ""), ("st", ""))),
    ("ly", "L IY", (("ly", ""),)),
    ("ness", "N AH S", (("ness", ""),)),
    ("less", "L AH S", (("less", ""),)),
    ("ful", "F AH L", (("ful", ""),)),
    ("able", "AH B AH L", (("able", ""), ("able", "e"))),
    ("'ll", "AH L", (("'ll", ""),)),
    ("'d", "", (("'d", ""),)),
    ("'ve", "AH V", (("'ve", ""),)),
    ("'re", "ER", (("'re", ""),)),
)


def _undoubled(root: str, restore: str) -> tuple[str, ...]:
    """Undo the doubling of a consonant before an ending: "stopp" -> "stop"."""
    doubled = not restore and len(root) > 3 and root[-1] == root[-2] and root[-1] not in "aeiou"
    return (root[:-1],) if doubled else ()


def _plural(stem: Phonemes) -> Phonemes:
    if stem[-1] in _SIBILANTS:
        return ("IH", "Z")
    return ("S",) if stem[-1] in _VOICELESS else ("Z",)


def _suffix(ending: str, stem: Phonemes) -> Phonemes:
    """Phonemes of an ending that depends on the last phoneme of the stem."""
    if ending in ("s", "ies"):
        return _plural(stem)
    if stem[-1] in ("T", "D"):
        return ("IH", "D")
    return ("T",) if ending != "'d" and stem[-1] in _VOICELESS | {"S", "SH", "CH"} else ("D",)


def _pronounce_compound(word: str) -> Phonemes | None:
    """Two known words written as one ("snowplow"), the most even split first."""
    cuts = sorted(range(3, len(word) - 2), key=lambda cut: abs(2 * cut - len(word)))
    for cut in cuts:
        first, second = look_up(word[:cut]), look_up(word[cut:])
        if first and second:
            return first + second
    return None


# Letter-to-sound rules, longest match first, applied left to right: letters[/what must follow]=phonemes.
_LETTER_RULES = """
tion=SH AH N; sion=ZH AH N; tious=SH AH S; cious=SH AH S; ture=CH ER; ough=AH F; augh=AO; eigh=EY; ight=AY T;
ould=UH D; tch=CH; dge=JH; sch=SH; igh=AY; air=EH R; are/$=EH R; ear=IH R; eer=IH R; ore/$=AO R; our=AO R;
oor=AO R; ire/$=AY ER; ous/$=AH S; que/$=K; ch=CH; sh=SH; th=TH; ph=F; wh=W; gh=G; kn=N; wr=R; ck=K; qu=K W;
ng=NG; sc/[eiy]=S; cc/[eiy]=K S; ai=EY; ay=EY; ea=IY; ee=IY; ei=IY; ey=IY; ie=IY; oa=OW; oe=OW; oi=OY; oy=OY;
oo=UW; ou=AW; ow/$=OW; ow=AW; au=AO; aw=AO; ew=UW; ue/$=UW; ui=UW; ar=AA R; er=ER; ir=ER; ur=ER; yr=ER; or=AO R;
al/l=AO; le/$=AH L; a/[^aeiouywx]e$=EY; e/[^aeiouywx]e$=IY; i/[^aeiouywx]e$=AY; o/[^aeiouywx]e$=OW;
u/[^aeiouywx]e$=UW; c/[eiy]=S; g/[eiy]=JH; e/$=; a/$=AH; i/$=IY; o/$=OW; u/$=UW; y/$=IY; y/[aeiou]=Y; a=AE; b=B;
c=K; d=D; e=EH; f=F; g=G; h=HH; i=IH; j=JH; k=K; l=L; m=M; n=N; o=AA; p=P; q=K; r=R; s=S; t=T; u=AH; v=V; w=W;
x=K S; y=IH; z=Z
"""


@lru_cache(maxsize=1)
def _compiled_rules() -> list[tuple[re.Pattern[str], Phonemes]]:
    rules = []
    for rule in _LETTER_RULES.split(";"):
        pattern, _, phones = rule.strip().partition("=")
        letters, _, following = pattern.partition("/")
        rules.append((re.compile(letters + (f"(?={following})" if following else "")), tuple(phones.split())))
    return rules


_DOUBLED = re.compile(r"([bdfgklmnprstvz])\1")


def apply_letter_rules(word: str) -> Phonemes:
    """Phonemes of a lower-case word by letter-to-sound rules; never empty for a word with letters."""
    letters = _DOUBLED.sub(r"\1", word)
    phones: list[str] = []
    position = 0
    while position < len(letters):
        for pattern, sounds in _compiled_rules():
            if found := pattern.match(letters, position):
                phones.extend(sounds)
                position = found.end()
                break
        else:
            raise ValueError(f"no rule for {letters[position]!r} in {word!r}")
    return tuple(phones) or ("AH",)


_PRONOUNCEABLE = re.compile(r"[a-z'\-]*[a-z][a-z'\-]*")


def pronounce_unknown(word: str) -> Phonemes:
    """Phonemes of a word outside the dictionary: by a known stem with its ending, by `g2p_en`, or by rules.

    `g2p_en` (Park & Kim 2019) is the network that labelled the benchmarks; it is used where it is installed.
    """
    if not _PRONOUNCEABLE.fullmatch(word):
        raise UserError(f"cannot pronounce {word!r}: expected the letters a to z, ' and -; give its phonemes")
    if "-" not in word and (phonemes := pronounce_inflected(word)):
        return phonemes
    network = _load_network()
    if network is None:
        return pronounce_by_rule(word)
    parts = [part for part in re.split(r"[-']+", word) if part]
    return tuple(name for part in parts for name in look_up(part) or _predict(network, part))


@lru_cache(maxsize=1)
def _load_network() -> Any:
    if find_spec("g2p_en") is None:
        return None
    from g2p_en import G2p

    return G2p()


def _predict(network: Any, word: str) -> Phonemes:
    """Phonemes without stress; the rules' if the network gives none."""
    names = (name.rstrip("012") for name in network.predict(word))
    return tuple(name for name in names if name in PHONEMES) or pronounce_by_rule(word)
