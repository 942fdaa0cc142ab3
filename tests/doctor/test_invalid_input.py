"""Arbitrary files are diagnosed or refused with one sentence, never with a traceback."""

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.doctor import VERDICTS, diagnose, log_table
from arcuate.doctor.page import diagnosis_page
from arcuate.errors import UserError
from arcuate.files import to_json_line
from support.cases import cases
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.doctor_logs import falling, log, write_jsonl
from support.pages import check_page

RUN = log(falling(), falling(6.5, 0.8), falling(7.0, 0.4))


def one_sentence(text: str) -> str:
    assert text and "\n" not in text
    return text


def sound(path: Path) -> str:
    """Read, judge and draw a file; the verdict, or the sentence it was refused with."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            diagnosis = diagnose(path)
        except UserError as error:
            return one_sentence(str(error))
        json.loads(to_json_line(diagnosis.to_dict()), parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
        assert diagnosis_page(diagnosis).startswith("<!DOCTYPE html>")
        assert diagnosis.primary in VERDICTS
        return diagnosis.primary


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", ["empty"]),
        ("blank.csv", b" \r\n \n", ["empty"]),
        ("picture.jsonl", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ["PNG"]),
        ("garbage.log", bytes(range(256)) * 40, ["neither text"]),
        ("zip.json", b"PK\x03\x04" + bytes(50), ["zip"]),
        ("novel.txt", b"Call me Ishmael. Some years ago" * 50, ["no loss or error rate"]),
        ("stats", b"\x80\x04}q\x00.", ["neither text"]),
        ("config.json", b'{"lr": 0.1, "layers": [1, 2]}', ["not a training log"]),
    ],
)
def test_files_that_are_not_logs_are_refused(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert_refused(arcuate("doctor", tmp_path / name, "--json"), *words)


def test_folders_and_paths_without_a_log_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("nothing here")
    assert_refused(arcuate("doctor", tmp_path), "nor a folder with a training log")
    assert_refused(arcuate("doctor", tmp_path / "nowhere"), "nowhere")
    assert_refused(arcuate("doctor", tmp_path / "notes.md", "--dataset", "t12"), "b2t24")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda text: text.replace("\n", "\r\n").encode(), "healthy"),
        (lambda text: text.encode("utf-16"), "healthy"),
        (lambda text: text.encode("utf-16-le"), "healthy"),
        (lambda text: b"\xef\xbb\xbf" + text.encode(), "healthy"),
        (lambda text: text.encode()[:-20], "healthy"),
        (lambda text: text.encode() + b"\0" * 200, "healthy"),
        (lambda text: b"starting\n" + text.encode(), "healthy"),
        (lambda text: text.replace('"loss"', '"lost"').encode(), "healthy"),
        (lambda text: "\n".join(reversed(text.splitlines())).encode(), "healthy"),
        (lambda text: (text + '{"step": 9950, "split": "train", "loss": NaN}\n').encode(), "exploded"),
        (lambda text: (text + '{"step": 9950, "split": "train", "loss": -Infinity}\n').encode(), "exploded"),
        (lambda text: (text + text).encode(), "restarted"),
    ],
)  # fmt: skip
def test_damaged_logs_are_still_read(tmp_path: Path, change, verdict: str) -> None:  # type: ignore[no-untyped-def]
    text = write_jsonl(tmp_path / "log", RUN).read_text()
    (tmp_path / "log").write_bytes(change(text))
    diagnosis = one_object(arcuate("doctor", tmp_path / "log", "--json").stdout)
    assert diagnosis["primary"] == verdict
    assert set(diagnosis) >= {
        "primary", "secondary", "evidence", "since_step", "best_per", "best_step", "last_per", "causes", "suggestion"
    }  # fmt: skip
    assert ("runs" in diagnosis) == (verdict == "restarted")


KEYS = st.sampled_from(
    ["step", "epoch", "per", "val_per", "loss", "train_loss", "split", "tag", "seed", "lr", "grad_norm", "x"]
)
VALUES = st.one_of(
    st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=5), st.sampled_from(["train", "val", "nan"]),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.sampled_from(["per", "loss"]), st.floats(), max_size=2),
)  # fmt: skip


@settings(max_examples=cases(0.5))
@given(rows=st.lists(st.dictionaries(KEYS, VALUES, max_size=6), min_size=1, max_size=40))
def test_random_rows(tmp_path: Path, rows: list[dict]) -> None:
    (tmp_path / "file").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    sound(tmp_path / "file")
    (tmp_path / "file").write_text(json.dumps({"history": rows}), "utf-8")
    sound(tmp_path / "file")


def test_thinning_a_long_log_keeps_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 120_000
    if n < log_table._MAX_LENGTH:
        monkeypatch.setattr(log_table, "_MAX_LENGTH", 1 << 16)
        monkeypatch.setattr(log_table, "_THINNED_LENGTH", 1 << 14)
    per = falling(n=1200)
    lines = []
    for i in range(n):
        found = f', "val_per": {per[i * 1200 // n]:.5f}' if i % (n // 1200) == 0 else ""
        lines.append(f'{{"step": {i}, "train_loss": {"NaN" if i == 70_123 else 1.5}{found}}}')
    (tmp_path / "log").write_text("\n".join(lines))
    diagnosis = diagnose(tmp_path / "log")
    assert (diagnosis.primary, diagnosis.since_step) == ("exploded", 70_123)


def test_page_has_only_its_own_scripts_and_escapes_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "<script>alert(1)<", RUN)
    done = arcuate("doctor", path, "--dataset", "b2t24", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "page.html").read_text()
    check_page(html)
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert 'class="mark band"' in html and "healthy runs" in html


def test_diagnose_does_not_import_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write_jsonl(tmp_path / "log", RUN)
    code = f"import sys; from pathlib import Path; from arcuate.doctor import diagnose; diagnose(Path({str(path)!r}));"
    subprocess.run([sys.executable, "-c", code + " assert 'torch' not in sys.modules"], check=True)


def test_page_does_not_overwrite_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [json.dumps({"step": i, "val_per": 0.9 - 0.01 * i, "val_loss": 2.0 - 0.01 * i}) for i in range(60)]
    log.write_text("\n".join(rows), "utf-8")
    before = log.read_bytes()
    assert_refused(arcuate("doctor", log, "--html", log), "not an earlier page.html")
    assert log.read_bytes() == before
    page = tmp_path / "page.html"
    for _ in range(2):  # an earlier page is replaced
        assert arcuate("doctor", log, "--html", page).returncode == 0


def test_huge_values_are_an_explosion(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": i, "val_per": 0.5 if i < 20 else 1e308, "val_loss": 1.0 if i < 20 else 1e308} for i in range(40)]
    log.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    done = arcuate("doctor", log, "--json")
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)["primary"] == "exploded"


DIARY = """# Run 6: constant learning rate

- **PER**: 0.944 → 0.513 (46 % improvement, but showing signs of instability)
- **Best PER**: 0.512 at step 4600
- NaN gradients appear at step 4200, with a gradient norm of 17.0

## Result

Learning was faster than before, but the learning rate of 0.0015 became too high after step 4000.
"""


@pytest.mark.parametrize(
    "text",
    [
        DIARY,
        "PER: 0.944 -> 0.512 (best at step 4600)\n",
        "We trained for a few days and saw PER: 0.51 at step 4600.\nThen the loss: 3.2 rose again because of a bad"
        " batch at step 5000.\n",
    ],
    ids=["diary", "one line", "plain text"],
)
def test_documents_are_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text, "utf-8")
    assert_refused(arcuate("doctor", tmp_path / "notes.txt"), "document", "trainer")


@pytest.mark.shared
def test_written_diaries_are_not_read_as_logs(shared: Path) -> None:
    files = sorted((shared / "origin").glob("*.txt"))
    if not files:
        pytest.skip("the diaries (../shared/origin) are not available")
    for file in files:
        with pytest.raises(UserError, match="document"):
            diagnose(file)


def test_printed_output_with_sentences_between_its_lines_is_a_log(tmp_path: Path) -> None:
    lines = []
    for step in range(0, 4000, 100):
        per = 0.2 + 0.7 * 0.9 ** (step / 100)
        lines += [f"step {step}: val loss {3 * per:.3f} PER {per:.4f}"]
        lines += [f"The model has improved on all of the validation trials by {step}, saving a checkpoint now"]
    (tmp_path / "out.txt").write_text("\n".join(lines))
    assert len(diagnose(tmp_path / "out.txt").log.per) == 40  # type: ignore[union-attr]
