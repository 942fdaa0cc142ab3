"""The complete workflow on a small cohort, on the command line and in Python."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import arcuate as package
from arcuate.data.store import Store
from arcuate.run import Run
from support.cli import assert_refused, one_object
from support.command import arcuate

FEW = ["train.steps=30", "train.validate_every=10", "train.log_every=5", "train.checkpoint_every=10"]


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    done = arcuate("train", "tiny", "--data", cohort_store, "--run", path, "--json", *FEW)
    assert done.returncode == 0, done.stderr
    result = one_object(done.stdout)
    assert result["steps"] == 30
    return path


def test_a_run_folder_is_complete(run: Path) -> None:
    assert {p.name for p in run.iterdir()} >= {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
    }
    for link in ("best", "last"):
        target = (run / "checkpoints" / link).readlink()
        assert not target.is_absolute() and target.name.startswith("step-")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["split"] == "train"] == [5, 10, 15, 20, 25, 30]
    assert [r["step"] for r in rows if r["split"] == "val"] == [10, 20, 30]
    losses = [r["loss"] for r in rows if r["split"] == "train"]
    assert losses[-1] < losses[0]


def test_best_is_the_lowest_actual_validation_per(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validated = [(r["per"], r["loss"], r["step"]) for r in rows if r["split"] == "val"]
    assert (run / "checkpoints/best").readlink().name == f"step-{min(validated)[2]:08d}"


def test_same_recipe_same_weights(run: Path, cohort_store: Path, tmp_path: Path) -> None:
    arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path / "again", *FEW, "data.workers=2")
    for a, b in zip(
        *(sorted(r.glob("checkpoints/last/*.safetensors")) for r in (run, tmp_path / "again")), strict=True
    ):
        assert a.read_bytes() == b.read_bytes()


def test_a_run_folder_is_never_written_into(run: Path, cohort_store: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert_refused(arcuate("train", "tiny", "--data", cohort_store, "--run", run, *FEW), "exists and is not empty")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_evaluate_with_the_beam_search_prints_both_rates(run: Path) -> None:
    result = one_object(arcuate("evaluate", run, "--beam", "20", "--label", "b", "--json").stdout)
    greedy = one_object(arcuate("evaluate", run, "--label", "g", "--json").stdout)
    assert (result["search"], result["beam"]) == ("beam", 20)
    assert result["per_greedy"] == greedy["per"] and "per_greedy" not in greedy
    assert "(greedy " in arcuate("evaluate", run, "--beam", "20", "--label", "b").stdout


def test_validation_may_use_the_beam_search(cohort_store: Path, tmp_path: Path) -> None:
    overrides = [*FEW, "train.steps=10", "validate.search=beam"]
    done = arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path / "beamed", "--json", *overrides)
    assert done.returncode == 0, done.stderr
    result = one_object(arcuate("evaluate", f"{tmp_path / 'beamed'}@last", "--json").stdout)
    rows = [json.loads(line) for line in (tmp_path / "beamed/metrics.jsonl").read_text().splitlines()]
    assert result["per"] == pytest.approx([r["per"] for r in rows if r["split"] == "val"][-1])


def test_a_run_is_decoded_to_words(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lexicon.txt").write_text("the\tDH AH\ndog\tD AO G\n")
    (tmp_path / "lm.arpa").write_text(
        "\\data\\\nngram 1=5\n\n\\1-grams:\n-2\t<unk>\n-99\t<s>\n-1\t</s>\n-0.5\tthe\n-0.6\tdog\n\n\\end\\\n"
    )
    done = arcuate(
        *(
            "decode",
            run,
            "--split",
            "val",
            "--lexicon",
            tmp_path / "lexicon.txt",
            "--lm",
            tmp_path / "lm.arpa",
        ),
        *("--out", tmp_path / "hyps.jsonl", "--json"),
    )
    result = one_object(done.stdout)
    rows = [json.loads(line) for line in (tmp_path / "hyps.jsonl").read_text().splitlines()]
    assert len(rows) == result["n_trials"] and result["n_words"] > 0 and result["lm_order"] == 1
    assert result["wer"] == pytest.approx(sum(r["errors"] for r in rows) / result["n_words"])
    kept = Run(run).results_file("val", "words")
    assert kept.read_bytes() == (tmp_path / "hyps.jsonl").read_bytes()
    summary = json.loads(kept.with_suffix(".json").read_text())
    assert (summary["wer"], summary["split"], summary["selected_on"]) == (result["wer"], "val", "val")
    assert isinstance(summary["step"], int)
    page = Path(one_object(arcuate("report", run, "--json").stdout)["report"]).read_text("utf-8")
    assert "Decoded sentences" in page and "Word error rate" in page


def test_evaluate_prints_what_scripts_rely_on(run: Path, tmp_path: Path) -> None:
    done = arcuate("evaluate", run, "--split", "val", "--json", "--scores", tmp_path / "scores.npz")
    result = one_object(done.stdout)
    assert set(result) >= {
        "per", "per_low", "per_high", "n_trials", "substitutions", "insertions", "deletions", "per_by_session"
    }  # fmt: skip
    rows = [json.loads(line) for line in (run / "results/val.jsonl").read_text().splitlines()]
    assert len(rows) == result["n_trials"]
    errors = sum(r["substitutions"] + r["insertions"] + r["deletions"] for r in rows)
    assert result["per"] == pytest.approx(errors / sum(len(r["reference"]) for r in rows))
    assert result["per_low"] <= result["per"] <= result["per_high"]
    assert (result["split"], result["selected_on"]) == ("val", "val")
    scores = np.load(tmp_path / "scores.npz")
    assert scores["logp"].dtype == np.float16 and scores["logp"].shape == (scores["lengths"].sum(), 41)
    assert len(scores["lengths"]) == len(rows)
    np.testing.assert_allclose(np.exp(scores["logp"].astype(np.float32)).sum(1), 1, atol=0.02)


def test_evaluation_agrees_with_the_validation_during_training(run: Path) -> None:
    result = one_object(arcuate("evaluate", f"{run}@last", "--split", "val", "--label", "last", "--json").stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert result["per"] == [r["per"] for r in rows if r["split"] == "val"][-1]
    assert (run / "results/val.last.jsonl").exists()


def test_test_trials_are_decoded_without_labels(run: Path) -> None:
    result = one_object(arcuate("evaluate", run, "--split", "test", "--json").stdout)
    assert result["per"] is None and result["n_trials"] > 0


def test_report_is_one_page(run: Path) -> None:
    arcuate("evaluate", run, "--split", "val")
    done = arcuate("report", run, "--json")
    page = Path(one_object(done.stdout)["report"]).read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)


def test_python_gives_the_same_phonemes_as_the_command_line(run: Path, cohort_store: Path) -> None:
    arcuate("evaluate", run, "--split", "val")
    rows = {r["trial"]: r for r in map(json.loads, (run / "results/val.jsonl").read_text().splitlines())}
    store, model = Store.open(cohort_store), package.load(run)
    for info in [t for t in store.trials if t.split == "val"][:3]:
        bins = store.read_bins(info)
        hypothesis = model.decode(bins, info.session, store.block_statistics(info))
        assert hypothesis.phonemes == rows[info.id]["hypothesis"]
        assert model.log_probs(bins, info.session, store.block_statistics(info)).shape[1] == 41
    assert repr(model).startswith("Decoder(") and len(repr(model)) < 100
    evaluation = package.evaluate(run, split="val")
    assert repr(evaluation).startswith(f"Evaluation('{run}': PER ") and len(repr(evaluation)) < 300 + len(str(run))


def test_python_rejects_invalid_input(run: Path) -> None:
    model = package.load(run)
    with pytest.raises(package.errors.UserError, match="shape"):
        model.log_probs(np.zeros((10, 3)), model.sessions[0])
    with pytest.raises(package.errors.UserError, match="unknown to this model"):
        model.log_probs(np.zeros((10, 32)), "t15.1999.01.01")


def test_dry_run_writes_nothing_and_warns(cohort_store: Path, tmp_path: Path) -> None:
    planned = ["train", "tiny", "--data", cohort_store, "--run", tmp_path / "r", "optimizer.eps=0.1"]
    done = arcuate(*planned, "--dry-run", "--json")
    assert one_object(done.stdout)["dry_run"] is True
    assert "lower optimizer.eps" in " ".join(done.stderr.split())
    assert not (tmp_path / "r").exists()


def test_threads_do_not_leak_between_tests() -> None:
    assert torch.get_num_threads() == 1
