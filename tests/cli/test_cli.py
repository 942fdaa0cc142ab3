"""Command line: exit codes, one-sentence errors, one line of JSON, no torch where it is not needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import NO_TORCH, assert_refused, one_object
from support.command import arcuate

__all__ = ["NO_TORCH", "arcuate", "assert_refused", "one_object"]


def test_help_lists_the_commands_in_workflow_order() -> None:
    text = arcuate("--help").stdout
    places = [
        text.index(f"│ {name} ") for name in ("demo", "simulate", "prepare", "recipes", "train", "evaluate", "report")
    ]
    assert places == sorted(places)


def test_a_process_of_its_own_prints_the_same() -> None:
    for arguments in (["recipes", "list"], ["train", "tiny", "--data", "nowhere", "--run", "r"]):
        fresh = subprocess.run([sys.executable, "-m", "arcuate", *arguments], capture_output=True, text=True)
        here = arcuate(*arguments)
        assert (fresh.returncode, fresh.stdout, fresh.stderr) == (here.returncode, here.stdout, here.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["recipes", "list"], ["decode", "--help"]])
def test_commands_without_a_model_import_no_torch(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_simulate_prepare_and_report_import_no_torch(tmp_path: Path) -> None:
    source, store = str(tmp_path / "source"), str(tmp_path / "store")
    for arguments in (
        ["simulate", source, "--sessions", "1", "--trials", "8", "--electrodes", "8"],
        ["prepare", source, store],
    ):
        done = subprocess.run(
            [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_recipes_show_counts_the_published_parameters() -> None:
    shown = one_object(arcuate("recipes", "show", "b2t25-gru", "--json").stdout)
    assert shown["n_parameters"] == 44_315_177
    assert shown["optimizer"]["eps"] == 0.1
    assert one_object(arcuate("recipes", "show", "b2t24-gru", "--json").stdout)["n_parameters"] == 133_845_033


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "tiny", "--data", "nowhere", "--run", "r"], ["nowhere"]),
        (["train", "tinny", "--data", "nowhere", "--run", "r"], ["tiny"]),
        (["train", "tiny", "--data", "nowhere", "--run", "r", "train.stepz=2"], ["train.steps"]),
        (["evaluate", "nowhere"], ["nowhere"]),
        (["evaluate", "."], ["recipe.yaml"]),
        (["report", "nowhere"], ["nowhere"]),
        (["prepare", "nowhere", "store"], ["nowhere"]),
        (["prepare", ".", "store"], ["hdf5"]),
        (["simulate", "out", "--layout", "b2t26"], ["b2t25"]),
        (["simulate", "out", "--difficulty", "brutal"], ["brutal"]),
        (["import", "nowhere", "out", "--kind", "nejm"], ["nowhere"]),
        (["recipes", "show", "nothing"], ["known recipes"]),
        (["frobnicate"], ["frobnicate"]),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = arcuate(*arguments, cwd=tmp_path)
    assert_refused(done, *words)
    assert not list(tmp_path.iterdir())


def test_a_recipe_for_other_channels_is_rejected_before_anything_is_written(cohort_store: Path, tmp_path: Path) -> None:
    done = arcuate("train", "b2t25-gru", "--data", cohort_store, "--run", tmp_path / "run")
    assert_refused(done, "512", "32")
    assert not (tmp_path / "run").exists()
