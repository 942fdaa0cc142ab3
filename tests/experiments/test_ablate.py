"""Ablations: parsing and checks of factors, arms that isolate each, judgements on fabricated results."""

import json
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.experiments.ablation import (
    AblationRuns,
    Experiment,
    arm_pairs,
    arms,
    cells,
    check_factors,
    open_experiment,
    parse_factors,
)
from arcuate.insight.ablation import AblationResult, ablation_page, judge_ablation, report_ablation
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.fabricate_runs import make_run, write_val
from support.pages import check_page

FACTORS = [
    "eps:optimizer.eps=1e-4",
    "rate:schedule.peak_lr=0.001",
    "aug:augment.white_noise_sd=0.1,augment.offset_sd=0",
]


def test_factors_and_common_overrides_are_distinguished() -> None:
    factors, overrides = parse_factors(
        [
            "eps:optimizer.eps=1e-8",
            "train.steps=200",
            "s:schedule={kind: linear, peak_lr: 0.1, min_lr: 0.0},data.workers=1",
        ]
    )
    assert overrides == ("train.steps=200",)
    assert [f.name for f in factors] == ["eps", "s"]
    assert factors[1].overrides == ("schedule={kind: linear, peak_lr: 0.1, min_lr: 0.0}", "data.workers=1")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "1 to 12 factors"),
        (["eps"], "not a factor"),
        (["eps:optimizer.eps"], "not a factor"),
        (["schedule={kind: constant, peak_lr: 0.1}"], "1 to 12 factors"),  # the colon is inside a value
        (["a:optimizer.eps=1", "a:schedule.peak_lr=1"], "twice"),
        (["base:optimizer.eps=1"], "another"),
        (["all-but-x:optimizer.eps=1"], "another"),
        ([f"f{i}:optimizer.eps=1" for i in range(13)], "1 to 12 factors"),
    ],
)
def test_bad_factors_are_rejected(given: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_factors(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["e:optimizer.eps=1e-8"], "changes nothing"),
        (["n:notes=hello"], "changes nothing"),
        (["e:optimizer.epz=1"], "optimizer.eps"),
        (["e:optimizer.eps=-1"], "invalid"),
        (["e:optimizer.eps=1,b"], "invalid"),
        (["s:train.seed=3"], "--seeds"),
        (["s:data.max_sessions=1"], "different trials"),
        (["a:schedule.peak_lr=0.1", "b:schedule={kind: constant, peak_lr: 0.1}"], "both set"),
        (["a:schedule.min_lr=0.01", "b:schedule.peak_lr=0.001"], "min_lr"),
    ],
)
def test_untestable_factors_are_rejected(given: list[str], words: str) -> None:
    factors, overrides = parse_factors(given)
    with pytest.raises(UserError, match=words):
        check_factors("tiny", overrides, factors)


def test_each_factor_is_isolated_in_both_directions() -> None:
    factors, _ = parse_factors(FACTORS)
    names = [arm.name for arm in arms(factors)]
    assert names == ["base", "eps", "rate", "aug", "all-but-eps", "all-but-rate", "all-but-aug", "all"]
    changed = {arm.name: arm.changed for arm in arms(factors)}
    for name, pairs in arm_pairs(factors).items():
        assert len(pairs) == 2
        assert all(changed[after] - changed[before] == {name} for before, after in pairs)


@pytest.mark.parametrize(("n", "n_arms", "n_comparisons"), [(1, 2, 1), (2, 4, 4), (4, 10, 8)])
def test_no_arm_is_trained_twice(n: int, n_arms: int, n_comparisons: int) -> None:
    factors, _ = parse_factors([f"f{i}:optimizer.eps=1e-{i + 2}" for i in range(n)])
    assert len(arms(factors)) == n_arms and sum(map(len, arm_pairs(factors).values())) == n_comparisons


def fabricate(tmp_path: Path, truth: dict[str, float], n_seeds: int = 3, given: list[str] = FACTORS) -> AblationResult:
    """An experiment whose arms have the error rates that `truth` gives them, 0.3 where it says nothing."""
    factors, overrides = parse_factors(given)
    experiment = Experiment("tiny", overrides, factors, tmp_path / "store", tmp_path / "out", n_seeds, "val", "best")
    for i, cell in enumerate(cells(experiment)):
        run = make_run(cell.run.path, cell.overrides, results=False)
        write_val(run, truth.get(cell.arm.name, 0.3), seed=i)
    return judge_ablation(experiment)


def test_responsible_factor_is_named(tmp_path: Path) -> None:
    found = fabricate(tmp_path, {"eps": 0.5, "all": 0.5, "all-but-rate": 0.5, "all-but-aug": 0.5})
    assert "eps caused it" in found.verdict and "rises by" in found.verdict
    effects = {j.factor: j for j in found.factors}
    assert all(e.significant for e in effects["eps"].effects)
    assert not any(e.significant for name in ("rate", "aug") for e in effects[name].effects)
    assert "no significant effect" in effects["aug"].sentence


TWO = {"eps": 0.4, "rate": 0.5, "all": 0.6, "all-but-eps": 0.5, "all-but-rate": 0.4, "all-but-aug": 0.6}
CANCELLING = {"eps": 0.5, "rate": 0.1, "all-but-eps": 0.1, "all-but-rate": 0.5}


@pytest.mark.parametrize(
    ("truth", "n_seeds", "n_factors", "words"),
    [
        (TWO, 3, 3, "largest first: rate and eps"),
        ({}, 3, 3, "No factor has a significant effect"),
        (CANCELLING, 3, 3, "eps and rate"),
        ({"eps": 0.5, "all": 0.5}, 1, 3, "variation between seeds is not included"),
        ({"eps": 0.5}, 3, 1, "eps caused it"),
    ],
)
def test_verdict(truth: dict[str, float], n_seeds: int, n_factors: int, words: str, tmp_path: Path) -> None:
    assert words in fabricate(tmp_path, truth, n_seeds, FACTORS[:n_factors]).verdict


def test_effect_only_in_combination_is_found(tmp_path: Path) -> None:
    truth = {"all": 0.6, "all-but-aug": 0.6}  # eps and rate only together
    found = fabricate(tmp_path, truth)
    eps = next(j for j in found.factors if j.factor == "eps")
    assert eps.alone and not eps.alone.significant and eps.with_others and eps.with_others.significant
    assert "None of them both alone and with the others" in found.verdict


def test_unfinished_experiment_lists_missing_runs(tmp_path: Path) -> None:
    found = fabricate(tmp_path, {})
    for cell in cells(found.experiment):
        if cell.arm.name == "all":
            cell.run.results_file("val").unlink()
    again = judge_ablation(found.experiment)
    assert len(again.missing) == 3 and "No verdict yet" in again.verdict
    check_page(ablation_page(again))


def test_page_figures_and_json(tmp_path: Path) -> None:
    found = fabricate(tmp_path, {"eps": 0.5, "all": 0.5})
    summary = found.to_dict()
    assert json.loads(json.dumps(summary, allow_nan=False))["n_comparisons"] == 7
    check_page(ablation_page(found))
    report_ablation(AblationRuns(found.experiment, {}))
    drawing = (found.experiment.out / "effects.svg").read_text("utf-8")
    assert drawing.startswith("<svg") and 'xmlns="http://www.w3.org/2000/svg"' in drawing


def test_folder_of_another_experiment_is_rejected(tmp_path: Path, cohort_store: Path) -> None:
    factors, _ = parse_factors(FACTORS)
    first = Experiment("tiny", (), factors, cohort_store, tmp_path / "out", 2)
    open_experiment(first)
    open_experiment(first)
    with pytest.raises(UserError, match="different factors"):
        open_experiment(Experiment("tiny", (), factors[:1], cohort_store, tmp_path / "out", 2))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not an ablation folder"):
        open_experiment(Experiment("tiny", (), factors, cohort_store, tmp_path / "used", 2))


FEW = ["train.steps=6", "train.validate_every=3", "train.log_every=3", "encoder.width=16", "encoder.depth=1"]


def command(store: Path, out: Path, *more: str) -> list[str]:
    given = ["ablate", "tiny", "eps:optimizer.eps=0.1", *more, "--data", store, "--out", out, "--seeds", "1"]
    return [str(word) for word in given]


@pytest.mark.thorough
def test_ablate_command_resumes(tmp_path: Path, cohort_store: Path) -> None:
    out = tmp_path / "out"
    arguments = command(cohort_store, out, *FEW)
    assert_refused(arcuate(*arguments, "--checkpoint", "first"), "first")
    planned = one_object(arcuate(*arguments, "--dry-run", "--json").stdout)
    assert len(planned["runs"]) == 2 and planned["n_steps"] == 12 and not out.exists()
    done = arcuate(*arguments, "--json")
    found = one_object(done.stdout)
    assert done.returncode == 0 and found["missing"] == [] and found["failed"] == {}
    assert [(a["arm"], len(a["per_by_run"])) for a in found["arms"]] == [("base", 1), ("eps", 1)]
    for name in ("ablation.json", "ablation.html", "effects.svg"):
        assert (out / name).is_file()
    before = (out / "eps" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    again = one_object(arcuate(*arguments, "--json").stdout)
    assert again["effects"] == found["effects"]
    assert (out / "eps" / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    listed = json.loads(arcuate("runs", out, "--json").stdout)
    assert [row["name"] for row in listed] == ["base/seed-0", "eps/seed-0"]
    assert [c["path"] for c in listed[1]["changes"]] == ["optimizer.eps"]
