"""Completion, error messages with a valid form, singular and plural, progress bars."""

from functools import reduce
from pathlib import Path

import pytest

from arcuate.cli.commands import COMMANDS, make_app
from arcuate.cli.show_data import leakage_line, print_summary
from arcuate.config import to_yaml
from arcuate.data.prepare import prepare
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import Evaluation, Provenance
from arcuate.evaluation.trials import PhonemeMetrics
from arcuate.experiments.recipe import compare_recipes, load_recipe, recipe_names, setting_for
from arcuate.experiments.train import train, worker_count
from arcuate.progress import counted
from arcuate.run import Run
from support.cli import assert_refused
from support.command import arcuate
from support.recordings import FakeTrial, noise, write_hdf5


def completed(words: str) -> list[str]:
    """What the script of a shell gets for the last word."""
    done = arcuate("__complete", *words.split(" ")[1:])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.partition("\x1fbegin")[2].split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_shells_know_commands_options_and_choices(shell: str) -> None:
    script = make_app().generate_completion(shell=shell)
    for word in ("simulate", "recipes", "electrodes", "falcon-h2", "__complete"):
        assert word in script


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    app = make_app()
    command = reduce(lambda group, word: group[word], name.split(), app)
    found = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    assert [argument.name for argument in found if argument.show and not argument.parameter.help] == []
    assert command.help


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("arcuate train ", recipe_names()),
        ("arcuate train b2t24-", ["b2t24-best", "b2t24-gru", "b2t24-transformer"]),
        ("arcuate recipes show ti", ["tiny", "tiny-best", "tiny-transformer"]),
        ("arcuate recipes diff tiny ti", ["tiny", "tiny-best", "tiny-transformer"]),
        ("arcuate evaluate run --split ", ["val", "test", "dev", "train"]),
    ],
)
def test_the_shell_completes_names(words: str, expected: list[str]) -> None:
    assert completed(words) == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.kind=constant", ["schedule of kind constant needs schedule.peak_lr", "schedule.peak_lr=VALUE"]),
        ("schedule.kind=cosine", ["constant, linear", "did you mean warmup_cosine"]),
        ("schedule=constant", ["schedule.kind=constant"]),
        ("data.sessions=x", ["expected a list", "data.sessions=[x]"]),
        ("data.batching.kind=foo", ["sessions, shuffled, bucketed"]),
    ],
)
def test_a_value_of_the_wrong_type_is_answered_with_a_valid_form(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        load_recipe("tiny", [override])
    for word in words:
        assert word in str(refused.value)
    load_recipe("tiny", ["schedule.kind=constant", "schedule.peak_lr=0.01", "data.sessions=[x]"])  # the forms suggested


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--steps", "train.steps"),
        ("--log-every", "train.log_every"),
        ("--dev-fraction", "data.dev_fraction"),
        ("--stepss", "train.steps"),
        ("--frobnicate", None),
        ("", None),
    ],
)
def test_an_option_that_is_a_setting_is_recognised(option: str, setting: str | None) -> None:
    assert setting_for(option) == setting
    if setting:
        assert_refused(arcuate("train", "tiny", option, "5", "--data", "x", "--run", "y"), f"{setting}=VALUE")


# --- recipes diff ------------------------------------------------------------------------------------------


def test_runs_can_be_compared(tmp_path: Path) -> None:
    for name, steps in (("one", 7), ("two", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(to_yaml(load_recipe("b2t25-gru", [f"train.steps={steps}"])))
    result = compare_recipes(tmp_path / "one", tmp_path / "two").to_dict()
    assert result["changes"] == [{"path": "train.steps", "before": 7, "after": 9}]
    result = compare_recipes(tmp_path / "one").to_dict()
    assert (result["a"], result["b"]) == ("b2t25-gru", str(tmp_path / "one"))
    assert result["changes"] == [{"path": "train.steps", "before": 120000, "after": 7}]


# --- words and numbers -------------------------------------------------------------------------------------


def test_one_item_is_counted_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (counted(1, "session"), counted(0, "session")) == ("1 session", "0 sessions")
    for split in ("train", "val"):
        write_hdf5(tmp_path / "source" / "t15.2023.08.11" / f"data_{split}.hdf5", [FakeTrial(noise(seed=1))])
    report = prepare(tmp_path / "source", tmp_path / "store").report
    print_summary(report, tmp_path / "store")
    assert "2 trials in 1 session, 8 channels" in capsys.readouterr().out
    assert report.leakage is not None
    line = leakage_line(report.leakage)
    assert "1 recording in two splits" in line and "1 of 1 val sentences in train" in line


def test_one_trial_gives_no_interval() -> None:
    metrics = PhonemeMetrics(0.2, None, None, None, 1, 1, 10, 2, 0, 0, None, {}, {}, None, None, None)
    provenance = Provenance("r", "tiny", "val", None, "dev", "best", 1, "greedy", None, "ctc", None, None)
    evaluation = Evaluation(Run(Path("r")), (), metrics, provenance)
    assert "no interval from a single trial, on 1 val trial:" in evaluation.summary()


def test_more_workers_than_cores_are_reported_and_not_started(
    monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path, messages: list[str]
) -> None:
    monkeypatch.setattr("arcuate.experiments.train.count_cores", lambda: 3)
    recipe = load_recipe("tiny", ["data.workers=200"])
    assert worker_count(recipe) == 3
    assert worker_count(load_recipe("tiny", ["data.workers=1"])) == 1
    train("tiny", cohort_store, tmp_path / "run", overrides={"data.workers": 200}, dry_run=True)
    assert "data.workers=200 exceeds the number of cores; using 3 workers" in messages
