"""`arcuate decode` and `arcuate tune` on small files, as a script calls them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from arcuate.cli import app
from arcuate.errors import UserError
from arcuate.tokens import CLASSES, INDEX

LEXICON = {"see": "S IY", "sea": "S IY", "the": "DH AH", "dog": "D AO G", "a": "AH", "i": "AY"}
SENTENCES = ["i see the dog", "the sea", "see a dog", "i see a sea"]
ARPA = """\\data\\
ngram 1=9
ngram 2=4

\\1-grams:
-2.0\t<unk>
-99\t<s>\t-0.5
-1.0\t</s>
-0.8\tsee\t-0.4
-1.6\tsea\t-0.2
-0.7\tthe\t-0.4
-1.1\tdog\t-0.3
-0.9\ta\t-0.3
-0.9\ti\t-0.3

\\2-grams:
-0.3\t<s> i
-0.2\ti see
-0.4\tthe sea
-0.5\ta sea

\\end\\
"""


def spoken(text: str, seed: int) -> np.ndarray:
    """Frames that say a sentence clearly enough, silences between words."""
    tokens = [INDEX[p] for word in text.split() for p in (*LEXICON[word].split(), "SIL")]
    path = [c for token in tokens for c in (token, 0)]
    logits = np.random.default_rng(seed).normal(size=(len(path), len(CLASSES)))
    logits[np.arange(len(path)), path] += 9.0
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    trials = [spoken(text, i) for i, text in enumerate(SENTENCES)]
    np.savez(
        folder / "scores.npz",
        logp=np.concatenate(trials).astype(np.float16),
        lengths=[len(t) for t in trials],
        classes=CLASSES,
    )
    (folder / "lexicon.txt").write_text("".join(f"{w}\t{p}\n" for w, p in LEXICON.items()))
    (folder / "lm.arpa").write_text(ARPA)
    rows = [{"id": str(i), "text": text, "session": f"day{i % 2}"} for i, text in enumerate(SENTENCES)]
    (folder / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def call(files: Path, command: str, *more: str) -> dict[str, Any]:
    arguments = [
        command,
        str(files / "scores.npz"),
        *("--lexicon", str(files / "lexicon.txt"), "--lm", str(files / "lm.arpa")),
        *("--references", str(files / "refs.jsonl"), "--json", *more),
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_decode_writes_text_score_and_n_best(files: Path, tmp_path: Path) -> None:
    summary = call(files, "decode", "--out", str(tmp_path / "hyps.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "hyps.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == SENTENCES
    assert summary["wer"] == 0.0 and summary["cer"] == 0.0 and summary["n_words"] == 13
    assert summary["seconds_per_sentence"] > 0 and summary["peak_rss_mb"] > 10
    assert summary["tuned_on_these"] is False and summary["lm"] == "lm.arpa"
    for row in rows:
        assert row["nbest"][0]["text"] == row["text"] and row["nbest"][0]["score"] == row["score"]
        assert {"acoustic", "lm", "bonus"} <= row["nbest"][0].keys()


def test_tuned_weights_are_used_and_flagged(files: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.yaml"
    tuned = call(files, "tune", "--out", str(weights), "--budget", "3", "--folds", "2")
    assert tuned["wer_cross_fitted"] is not None and tuned["tuned_on_these"] is True
    assert yaml.safe_load(weights.read_text())["tuned"]["n_trials"] == 4
    summary = call(files, "decode", "--out", str(tmp_path / "h.jsonl"), "--config", str(weights))
    assert summary["tuned_on_these"] is True


def test_words_are_added_at_run_time(files: Path, tmp_path: Path) -> None:
    given = ("--word", "deedog=30=D AO G")
    call(files, "decode", "--out", str(tmp_path / "h.jsonl"), *given)
    assert "deedog" in (tmp_path / "h.jsonl").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("refs.jsonl", '{"text": "one line"}\n', "1 lines"),
        ("refs.jsonl", '{"id": "0"}\n' * 4, "line 1 has no text"),
        ("weights.yaml", "lm_wait: 1\n", "lm_wait"),
        ("weights.yaml", "beam: -3\n", "beam"),
        ("weights.yaml", "[1]\n", "mapping"),
        ("lexicon.txt", "see\tS QQ\n", "line 1"),
    ],
)
def test_mistakes_are_one_sentence(
    files: Path, tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    place = lambda n: str((tmp_path if n == name else files) / n)
    arguments = ["decode", str(files / "scores.npz"), "--out", str(tmp_path / "h.jsonl")]
    arguments += [
        "--lexicon",
        place("lexicon.txt"),
        "--lm",
        place("lm.arpa"),
        "--references",
        place("refs.jsonl"),
    ]
    arguments += ["--config", place("weights.yaml")] if name == "weights.yaml" else []
    with pytest.raises(UserError, match=sentence):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_bad_trial_is_named(files: Path, tmp_path: Path) -> None:
    with np.load(files / "scores.npz") as file:
        parts = dict(file)
    parts["logp"][int(parts["lengths"][0]) + 2, 5] = np.nan
    np.savez(tmp_path / "bad.npz", **parts)
    arguments = ["decode", str(tmp_path / "bad.npz"), "--out", str(tmp_path / "h.jsonl")]
    arguments += ["--lexicon", str(files / "lexicon.txt"), "--lm", str(files / "lm.arpa")]
    with pytest.raises(UserError, match="trial 1: frame 2 contains NaN"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
