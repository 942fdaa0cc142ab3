"""User errors and closed streams on the command line: one sentence, before anything happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arcuate.cli.commands import GROUPS, SUCCESSORS
from arcuate.config import to_yaml
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, official_ancestor
from support.cli import assert_refused
from support.command import arcuate

COMMAND = [sys.executable, "-m", "arcuate"]


def bars(text: str) -> bool:
    """Whether a progress bar was drawn."""
    return "\u2501" in text or "0/?" in text or "left" in text.split("error:")[0]


def test_a_command_that_is_gone_names_its_successor() -> None:
    assert_refused(arcuate("push", "runs/a"), "use export RUN hf:ORG/NAME")
    known = {command.name for group in GROUPS.values() for command in group}
    assert not known & set(SUCCESSORS)
    for remedy in SUCCESSORS.values():
        named = remedy.removeprefix("use ").split()
        first_words = {name.split()[0] for name in known}
        assert not remedy.startswith("use ") or named[0] in first_words or not named[0].isalpha(), remedy


# --- extends -----------------------------------------------------------------------------------------------


def test_extends_is_read_from_the_folder_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    (mine / "parts").mkdir(parents=True)
    elsewhere.mkdir()
    (mine / "parts" / "base.yaml").write_text("extends: more.yaml\ntrain: {steps: 77}\n")
    (mine / "parts" / "more.yaml").write_text("extends: official-exact\ntrain: {log_every: 3}\n")
    (mine / "child.yaml").write_text("extends: parts/base.yaml\n")
    (elsewhere / "more.yaml").write_text("extends: tiny\ntrain: {log_every: 5}\n")
    (mine / "lost.yaml").write_text("extends: more.yaml\n")
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe("../mine/child.yaml")
    assert (recipe.train.steps, recipe.train.log_every) == (77, 3)
    assert official_ancestor("../mine/child.yaml") == "b2t25-gru"
    with pytest.raises(UserError, match=r"no file named 'more\.yaml' .*mine/lost\.yaml"):
        load_recipe("../mine/lost.yaml")


def test_the_recipe_of_a_run_needs_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: b2t25-gru\ntrain: {steps: 77}\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\n")
    recipe = load_recipe(str(tmp_path / "child.yaml"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(recipe))
    (tmp_path / "base.yaml").unlink()
    again = load_recipe(str(tmp_path / "run"))
    assert again == recipe and again.extends == "b2t25-gru"


def test_a_recipe_that_extends_itself_by_another_path_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: ./b.yaml\n")
    (tmp_path / "b.yaml").write_text(f"extends: {tmp_path}/./a.yaml\n")
    with pytest.raises(UserError, match="extends itself"):
        load_recipe(str(tmp_path / "a.yaml"))


# --- numbers out of range ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--difficulty", "1e-300"],
        ["--difficulty", "1e300"],
        ["--seed", str(10**400)],
        ["--seed", "-1"],
        ["--sessions", "-1"],
        ["--trials", "-5"],
        ["--electrodes", "0"],
        ["--layout", "b2t26"],
    ],
    ids=lambda a: a[0] + a[1][:8],
)
def test_simulate_rejects_before_a_progress_bar_appears(tmp_path: Path, arguments: list[str]) -> None:
    done = arcuate("simulate", tmp_path / "out", *arguments)
    assert_refused(done)
    assert not bars(done.stderr), done.stderr
    assert not list(tmp_path.iterdir())


# --- streams that end --------------------------------------------------------------------------------------


def into_a_closed_pipe(stream: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    try:
        return subprocess.run([*COMMAND, *arguments], **streams, text=True, check=False)
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["recipes", "list", "--json"], ["--help"]])
def test_a_broken_pipe_prints_no_traceback(arguments: list[str]) -> None:
    done = into_a_closed_pipe("stdout", *arguments)
    assert done.stderr == "" and (done.returncode == 141 or (arguments == ["--help"] and done.returncode))


def shell(line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", line, "sh", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_closed_stdout_prints_no_traceback(tmp_path: Path) -> None:
    done = shell('"$@" >&-', "recipes", "list", "--json")
    assert done.returncode == 2 and "stdout is closed" in done.stderr and "Traceback" not in done.stderr
    simulate = ["simulate", tmp_path / "out", "--sessions", 1, "--trials", 4, "--electrodes", 4]
    for arguments in (simulate, ["prepare", tmp_path / "out", tmp_path / "store"]):
        done = shell('"$@" >&-', *arguments)
        assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_command_continues_when_stderr_is_closed(tmp_path: Path) -> None:
    assert shell('"$@" 2>&-', "recipes", "show", "nothing").returncode == 2
    arguments = ["simulate", str(tmp_path / "out"), "--sessions", "1", "--trials", "8", "--electrodes", "4"]
    done = into_a_closed_pipe("stderr", *arguments, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["trials"]["train"] == 6


# --- demo --------------------------------------------------------------------------------------------------


@pytest.fixture
def old_demo(tmp_path: Path) -> Path:
    """What an earlier demo left behind."""
    (tmp_path / "data" / "store").mkdir(parents=True)
    (tmp_path / "data" / ".made-by-demo").touch()
    (tmp_path / "run").mkdir()
    trained_on = {"data": {"path": str((tmp_path / "data" / "store").resolve())}}
    (tmp_path / "run" / "environment.json").write_text(json.dumps(trained_on))
    return tmp_path


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return arcuate("demo", "--run", folder / "run", "--data", folder / "data", *arguments)


@pytest.mark.parametrize(
    ("override", "word"),
    [("train.stepz=5", "train.steps"), ("runtime.device=cuda:77", "device"), ("nonsense", "key.sub=value")],
)
def test_demo_rejects_overrides_before_it_removes_anything(old_demo: Path, override: str, word: str) -> None:
    before = sorted(old_demo.rglob("*"))
    assert_refused(demo(old_demo, override), word)
    assert sorted(old_demo.rglob("*")) == before


def test_demo_removes_nothing_if_either_folder_is_not_its_own(old_demo: Path) -> None:
    (old_demo / "data" / ".made-by-demo").unlink()
    before = sorted(old_demo.rglob("*"))
    assert_refused(demo(old_demo), "--data")
    assert sorted(old_demo.rglob("*")) == before


def test_demo_rejects_a_file_and_folders_within_one_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run, data in (("file", "data"), ("run", "file"), ("same", "same"), ("data/run", "data")):
        assert_refused(arcuate("demo", "--run", tmp_path / run, "--data", tmp_path / data))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- train -------------------------------------------------------------------------------------------------


def test_a_run_folder_in_use_is_rejected_before_any_message(cohort_store: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    done = arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path / "run")
    assert_refused(done, "--resume")
    assert "parameters" not in done.stderr
