"""`compare`: runs on the same trials, grouped by seed, with significance tests."""

import json
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.files import read_json, read_jsonl, write_json, write_jsonl
from arcuate.insight.compare import compare, comparison_page
from arcuate.run import Run
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.fabricate_runs import make_run, write_val
from support.pages import check_page


def two(tmp_path: Path, a: float = 0.35, b: float = 0.2) -> list[Run]:
    first = make_run(tmp_path / "a", per=a)
    return [first, make_run(tmp_path / "b", ["encoder.dropout=0.5"], per=b, minute=1, seed=1)]


def test_significant_difference_is_reported_with_its_size(tmp_path: Path) -> None:
    found = json.loads(json.dumps(compare(*two(tmp_path)).to_dict(), allow_nan=False))["comparisons"][0]
    assert found["verdict"] == "better" and found["high"] < 0
    assert "b is better than a by" in found["sentence"] and "One run per side" in found["sentence"]
    assert [c["path"] for c in found["changes"]] == ["encoder.dropout"]
    assert found["sessions_better"] == 2 and found["sessions_worse"] == 0


def test_equal_error_rates_are_not_significantly_different(tmp_path: Path) -> None:
    found = compare(*two(tmp_path, 0.3, 0.3)).to_dict()["comparisons"][0]
    assert found["verdict"] == "no_evidence" and found["sentence"].startswith("No significant difference")
    assert found["low"] < 0 < found["high"]


def test_identical_decodings_are_reported_as_identical(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", ["encoder.dropout=0.5"], minute=1)
    found = compare(tmp_path / "a", tmp_path / "b").to_dict()["comparisons"][0]
    assert "same number of errors in every trial" in found["sentence"] and found["p"] == 1


def test_runs_that_differ_only_in_seed_form_a_group(tmp_path: Path) -> None:
    for i in range(3):
        make_run(tmp_path / "old" / f"seed-{i}", [f"train.seed={i}"], per=0.35, seed=i)
        make_run(
            tmp_path / "new" / f"seed-{i}",
            [f"train.seed={i}", f"data.seed={i}", "encoder.dropout=0.5"],
            per=0.2,
            seed=10 + i,
        )
    found = compare(tmp_path / "old", tmp_path / "new").to_dict()
    assert [(g["name"], len(g["runs"])) for g in found["groups"]] == [("old", 3), ("new", 3)]
    one = found["comparisons"][0]
    assert one["method"] == "components" and one["verdict"] == "better"
    assert found["groups"][0]["seed_sd"] is not None
    assert "One run per side" not in one["sentence"]


def test_note_if_all_runs_differ_only_in_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", ["train.seed=7"], minute=1, seed=3)
    found = compare(tmp_path).to_dict()
    assert len(found["groups"]) == 2
    assert any("variation between seeds" in note for note in found["notes"])


def test_runs_with_different_initial_weights_are_not_grouped(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", minute=1, seed=3, parent="runs/a@best")
    make_run(tmp_path / "c", ["train.seed=1"], minute=2, seed=4)
    groups = compare(tmp_path).to_dict()["groups"]
    assert sorted((g["name"], len(g["runs"])) for g in groups) == [("a (+1)", 2), ("b", 1)]  # not by the shared folder


def test_p_values_are_adjusted_for_several_comparisons(tmp_path: Path) -> None:
    make_run(tmp_path / "a", per=0.3)
    for i in range(4):
        make_run(tmp_path / f"b{i}", [f"encoder.dropout=0.{i + 3}"], per=0.27, minute=i + 1, seed=i)
    found = compare(tmp_path).to_dict()
    assert found["n_comparisons"] == 4
    for one in found["comparisons"]:
        assert one["p_adjusted"] >= one["p"] and "for 4 comparisons" in one["sentence"]
        assert one["significant"] == (one["p_adjusted"] < 0.05)


def test_sessions_as_sampling_unit(tmp_path: Path) -> None:
    runs = two(tmp_path)
    by_trial, by_session = (compare(*runs, over=o).to_dict()["comparisons"][0] for o in ("trials", "sessions"))
    assert by_session["df"] == pytest.approx(1) and by_session["over"] == "sessions"
    assert by_session["difference"] == pytest.approx(by_trial["difference"])


def other_hash(run: Run) -> None:
    file = run.results_file("val", ending="json")
    write_json(file, read_json(file) | {"data_hash": "d" * 64})


def fewer_trials(run: Run) -> None:
    write_val(run, 0.2, n_trials=60)


def other_reference(run: Run) -> None:
    rows = read_jsonl(run.results_file("val"))
    rows[0]["n_tokens"] += 1
    write_jsonl(run.results_file("val"), rows)


def no_labels(run: Run) -> None:
    rows = [row | {"n_tokens": None} for row in read_jsonl(run.results_file("val"))]
    write_jsonl(run.results_file("val"), rows)


def twice(run: Run) -> None:
    rows = read_jsonl(run.results_file("val"))
    write_jsonl(run.results_file("val"), [*rows, rows[0]])


def no_counts(run: Run) -> None:
    write_jsonl(run.results_file("val"), [{"trial": "x", "n_tokens": 3, "substitutions": "many"}] * 3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_hash, "different data"),
        (fewer_trials, "different trials"),
        (other_reference, "different references"),
        (no_labels, "needs at least two"),
        (twice, "twice"),
        (no_counts, "lacks the trial or edit counts"),
    ],
)
def test_incomparable_results_are_refused(tmp_path: Path, damage: object, words: str) -> None:
    runs = two(tmp_path)
    damage(runs[1])  # type: ignore[operator]
    with pytest.raises(UserError, match=words):
        compare(*runs)


def test_notes_on_selection_and_search(tmp_path: Path) -> None:
    runs = two(tmp_path)
    file = runs[1].results_file("val", ending="json")
    write_json(file, read_json(file) | {"search": "beam"})
    notes = " ".join(compare(*runs).notes)
    assert "different searches (beam, greedy)" in notes and "selected on val" in notes


def test_page_is_valid_and_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "<b>a&b</b>", per=0.4)
    make_run(tmp_path / "b", ["encoder.dropout=0.5"], per=0.2, seed=1)
    text = comparison_page(compare(tmp_path))
    check_page(text)
    assert "<b>a" not in text and "&lt;b&gt;a" in text


def test_compare_command(tmp_path: Path) -> None:
    two(tmp_path)
    page = tmp_path / "c.html"
    done = arcuate("compare", tmp_path / "a", tmp_path / "b", "--html", page, "--json")
    found = one_object(done.stdout)
    assert found["comparisons"][0]["verdict"] == "better"
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert "b is better than a" in arcuate("compare", tmp_path / "a", tmp_path / "b").stdout.replace("\n", " ")


def test_user_errors_are_one_sentence(tmp_path: Path) -> None:
    runs = two(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    assert_refused(arcuate("compare", a), "at least two")
    assert_refused(arcuate("compare", a, a), "given twice")
    assert_refused(arcuate("compare", a, tmp_path / "nowhere"), "nowhere")
    assert_refused(arcuate("compare", a, b, "--over", "blocks"), "--over")
    assert_refused(arcuate("compare", a, b, "--html", tmp_path), "is a folder")
    assert_refused(arcuate("compare", a, b, "--label", "beam"), "val.beam")
    assert_refused(arcuate("compare", a, b, "--split", "dev"), "no checkpoint")
    other_hash(runs[1])
    assert_refused(arcuate("compare", a, b), "different data")


def test_ablation_arms_are_compared_by_their_last_checkpoint(tmp_path: Path) -> None:
    for name, overrides, per in (("base", [], 0.4), ("more", ["encoder.dropout=0.5"], 0.2)):
        run = make_run(tmp_path / name, overrides, per=per, results=False)
        write_val(run, per, label="last")
    done = arcuate("compare", tmp_path / "base", tmp_path / "more")
    assert done.returncode == 0, done.stderr
    assert "more is better than base" in done.stdout
    assert "val.last" in done.stderr and "selected on val" not in done.stderr


def test_note_on_different_code_revisions(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", revision="a" * 40),
        make_run(tmp_path / "b", ["encoder.dropout=0.5"], revision="b" * 40),
        make_run(tmp_path / "c", ["encoder.dropout=0.4"], revision="a" * 40),
    ]
    assert any(f"different code ({'a' * 12}, {'b' * 12})" in note for note in compare(*runs[:2]).notes)
    assert not any("different code" in note for note in compare(runs[0], runs[2]).notes)


def test_note_on_a_best_checkpoint_that_a_rewind_kept(tmp_path: Path) -> None:
    runs = two(tmp_path)
    (runs[0].checkpoints / "best-00000100").mkdir()
    (runs[0].checkpoints / "best").symlink_to("best-00000100")
    assert f"{runs[0].path} was scored at step 600, but its best checkpoint is step 100." in compare(*runs).notes
