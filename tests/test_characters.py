"""Character targets through the complete path: store, training, evaluation, words, report, streaming."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from arcuate.cli.console import TrainingDisplay, err
from arcuate.cli.show_results import evaluation as print_evaluation
from arcuate.cli.show_runs import print_diagnosis
from arcuate.data.alphabet import CHARACTERS, CLASSES, PUNCTUATION
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.decoding.decoder import StreamingDecoder
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.options import SearchOptions
from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.evaluation.decode import TrialSource, decode, open_task
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.train import train
from arcuate.files import DECODINGS
from arcuate.insight.compare import compare
from arcuate.insight.ledger import write_ledger
from arcuate.insight.report import write_report
from arcuate.insight.runs import list_runs
from arcuate.language.lexicon import open_lexicon
from arcuate.live.options import LiveOptions
from arcuate.live.server import page_info
from arcuate.live.session import LiveSession
from arcuate.models.io import load_model
from arcuate.run import Run


@pytest.fixture(scope="module")
def character_run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of characters and a run trained on it for a few steps, with what the command line prints in train.txt."""
    folder = tmp_path_factory.mktemp("characters")
    prepare(cohort_store.parent / "source", folder / "store", targets="characters")
    overrides = ["train.steps=6", "train.validate_every=3", "encoder.width=24", "validate.lm=default"]
    with err.capture() as printed:
        train("tiny", folder / "store", folder / "run", overrides=overrides, callbacks=[TrainingDisplay()])
    (folder / "train.txt").write_text(printed.get(), "utf-8")
    return folder / "run"


@pytest.mark.thorough
def test_the_model_has_the_alphabet_of_its_store(character_run: Path) -> None:
    assert load_model(character_run / "checkpoints" / "best").config.classes == CHARACTERS


def test_evaluation_names_characters(character_run: Path, tmp_path: Path) -> None:
    result = evaluate(character_run, scores=tmp_path / "scores.npz")
    assert result.summary().startswith("CER ") and "characters" in result.summary()
    assert result.to_dict()["unit"] == "character"
    rows = [json.loads(line) for line in result.results_file.read_text("utf-8").splitlines()]
    assert "".join(rows[0]["reference"]).replace(">", " ").replace("~", ".") == rows[0]["text"].lower()
    assert read_frames(tmp_path / "scores.npz").classes == CHARACTERS


def test_the_command_line_names_the_character_error_rate(
    character_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = (character_run.parent / "train.txt").read_text("utf-8")
    assert "val CER" in shown and "PER" not in shown
    print_evaluation(evaluate(character_run), {})
    print_evaluation(evaluate(character_run, adapt=True), {})
    printed = capsys.readouterr().out
    assert "CER by session (val)" in printed and "CER" in printed.splitlines()[-1] and "PER" not in printed


def test_pages_and_tables_of_several_runs_name_the_character_error_rate(
    character_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare, runs, ledger, doctor and board; PER must not occur."""
    for name in ("a", "b"):
        shutil.copytree(character_run, tmp_path / "runs" / name, symlinks=True)
    entries = list_runs(tmp_path / "runs", diagnose=diagnose)
    assert entries.rate_name == "CER" and [entry.rate_name for entry in entries] == ["CER", "CER"]
    comparison = compare(tmp_path / "runs" / "a", tmp_path / "runs" / "b", html=tmp_path / "compare.html")
    diagnosis = diagnose(tmp_path / "runs" / "a", html=tmp_path / "doctor.html")
    assert "CER" in comparison.method and diagnosis.error_name == "CER"
    print_diagnosis(diagnosis)
    texts = [write_ledger(tmp_path / "runs", diagnose=diagnose), capsys.readouterr().out]
    for page in ("compare.html", "doctor.html"):
        body = (tmp_path / page).read_text("utf-8").partition("<body>")[2]
        texts.append(body.partition("<script>")[0])  # without the Vega bundle
    for text in texts:
        assert "CER" in text and not re.search(r"\bPER\b", text)


def test_lists_of_runs_on_different_alphabets_name_both_error_rates(character_run: Path, tmp_path: Path) -> None:
    assert run_rate_name(Run(tmp_path), Run(character_run)) == "PER / CER"


def test_words_are_spelled(character_run: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("the\ncat\nsat\n1st\n", "utf-8")
    result = decode(character_run, SearchOptions(lexicon=words, words=("arcuate",)))
    assert result.search.n_lexicon_words == 4 and result.metrics.words.wer is not None  # 1st has no spelling
    assert {w for t in result for w in t.text.split()} <= {"the", "cat", "sat", "arcuate"}


def test_words_of_saved_log_probabilities_are_those_of_the_run(character_run: Path, tmp_path: Path) -> None:
    """Punctuation counts as a word boundary in a file too."""
    words, file = tmp_path / "words.txt", tmp_path / "scores.npz"
    words.write_text("the\ncat\nsat\n", "utf-8")
    evaluate(character_run, scores=file)
    models = SearchOptions(lexicon=words)
    of_run, of_file = (
        open_task(TrialSource(source, None, "val", None), models, None, DECODINGS, None)
        for source in (character_run, file)
    )
    assert len(of_file.search.classes) == len(CHARACTERS) - len(PUNCTUATION & set(CHARACTERS))
    for a, b in zip(of_run.trials, of_file.trials, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=0.02)  # the file is float16


def test_the_dictionary_is_spelled() -> None:
    classes = tuple(name for name in CHARACTERS if name not in PUNCTUATION)
    lexicon = open_lexicon("default", classes)
    assert lexicon.pronunciations("hello") == [tuple("hello")]
    assert len(lexicon.words) > 100_000


def test_report_shows_characters(character_run: Path) -> None:
    evaluate(character_run)
    page = write_report(character_run).read_text("utf-8")
    assert "Character confusions" in page and "Character error rate" in page and "Phoneme" not in page


def test_streaming_decodes_characters(character_run: Path) -> None:
    store = Store.open(character_run.parent / "store")
    trial = next(t for t in store.trials if t.split == "val")
    decoder = StreamingDecoder.load(character_run, SearchOptions(lm="none"), trial.session)
    decoder.push(store.read_bins(trial))
    hypothesis = decoder.finish()
    assert all(0 < token < len(CHARACTERS) for token in hypothesis.tokens)
    assert (
        page_info(LiveSession(decoder, LiveOptions(), print), None)["unit"] == "character"
    )  # named so on the live page


def test_a_model_of_another_alphabet_is_rejected(character_run: Path, cohort_store: Path) -> None:
    with pytest.raises(UserError, match=r"32 classes .* 41 classes"):
        evaluate(character_run, data=cohort_store)


def test_phonemes_are_unchanged() -> None:
    assert len(CLASSES) == 41 and np.array(CLASSES)[[0, 1, 39, 40]].tolist() == ["BLANK", "AA", "ZH", "SIL"]
