"""Published results are shown beside runs on the same data set, and never beside simulated data."""

import json
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.insight.published import DATASETS, RESULTS, compare_published
from arcuate.insight.report.page import write_report


def make_run(folder: Path, **data: object) -> Path:
    (folder / "results").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: tiny\n", "utf-8")
    (folder / "environment.json").write_text(json.dumps({"data": data}), "utf-8")
    return folder


def test_a_run_is_shown_beside_results_on_its_own_data_set(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", layout="b2t25")
    (run / "results" / "val.json").write_text('{"per": 0.12}', "utf-8")
    (run / "results" / "val.words.json").write_text('{"wer": 0.09}', "utf-8")
    found = compare_published(run)
    assert (found.per, found.wer, found.dataset) == (0.12, 0.09, "b2t25")
    assert found.published == tuple(r for r in RESULTS if r.dataset == "b2t25") and found.published
    assert json.loads(json.dumps(found.to_dict()))["published"][0]["metric"] in ("PER", "WER")


def test_simulated_data_are_compared_with_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", layout="b2t25", simulated=True)
    (run / "results" / "val.json").write_text('{"per": 0.12}', "utf-8")
    found = compare_published(run)
    assert found.published == () and "simulated" in found.note


@pytest.mark.parametrize("simulated", [False, True])
def test_the_report_shows_published_results_on_the_same_data_set(tmp_path: Path, simulated: bool) -> None:
    run = make_run(tmp_path / "run", layout="b2t24", simulated=simulated)
    trial = {"id": "t12/1", "session": "t12.2022.04.28", "reference": ["AA", "B"], "hypothesis": ["AA", "T"]}
    (run / "results" / "val.jsonl").write_text(json.dumps(trial) + "\n", "utf-8")
    (run / "results" / "val.json").write_text('{"per": 0.5, "n_trials": 1}', "utf-8")
    page = write_report(run).read_text("utf-8")
    for result in RESULTS:
        assert (result.split in page) == (result.dataset == "b2t24" and not simulated)
    assert ("this run" in page and 'href="#published"' in page) == (not simulated)


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="arcuate evaluate"):
        compare_published(make_run(tmp_path / "run", layout="b2t24"))


def test_every_result_names_data_metric_and_source() -> None:
    for result in RESULTS:
        assert result.dataset in DATASETS and result.metric in ("PER", "WER") and 0 < result.percent < 100
        assert result.source and result.split and result.system
