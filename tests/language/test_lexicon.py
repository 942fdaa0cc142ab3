"""Lexicons: all pronunciations and homophones, and errors with file and line."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.language.lexicon import grapheme_lexicon, open_lexicon, read_lexicon

SEVERAL = "you\tY UW\nyou\tY AH\new\tIY UW\nyew\tY UW\nyou\tY UW\n"


def write_lexicon(folder: Path, text: str) -> Path:
    (folder / "lexicon.txt").write_bytes(text.encode())
    return folder / "lexicon.txt"


def test_all_pronunciations_and_homophones(tmp_path: Path) -> None:
    lexicon = read_lexicon(write_lexicon(tmp_path, SEVERAL))
    assert lexicon.words == ("you", "ew", "yew") and len(lexicon) == 4  # a repeated entry counts once
    assert lexicon.pronunciations("you") == [("Y", "UW"), ("Y", "AH")]
    assert lexicon.pronunciations("yew") == [("Y", "UW")] and lexicon.pronunciations("ewe") == []
    assert lexicon.tokens[: lexicon.offsets[1]].tolist() == [CLASSES.index("Y"), CLASSES.index("UW")]


def test_dictionary_style(tmp_path: Path) -> None:
    text = ";;; a comment\r\nREAD  R EH1 D\r\nREAD(2)  R IY1 D\r\n\r\n(paren  P AH0\r\n"
    lexicon = read_lexicon(write_lexicon(tmp_path, "\ufeff" + text))
    assert lexicon.pronunciations("READ") == [("R", "EH", "D"), ("R", "IY", "D")]
    assert lexicon.words == ("READ", "(paren")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tAH\nhello\t\n", "line 2: the word 'hello' has no pronunciation"),
        ("a\tAH\n\nhello\n", "line 3: the word 'hello' has no pronunciation"),
        ("a\tAH\nb\tB QQ\n", "line 2: unknown phoneme 'QQ' in 'b'; known are AA"),
        ("a\tAH SIL\n", "line 1: SIL in 'a' is not part of a pronunciation"),
        ("a b\tAH\n", "line 1: expected one word"),
        ("\tAH\n", "line 1: expected one word"),
        ("a\tAH\n<unk>\tAH\n", "line 2: <unk> is reserved"),
        ("</S>\tAH\n", "line 1: </S> is reserved"),
        ("\n\n", "no pronunciations"),
        ("a\tah\n", "unknown phoneme 'ah'"),
    ],
)
def test_errors_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_lexicon(write_lexicon(tmp_path, text))
    assert "lexicon.txt" in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent\.txt"):
        read_lexicon(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"a\tAH\ncaf\xe9\tK AE F EY\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        read_lexicon(tmp_path / "latin.txt")


def test_the_embedded_dictionary_is_the_default() -> None:
    lexicon = open_lexicon("default")
    assert len(lexicon) == 134_860 and lexicon.pronunciations("read") == [("R", "EH", "D"), ("R", "IY", "D")]
    assert lexicon.tokens.min() >= 1 and lexicon.tokens.max() < CLASSES.index("SIL")
    assert np.all(np.diff(lexicon.offsets) > 0)


def test_words_and_names_can_be_added(tmp_path: Path) -> None:
    lexicon = read_lexicon(write_lexicon(tmp_path, SEVERAL))
    more = lexicon.with_entries([("arcuate", ("AA", "R", "K"))]).with_words(["you", "hello", "zorgs"])
    assert more.pronunciations("hello") == open_lexicon("default").pronunciations("hello")
    assert more.pronunciations("arcuate") == [("AA", "R", "K")]
    assert more.guessed == ("zorgs",) and more.pronunciations("zorgs")
    assert len(lexicon) == 4  # unchanged
    assert lexicon.with_entries([("arcuate", ("AA",))] * 2).word_of.tolist() == [*lexicon.word_of, len(lexicon.words)]
    known = lexicon.words[0], lexicon.entry(0)
    assert lexicon.with_entries([known]) is lexicon
    another = lexicon.with_entries([(lexicon.words[0], ("AA", "B")), known])
    assert another.words == lexicon.words and another.entry(4) == ("AA", "B")
    with pytest.raises(UserError, match="'QQ' of 'x'"):
        lexicon.with_entries([("x", ("QQ",))])
    with pytest.raises(UserError, match="cannot pronounce '4711'"):
        lexicon.with_words(["4711"])


def test_grapheme_lexicon() -> None:
    classes = ("BLANK", ">", *"'abcdefghijklmnopqrstuvwxyz")
    lexicon, skipped = grapheme_lexicon(["it's", "so", "naïve", "so", ""], classes)
    assert lexicon.words == ("it's", "so") and skipped == ("naïve", "")
    assert lexicon.entry(0) == ("i", "t", "'", "s")
    with pytest.raises(UserError, match="no word"):
        grapheme_lexicon(["ñ"], classes)


@pytest.mark.shared
def test_the_real_lexicon(shared: Path) -> None:
    lexicon = read_lexicon(shared / "real" / "words" / "t15" / "lexicon.txt")
    assert (len(lexicon), len(lexicon.words)) == (46_842, 42_201)
    same = [w for i, w in enumerate(lexicon.word_of) if lexicon.entry(i) == ("Y", "UW")]
    assert {lexicon.words[w] for w in same} == set("ewe hugh u yew yoo you yu yue".split())
