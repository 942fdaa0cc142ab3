"""Modified Kneser–Ney: equal to lmplz, equal to the formulas, and normalised."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.errors import UserError
from arcuate.language.ngram.arpa import read_arpa
from arcuate.language.ngram.estimate import (
    count_ngrams,
    estimate_model,
    estimate_tables,
    prune_thresholds,
    read_corpus,
)
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.text import read_sentences
from arcuate.language.ngram.trie import NGramTables, model_from_tables
from support.cases import cases

LMPLZ = Path(__file__).parent / "lmplz"  # README there: where the expected values come from
TEXT = (LMPLZ / "text.txt").read_text().splitlines()


def as_dict(tables: NGramTables) -> dict[tuple[str, ...], tuple[float, float]]:
    words = tables.words
    return {
        tuple(words[w] for w in row): (float(log_prob), float(backoff))
        for table in tables.orders
        for row, log_prob, backoff in zip(table.ids, table.log_probs, table.backoffs, strict=True)
    }


def estimated(lines: list[str], order: int, prune: tuple[int, ...] = ()) -> NGramTables:
    return estimate_tables(read_corpus([line.encode() for line in lines], "text"), order, prune)[0]


@pytest.mark.parametrize(
    ("name", "n_lines", "order", "prune"), [("pruned4.arpa.gz", 160, 4, (0, 0, 1)), ("first12_3.arpa.gz", 12, 3, ())]
)
def test_equal_to_lmplz(name: str, n_lines: int, order: int, prune: tuple[int, ...]) -> None:
    expected, found = as_dict(read_arpa(LMPLZ / name)), as_dict(estimated(TEXT[:n_lines], order, prune))
    assert found.keys() == expected.keys()
    worst = max(abs(a - b) for gram in found for a, b in zip(found[gram], expected[gram], strict=True))
    assert worst < 1e-5


def reference_probs(lines: list[str], order: int) -> dict[tuple[str, ...], float]:
    """Reference implementation of interpolated modified Kneser–Ney; probabilities of all n-grams seen."""
    plain: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        words = ("<s>", *line.split(), "</s>")
        for k in range(1, order + 1):
            plain.update(words[i : i + k] for i in range(len(words) - k + 1))
    counts = []
    for k in range(1, order + 1):
        grams = [gram for gram in plain if len(gram) == k and gram != ("<s>",)]
        if k == order:
            counts.append({gram: plain[gram] for gram in grams})
            continue
        before = Counter(gram[1:] for gram in plain if len(gram) == k + 1)
        counts.append({gram: plain[gram] if gram[0] == "<s>" else before[gram] for gram in grams})
    n_words = len(counts[0]) + 1
    probs: dict[tuple[str, ...], float] = {}
    for level in counts:
        n = Counter(level.values())
        y = n[1] / (n[1] + 2 * n[2])
        discount = [0.0] + [j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3)]
        total: dict[tuple[str, ...], int] = defaultdict(int)
        freed: dict[tuple[str, ...], float] = defaultdict(float)
        for gram, count in level.items():
            total[gram[:-1]] += count
            freed[gram[:-1]] += discount[min(count, 3)]
        for gram, count in level.items():
            context = gram[:-1]
            shorter = probs[gram[1:]] if context else 1 / n_words
            probs[gram] = (count - discount[min(count, 3)] + freed[context] * shorter) / total[context]
    return probs


@pytest.mark.parametrize("order", [1, 2, 3])
def test_equal_to_the_formulas(order: int) -> None:
    found, expected = as_dict(estimated(TEXT, order)), reference_probs(TEXT, order)
    assert expected.keys() == found.keys() - {("<unk>",), ("<s>",)}
    for gram, prob in expected.items():
        # the last n-gram of each order enters with its plain count, as in lmplz: discounts differ slightly
        assert math.exp(found[gram][0]) == pytest.approx(prob, rel=0.02), gram


def total_prob(model: LanguageModel, history: list[str]) -> float:
    state = model.start
    for word in history:
        _, state = model.advance(state, model.find(word))
    return sum(math.exp(model.advance(state, w)[0]) for w in range(len(model.words)) if w != model.bos)


SENTENCES = st.lists(st.lists(st.sampled_from("abcdef"), max_size=7).map(" ".join), min_size=1, max_size=30)


@given(
    lines=SENTENCES.filter(lambda lines: any(lines)),
    order=st.integers(1, 5),
    prune=st.sampled_from([(), (0, 1), (0, 0, 2)]),
    history=st.lists(st.sampled_from("abcdefg"), max_size=6),
)
@settings(max_examples=cases(5))
def test_probabilities_sum_to_one_after_any_history(
    lines: list[str], order: int, prune: tuple[int, ...], history: list[str]
) -> None:
    model = model_from_tables(estimated(lines, order, prune[:order]))
    assert total_prob(model, history) == pytest.approx(1, abs=1e-4)


@given(lines=SENTENCES.filter(lambda lines: any(lines)))
def test_sorted_keys_count_ngrams(lines: list[str]) -> None:
    corpus = read_corpus([line.encode() for line in lines], "text")
    words, ids = corpus.words, np.zeros((1, 0), int)
    for k, table in enumerate(count_ngrams(corpus, 3), start=1):
        ids = np.concatenate([ids[table.parents], table.words[:, None]], axis=1)
        expected: Counter[tuple[str, ...]] = Counter()
        for line in lines:
            padded = ("<s>", *line.split(), "</s>")
            expected.update(padded[i : i + k] for i in range(len(padded) - k + 1))
        found = {tuple(words[w] for w in row): int(n) for row, n in zip(ids, table.counts, strict=True) if n}
        assert found == expected


def test_pruning_thresholds_as_in_lmplz() -> None:
    assert prune_thresholds((), 3) == [0, 0, 0]
    assert prune_thresholds((0, 0, 1), 5) == [0, 0, 1, 1, 1]
    for invalid in ((1,), (0, 2, 1), (0, 0, 0, 0)):
        with pytest.raises(UserError, match="--prune"):
            prune_thresholds(invalid, 3)


def test_invalid_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("hello there\nwe <unk> it\n")
    with pytest.raises(UserError, match=r"t\.txt, line 2.*<unk>"):
        estimate_model([tmp_path / "t.txt"], 3)
    (tmp_path / "t.txt").write_text("\n \n")
    with pytest.raises(UserError, match="no words"):
        estimate_model([tmp_path / "t.txt"], 3)
    with pytest.raises(UserError, match="cannot read"):
        estimate_model([tmp_path / "absent.txt"], 3)
    (tmp_path / "t.txt").write_bytes(b"caf\xe9 noir\n")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        estimate_model([tmp_path / "t.txt"], 3)


def test_the_model_stores_its_sentences(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Hello there!\nhow are you\n\n")
    built = estimate_model([tmp_path / "t.txt"], 2)
    assert built.model.contains("hello there") is True
    assert built.model.contains("hello you") is False
    assert built.n_empty == 1


def test_sentences_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Hello there!\nhow are you\nhello there\n")
    built = estimate_model([tmp_path / "t.txt"], 2, normalise=True, leave_out=["hello there."])
    assert built.n_left_out == 2 and "hello" not in list(built.model.words)
    (tmp_path / "gap.txt").write_text("one\n\n two \n")
    assert read_sentences(tmp_path / "gap.txt") == ["one", "two"]
