"""Random English sentences from a small grammar, with regular and irregular inflections."""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

CORPORA = ("conversation", "care", "words")


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


_SLOT = re.compile(r"<([a-z]+)(?:\.(\w+))?>")
_WEIGHT = re.compile(r"^(\d+)\* ")
_VOWELS = "aeiou"
_IRREGULAR_PAST = _pairs(
    "see=saw find=found take=took bring=brought buy=bought sell=sold throw=threw catch=caught hold=held"
    " build=built break=broke cut=cut keep=kept hide=hid lose=lost choose=chose lend=lent send=sent draw=drew"
    " read=read write=wrote forget=forgot understand=understood lead=led leave=left hang=hung shake=shook"
    " feed=fed teach=taught hear=heard think=thought pay=paid deal=dealt burn=burned"
)
_IRREGULAR_PLURAL = _pairs(
    "child=children tooth=teeth mouse=mice goose=geese knife=knives leaf=leaves shelf=shelves wolf=wolves"
    " thief=thieves policeman=policemen foot=feet calf=calves scarf=scarves"
)


@dataclass(frozen=True)
class _Rule:
    """Alternatives of a grammar symbol."""

    alternatives: tuple[str, ...]
    cumulative: tuple[float, ...]  # cumulative probabilities


@lru_cache(maxsize=1)
def grammar() -> dict[str, _Rule]:
    """The rules of grammar.txt."""
    text = resources.files("arcuate.data.simulation").joinpath("grammar.txt").read_text(encoding="utf-8")
    rules = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, body = line.split(":", 1)
        weights, alternatives = [], []
        for choice in body.split("|"):
            weighted = _WEIGHT.match(choice.strip())
            weights.append(int(weighted.group(1)) if weighted else 1)
            alternatives.append(_WEIGHT.sub("", choice.strip()))
        cumulative = np.cumsum(weights) / sum(weights)
        rules[name] = _Rule(tuple(alternatives), tuple(cumulative.tolist()))
    return rules


def make_sentence(corpus: str, rng: np.random.Generator) -> str:
    """One sentence of a corpus, capitalised and with a final mark."""
    words = _expand(f"<{corpus}>", rng)
    words = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", words)
    words = " ".join(_decapitalise(word) for word in words.split(" "))
    text = words[0].upper() + words[1:]
    return text if text[-1] in ".?!" else text + "."


@lru_cache(maxsize=1)
def _proper_nouns() -> frozenset[str]:
    words_by_rule = (grammar()[name].alternatives for name in ("name", "city", "month", "weekday", "subject"))
    return frozenset(word for words in words_by_rule for word in words)


def _decapitalise(word: str) -> str:
    """Lower-case the first word of a nested template; names and "I" keep their capital."""
    proper = word.strip("?.") in _proper_nouns() or word == "I" or word.startswith("I'")
    return word if proper else word.lower()


def _expand(template: str, rng: np.random.Generator) -> str:
    rules = grammar()

    def draw(slot: re.Match[str]) -> str:
        rule = rules[slot.group(1)]
        choice = int(np.searchsorted(rule.cumulative, rng.random(), side="right"))
        words = _expand(rule.alternatives[min(choice, len(rule.alternatives) - 1)], rng)
        return inflect(words, slot.group(2)) if slot.group(2) else words

    return _SLOT.sub(draw, template)


def inflect(words: str, form: str) -> str:
    """Plural ("s"), "-ing" or past of a word; a phrase inflects its verb ("look at") or its last noun."""
    if form == "cap":
        return words[0].upper() + words[1:]
    if form == "s":
        first, _, last = words.rpartition(" ")
        return f"{first} {_plural(last)}".strip()
    verb, _, rest = words.partition(" ")
    return f"{_ing(verb) if form == 'ing' else _past(verb)} {rest}".strip()


def _plural(noun: str) -> str:
    if noun in _IRREGULAR_PLURAL:
        return _IRREGULAR_PLURAL[noun]
    if noun.endswith("y") and noun[-2] not in _VOWELS:
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "z", "ch", "sh")) or noun in ("potato", "tomato", "hero"):
        return noun + "es"
    return noun + "s"


def _doubles_final(verb: str) -> bool:
    """Whether the final consonant is doubled before an ending ("stopping")."""
    short = len(verb) >= 3 and verb[-1] not in "aeiouwxy" and verb[-2] in _VOWELS and verb[-3] not in _VOWELS
    return short and (sum(letter in _VOWELS for letter in verb) == 1 or verb in ("prefer", "forget"))


def _ing(verb: str) -> str:
    if verb.endswith("e") and not verb.endswith("ee"):
        return verb[:-1] + "ing"
    return verb + verb[-1] * _doubles_final(verb) + "ing"


def _past(verb: str) -> str:
    if verb in _IRREGULAR_PAST:
        return _IRREGULAR_PAST[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in _VOWELS:
        return verb[:-1] + "ied"
    return verb + verb[-1] * _doubles_final(verb) + "ed"
