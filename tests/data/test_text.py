"""Text: both normalisations on cases derived by hand from the official rules, pronunciation on real labels, G2P."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from arcuate.data import alphabet as tokens
from arcuate.data import text as module
from arcuate.data.text import (
    apply_letter_rules,
    dictionary,
    label_text,
    normalise_text,
    pronounce,
    pronounce_by_rule,
    pronounce_unknown,
    text_to_tokens,
)
from arcuate.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bring it closer.", "bring it closer"),
        ("It's 5 o'clock, isn't it?", "it's five o'clock isn't it"),
        ("well-known  facts", "well-known facts"),
        ("I- I mean it", "i i mean it"),
        ("an -- interruption", "an - interruption"),
        ("well--known", "wellknown"),
        ("the dogs ' bowl", "the dogs' bowl"),
        ("  Padded, twice!  ", "padded twice"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_normalisation_for_error_rates(text: str, expected: str) -> None:
    assert normalise_text(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bring it closer.", "bring it closer"),
        ("An octillion atoms -- now.", "an octillion atoms  now"),
        ("the dogs ' bowl", "the dogs ' bowl"),
        ("Do they make class-biased decisions?", "do they make class-biased decisions"),
    ],
)
def test_normalisation_for_labels(text: str, expected: str) -> None:
    assert label_text(text) == expected


# --- pronunciation

SHARED = Path(__file__).resolve().parents[3] / "shared" / "real"
T15_SENTENCES = SHARED / "words" / "t15" / "dev.jsonl"
T12_LENGTHS = SHARED / "t12_trial" / "t12.2022.04.28_train_frame_lens.csv"


def names(text: str) -> str:
    return " ".join(pronounce(text).names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bring it closer.", "B R IH NG SIL IH T SIL K L OW S ER SIL"),
        ("maids' gowns", "M EY D Z SIL SIL G AW N Z SIL"),  # a separate mark adds a silence
        ("atoms -- now", "AE T AH M Z SIL N AW SIL"),
        ("...", "SIL"),
    ],
)
def test_silence_after_every_word(text: str, expected: str) -> None:
    assert names(text) == expected
    assert tokens.token_names(text_to_tokens(text)[0]) == expected.split()


def test_homographs_depend_on_their_neighbours() -> None:
    verb, noun = "Y UW Z SIL", "Y UW S SIL"
    assert names("I try not to use it").split(" T UW SIL ")[1].startswith(verb)
    assert names("use a pencil").startswith(verb)
    assert names("it has no use").endswith(noun)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("glimmerings", "G L IH M ER IH NG Z"),
        ("snorkeled", "S N AO R K AH L D"),
        ("class-biased", "K L AE S B AY AH S T"),
        ("bcx", "B IY S IY EH K S"),
    ],
)
def test_unknown_words_are_pronounced_and_reported(word: str, expected: str) -> None:
    pronunciation = pronounce(f"the {word} is here")
    assert pronunciation.unknown == (word,)
    assert " ".join(pronunciation.names) == f"DH AH SIL {expected} SIL IH Z SIL HH IY R SIL"


@pytest.mark.parametrize(
    ("word", "expected"), [("blorpish", "B L AO R P IH SH"), ("vake", "V EY K"), ("quotch", "K W AA CH")]
)
def test_letters_by_rule(word: str, expected: str) -> None:
    assert " ".join(apply_letter_rules(word)) == expected


def test_dictionary_stays_within_the_alphabet() -> None:
    tokens.encode({phone for variants in dictionary().values() for phones in variants for phone in phones})
    for word, pair in module._HOMOGRAPHS.items():
        assert set(pair) <= set(dictionary()[word]), word


@pytest.mark.shared
@pytest.mark.skipif(not T15_SENTENCES.is_file(), reason="the real sentences are not beside this checkout")
def test_real_sentences_agree() -> None:
    lines = [json.loads(line) for line in T15_SENTENCES.read_text(encoding="utf-8").splitlines()]
    agree = sum(pronounce(line["text"]).names == line["phonemes"] for line in lines)
    assert agree / len(lines) >= 0.965


@pytest.mark.shared
@pytest.mark.skipif(not T12_LENGTHS.is_file(), reason="the real label lengths are not beside this checkout")
def test_real_label_lengths_agree() -> None:
    with T12_LENGTHS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    agree = sum(len(pronounce(row["sentence"]).names) == int(row["n_phones_incl_SIL"]) for row in rows)
    assert agree / len(rows) >= 0.96


# --- words of lexicons


class Network:
    """Stands for g2p_en.G2p."""

    def predict(self, word: str) -> list[str]:
        return [] if word == "silent" else ["Z", "AO1", "<unk>", "K"]


def test_unknown_words_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "g2p_en", SimpleNamespace(G2p=Network, __spec__=SimpleNamespace()))
    module._load_network.cache_clear()
    assert pronounce_unknown("hello's") == ("HH", "AH", "L", "OW", "Z")  # known stems come first
    assert pronounce_unknown("zqxv") == ("Z", "AO", "K")
    assert pronounce_unknown("zqxv-hello") == ("Z", "AO", "K", "HH", "AH", "L", "OW")
    module._load_network.cache_clear()


def test_unknown_words_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pronounce_unknown("zorgtown") == ("Z", "AO", "R", "G", "T", "AW", "N") == pronounce_by_rule("zorgtown")
    with pytest.raises(UserError, match="give its phonemes"):
        pronounce_unknown("123")
