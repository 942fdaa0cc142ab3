"""Pronunciation lexicons: which token strings are which words. Every pronunciation and every homophone counts."""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import BLANK_NAME, CLASSES, SILENCE_NAME
from arcuate.data.g2p import pronounce_unknown
from arcuate.data.pronunciation import dictionary, dictionary_entries
from arcuate.errors import UserError

_VARIANT = re.compile(r"\(\d+\)$")
_STRESS = re.compile(r"^([A-Z]{1,2})[0-2]$")
_COMMENT = ";;;"
RESERVED = frozenset({"<s>", "</s>", "<unk>"})
EMBEDDED = ("default", "pocketsphinx")


@dataclass(frozen=True, eq=False)
class Lexicon:
    """Words and their pronunciations, flat: entry i is word word_of[i], spelt tokens[offsets[i]:offsets[i + 1]]."""

    words: tuple[str, ...]  # distinct, in the order of their first entry
    word_of: np.ndarray  # (n_entries,) int32
    tokens: np.ndarray  # (sum of lengths,) int32, class indices without blank and boundary
    offsets: np.ndarray  # (n_entries + 1,) int64
    classes: tuple[str, ...] = CLASSES
    name: str = ""
    guessed: tuple[str, ...] = ()  # words whose pronunciation no dictionary had
    _ids: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: i for i, word in enumerate(self.words)})

    def __len__(self) -> int:
        return len(self.word_of)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def entry(self, i: int) -> tuple[str, ...]:
        """The tokens of entry i, by name."""
        return tuple(self.classes[t] for t in self.tokens[self.offsets[i] : self.offsets[i + 1]])

    def pronunciations(self, word: str) -> list[tuple[str, ...]]:
        """All pronunciations of a word, in the order they were given; none if it is not there."""
        if word not in self._ids:
            return []
        return [self.entry(int(i)) for i in np.flatnonzero(self.word_of == self._ids[word])]

    def with_entries(self, entries: Iterable[tuple[str, Sequence[str]]]) -> "Lexicon":
        """A lexicon with further pronunciations, such as names; an entry that is there already changes nothing."""
        old = [(self.words[w], self.entry(i)) for i, w in enumerate(self.word_of.tolist())]
        new = [(word, tuple(names)) for word, names in entries]
        for word, names in new:
            if not names or not frozenset(self.classes[1:]).issuperset(names):
                raise UserError(
                    f"the pronunciation '{' '.join(names)}' of '{word}' has unknown or no phonemes"
                )
        return replace(make_lexicon([*old, *new], self.classes, self.name), guessed=self.guessed)

    def with_words(self, words: Iterable[str]) -> "Lexicon":
        """A lexicon with further words, pronounced as the dictionary has them, or as they are likely said."""
        new = [word for word in dict.fromkeys(words) if word not in self]
        known = [(word, phones) for word in new for phones in dictionary().get(word, ())]
        unknown = [word for word in new if word not in dictionary()]
        added = self.with_entries([*known, *((word, pronounce_unknown(word).phonemes) for word in unknown)])
        return replace(added, guessed=self.guessed + tuple(unknown))


def open_lexicon(name: str | Path, classes: Sequence[str] = CLASSES) -> Lexicon:
    """A lexicon by name (`default`: the dictionary that `pocketsphinx` carries) or from a file."""
    if str(name) in EMBEDDED:
        return default_lexicon()
    return read_lexicon(Path(name), classes)


def default_lexicon() -> Lexicon:
    """The 134,860 pronunciations of the installed dictionary."""
    return make_lexicon(dictionary_entries(), CLASSES, "pocketsphinx")


def read_lexicon(path: Path, classes: Sequence[str] = CLASSES) -> Lexicon:
    """A text file with a word and its pronunciation per line, as tab-separated lists and CMU dictionaries have them.

    Variants may repeat the word or count up as `word(2)`; stress digits and `;;;` comments are left out.
    """
    lexicon = make_lexicon(_entries(path, classes), tuple(classes), path.name)
    if not len(lexicon):
        raise UserError(f"{path} has no pronunciations; expected lines such as 'hello<tab>HH AH L OW'")
    return lexicon


def _entries(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    known = frozenset(classes[1:-1]) if tuple(classes) == CLASSES else frozenset(classes[1:])
    for number, line in _lines(path):
        if not line.strip() or line.startswith(_COMMENT):
            continue
        word, phones = _split(line)
        if not known.issuperset(phones):
            phones = [_STRESS.sub(r"\1", phone) for phone in phones]
        _check(path, number, word, phones, known)
        yield _VARIANT.sub("", word) or word, phones


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, decoded one by one so that a stray byte is named by its line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"{path}, line {number}: not UTF-8 text; convert it, for example with iconv"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read the lexicon {path}: {error.strerror}") from error


def _split(line: str) -> tuple[str, list[str]]:
    """Word and pronunciation: at the first tab if there is one, else at the first space."""
    word, _, rest = line.strip("\r\n").partition("\t") if "\t" in line else line.strip().partition(" ")
    return word.strip(), rest.split()


def _check(path: Path, number: int, word: str, phones: list[str], known: frozenset[str]) -> None:
    where = f"{path}, line {number}"
    if not word or len(word.split()) > 1:
        raise UserError(f"{where}: expected one word before its pronunciation, found {word[:40]!r}")
    if word.lower() in RESERVED:
        raise UserError(f"{where}: {word} is a mark of language models, no word to be said; remove the line")
    if not phones:
        raise UserError(f"{where}: the word '{word}' has no pronunciation; add one or remove the line")
    if known.issuperset(phones):
        return
    for phone in phones:
        if phone in (SILENCE_NAME, BLANK_NAME):
            raise UserError(
                f"{where}: {phone} in '{word}' is no phoneme of a word; leave it out, the search adds it"
            )
        if phone not in known:
            names = " ".join(sorted(known))
            raise UserError(f"{where}: unknown phoneme {phone[:40]!r} in '{word}'; known are {names}")


def grapheme_lexicon(
    words: Iterable[str], classes: Sequence[str], name: str = "spelled"
) -> tuple[Lexicon, tuple[str, ...]]:
    """Words spelt in the characters of `classes`, and the words that cannot be spelt in them."""
    known = frozenset(classes)
    every = list(dict.fromkeys(words))
    unspelt = tuple(word for word in every if not word or not known.issuperset(word))
    left_out = frozenset(unspelt)
    entries = [(word, tuple(word)) for word in every if word not in left_out]
    if not entries:
        raise UserError(f"no word of {name} can be spelt with the classes {' '.join(classes)}")
    return make_lexicon(entries, tuple(classes), name), unspelt


def make_lexicon(
    entries: Iterable[tuple[str, Sequence[str]]], classes: tuple[str, ...], name: str
) -> Lexicon:
    """Entries to arrays, one by one; the same word with the same pronunciation counts once."""
    index = {label: i for i, label in enumerate(classes)}
    ids: dict[str, int] = {}
    seen: set[tuple[int, bytes]] = set()
    word_of, tokens, offsets = array("i"), array("i"), array("q", [0])
    for word, names in entries:
        spelt = array("i", [index[label] for label in names])
        entry = ids.setdefault(word, len(ids)), spelt.tobytes()
        if entry in seen:
            continue
        seen.add(entry)
        word_of.append(entry[0])
        tokens.extend(spelt)
        offsets.append(len(tokens))
    return Lexicon(
        tuple(ids),
        np.array(word_of, np.int32),
        np.array(tokens, np.int32),
        np.array(offsets, np.int64),
        classes,
        name,
    )
