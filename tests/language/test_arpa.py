"""ARPA files of various tools: read correctly, or rejected with file and line."""

import gzip
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.errors import UserError
from arcuate.language.ngram.arpa import read_arpa, write_arpa
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.perplexity import score_text
from arcuate.language.ngram.trie import model_from_tables
from support.backoff import SMALL, Backoff, model_of, reference_log10, walk, write_arpa_text
from support.cases import cases

TEXT = ["a", "b", "c", "a", "b", "</s>"]


def same(a: LanguageModel, b: LanguageModel) -> bool:
    """Whether two models have the same n-grams and probabilities, up to ten digits."""
    return list(a.words) == list(b.words) and all(
        np.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(a.arrays, b.arrays, strict=True)
    )


def read(path: Path) -> LanguageModel:
    return model_from_tables(read_arpa(path))


def edited(edit: Callable[[str], str]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_arpa_text(folder / "m.arpa", SMALL)
        path.write_bytes(edit(path.read_bytes().decode()).encode())
        return path

    return write


HARMLESS = {
    "plain": edited(lambda text: text),
    "byte order mark": edited(lambda text: "\ufeff" + text),
    "carriage returns": edited(lambda text: text.replace("\n", "\r\n")),
    "comment before": edited(lambda text: "made by hand\nngram 9\n\n" + text),
    "spaces for tabs": edited(lambda text: text.replace("\t", " ")),
    "trailing spaces": edited(lambda text: re.sub(r"(\d|[a-c])\n", r"\1 \t\n", text)),
    "blank lines inside": edited(lambda text: text.replace("-0.3\ta b", "\n\n-0.3\ta b")),
    "no last newline": edited(lambda text: text.rstrip("\n")),
    "counts with spaces": edited(lambda text: text.replace("ngram 1=6", "ngram  1 = 6")),
    "same line twice, counted once": edited(lambda t: t.replace("-0.3\ta b\t-0.5", "-0.3\ta b\t-0.5\n-0.3\ta b\t-0.5")),
    "same line twice": edited(
        lambda text: text.replace("-0.3\ta b\t-0.5", "-0.3\ta b\t-0.5\n-0.3\ta b\t-0.5").replace(
            "ngram 2=3", "ngram 2=4"
        )
    ),
    "same word twice": edited(
        lambda text: text.replace("-0.9\tc", "-0.9\tc\n-0.9\tc").replace("ngram 1=6", "ngram 1=7")
    ),
    "exponents": edited(lambda text: text.replace("-0.15\t", "-1.5e-1\t").replace("-0.9\t", "-9E-01\t")),
    "back-off on the longest": edited(lambda text: text.replace("<s> a b", "<s> a b\t0.0")),
    "other order": edited(
        lambda text: text.replace("-0.2\t<s> a\t-0.1\n-0.3\ta b\t-0.5", "-0.3\ta b\t-0.5\n-0.2\t<s> a\t-0.1")
    ),
    "empty longest order": edited(
        lambda text: text.replace("ngram 3=2", "ngram 3=2\nngram 4=0").replace("\\end\\", "\\4-grams:\n\n\\end\\")
    ),
}


def test_repeated_ngrams_are_counted(tmp_path: Path) -> None:
    assert read(HARMLESS["same line twice"](tmp_path)).metadata["n_repeated"] == 1
    assert read(HARMLESS["same word twice"](tmp_path)).metadata["n_repeated"] == 1


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_variations_change_nothing(name: str, tmp_path: Path) -> None:
    assert same(read(HARMLESS[name](tmp_path)), model_of(SMALL))


def test_gzip_is_detected_by_its_bytes(tmp_path: Path) -> None:
    plain = write_arpa_text(tmp_path / "m.arpa", SMALL)
    packed = tmp_path / "misnamed.arpa"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert same(read(packed), model_of(SMALL))


INVALID = {
    "different values": (
        edited(lambda t: t.replace("-0.3\ta b\t-0.5", "-0.3\ta b\t-0.5\n-0.4\ta b").replace("2=3", "2=4")),
        "line 17.*'a b' of line 16 is repeated",
    ),
    "word with different values": (
        edited(lambda t: t.replace("-0.9\tc", "-0.9\tc\n-0.8\tc").replace("1=6", "1=7")),
        "line 13: the n-gram 'c' of line 12 is repeated",
    ),
    "no number": (edited(lambda t: t.replace("-0.3\ta b", "x\ta b")), "line 16: a number"),
    "not a number": (edited(lambda t: t.replace("-0.3\ta b", "nan\ta b")), "line 16: a number"),
    "infinite": (edited(lambda t: t.replace("-0.3\ta b", "1e999\ta b")), "line 16: a log-prob"),
    "positive": (edited(lambda t: t.replace("-0.3\ta b", "0.3\ta b")), "line 16: a log-prob"),
    "back-off too high": (edited(lambda t: t.replace("a b\t-0.5", "a b\t1e39")), "line 16: a back-off is above 99"),
    "too few words": (edited(lambda t: t.replace("-0.3\ta b\t-0.5", "-0.3\ta")), "line 16: there are fewer"),
    "too many words": (edited(lambda t: t.replace("a b\t-0.5", "a b\t-0.5 c")), "line 16: there are more"),
    "word without unigram": (edited(lambda t: t.replace("a b c", "a b zebra")), "line 21: a word of this"),
    "cut off": (edited(lambda t: t[: t.index("-0.4")]), "end of the file"),
    "no end mark": (edited(lambda t: t.replace("\\end\\", "")), "end of the file"),
    "missing section": (edited(lambda t: t.replace("\\2-grams:", "\\3-grams:")), "expected .2-grams"),
    "counts out of order": (edited(lambda t: t.replace("ngram 2", "ngram 5")), "line 3: expected the count of 2"),
    "no counts": (edited(lambda t: re.sub(r"ngram.*\n", "", t)), "no counts"),
    "no unigrams": (edited(lambda t: re.sub(r"(?s)(\\1-grams:).*(\\2-grams:)", r"\1\n\2", t)), "no unigrams"),
    "no data": (edited(lambda t: "hello\n"), "not an ARPA file"),
    "one endless line": (edited(lambda t: "\\data\\\n" + "x" * 9_000_000), "line"),
}


@pytest.mark.parametrize("name", INVALID)
def test_errors_name_file_and_line(name: str, tmp_path: Path) -> None:
    write, message = INVALID[name]
    with pytest.raises(UserError, match=message) as error:
        read(write(tmp_path))
    assert "m.arpa" in str(error.value)


def test_wrong_counts_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = edited(lambda text: text.replace("ngram 2=3", "ngram 2=300"))(tmp_path)
    assert same(read(path), model_of(SMALL))
    assert "line 3: 300 2-grams are declared, but there are 3" in caplog.text


def test_broken_gzip_and_bad_encoding(tmp_path: Path) -> None:
    packed = gzip.compress(write_arpa_text(tmp_path / "m.arpa", SMALL).read_bytes())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match="decompressed"):
        read(tmp_path / "cut.gz")
    latin = (tmp_path / "m.arpa").read_bytes().replace(b"-0.9\tc", b"-0.9\tcaf\xe9")
    (tmp_path / "latin.arpa").write_bytes(latin)
    with pytest.raises(UserError, match="line 12: a word is not UTF-8"):
        read(tmp_path / "latin.arpa")


def test_pruned_contexts_are_implied(tmp_path: Path) -> None:
    """'a b c' without 'a b' and 'b c': the longer n-gram is used, and the added contexts have back-off zero."""
    ngrams: Backoff = {gram: v for gram, v in SMALL.items() if gram not in {("a", "b"), ("<s>", "a")}}
    model = read(write_arpa_text(tmp_path / "m.arpa", ngrams))
    expected = [reference_log10(ngrams, TEXT[max(0, i - 2) : i], word) for i, word in enumerate(TEXT)]
    assert walk(model, TEXT)[0] == pytest.approx(expected, abs=1e-5)
    assert model.counts == (6, 3, 2) and model.metadata["n_implied"] == 2


def test_minus_infinity_and_99_are_probability_zero(tmp_path: Path) -> None:
    model = read(edited(lambda text: text.replace("-0.9\tc", "-inf\tc"))(tmp_path))
    assert walk(model, ["c"])[0] == pytest.approx([-99], abs=1e-4)
    assert np.isfinite(model.arrays.log_probs).all()


def test_unigrams_alone(tmp_path: Path) -> None:
    ngrams = {gram: value for gram, value in SMALL.items() if len(gram) == 1}
    model = read(write_arpa_text(tmp_path / "m.arpa", ngrams))
    assert model.order == 1 and walk(model, ["a", "b"])[0] == pytest.approx([-0.5, -0.6], abs=1e-6)


@pytest.mark.parametrize("name", ["out.arpa", "out.arpa.gz"])
def test_import_of_export_is_identity(name: str, tmp_path: Path) -> None:
    model = model_of(SMALL)
    write_arpa(model, tmp_path / name)
    back = read(tmp_path / name)
    assert all(np.array_equal(x, y) for x, y in zip(model.arrays, back.arrays, strict=True))


@given(st.binary(max_size=300))
@settings(max_examples=cases(10))
def test_any_bytes_are_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "m.arpa"
    complete = write_arpa_text(path, SMALL).read_bytes()
    cut = len(noise) * 7 % len(complete)
    path.write_bytes(complete[:cut] + noise + complete[cut + len(noise) :])
    with suppress(UserError):  # anything else fails
        read(path)


@pytest.mark.shared
def test_the_real_4_gram(shared: Path) -> None:
    lines = (shared / "real" / "words" / "t15" / "dev.jsonl").read_text().splitlines()
    model = read(shared / "real" / "words" / "t15" / "lm4.arpa.gz")
    assert model.counts == (60_402, 770_376, 359_644, 287_758)
    found = score_text(model, [json.loads(line)["text"] for line in lines])
    assert found.perplexity == pytest.approx(118.8, abs=0.05)
