"""The list of runs and the diary, including damaged run folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import write_json, write_jsonl
from arcuate.insight.ledger import escape_markdown, ledger_page, write_ledger
from arcuate.insight.runs import find_runs, list_runs, result_changes
from arcuate.run import Run, open_run
from support.cli import NO_TORCH, assert_refused
from support.command import arcuate
from support.fabricate_runs import make_run, write_val, write_words


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in list_runs(folder, diagnose=diagnose).to_dicts()}


def test_runs_are_found_at_any_depth_and_sorted_by_start(tmp_path: Path) -> None:
    make_run(tmp_path / "late", minute=9)
    make_run(tmp_path / "sweep" / "trial-0000", minute=5)
    make_run(tmp_path / "first", minute=1)
    (tmp_path / "first" / "results" / "inner").mkdir()
    assert list(rows_of(tmp_path)) == ["first", "sweep/trial-0000", "late"]


def test_run_folder_itself_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "only")
    assert list(rows_of(tmp_path / "only")) == ["only"]


def test_best_last_steps_and_verdict_come_from_the_log(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.25)
    row = rows_of(tmp_path)["a"]
    assert row["steps"] == row["planned_steps"] == row["best_step"] == 600
    assert row["best_per"] == pytest.approx(0.25, abs=0.01) and row["last_per"] == row["best_per"]
    assert row["verdict"] is not None and row["problems"] == []
    assert row["results"]["val"]["n_trials"] == 80


def test_parent_is_the_nearest_earlier_run(tmp_path: Path) -> None:
    make_run(tmp_path / "a", minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5", "schedule.peak_lr=0.01"], minute=1)
    make_run(tmp_path / "c", ["encoder.dropout=0.5", "schedule.peak_lr=0.02"], minute=2)
    rows = rows_of(tmp_path)
    assert (rows["a"]["parent"], rows["a"]["parent_kind"], rows["a"]["changes"]) == ("tiny", "recipe", [])
    assert rows["b"]["parent"] == "a" and len(rows["b"]["changes"]) == 2
    assert rows["c"]["parent"] == "b"
    assert rows["c"]["changes"] == [{"path": "schedule.peak_lr", "before": 0.01, "after": 0.02}]


def test_execution_settings_are_not_changes(tmp_path: Path) -> None:
    make_run(tmp_path / "a", minute=0)
    make_run(tmp_path / "b", ["runtime.threads=3", "data.workers=2", "train.log_every=7"], minute=1)
    assert rows_of(tmp_path)["b"]["changes"] == []


def test_run_on_other_data_is_not_a_parent(tmp_path: Path) -> None:
    make_run(tmp_path / "a", minute=0)
    make_run(tmp_path / "b", ["train.seed=4"], minute=1, data={"hashes": {"train": "other"}})
    assert rows_of(tmp_path)["b"]["parent"] == "tiny"


def test_source_of_initial_weights_is_the_parent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ["encoder.dropout=0.4"], minute=0)
    make_run(tmp_path / "z", minute=1)
    make_run(tmp_path / "b", minute=2, parent=f"{run.path}@best")
    row = rows_of(tmp_path)["b"]
    assert (row["parent"], row["parent_kind"]) == ("a", "weights")
    assert [c["path"] for c in row["changes"]] == ["encoder.dropout"]


def test_latest_of_equally_near_runs_is_the_parent(tmp_path: Path) -> None:
    for i in range(3):
        make_run(tmp_path / f"r{i}", [f"train.seed={i}"], minute=i)
    assert [data.parent.name for data in list_runs(tmp_path) if data.parent] == [
        "tiny",
        "r0",
        "r1",
    ]


DAMAGE = {
    "no recipe": lambda p: (p / "recipe.yaml").unlink(),
    "recipe is a list": lambda p: (p / "recipe.yaml").write_text("[1, 2]"),
    "recipe of another version": lambda p: (p / "recipe.yaml").write_text("name: x\nencoder: {kind: quantum}"),
    "binary log": lambda p: (p / "metrics.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe"),
    "broken log": lambda p: (p / "metrics.jsonl").write_text('{"step": 1\nnonsense\n'),
    "unusual log": lambda p: (p / "metrics.jsonl").write_text(
        '{"step": "x", "split": "val", "per": "y"}\n{"step": 1e400}\n'
    ),
    "empty log": lambda p: (p / "metrics.jsonl").write_text(""),
    "broken environment": lambda p: (p / "environment.json").write_text("{"),
    "data is not a mapping": lambda p: (p / "environment.json").write_text('{"data": 3, "started": 7}'),
    "split is not text": lambda p: (p / "environment.json").write_text('{"selected_on": ["val"]}'),
    "splits of the log are not text": lambda p: (p / "metrics.jsonl").write_text('{"step": 1, "split": {"a": []}}\n'),
    "broken results": lambda p: (p / "results" / "val.json").write_text("[]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_run_is_listed_and_does_not_affect_others(tmp_path: Path, kind: str) -> None:
    make_run(tmp_path / "intact")
    make_run(tmp_path / "broken", minute=1)
    DAMAGE[kind](tmp_path / "broken")
    rows = rows_of(tmp_path)
    assert rows["intact"]["problems"] == [] and rows["intact"]["best_per"] is not None
    assert "broken" in rows
    if kind not in ("unusual log", "empty log", "data is not a mapping") and "not text" not in kind:
        assert rows["broken"]["problems"]
    assert "broken" in write_ledger(tmp_path, diagnose=diagnose)


@pytest.mark.parametrize("text", ["seed: !!bool maybe", "seed: 2024-99-99", "a: &a [*a]", "seed: !!int ''"])
def test_one_invalid_recipe_does_not_affect_other_runs(tmp_path: Path, text: str) -> None:
    make_run(tmp_path / "good")
    make_run(tmp_path / "bad", minute=1).recipe_file.write_text(text)
    good, bad = list_runs(tmp_path, diagnose=diagnose)
    assert good.verdict and not good.problems
    assert any("recipe.yaml" in problem for problem in bad.problems)


def test_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "recipe.yaml").write_text("name: mine")
    with pytest.raises(UserError, match="contains no runs"):
        find_runs(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_runs(tmp_path / "nowhere")


def test_diary_has_purpose_changes_result_and_finding(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5", "notes=more dropout against overfitting"], per=0.2, minute=1)
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "more dropout against overfitting" in text
    assert "`encoder.dropout`: 0.2 → 0.5" in text
    assert "b is better than a by" in text and "the only setting that changed" in text
    assert "One run per side" in text


def test_several_changes_are_not_attributed_to_one(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5", "schedule.peak_lr=0.01"], per=0.2, minute=1)
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "2 settings changed at once, so the difference cannot be attributed to one of them" in text


def test_untested_differences_are_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5"], per=0.2, minute=1, results=False)
    assert "not tested for significance (both runs must be evaluated on the same split)" in write_ledger(
        tmp_path, diagnose=diagnose
    )


def test_runs_scored_on_different_trials_are_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0)
    run = make_run(tmp_path / "b", ["encoder.dropout=0.6"], per=0.2, minute=2)
    write_val(run, 0.2, n_trials=50)
    assert "different trials" in write_ledger(tmp_path, diagnose=diagnose)


def test_text_from_a_folder_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "a", ['notes="<script>alert(1)</script> | [x](http://y) `z`\\n# Heading"'])
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "<script>" not in text and "\n# Heading" not in text
    assert escape_markdown("a|b") == "a\\|b"


def test_runs_and_ledger_commands(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", minute=0)
    make_run(tmp_path / "runs" / "b", ["schedule.peak_lr=0.01"], minute=1)
    listed = arcuate("runs", tmp_path / "runs", "--json")
    assert len(listed.stdout.splitlines()) == 1
    rows = json.loads(listed.stdout, parse_constant=lambda c: pytest.fail(c))
    assert [r["name"] for r in rows] == ["a", "b"] and rows[1]["changes"][0]["path"] == "schedule.peak_lr"
    shown = arcuate("runs", cwd=tmp_path)
    assert shown.returncode == 0 and "peak_lr 0.003 → 0.01" in shown.stdout
    assert arcuate("runs", "ledger", tmp_path / "runs", "--out", tmp_path / "DIARY.md").returncode == 0
    assert (tmp_path / "DIARY.md").read_text("utf-8") == arcuate("runs", "ledger", tmp_path / "runs").stdout


def test_command_line_errors_are_one_sentence(tmp_path: Path) -> None:
    assert_refused(arcuate("runs", tmp_path), "contains no runs")
    assert_refused(arcuate("runs", "ledger", tmp_path / "nowhere"), "nowhere")
    make_run(tmp_path / "a")
    assert_refused(arcuate("runs", "ledger", tmp_path, "--out", tmp_path), "is a folder")


@pytest.mark.parametrize("command", [["runs"], ["runs", "ledger"]])
def test_ledger_does_not_import_torch(tmp_path: Path, command: list[str]) -> None:
    make_run(tmp_path / "a")
    code = NO_TORCH.format(arguments=[*command, str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ablation(home: Path, label: str = "last") -> None:
    """An ablation of two factors with one seed, every arm scored at its last checkpoint."""
    arms = {
        "base": ([], 0.4), "eps": (["optimizer.eps=0.01"], 0.4), "noise": (["augment.white_noise_sd=0.9"], 0.2),
        "all": (["optimizer.eps=0.01", "augment.white_noise_sd=0.9"], 0.2),
    }  # fmt: skip
    for minute, (arm, (overrides, per)) in enumerate(arms.items()):
        run = make_run(home / arm / "seed-0", overrides, per=per, minute=minute, results=False)
        write_val(run, per, label=label)
    (home / "experiment.json").write_text("{}")


def test_ablation_arms_have_the_baseline_as_parent(tmp_path: Path) -> None:
    ablation(tmp_path / "abl")
    rows = rows_of(tmp_path)
    assert [r["parent"] for r in rows.values()] == ["tiny", *["abl/base/seed-0"] * 3]
    assert rows["abl/all/seed-0"]["parent_kind"] == "base"
    changed = [c["path"] for c in rows["abl/all/seed-0"]["changes"]]
    assert changed == ["augment.white_noise_sd", "optimizer.eps"]


def test_labelled_results_are_tested_and_not_marked_as_selected(tmp_path: Path) -> None:
    ablation(tmp_path / "abl")
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "abl/noise/seed-0 is better than abl/base/seed-0 by" in text
    assert "evaluated on val (last checkpoint)" in text
    assert "the arm `all` of an ablation" in text and "changed at once" not in text
    assert "not tested" not in text and "the split it was selected on" not in text


def test_best_checkpoint_on_its_own_split_is_marked_as_selected(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert "the split it was selected on" in write_ledger(tmp_path, diagnose=diagnose)


def test_ablation_verdict_precedes_its_runs(tmp_path: Path) -> None:
    ablation(tmp_path / "abl")
    assert "**Ablation abl** (4 of the runs): not judged yet" in write_ledger(tmp_path, diagnose=diagnose)
    (tmp_path / "abl" / "ablation.json").write_text('{"verdict": "noise caused it."}')
    assert "(4 of the runs): noise caused it." in write_ledger(tmp_path, diagnose=diagnose)


def test_differences_in_length_and_code_are_reported(tmp_path: Path) -> None:
    early = make_run(tmp_path / "a", per=0.4, minute=0, revision="a" * 40)
    lines = early.metrics_file.read_text().splitlines()
    early.metrics_file.write_text("\n".join(lines[:24]) + "\n")
    make_run(tmp_path / "b", ["encoder.dropout=0.5"], per=0.2, minute=1, revision="b" * 40)
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "a reached step 300 of 600" in text
    assert f"different code ({'a' * 12} and {'b' * 12})" in text


def test_changes_have_full_names_and_lines_fit_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "runs"
    make_run(home / "a", minute=0)
    make_run(home / "a-run-with-quite-a-long-name", ["encoder.dropout=0.5", "schedule.peak_lr=0.01"], minute=1)
    monkeypatch.setenv("COLUMNS", "60")  # a new process, because a forked one has already read its terminal size
    command = [sys.executable, "-m", "arcuate", "runs"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert all(len(line) <= 60 for line in lines), lines
    text = " ".join(" ".join(lines).split())
    assert "relative to a: encoder.dropout 0.2 → 0.5, schedule.peak_lr 0.003 → 0.01" in text
    assert "encoder.dropout 0.2 → 0.5" in write_ledger(home, diagnose=diagnose).partition("##")[0]


# Parents, targets, words and the summary over all runs


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["transducer.width=64"], []),
        (["validate.lm=other"], ["validate.lm=none"]),
        (["augment.time_masks.probability=0.5"], []),
    ],
)
def test_settings_that_resolve_to_the_same_behaviour_are_not_changes(before: list[str], after: list[str]) -> None:
    assert result_changes(load_recipe("tiny", before), load_recipe("tiny", after)) == ()


def test_precision_that_falls_back_is_not_a_change(tmp_path: Path) -> None:
    bf16 = "train.precision.kind=bf16"
    make_run(tmp_path / "a", minute=0, precision="fp32")
    make_run(tmp_path / "b", [bf16], minute=1, precision="fp32")
    assert rows_of(tmp_path)["b"]["changes"] == []


def test_diary_says_whether_targets_were_met(tmp_path: Path) -> None:
    target = "target.per=0.3"
    make_run(tmp_path / "good", ["purpose=Lower noise should help", target], per=0.2, minute=0)
    make_run(tmp_path / "bad", [target], per=0.5, minute=1)
    early = make_run(tmp_path / "early", ["target.per=0.01"], per=0.5, minute=2)
    early.metrics_file.write_text("".join(early.metrics_file.read_text().splitlines(keepends=True)[:20]))
    text, rows = write_ledger(tmp_path, diagnose=diagnose), rows_of(tmp_path)
    assert [rows[name]["target"]["status"] for name in ("good", "bad", "early")] == ["met", "missed", "open"]
    assert "**Purpose:** Lower noise should help." in text
    assert "PER ≤ 30.0 %: **met**" in text and "**missed** (best PER" in text
    assert "**open, the run is not finished**" in text


def test_target_for_words_is_judged_by_what_was_decoded_later(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ["target={wer: 0.1}"])
    assert rows_of(tmp_path)["a"]["target"]["status"] == "missed"
    write_words(run, 0.09)
    row = rows_of(tmp_path)["a"]
    assert (row["target"]["status"], row["target"]["step"]) == ("met", 600)


def test_wer_stands_beside_per(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", per=0.2)
    make_run(tmp_path / "b", ["encoder.dropout=0.5"], per=0.3, minute=1)
    write_words(run, 0.0914)
    row, text = rows_of(tmp_path)["a"], write_ledger(tmp_path, diagnose=diagnose)
    assert row["best_wer"] == row["words"]["val"]["wer"] == 0.0914 and "val.words" not in row["results"]
    assert "decoded to words on val: WER 9.1 % (7.1 % to 11.1 %), language model small 3-gram" in text
    assert "| 9.1 % |" in text
    assert "Lowest WER: a, 9.1 % on val" in text
    shown = arcuate("runs", tmp_path).stdout
    assert "WER" in shown and "9.1 %" in shown


def test_best_results_are_ranked_within_a_data_set(tmp_path: Path) -> None:
    for i, per in enumerate((0.3, 0.1, 0.2)):
        make_run(tmp_path / f"r{i}", [f"encoder.dropout=0.{i}"], per=per, minute=i)
    other = {"path": "/x", "hashes": {"train": "f" * 64}, "sessions": []}
    make_run(tmp_path / "elsewhere", per=0.01, minute=5, data=other)
    text = write_ledger(tmp_path, diagnose=diagnose)
    first = text.split("## Best results so far, data set 1")[1].split("##")[0]
    assert [line.split(":")[0] for line in first.strip().splitlines()] == ["1. r1", "2. r2", "3. r0"]
    assert "1. elsewhere" in text.split("## Best results so far, data set 2")[1]


def test_summary_of_what_helped(tmp_path: Path) -> None:
    """Only significant differences between finished runs count."""
    make_run(tmp_path / "a", per=0.3, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.1"], per=0.2, minute=1)
    make_run(tmp_path / "c", ["augment.white_noise_sd=0.9"], per=0.45, minute=2)
    make_run(tmp_path / "d", ["augment.offset_sd=0.3"], per=0.3, minute=3, seed=5)
    stopped = make_run(tmp_path / "e", ["encoder.width=64"], per=0.05, minute=4)
    stopped.metrics_file.write_text("".join(stopped.metrics_file.read_text().splitlines(keepends=True)[:20]))
    text = write_ledger(tmp_path, diagnose=diagnose).split("## What helped and what did not")[1].split("\n## ")[0]
    helped, rest = text.split("**Made it worse:**")
    worse, unclear = rest.split("**Made no significant difference:**")
    assert "**Helped:**" in helped and "encoder.dropout 0.2 → 0.1" in helped and "b against a" in helped
    assert "augment.white_noise_sd 0.5 → 0.9" in worse and "c against a" in worse
    assert "augment.offset_sd 0.2 → 0.3" in unclear
    assert "encoder.width" not in text
    assert "Holm-adjusted for 3 comparisons" in text


def write_decoded(run: Run, wer: float, lm: str = "small 3-gram") -> None:
    """Sixty decoded sentences of eight words, a share of them with one error."""
    rows = [{"id": f"s1/val/{i:04d}", "errors": int(i < 60 * 8 * wer), "n_words": 8} for i in range(60)]
    write_jsonl(run.results_file("val", "words"), rows)
    write_json(run.results_file("val", "words", "json"), {"wer": wer, "lm": lm, "split": "val", "step": 600})


def test_wer_is_tested_for_significance_too(tmp_path: Path) -> None:
    """PER does not differ here, WER does."""
    for i, (name, wer) in enumerate((("a", 0.02), ("b", 0.1))):
        changed = ["encoder.dropout=0.1"] if i else []
        write_decoded(make_run(tmp_path / name, changed, per=0.3, minute=i), wer)
    text = write_ledger(tmp_path, diagnose=diagnose)
    summary = text.split("## What helped and what did not")[1].split("\n## ")[0]
    assert "Holm-adjusted for 2 comparisons" in summary
    worse, unclear = summary.split("**Made it worse:**")[1].split("**Made no significant difference:**")
    assert "points of WER" in worse and "points of PER" in unclear
    assert "b is worse than a by 7.9 percentage points of WER" in text


def test_wer_of_different_language_models_is_not_compared(tmp_path: Path) -> None:
    for i, lm in enumerate(("small 3-gram", "large 5-gram")):
        changed = ["encoder.dropout=0.1"] if i else []
        write_decoded(make_run(tmp_path / "ab"[i], changed, per=0.3, minute=i), 0.02 + 0.1 * i, lm)
    text = write_ledger(tmp_path, diagnose=diagnose)
    assert "WER not compared" in text and "lm small 3-gram and large 5-gram" in text
    assert "points of WER" not in text


def test_damaged_word_results_are_reported(tmp_path: Path) -> None:
    for i in range(2):
        changed = ["encoder.dropout=0.1"] if i else []
        run = make_run(tmp_path / "ab"[i], changed, per=0.3, minute=i)
        write_decoded(run, 0.02)
        write_jsonl(run.results_file("val", "words"), [{"id": "x", "errors": "two", "n_words": 3}])
    assert "lacks the trial or word counts" in write_ledger(tmp_path, diagnose=diagnose)


def test_finished_calibration_is_not_called_too_short(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "calibrated", ["train.steps=60"])
    rows = [row for row in run.metrics() if row["split"] == "train" or row["step"] == 60]
    write_jsonl(run.metrics_file, rows)
    assert list_runs(tmp_path / "runs", diagnose=diagnose).runs[0].verdict == "too_short"
    write_json(run.calibration_file, {"curve": []})
    assert list_runs(tmp_path / "runs", diagnose=diagnose).runs[0].verdict == "calibrated"


def test_folders_of_a_command_in_progress_are_not_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "first")
    make_run(tmp_path / "runs" / ".cal1.part" / "second")
    assert [entry.name for entry in list_runs(tmp_path / "runs", diagnose=diagnose)] == ["first"]


def test_misspelt_run_gets_the_nearest_one(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    with pytest.raises(UserError, match=r"did you mean .*/first\?"):
        open_run(tmp_path / "frist")
    with pytest.raises(UserError, match="arcuate train"):
        open_run(tmp_path / "xyz")


def test_the_page_of_the_diary_shows_names_as_they_are(tmp_path: Path) -> None:
    make_run(tmp_path / "a|b<i>[c]*")
    page = ledger_page(write_ledger(tmp_path, diagnose=diagnose))
    assert "<td>a|b&lt;i&gt;[c]*</td>" in page and "<h2>1. a|b&lt;i&gt;[c]*: healthy</h2>" in page
    assert "<li>" in page and "|---|" not in page and "<i>" not in page
