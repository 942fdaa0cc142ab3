"""Pronunciation lexicons: words and their token sequences, with all variants and homophones."""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from arcuate.data.alphabet import BLANK_NAME, CLASSES, SILENCE_NAME, boundary_index, token_unit
from arcuate.data.text import dictionary, dictionary_entries, pronounce_unknown
from arcuate.errors import UserError
from arcuate.language.ngram.text import decode_line, read_lines

_VARIANT = re.compile(r"\(\d+\)$")
_STRESS = re.compile(r"^([A-Z]{1,2})[0-2]$")
_COMMENT = ";;;"
_RESERVED = frozenset({"<s>", "</s>", "<unk>"})
_EMBEDDED = ("default", "pocketsphinx")


@dataclass(frozen=True, eq=False)
class Lexicon:
    """Pronunciations in flat arrays: entry i is word word_of[i] with tokens[offsets[i]:offsets[i + 1]]."""

    words: tuple[str, ...]  # distinct, in the order of their first entry
    word_of: np.ndarray  # (n_entries,) int32
    tokens: np.ndarray  # (sum of lengths,) int32, class indices without blank and boundary
    offsets: np.ndarray  # (n_entries + 1,) int64
    classes: tuple[str, ...] = CLASSES
    name: str = ""
    guessed: tuple[str, ...] = ()  # words whose pronunciation is from G2P
    _ids: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: i for i, word in enumerate(self.words)})

    def __len__(self) -> int:
        return len(self.word_of)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def entry(self, i: int) -> tuple[str, ...]:
        """Token names of entry i."""
        return tuple(self.classes[t] for t in self.tokens[self.offsets[i] : self.offsets[i + 1]])

    def pronunciations(self, word: str) -> list[tuple[str, ...]]:
        """All pronunciations of a word, in order; empty for words that are not in the lexicon."""
        if word not in self._ids:
            return []
        return [self.entry(int(i)) for i in np.flatnonzero(self.word_of == self._ids[word])]

    def with_entries(self, entries: Iterable[tuple[str, Sequence[str]]]) -> "Lexicon":
        """Add pronunciations, such as names; existing entries are ignored."""
        new = list(dict.fromkeys((word, tuple(names)) for word, names in entries))
        known = frozenset(self.classes[1:])
        for word, names in new:
            if not names or not known.issuperset(names):
                raise UserError(
                    f"the pronunciation '{' '.join(names)}' of '{word}' is empty or has unknown phonemes;"
                    f" known are {' '.join(self.classes[1:])}"
                )
        new = [(word, names) for word, names in new if word not in self or names not in self.pronunciations(word)]
        if not new:
            return self
        added = make_lexicon(new, self.classes, self.name)
        words = tuple(dict.fromkeys((*self.words, *added.words)))
        ids = {word: i for i, word in enumerate(words)}
        return replace(
            self,
            words=words,
            word_of=np.append(self.word_of, np.array([ids[word] for word in added.words], np.int32)[added.word_of]),
            tokens=np.append(self.tokens, added.tokens),
            offsets=np.append(self.offsets, self.offsets[-1] + added.offsets[1:]),
        )

    def with_words(self, words: Iterable[str]) -> "Lexicon":
        """Add words, pronounced as in the dictionary or, if unknown, by G2P."""
        new = [word for word in dict.fromkeys(words) if word not in self]
        if token_unit(self.classes) == "character":
            return self.with_entries((word, tuple(word)) for word in new)
        known = [(word, phones) for word in new for phones in dictionary().get(word, ())]
        unknown = [word for word in new if word not in dictionary()]
        added = self.with_entries([*known, *((word, pronounce_unknown(word)) for word in unknown)])
        return replace(added, guessed=self.guessed + tuple(unknown))


def open_lexicon(name: str | Path, classes: Sequence[str] = CLASSES) -> Lexicon:
    """Open a lexicon by name (`default`: the dictionary in `pocketsphinx`, 134,860 pronunciations) or from a file.

    With the classes of a character alphabet, words are spelled: those of the dictionary, or of a file with one word
    per line.
    """
    if str(name) in _EMBEDDED:
        if token_unit(classes) == "character":
            return grapheme_lexicon((word for word, _ in dictionary_entries()), classes, "pocketsphinx, spelled")[0]
        return make_lexicon(dictionary_entries(), CLASSES, "pocketsphinx")
    if token_unit(classes) == "character" and _is_word_list(Path(name)):
        return _spell_words(Path(name), classes)
    return read_lexicon(Path(name), classes)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a lexicon with their numbers, without empty ones and comments."""
    for number, encoded in enumerate(read_lines(path), start=1):
        line = decode_line(encoded, path, number)
        if line.strip() and not line.startswith(_COMMENT):
            yield number, line


def _is_word_list(path: Path) -> bool:
    """Whether the first line with a word has nothing after it."""
    return any(len(line.split()) == 1 for _, line in islice(_read_lines(path), 1))


def _spell_words(path: Path, classes: Sequence[str]) -> Lexicon:
    words = []
    for number, line in _read_lines(path):
        word = line.strip()
        if len(word.split()) > 1 or word.lower() in _RESERVED:
            raise UserError(f"{path}, line {number}: expected one word per line, found {word[:40]!r}")
        words.append(word)
    return grapheme_lexicon(words, classes, path.name)[0]


def read_lexicon(path: Path, classes: Sequence[str] = CLASSES) -> Lexicon:
    """Read a text file with a word and its pronunciation per line, tab-separated or in CMU dictionary style.

    Variants repeat the word or are numbered as `word(2)`. Stress digits and `;;;` comments are ignored.
    """
    lexicon = make_lexicon(_read_entries(path, classes), tuple(classes), path.name)
    if not len(lexicon):
        raise UserError(f"{path} has no pronunciations; expected lines such as 'hello<tab>HH AH L OW'")
    return lexicon


def _read_entries(path: Path, classes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    known = frozenset(classes[1:-1]) if tuple(classes) == CLASSES else frozenset(classes[1:])
    for number, line in _read_lines(path):
        # The first tab, or else the first space, separates the word from its pronunciation.
        word, _, rest = line.strip("\r\n").partition("\t") if "\t" in line else line.strip().partition(" ")
        word, phones = word.strip(), rest.split()
        if not known.issuperset(phones):
            phones = [_STRESS.sub(r"\1", phone) for phone in phones]
        _check_entry(path, number, word, phones, known)
        yield _VARIANT.sub("", word) or word, phones


def _check_entry(path: Path, number: int, word: str, phones: list[str], known: frozenset[str]) -> None:
    where = f"{path}, line {number}"
    if not word or len(word.split()) > 1:
        raise UserError(f"{where}: expected one word before its pronunciation, found {word[:40]!r}")
    if word.lower() in _RESERVED:
        raise UserError(f"{where}: {word} is reserved for language models; remove the line")
    if not phones:
        raise UserError(f"{where}: the word '{word}' has no pronunciation; add one or remove the line")
    if known.issuperset(phones):
        return
    for phone in phones:
        if phone in (SILENCE_NAME, BLANK_NAME):
            raise UserError(
                f"{where}: {phone} in '{word}' is not part of a pronunciation; remove it, because the search adds it"
            )
        if phone not in known:
            names = " ".join(sorted(known))
            raise UserError(f"{where}: unknown phoneme {phone[:40]!r} in '{word}'; known are {names}")


def grapheme_lexicon(
    words: Iterable[str], classes: Sequence[str], name: str = "spelled"
) -> tuple[Lexicon, tuple[str, ...]]:
    """Spell words with the characters of `classes`; return the lexicon and the words that cannot be spelled."""
    edge = boundary_index(classes)
    known = frozenset(classes[1:edge] if edge > 0 else classes[1:])
    distinct = list(dict.fromkeys(words))
    skipped = tuple(word for word in distinct if not word or not known.issuperset(word))
    entries = [(word, tuple(word)) for word in distinct if word and known.issuperset(word)]
    if not entries:
        raise UserError(f"no word of {name} can be spelled with the classes {' '.join(classes)}")
    return make_lexicon(entries, tuple(classes), name), skipped


def make_lexicon(entries: Iterable[tuple[str, Sequence[str]]], classes: tuple[str, ...], name: str) -> Lexicon:
    """Build a lexicon from (word, token names) pairs; repeated pairs are ignored."""
    index = {label: i for i, label in enumerate(classes)}
    ids: dict[str, int] = {}
    seen: set[tuple[int, bytes]] = set()
    word_of, tokens, offsets = array("i"), array("i"), array("q", [0])
    for word, names in entries:
        token_ids = array("i", map(index.__getitem__, names))
        entry = ids.setdefault(word, len(ids)), token_ids.tobytes()
        if entry in seen:
            continue
        seen.add(entry)
        word_of.append(entry[0])
        tokens.extend(token_ids)
        offsets.append(len(tokens))
    return Lexicon(
        tuple(ids), np.array(word_of, np.int32), np.array(tokens, np.int32), np.array(offsets, np.int64), classes, name
    )
