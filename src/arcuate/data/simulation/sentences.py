"""Random English sentences from a small grammar."""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

CORPORA = ("conversation", "care", "words")
_SLOT = re.compile(r"<([a-z.]+)>")
_WEIGHT = re.compile(r"^(\d+)\* ")


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
        return _expand(rule.alternatives[min(choice, len(rule.alternatives) - 1)], rng)

    return _SLOT.sub(draw, template)
