"""The table of runs and the diary, including damaged run folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import append_jsonl, write_json, write_jsonl
from arcuate.insight.ledger import ledger_page, write_ledger
from arcuate.insight.report import write_report
from arcuate.insight.runs import find_runs, list_runs, result_changes
from arcuate.run import Run
from support.cli import NO_TORCH, assert_refused
from support.command import arcuate
from support.fabricate_runs import make_run, write_val, write_words


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in list_runs(folder, diagnose=diagnose).to_dicts()}


def diary(folder: Path) -> str:
    return write_ledger(folder, diagnose=diagnose)


def interrupt(run: Run, n_rows: int = 20) -> None:
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[:n_rows]))


# --- the table ---


def test_runs_are_found_at_any_depth_and_sorted_by_start(tmp_path: Path) -> None:
    make_run(tmp_path / "late", minute=9)
    make_run(tmp_path / "sweep" / "trial-0000", minute=5)
    make_run(tmp_path / "first", minute=1)
    make_run(tmp_path / ".cal1.part" / "second")  # of a command in progress
    (tmp_path / "first" / "results" / "inner").mkdir()
    assert list(rows_of(tmp_path)) == ["first", "sweep/trial-0000", "late"]
    assert list(rows_of(tmp_path / "late")) == ["late"]


def test_a_row_has_rates_steps_verdict_and_results(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.25)
    row = rows_of(tmp_path)["a"]
    assert row["steps"] == row["planned_steps"] == row["best_step"] == 600
    assert row["best_per"] == pytest.approx(0.25, abs=0.01) and row["last_per"] == row["best_per"]
    assert row["verdict"] is not None and row["problems"] == []
    assert row["results"]["val"]["n_trials"] == 80


def test_a_validation_that_a_rewind_undid_is_the_best_one(tmp_path: Path) -> None:
    """Its checkpoint is kept as `best`, and `evaluate` scores it."""
    run = make_run(tmp_path / "a", per=0.3, results=False)
    rows = run.metrics()
    first = next(i for i, row in enumerate(rows) if row["split"] == "val")
    rows[first:first] = [rows[first] | {"per": 0.111}]  # logged before the same step was trained again
    write_jsonl(run.metrics_file, rows)
    row, step = rows_of(tmp_path)["a"], rows[first]["step"]
    assert (row["best_per"], row["best_step"]) == (0.111, step)
    assert f"best PER 11.1 % at step {step}" in diary(tmp_path)
    assert "11.1\u202f%" in write_report(run).read_text("utf-8")


DAMAGE = {
    "no recipe": lambda p: (p / "recipe.yaml").unlink(),
    "recipe is a list": lambda p: (p / "recipe.yaml").write_text("[1, 2]"),
    "recipe of another version": lambda p: (p / "recipe.yaml").write_text("name: x\nencoder: {kind: quantum}"),
    "recipe with an invalid date": lambda p: (p / "recipe.yaml").write_text("seed: 2024-99-99"),
    "recipe with a cycle": lambda p: (p / "recipe.yaml").write_text("a: &a [*a]"),
    "binary log": lambda p: (p / "metrics.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe"),
    "broken log": lambda p: (p / "metrics.jsonl").write_text('{"step": 1\nnonsense\n'),
    "broken environment": lambda p: (p / "environment.json").write_text("{"),
    "broken results": lambda p: (p / "results" / "val.json").write_text("[]"),
}
UNUSUAL = {
    "unusual log": lambda p: (p / "metrics.jsonl").write_text(
        '{"step": "x", "split": "val", "per": "y"}\n{"step": 1e400}\n'
    ),
    "empty log": lambda p: (p / "metrics.jsonl").write_text(""),
    "data is not a mapping": lambda p: (p / "environment.json").write_text('{"data": 3, "started": 7}'),
    "split is not text": lambda p: (p / "environment.json").write_text('{"selected_on": ["val"]}'),
    "splits of the log are not text": lambda p: (p / "metrics.jsonl").write_text('{"step": 1, "split": {"a": []}}\n'),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *UNUSUAL])
def test_damaged_run_is_listed_and_does_not_affect_others(tmp_path: Path, kind: str) -> None:
    make_run(tmp_path / "intact")
    make_run(tmp_path / "broken", minute=1)
    {**DAMAGE, **UNUSUAL}[kind](tmp_path / "broken")
    rows = rows_of(tmp_path)
    assert rows["intact"]["problems"] == [] and rows["intact"]["best_per"] is not None
    assert bool(rows["broken"]["problems"]) == (kind in DAMAGE)
    assert ("**Could not be read:**" in diary(tmp_path)) == (kind in DAMAGE)


def test_finished_calibration_is_not_called_too_short(tmp_path: Path) -> None:
    run = make_run(tmp_path / "calibrated", ["train.steps=60"])
    write_jsonl(run.metrics_file, [row for row in run.metrics() if row["split"] == "train" or row["step"] == 60])
    assert rows_of(tmp_path)["calibrated"]["verdict"] == "too_short"
    write_json(run.calibration_file, {"curve": []})
    assert rows_of(tmp_path)["calibrated"]["verdict"] == "calibrated"


def test_targets_are_judged_by_the_log_and_by_words_decoded_later(tmp_path: Path) -> None:
    target = ["target.per=0.3"]
    make_run(tmp_path / "good", ["purpose=Lower noise should help", *target], per=0.2, minute=0)
    make_run(tmp_path / "bad", target, per=0.5, minute=1)
    interrupt(make_run(tmp_path / "early", ["target.per=0.01"], per=0.5, minute=2))
    run = make_run(tmp_path / "words", ["target.wer=0.1"], minute=3)
    text, rows = diary(tmp_path), rows_of(tmp_path)
    statuses = [rows[name]["target"]["status"] for name in ("good", "bad", "early", "words")]
    assert statuses == ["met", "missed", "open", "missed"]
    assert "**Purpose:** Lower noise should help." in text
    assert "PER ≤ 30.0 %: **met**" in text and "**missed** (best PER" in text
    assert "**open, the run is not finished**" in text
    write_words(run, 0.09)
    assert rows_of(tmp_path)["words"]["target"]["status"] == "met"


# --- parents and changes ---


def test_parent_is_the_latest_of_the_nearest_runs_on_the_same_data(tmp_path: Path) -> None:
    make_run(tmp_path / "a", minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5", "schedule.peak_lr=0.01"], minute=1)
    make_run(tmp_path / "c", ["encoder.dropout=0.5", "schedule.peak_lr=0.02"], minute=2)
    make_run(tmp_path / "d", ["train.seed=4"], minute=3, data={"hashes": {"train": "other"}})
    make_run(tmp_path / "e", ["runtime.threads=3", "data.workers=2", "train.log_every=7"], minute=4)
    make_run(tmp_path / "f", ["train.seed=1"], minute=5)
    rows = rows_of(tmp_path)
    assert [row["parent"] for row in rows.values()] == ["tiny", "a", "b", "tiny", "a", "e"]
    assert (rows["a"]["parent_kind"], rows["a"]["changes"], rows["e"]["changes"]) == ("recipe", [], [])
    assert rows["c"]["changes"] == [{"path": "schedule.peak_lr", "before": 0.01, "after": 0.02}]


def test_source_of_initial_weights_is_the_parent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", ["encoder.dropout=0.4"], minute=0)
    make_run(tmp_path / "z", minute=1)
    make_run(tmp_path / "b", minute=2, parent=f"{run.path}@best")
    row = rows_of(tmp_path)["b"]
    assert (row["parent"], row["parent_kind"]) == ("a", "weights")
    assert [c["path"] for c in row["changes"]] == ["encoder.dropout"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["transducer.width=64"], []),
        (["validate.lm=other"], ["validate.lm=default"]),
        (["augment.time_masks.probability=0.5"], []),
    ],
)
def test_settings_that_resolve_to_the_same_behaviour_are_not_changes(before: list[str], after: list[str]) -> None:
    assert result_changes(load_recipe("tiny", before), load_recipe("tiny", after)) == ()


def test_precision_that_falls_back_is_not_a_change(tmp_path: Path) -> None:
    make_run(tmp_path / "a", minute=0, precision="fp32")
    make_run(tmp_path / "b", ["train.precision.kind=bf16"], minute=1, precision="fp32")
    assert rows_of(tmp_path)["b"]["changes"] == []


# --- the diary ---


def test_diary_has_purpose_changes_result_and_finding(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.5", "notes=more dropout against overfitting"], per=0.2, minute=1)
    make_run(tmp_path / "c", ["encoder.dropout=0.6", "schedule.peak_lr=0.01"], per=0.2, minute=2, results=False)
    text = diary(tmp_path)
    assert "more dropout against overfitting" in text and "`encoder.dropout`: 0.2 → 0.5" in text
    assert "b is better than a by" in text and "the only setting that changed" in text and "One run per side" in text
    assert "the split it was selected on" in text
    assert "2 settings changed at once, so the difference cannot be attributed to one of them" in text
    assert "not tested for significance (both runs must be evaluated on the same split)" in text


def test_runs_of_other_trials_lengths_and_code_are_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.4, minute=0, revision="a" * 40)
    run = make_run(tmp_path / "b", ["encoder.dropout=0.6"], per=0.2, minute=2, revision="b" * 40)
    write_val(run, 0.2, n_trials=50)
    text = diary(tmp_path)
    assert "different trials" in text and f"different code ({'a' * 12} and {'b' * 12})" in text
    interrupt(Run(tmp_path / "a"), 24)
    assert "a reached step 300 of 600" in diary(tmp_path)


def test_text_from_a_folder_is_shown_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path / "a|b<i>[c]*", ['notes="<script>alert(1)</script> | [x](http://y) `z`\\n# Heading"'])
    text = diary(tmp_path)
    assert "<script>" not in text and "\n# Heading" not in text
    page = ledger_page(text)
    assert "<td>a|b&lt;i&gt;[c]*</td>" in page and "<h2>1. a|b&lt;i&gt;[c]*: healthy</h2>" in page
    assert "<li>" in page and "|---|" not in page and "<i>" not in page and '<a href="http' not in page


def test_an_ablation_has_one_verdict_and_its_baseline_as_parent(tmp_path: Path) -> None:
    home, changes = tmp_path / "abl", {"eps": "optimizer.eps=0.01", "noise": "augment.white_noise_sd=0.9"}
    arms = {"base": [], "eps": [changes["eps"]], "noise": [changes["noise"]], "all": [*changes.values()]}
    for minute, (arm, overrides) in enumerate(arms.items()):
        run = make_run(home / arm / "seed-0", overrides, minute=minute, results=False)
        write_val(run, 0.2 if changes["noise"] in overrides else 0.4, label="last")
    (home / "experiment.json").write_text("{}")
    rows, text = rows_of(tmp_path), diary(tmp_path)
    assert [r["parent"] for r in rows.values()] == ["tiny", *["abl/base/seed-0"] * 3]
    assert {c["path"] for c in rows["abl/all/seed-0"]["changes"]} == {"augment.white_noise_sd", "optimizer.eps"}
    assert "abl/noise/seed-0 is better than abl/base/seed-0 by" in text
    assert "evaluated on val (last checkpoint)" in text and "the split it was selected on" not in text
    assert "the arm `all` of an ablation" in text and "changed at once" not in text
    assert "**Ablation abl** (4 of the runs): not judged yet" in text
    (home / "ablation.json").write_text('{"verdict": "noise caused it."}')
    assert "(4 of the runs): noise caused it." in diary(tmp_path)


def test_best_results_are_ranked_within_a_data_set(tmp_path: Path) -> None:
    for i, per in enumerate((0.3, 0.1, 0.2)):
        make_run(tmp_path / f"r{i}", [f"encoder.dropout=0.{i}"], per=per, minute=i)
    make_run(tmp_path / "elsewhere", per=0.01, minute=5, data={"path": "/x", "hashes": {"train": "f" * 64}})
    text = diary(tmp_path)
    first = text.split("## Best results so far, data set 1")[1].split("##")[0]
    assert [line.split(":")[0] for line in first.strip().splitlines()] == ["1. r1", "2. r2", "3. r0"]
    assert "1. elsewhere" in text.split("## Best results so far, data set 2")[1]


def test_summary_of_what_helped(tmp_path: Path) -> None:
    """Only significant differences between finished runs count."""
    make_run(tmp_path / "a", per=0.3, minute=0)
    make_run(tmp_path / "b", ["encoder.dropout=0.1"], per=0.2, minute=1)
    make_run(tmp_path / "c", ["augment.white_noise_sd=0.9"], per=0.45, minute=2)
    make_run(tmp_path / "d", ["augment.offset_sd=0.3"], per=0.3, minute=3, seed=5)
    interrupt(make_run(tmp_path / "e", ["encoder.width=64"], per=0.05, minute=4))
    text = diary(tmp_path).split("## What helped and what did not")[1].split("\n## ")[0]
    helped, rest = text.split("**Made it worse:**")
    worse, unclear = rest.split("**Made no significant difference:**")
    assert "**Helped:**" in helped and "encoder.dropout 0.2 → 0.1" in helped and "b against a" in helped
    assert "augment.white_noise_sd 0.5 → 0.9" in worse and "c against a" in worse
    assert "augment.offset_sd 0.2 → 0.3" in unclear and "encoder.width" not in text
    assert "Holm-adjusted for 3 comparisons" in text


# --- words ---


def decoded(folder: Path, errors: dict[str, float], lms: tuple[str, str] = ("3-gram", "3-gram")) -> list[Run]:
    """Two runs with equal PER, each with sixty decoded sentences of eight words, a share of them with one error."""
    runs = []
    for i, (name, wer) in enumerate(errors.items()):
        run = make_run(folder / name, ["encoder.dropout=0.1"] if i else [], per=0.3, minute=i)
        rows = [{"id": f"s1/val/{k:04d}", "errors": int(k < 60 * 8 * wer), "n_words": 8} for k in range(60)]
        write_jsonl(run.results_file("val", "words"), rows)
        summary = {"wer": wer, "wer_low": wer - 0.02, "wer_high": wer + 0.02, "lm": lms[i], "split": "val", "step": 600}
        write_json(run.results_file("val", "words", "json"), summary)
        runs.append(run)
    return runs


def test_wer_stands_beside_per_and_is_tested_too(tmp_path: Path) -> None:
    runs = decoded(tmp_path, {"a": 0.02, "b": 0.1})
    text, row = diary(tmp_path), rows_of(tmp_path)["b"]
    assert row["best_wer"] == row["words"]["val"]["wer"] == 0.1 and "val.words" not in row["results"]
    assert "decoded to words on val: WER 10.0 % (8.0 % to 12.0 %), language model 3-gram" in text
    assert "| 10.0 % |" in text and "Lowest WER: a, 2.0 % on val" in text
    summary = text.split("## What helped and what did not")[1].split("\n## ")[0]
    worse, unclear = summary.split("**Made it worse:**")[1].split("**Made no significant difference:**")
    assert "Holm-adjusted for 2 comparisons" in summary
    assert "points of WER" in worse and "points of PER" in unclear
    assert "b is worse than a by 7.9 percentage points of WER" in text
    append_jsonl(runs[0].results_file("val", "words"), {"id": "x", "errors": "two", "n_words": 3})
    assert "lacks the trial or word counts" in diary(tmp_path)


def test_wer_of_different_language_models_is_not_compared(tmp_path: Path) -> None:
    decoded(tmp_path, {"a": 0.02, "b": 0.1}, ("3-gram", "5-gram"))
    text = diary(tmp_path)
    assert "WER not compared" in text and "lm 3-gram and 5-gram" in text and "points of WER" not in text


# --- commands ---


def test_runs_and_ledger_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "runs"
    make_run(home / "a", minute=0)
    make_run(home / "a-run-with-quite-a-long-name", ["encoder.dropout=0.5", "schedule.peak_lr=0.01"], minute=1)
    listed = arcuate("runs", home, "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["a", "a-run-with-quite-a-long-name"]
    assert arcuate("runs", "ledger", home, "--out", tmp_path / "DIARY.md").returncode == 0
    assert (tmp_path / "DIARY.md").read_text("utf-8") == arcuate("runs", "ledger", home).stdout
    monkeypatch.setenv("COLUMNS", "60")
    for command in (["runs"], ["runs", "ledger"]):
        code = NO_TORCH.format(arguments=command)
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if command == ["runs"]:
            assert all(len(line) <= 60 for line in done.stdout.splitlines())
            text = " ".join(done.stdout.split())
            assert "relative to a: encoder.dropout 0.2 → 0.5, schedule.peak_lr 0.003 → 0.01" in text


def test_command_line_errors_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "recipe.yaml").write_text("name: mine")
    assert_refused(arcuate("runs", tmp_path), "contains no runs")
    assert_refused(arcuate("runs", "ledger", tmp_path / "nowhere"), "nowhere")
    make_run(tmp_path / "a")
    assert_refused(arcuate("runs", "ledger", tmp_path, "--out", tmp_path), "is a folder")
    with pytest.raises(UserError, match="no such folder"):
        find_runs(tmp_path / "nowhere")
