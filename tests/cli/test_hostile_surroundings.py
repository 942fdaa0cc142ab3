"""Limits of the system and hostile names: one sentence, exit code 2, and no escape sequences on the terminal."""

import contextlib
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import cli
from arcuate.config import read_yaml
from arcuate.data.prepare import prepare
from arcuate.data.quality import find_problems
from arcuate.data.store import Store, is_store
from arcuate.data.trial import Trial
from arcuate.decoding.frame_files import read_frames
from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl
from arcuate.insight.ledger import write_ledger
from arcuate.insight.runs import list_runs
from arcuate.language.ngram.mix import mix_models
from arcuate.language.ngram.open import export_model, open_model
from arcuate.models.io import load_model
from support.command import arcuate
from support.fabricate_runs import make_run
from support.recordings import FakeTrial, noise, write_hdf5

GOLDEN = Path(__file__).parents[1] / "golden"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: np.ones(2**50), "not enough memory ("),
        (lambda: torch.ones(2**50), "not enough memory ("),
        (lambda: fail(OSError(12, "Cannot allocate memory", "folder")), "not enough memory ("),
        (lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried 20.00 MiB.")), "memory (CUDA .*_DEVICES"),
        (lambda: fail(RuntimeError("CUDA error: out of memory")), "memory (CUDA .*_DEVICES"),
        (lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")), "memory (CUDA .*_DEVICES"),
        (lambda: fail(RuntimeError("CUDA: no kernel image is available\nCompile …")), "a build of .*_DEVICES"),
        (lambda: fail(RuntimeError("CUDA error: device(s) busy or unavailable")), "end the program .*_DEVICES"),
        (
            lambda: fail(OSError(2, "No usable temporary directory found in ['/tmp']")),
            "['/tmp']; free some disk space,",
        ),
        (lambda: Path("a\0b").stat(), "which no path can contain"),  # such as the path of a store in a run
        (lambda: Path("\ud800").stat(), "which no path can contain"),
    ],
)
def test_what_the_system_lacks_is_one_sentence_with_its_remedy(
    attempt: Callable[[], object], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "run", lambda words: attempt())
    monkeypatch.setattr(cli, "_end_on_signals", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and re.search(".*".join(map(re.escape, said.split(".*"))), message), message
    assert not ("_DEVICES" in said and "ulimit" in message)


@pytest.mark.parametrize(
    "read",
    [
        lambda: Store.open(GOLDEN / "store").read_bins(Store.open(GOLDEN / "store").trials[0]),
        lambda: load_model(GOLDEN / "model"),
        lambda: read_frames(GOLDEN / "scores.npz"),
        lambda: open_model(GOLDEN / "words.alm"),
        lambda: read_json(GOLDEN / "model" / "model.json"),
        lambda: read_jsonl(GOLDEN / "run" / "metrics.jsonl"),
        lambda: read_yaml(GOLDEN / "run" / "recipe.yaml"),
    ],
    ids=["store", "weights", "frame scores", "language model", "JSON", "JSON lines", "YAML"],
)
def test_files_that_cannot_be_opened_are_not_called_damaged(read: Callable[[], object]) -> None:
    read()  # with everything imported that it needs
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    messages = []
    try:
        for spare in range(3):  # a reader may open several files
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + spare, hard))
            with contextlib.suppress(OSError):  # which the command line reports
                try:
                    read()
                except UserError as error:
                    messages.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all("too many files are open; raise the limit" in message for message in messages), messages


def test_escape_sequences_do_not_reach_the_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / f"run{ESCAPE}")
    for command in (["runs"], ["runs", "ledger"]):
        done = arcuate(*command, tmp_path / "runs")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr and "\\x1b" in done.stdout + done.stderr
    (tmp_path / "text.txt").write_text(f"the bank {ESCAPE}\n")
    done = arcuate("lm", "score", GOLDEN / "words.alm", tmp_path / "text.txt")
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\\x1b" in done.stdout


def test_paths_that_are_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    make_run(folder / "run")
    write_ledger(folder, folder / "diary.md", diagnose=diagnose)
    assert "bad" in (folder / "diary.md").read_text()
    shutil.copytree(GOLDEN / "model", folder / "model")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_model(folder / "model")


def test_huge_values_are_a_quality_problem() -> None:
    bins = noise(60)
    bins[3, 2] = 3e38
    trial = Trial("t15.2023.08.11", "train", 0, 1, bins, np.array([3], np.int32), "yes")
    assert [problem.reason for problem in find_problems(trial)] == ["extreme values"]
    bins[4, 1] = np.inf
    assert [problem.reason for problem in find_problems(trial)] == ["non-finite", "extreme values"]


def test_drift_of_huge_values(tmp_path: Path) -> None:
    for day in (11, 13):
        trials = [FakeTrial(noise(200, 32, seed=i) * np.float32(1e37)) for i in range(4)]
        write_hdf5(tmp_path / "source" / f"t15.2023.08.{day}" / "data_train.hdf5", trials)
    prepare(tmp_path / "source", tmp_path / "store")
    done = arcuate("report", tmp_path / "store")
    assert "Traceback" not in done.stderr and done.returncode in (0, 2), done.stderr


def test_damaged_language_models_are_not_mixed_or_exported(tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "words.alm").read_bytes())
    length = int.from_bytes(content[:8], "little")
    values = json.loads(content[8 : 8 + length])["log_probs"]["data_offsets"]
    content[8 + length + values[0] + 41] ^= 0x10
    (tmp_path / "bad.alm").write_bytes(content)
    open_model(tmp_path / "bad.alm")  # mapped, without reading it completely
    for attempt in (
        lambda: export_model(tmp_path / "bad.alm", tmp_path / "out.arpa"),
        lambda: mix_models([tmp_path / "bad.alm", GOLDEN / "words.alm"], tmp_path / "out.alm", weights=[0.5, 0.5]),
    ):
        with pytest.raises(UserError, match="damaged"):
            attempt()
    assert not (tmp_path / "out.arpa").exists() and not (tmp_path / "out.alm").exists()


# --- files without an end ---


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "environment.json", "metrics.jsonl", "incidents.jsonl", "results/val.json"]
)
def test_a_pipe_or_device_in_a_run_hides_no_other_run(tmp_path: Path, name: str) -> None:
    """A run from elsewhere may hold a link to /dev/zero or a pipe, which a reader would wait for or read for ever."""
    make_run(tmp_path / "good")
    for kind in ("device", "pipe"):
        file = make_run(tmp_path / kind).path / name
        file.unlink(missing_ok=True)
        file.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(file)
    found = {entry.name: entry for entry in list_runs(tmp_path, diagnose=diagnose)}
    assert sorted(found) == ["device", "good", "pipe"] and not found["good"].problems
    for kind in ("device", "pipe"):
        assert any("not a file" in problem for problem in found[kind].problems), found[kind].problems


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "state.json"])
def test_a_pipe_among_the_files_of_a_model_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(next((GOLDEN / "run" / "checkpoints").glob("step-*")), folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((UserError, OSError), match=name):  # the command line prints both as one sentence
        load_model(folder)


def test_a_pipe_in_a_store_is_refused(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "source" / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())])
    prepare(tmp_path / "source", tmp_path / "store")
    file = next((tmp_path / "store" / "sessions").glob("*.npy"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match=file.name):
        Store.open(tmp_path / "store")
    (tmp_path / "store" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "store" / "manifest.json")
    assert not is_store(tmp_path / "store")


def test_a_sparse_log_is_refused_by_its_size(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    os.truncate(run.metrics_file, 2**40)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: it has 1,099,511,627,776 bytes"):
        run.metrics()


def test_pipes_of_the_shell_are_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"id": "a"}\n')
    os.close(writing)
    assert read_jsonl(Path(f"/dev/fd/{reading}")) == [{"id": "a"}]
    os.close(reading)
