"""`arcuate decode` and `arcuate tune` on small files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.options import SearchOptions
from arcuate.errors import UserError
from arcuate.evaluation.decode import Transcription, decode
from arcuate.evaluation.tune import TunedWeights, tune
from arcuate.files import to_json_line

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


def call(files: Path, command: Any = decode, scores: Path | None = None, **given: Any) -> Any:
    """`decode` or `tune` with the words of the fixture; names of search options go to these."""
    words = {"lexicon": files / "lexicon.txt", "lm": files / "lm.arpa"}
    words |= {name: given.pop(name) for name in tuple(given) if name in SearchOptions.model_fields}
    return command(scores or files / "scores.npz", options=SearchOptions(**words), **given)


def edited(files: Path, path: Path, **parts: Any) -> Path:
    with np.load(files / "scores.npz") as file:
        np.savez(path, **(dict(file) | parts))
    return path


def test_decode_writes_text_score_and_n_best(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: Transcription = call(files, references=files / "refs.jsonl", out=tmp_path / "hyps.jsonl", n_best=2)
    assert len(words) == 4 and words.wer == words.cer == 0.0 and [s.text for s in words] == SENTENCES
    assert words[0].n_best[0].words == tuple(SENTENCES[0].split()) and len(words[:2]) == 2
    rows = [json.loads(line) for line in (tmp_path / "hyps.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == SENTENCES and [row["id"] for row in rows] == list("0123")
    for row in rows:
        assert row["nbest"][0]["text"] == row["text"] and row["nbest"][0]["score"] == row["score"]
        assert {"acoustic", "lm", "bonus"} <= row["nbest"][0].keys() and len(row["nbest"]) <= 2
    summary = json.loads(to_json_line(words.to_dict()))
    assert summary["seconds_per_sentence"] > 0 and summary["peak_rss_mb"] > 10 and summary["n_words"] == 13
    assert summary["tuned_on_these"] is False and summary["lm"] == "lm.arpa"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        words.to_frame()


def test_tuned_weights_are_used_and_flagged(files: Path, tmp_path: Path) -> None:
    weights, references = tmp_path / "weights.yaml", files / "refs.jsonl"
    tuned: TunedWeights = call(files, tune, out=weights, references=references, budget=3, folds=2)
    assert tuned.cross_fit is not None and tuned.cross_fit.wer_cross_fitted is not None
    assert yaml.safe_load(weights.read_text())["tuned"]["n_trials"] == 4
    with pytest.raises(UserError, match="13 decoded words with references are too few"):
        call(files, tune, references=references, budget=0, confidence=True)
    assert call(files, references=references, config=weights).tuned_on_these is True
    for folds, message in ((1, "at least 2"), (3, "at least 3 sessions")):
        with pytest.raises(UserError, match=message):
            call(files, tune, references=references, folds=folds)


def test_weights_no_better_than_the_initial_ones_are_not_taken(files: Path) -> None:
    tuned = call(files, tune, references=files / "refs.jsonl", beam=1, budget=1)  # one hypothesis per trial, all right
    assert tuned.wer == 0.0 and tuned.record.kept_start and tuned.record.n_evaluations > 1
    assert tuned.settings.lm_weight == 0.8


def test_a_trial_without_a_hypothesis_is_empty_and_counted(files: Path, tmp_path: Path, messages: list[str]) -> None:
    """Probability 1 for AA, which occurs in no word."""
    certain = np.full((2, len(CLASSES)), -np.inf, np.float16)
    certain[:, CLASSES.index("AA")] = 0.0
    logp = np.concatenate([certain, fake_log_probs("the sea", 1).astype(np.float16)])
    scores = edited(files, tmp_path / "s.npz", logp=logp, lengths=[2, len(logp) - 2])
    (tmp_path / "r.jsonl").write_text('{"text": "see"}\n{"text": "the sea"}\n')
    words = call(files, decode, scores, references=tmp_path / "r.jsonl")
    row = next(words.rows())
    assert (row["text"], row["score"], row["nbest"], row["words"]) == ("", None, [], [])
    assert "1 trials have no hypothesis" in messages[-1]
    assert call(files, tune, scores, references=tmp_path / "r.jsonl", budget=1).metrics.n_without_hypothesis == 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("refs.jsonl", '{"text": "one line"}\n', "1 lines"),
        ("refs.jsonl", '{"id": "0"}\n' * 4, "line 1 has no text"),
        ("refs.jsonl", "".join(f'{{"id": "{i}", "text": "see"}}\n' for i in "0113"), "'1' occurs twice"),
        ("weights.yaml", "lm_wait: 1\n", "lm_wait"),
        ("weights.yaml", "beam: -3\n", "beam"),
        ("weights.yaml", "[1]\n", "mapping"),
        ("lexicon.txt", "see\tS QQ\n", "line 1"),
    ],
)
def test_errors_are_one_sentence(files: Path, tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    given = {"references": tmp_path / name} if name == "refs.jsonl" else {}
    given |= {"config": tmp_path / name} if name == "weights.yaml" else {}
    given |= {"lexicon": tmp_path / name} if name == "lexicon.txt" else {}
    with pytest.raises(UserError, match=sentence):
        call(files, **given)


def test_a_bad_trial_is_named(files: Path, tmp_path: Path) -> None:
    with np.load(files / "scores.npz") as file:
        logp, lengths = file["logp"], file["lengths"]
    for frame, value, message in (
        (int(lengths[0]) + 2, np.nan, "trial 1: frame 2 contains NaN"),
        (0, np.nan, "trial 0: frame 0 contains NaN"),
        (0, 5.0, "trial 0: the probabilities of frame 0"),
    ):
        changed = logp.copy()
        changed[frame, 3] = value
        scores = edited(files, tmp_path / "bad.npz", logp=changed)
        for command in (decode, tune):
            with pytest.raises(UserError, match=message):
                call(files, command, scores, references=files / "refs.jsonl")
    with pytest.raises(UserError, match="'a' occurs twice"):
        call(files, scores=edited(files, tmp_path / "twice.npz", trials=["a", "b", "a", "c"]))


@pytest.mark.parametrize("word", ["deedog=30=D AO G", "Deedog=30=D AO G", "<deedog>=30=D AO G"])
def test_added_words_are_normalised(files: Path, word: str) -> None:
    """`<unk>` would become a plain word too, never the symbol of unknown words."""
    assert call(files, words=(word,))[0].text.endswith("deedog")


@pytest.mark.parametrize("word", ["a=nan", "a=inf", "a=1e39", "a=x", "a=4=N=EY", "=4", "two words=4", "a=1="])
def test_invalid_words_are_rejected(files: Path, word: str) -> None:
    with pytest.raises(UserError, match="--words"):
        call(files, words=(word,))


@pytest.mark.parametrize("command", [decode, tune])
def test_outputs_are_checked_first(files: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link.jsonl").symlink_to(files / "refs.jsonl")
    bad = edited(files, tmp_path / "bad.npz", logp=np.zeros((1, 1)))  # decoding would fail with another error
    for target, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "o", "is not a folder"),
        (bad, "is an input of this command"),
        (tmp_path / "link.jsonl", "is an input of this command"),
        (files / "lm.arpa", "is an input of this command"),
    ):
        with pytest.raises(UserError, match=message):
            call(files, command, bad, references=files / "refs.jsonl", out=target)


def test_scores_without_a_word_boundary_are_reported(files: Path, tmp_path: Path, messages: list[str]) -> None:
    scores = edited(files, tmp_path / "s.npz", classes=[*CLASSES[:-1], "QQ"])
    (tmp_path / "lexicon.txt").write_text("see\tS IY\n")
    call(files, scores=scores, lexicon=tmp_path / "lexicon.txt")
    assert any("none of the classes is a word boundary" in message for message in messages)


@pytest.mark.parametrize("option", [{"split": "test"}, {"head": "both"}, {"data": "store"}])
def test_options_of_runs_are_refused_for_files(files: Path, option: dict[str, str]) -> None:
    """They would have no effect."""
    with pytest.raises(UserError, match=f"--{next(iter(option))}.* cannot be applied to the file"):
        call(files, **option)
