"""`arcuate decode` and `arcuate tune` on small files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from arcuate.cli import run
from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.evaluation.decode import decode
from support.command import arcuate

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


def fake_log_probs(text: str, seed: int) -> np.ndarray:
    """Log-probabilities of a sentence with high confidence, silences between words."""
    tokens = [CLASSES.index(p) for word in text.split() for p in (*LEXICON[word].split(), "SIL")]
    path = [c for token in tokens for c in (token, 0)]
    logits = np.random.default_rng(seed).normal(size=(len(path), len(CLASSES)))
    logits[np.arange(len(path)), path] += 9.0
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    trials = [fake_log_probs(text, i) for i, text in enumerate(SENTENCES)]
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
    done = arcuate(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


def test_the_api_returns_a_sequence_of_transcripts(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = decode(
        files / "scores.npz",
        lexicon=files / "lexicon.txt",
        lm=str(files / "lm.arpa"),
        references=files / "refs.jsonl",
        n_best=2,
    )
    assert len(words) == 4 and words.wer == words.cer == 0.0 and words.out is None
    assert [transcript.text for transcript in words] == SENTENCES and len(words[:2]) == 2
    assert words[0].n_best[0].words == tuple(SENTENCES[0].split()) and len(words[0].n_best) <= 2
    json.dumps(words.to_dict())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        words.to_frame()


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
def test_errors_are_one_sentence(files: Path, tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    place = lambda n: str((tmp_path if n == name else files) / n)
    arguments = ["decode", str(files / "scores.npz"), "--out", str(tmp_path / "h.jsonl")]
    arguments += ["--lexicon", place("lexicon.txt"), "--lm", place("lm.arpa"), "--references", place("refs.jsonl")]
    arguments += ["--config", place("weights.yaml")] if name == "weights.yaml" else []
    with pytest.raises(UserError, match=sentence):
        run(arguments)


def test_a_bad_trial_is_named(files: Path, tmp_path: Path) -> None:
    with np.load(files / "scores.npz") as file:
        parts = dict(file)
    parts["logp"][int(parts["lengths"][0]) + 2, 5] = np.nan
    np.savez(tmp_path / "bad.npz", **parts)
    arguments = ["decode", str(tmp_path / "bad.npz"), "--out", str(tmp_path / "h.jsonl")]
    arguments += ["--lexicon", str(files / "lexicon.txt"), "--lm", str(files / "lm.arpa")]
    with pytest.raises(UserError, match="trial 1: frame 2 contains NaN"):
        run(arguments)


def rejection(files: Path, *more: str, command: str = "decode", scores: Path | None = None) -> str:
    """The error message of a command."""
    arguments = [command, str(scores or files / "scores.npz")]
    arguments += ["--lexicon", str(files / "lexicon.txt"), "--lm", str(files / "lm.arpa"), *more]
    with pytest.raises(UserError) as caught:
        run(arguments)
    return str(caught.value)


def edited(files: Path, path: Path, **parts: Any) -> Path:
    with np.load(files / "scores.npz") as file:
        np.savez(path, **(dict(file) | parts))
    return path


def test_weights_no_better_than_the_initial_ones_are_not_written(files: Path, tmp_path: Path) -> None:
    """Only a blank penalty beyond the bounds of `tune` finds the word, so every step increases the errors."""
    path = [c for token in ("S", "IY", "SIL") for c in (CLASSES.index(token), 0)]
    logits = np.zeros((len(path), len(CLASSES)))
    logits[np.arange(len(path)), path] = 25.0
    logits[:, 0] = 50.0
    logp = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)
    scores = edited(files, tmp_path / "one.npz", logp=logp, lengths=[len(path)])
    (tmp_path / "one.jsonl").write_text('{"text": "see"}\n')
    (tmp_path / "start.yaml").write_text("blank_penalty: 30\n")
    arguments = ["tune", str(scores), "--lexicon", str(files / "lexicon.txt"), "--lm", str(files / "lm.arpa")]
    arguments += ["--references", str(tmp_path / "one.jsonl"), "--config", str(tmp_path / "start.yaml")]
    arguments += ["--out", str(tmp_path / "w.yaml"), "--budget", "1", "--json"]
    summary = json.loads(arcuate(*arguments).stdout)
    assert summary["wer"] == 0.0 and summary["blank_penalty"] == 30.0 and summary["kept_start"] is True


def test_a_trial_without_a_hypothesis_is_empty_and_counted(files: Path, tmp_path: Path, messages: list[str]) -> None:
    """Probability 1 for AA, which occurs in no word."""
    certain = np.full((2, len(CLASSES)), -np.inf, np.float16)
    certain[:, CLASSES.index("AA")] = 0.0
    logp = np.concatenate([certain, fake_log_probs("the sea", 1).astype(np.float16)])
    scores = edited(files, tmp_path / "s.npz", logp=logp, lengths=[2, len(logp) - 2])
    (tmp_path / "r.jsonl").write_text('{"text": "see"}\n{"text": "the sea"}\n')
    for command in ("decode", "tune"):
        arguments = [
            command,
            str(scores),
            "--lexicon",
            str(files / "lexicon.txt"),
            "--out",
            str(tmp_path / f"o-{command}"),
        ]
        arguments += ["--lm", str(files / "lm.arpa"), "--references", str(tmp_path / "r.jsonl"), "--json"]
        arguments += ["--budget", "1"] if command == "tune" else []
        summary = json.loads(arcuate(*arguments).stdout)
        assert summary["n_without_hypothesis"] == 1
        if command == "decode":
            row = json.loads((tmp_path / "o-decode").read_text().splitlines()[0])
            assert (row["text"], row["score"], row["nbest"], row["words"]) == ("", None, [], [])
            assert "1 trials have no hypothesis" in messages[-1]


def test_added_words_are_normalised(files: Path, tmp_path: Path) -> None:
    call(files, "decode", "--out", str(tmp_path / "h.jsonl"), "--word", "Deedog=30=D AO G")
    assert json.loads((tmp_path / "h.jsonl").read_text().splitlines()[0])["text"].endswith("deedog")


@pytest.mark.parametrize(
    "word", ["a=nan", "a=inf", "a=1e39", "a=x", "a=4=N=EY", "=4", "two words=4", "<unk>=3=S IY", "a=1="]
)
def test_invalid_words_are_rejected(files: Path, tmp_path: Path, word: str) -> None:
    if word == "<unk>=3=S IY":  # normalised to a plain word, never the unknown-word symbol
        call(files, "decode", "--out", str(tmp_path / "o"), "--word", word)
        assert "<unk>" not in (tmp_path / "o").read_text()
        return
    assert "--word" in rejection(files, "--out", str(tmp_path / "o"), "--word", word)


def test_trials_named_twice_are_rejected(files: Path, tmp_path: Path) -> None:
    scores = edited(files, tmp_path / "s.npz", trials=["a", "b", "a", "c"])
    assert "'a' occurs twice" in rejection(files, "--out", str(tmp_path / "o"), scores=scores)
    rows = "".join(f'{{"id": "{i}", "text": "see"}}\n' for i in "0113")
    (tmp_path / "r.jsonl").write_text(rows)
    message = rejection(files, "--out", str(tmp_path / "o"), "--references", str(tmp_path / "r.jsonl"))
    assert "'1' occurs twice" in message


def test_outputs_are_checked_first(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    bad = edited(files, tmp_path / "bad.npz", logp=np.zeros((1, 1)))  # decoding would fail with another error
    for command in ("decode", "tune"):
        for target, message in (
            (tmp_path, "is a folder"),
            (tmp_path / "file" / "o", "is not a folder"),
            ("", "folder"),
        ):
            assert message in rejection(files, "--out", str(target), command=command, scores=bad)


def test_inputs_are_not_overwritten(files: Path, tmp_path: Path) -> None:
    scores = edited(files, tmp_path / "s.npz")
    (tmp_path / "link.jsonl").symlink_to(files / "refs.jsonl")
    assert "is an input of this command" in rejection(files, "--out", str(scores), scores=scores)
    refs = str(files / "refs.jsonl")
    assert "is an input" in rejection(files, "--references", refs, "--out", refs)
    assert "is an input" in rejection(files, "--references", refs, "--out", str(tmp_path / "link.jsonl"))
    assert "is an input" in rejection(files, "--out", str(files / "lm.arpa"), command="tune")


def test_the_first_trial_is_named_too(files: Path, tmp_path: Path) -> None:
    with np.load(files / "scores.npz") as file:
        logp = file["logp"].copy()
    logp[0, 3] = np.nan
    bad = edited(files, tmp_path / "bad.npz", logp=logp)
    for command in ("decode", "tune"):
        message = rejection(
            files, "--out", str(tmp_path / "o"), "--references", str(files / "refs.jsonl"), command=command, scores=bad
        )
        assert message.startswith("trial 0: frame 0 contains NaN")
    logp[0, 3] = 5.0
    bad = edited(files, tmp_path / "bad.npz", logp=logp)
    assert rejection(files, "--out", str(tmp_path / "o"), scores=bad).startswith(
        "trial 0: the probabilities of frame 0"
    )


def test_one_fold_is_rejected(files: Path, tmp_path: Path) -> None:
    refs = ("--references", str(files / "refs.jsonl"))
    assert "at least 2" in rejection(files, "--out", str(tmp_path / "o"), "--folds", "1", *refs, command="tune")


def test_scores_without_a_word_boundary_are_reported(files: Path, tmp_path: Path, messages: list[str]) -> None:
    scores = edited(files, tmp_path / "s.npz", classes=[*CLASSES[:-1], "QQ"])
    (tmp_path / "lexicon.txt").write_text("see\tS IY\n")
    arguments = ["decode", str(scores), "--lexicon", str(tmp_path / "lexicon.txt"), "--lm", str(files / "lm.arpa")]
    run([*arguments, "--out", str(tmp_path / "o")])
    assert any("none of the classes is a word boundary" in message for message in messages)


@pytest.mark.parametrize("option", [{"split": "test"}, {"checkpoint": "last"}, {"data": "store"}])
def test_options_of_runs_are_refused_for_files(files: Path, option: dict[str, str]) -> None:
    """They would have no effect."""
    with pytest.raises(UserError, match=f"--{next(iter(option))} cannot be applied to the file"):
        decode(files / "scores.npz", lexicon=str(files / "lexicon.txt"), **option)  # type: ignore[arg-type]
