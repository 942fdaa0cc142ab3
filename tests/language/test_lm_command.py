"""The command `arcuate lm`."""

import gzip
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from arcuate.cli import run as run_command
from arcuate.errors import UserError
from support.backoff import SMALL, write_arpa_text
from support.cli import NO_TORCH, assert_refused, one_object
from support.command import arcuate

LMPLZ = Path(__file__).parent / "lmplz"


Run = Callable[..., tuple[dict, str]]


@pytest.fixture
def lm(capsys: pytest.CaptureFixture[str]) -> Run:
    """`arcuate lm … --json` in this process: its result and its messages on stderr."""

    def run(*arguments: object) -> tuple[dict, str]:
        run_command(["lm", *map(str, arguments), "--json"])
        captured = capsys.readouterr()
        return one_object(captured.out), captured.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes((LMPLZ / "text.txt").read_bytes())
    return tmp_path / "text.txt"


def test_build_score_and_export(text: Path, lm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arpa = text.with_name("m.alm"), text.with_name("m.arpa.gz")
    built, _ = lm("build", text, model, "--order", 4, "--prune", 0, 0, 1)
    assert built["n_ngrams"] == [457, 900, 82, 38]  # as lmplz has them
    assert built["metadata"]["prune"] == [0, 0, 1]
    scored, _ = lm("score", model, text)
    assert scored["n_sentences"] == 160 and scored["n_in_training_text"] == 160
    assert scored["perplexity_unseen"] is None
    monkeypatch.setattr("sys.stdin", io.StringIO("please build it\n"))
    assert lm("score", model)[0]["n_words"] == 3
    lm("export", model, arpa)
    assert gzip.decompress(arpa.read_bytes()).startswith(b"\\data\\\nngram 1=457\n")
    assert lm("score", arpa, text)[0]["perplexity"] == scored["perplexity"]


def test_a_model_of_a_small_text_comes_with_advice(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["lm", "build", str(text), str(text.with_name("m.alm"))])
    assert "arcuate lm mix" in capsys.readouterr().err


def test_import_and_info(tmp_path: Path, lm: Run) -> None:
    arpa, model = write_arpa_text(tmp_path / "m.arpa", SMALL), tmp_path / "m.alm"
    for _ in range(2):  # an earlier model is replaced
        done, _ = lm("import", arpa, model)
        assert done["order"] == 3 and done["n_ngrams"] == [6, 3, 2]
    assert lm("info", model)[0] == done
    data = bytearray(model.read_bytes())
    data[-3] ^= 255
    model.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        lm("info", model)


def test_mix_with_tuned_weights(text: Path, lm: Run) -> None:
    folder = text.parent
    lines = text.read_text().splitlines()
    for name, part in (("a", lines[:70]), ("b", lines[50:120]), ("held", lines[120:])):
        (folder / f"{name}.txt").write_text("\n".join(part) + "\n")
    for name in "ab":
        lm("build", folder / f"{name}.txt", folder / f"{name}.alm", "--order", 3)
    pair = (folder / "a.alm", folder / "b.alm")
    mixed, _ = lm("mix", *pair, folder / "c.alm", "--tune", folder / "held.txt")
    assert sum(mixed["weights"]) == pytest.approx(1)
    assert mixed["n_sentence_hashes"] == len(set(lines[:120]))
    assert mixed["tuned_on"]["perplexity"] == pytest.approx(mixed["tuned_on"]["perplexity_word_by_word"], rel=0.1)
    assert lm("mix", *pair, folder / "d.alm", "--weights", 1, 3)[0]["weights"] == [0.25, 0.75]


def test_leakage_is_reported_and_can_be_excluded(text: Path, lm: Run, caplog: pytest.LogCaptureFixture) -> None:
    evaluation, model = text.with_name("eval.txt"), text.with_name("m.alm")
    lines = text.read_text().splitlines()
    evaluation.write_text(f"{lines[3].capitalize()}!\nnothing like this is in the text\n")
    built, _ = lm("build", text, model, "--order", 3, "--against", evaluation)
    assert built["leakage"] == {"n_sentences": 2, "n_in_training_text": 1, "share": 0.5}
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "1 of 2 evaluation sentences" in warning.getMessage()
    clean, _ = lm("build", text, model, "--leave-out", evaluation, "--against", evaluation)
    assert clean["leakage"]["n_in_training_text"] == 0 and clean["n_left_out"] >= 1
    assert lm("score", model, text, "--against", evaluation)[0]["leakage"]["n_in_training_text"] == 0


ERRORS = {
    "no language model nowhere": "score nowhere {text}",
    "not an ARPA file": "score {text} {text}",
    "cannot read": "build {folder}/absent {folder}/m",
    "starts with 0": "build {text} {folder}/m --prune 1",
    "--order": "build {text} {folder}/m --order 0",
    "--tune": "mix default default {folder}/m",
    "at least two": "mix default {folder}/m",
    "is a folder": "import {text} {folder}",
    "give the ARPA file in it": "import {folder} {folder}/m",
    "is an input of this command": "build {text} {text}",
    "an input of this command": "import {text} {text}",
    "text.txt is not a folder": "build {text} {text}/m",
    "name the file to write last": "mix default default {text} --weights 1 1",
}


@pytest.mark.parametrize("message", ERRORS)
def test_error_messages(message: str, tmp_path: Path, text: Path) -> None:
    words = ERRORS[message].format(text=text, folder=tmp_path).split()
    with pytest.raises(UserError, match=message):
        run_command(["lm", *words])


def test_an_invalid_file_is_rejected_with_its_line_and_nothing_is_written(tmp_path: Path) -> None:
    invalid = write_arpa_text(tmp_path / "m.arpa", SMALL)
    invalid.write_text(invalid.read_text().replace("-0.3\ta b", "x\ta b"))
    assert_refused(arcuate("lm", "import", invalid, tmp_path / "m.alm"), "m.arpa, line 16")
    assert [path.name for path in tmp_path.iterdir()] == ["m.arpa"]


def test_no_torch_is_imported(text: Path) -> None:
    arguments = ["lm", "build", str(text), str(text.with_name("m.alm")), "--json"]
    done = subprocess.run([sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
