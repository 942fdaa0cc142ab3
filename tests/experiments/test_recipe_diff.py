"""Differences between recipes, and warnings about learning rate, eps or reduction changed alone."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from arcuate.config import Change, to_tree, to_yaml
from arcuate.errors import UserError
from arcuate.experiments.recipe import (
    DESCRIPTIVE_KEYS,
    OFFICIAL,
    compare_recipes,
    diff_recipes,
    load_recipe,
    official_ancestor,
    recipe_names,
)
from arcuate.training.step_size import coupling_warnings
from support.cli import one_object
from support.command import arcuate


def warnings(name: str, *overrides: str) -> list[str]:
    ancestor = official_ancestor(name)
    assert ancestor is not None
    return coupling_warnings(load_recipe(name, overrides), load_recipe(ancestor), ancestor)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {k: v for key, value in tree.items() for k, v in leaves(value, f"{path}.{key}" if path else key).items()}


def test_changes_are_the_values_of_the_written_recipes() -> None:
    recipes = [load_recipe(name) for name in recipe_names()]
    for a, b in combinations(recipes, 2):
        before, after = (leaves({k: v for k, v in to_tree(r).items() if k not in DESCRIPTIVE_KEYS}) for r in (a, b))
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        found = diff_recipes(a, b)
        turned = {(c.path, str(c.after), str(c.before)) for c in diff_recipes(b, a)}
        assert {(c.path, str(c.before), str(c.after)) for c in found} == turned
        assert {p for p in changed if not any(p == c.path or p.startswith(f"{c.path}.") for c in found)} == set()
        for change in found:
            assert leaves(change.before, change.path).items() <= before.items()
            assert leaves(change.after, change.path).items() <= after.items()


def test_a_change_has_a_path_and_both_values() -> None:
    changed = load_recipe("b2t25-gru", ["train.steps=7", "optimizer.betas=[0.8, 0.9]", "validate.lm=default"])
    assert diff_recipes(load_recipe("b2t25-gru"), changed) == [
        Change("optimizer.betas", [0.9, 0.999], [0.8, 0.9]),
        Change("train.steps", 120000, 7),
        Change("validate.lm", "none", "default"),
    ]


def test_ancestry_reaches_the_root(tmp_path: Path) -> None:
    names = ["diary-run04"]
    while (parent := load_recipe(names[-1]).extends) is not None:
        names.append(parent)
    assert names == ["diary-run04", "diary-run03", "diary-run02", "diary-run01", "b2t24-gru"]
    (tmp_path / "mine.yaml").write_text("extends: official-exact\n")
    assert official_ancestor(str(tmp_path / "mine.yaml")) == "b2t25-gru"
    assert official_ancestor("tiny") is None
    assert official_ancestor("b2t24-gru") == "b2t24-gru"
    (tmp_path / "recipe.yaml").write_text(to_yaml(load_recipe("diary-run06", ["train.steps=7"])))  # of a run: resolved
    assert official_ancestor(str(tmp_path / "recipe.yaml")) == "b2t24-gru"


def test_a_recipe_that_descends_from_itself_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text(f"extends: {tmp_path / 'loop.yaml'}\n")
    with pytest.raises(UserError, match="extends itself"):
        official_ancestor(str(tmp_path / "loop.yaml"))


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_recipes_are_not_warned_about(name: str) -> None:
    assert warnings(name) == []
    assert warnings(name, "train.steps=7", "augment.white_noise_sd=0.1", "train.clip_norm=1") == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.peak_lr=0.001", ["the peak learning rate (0.02 → 0.001)", "0.2 → 0.01", "30–40"]),
        (
            "optimizer.eps=1e-8",
            ["optimizer.eps (0.1 → 1e-08)", "0.2 → 2e+06", "about the learning rate, 0.02"],
        ),
        ("loss.ctc.reduction=sum_per_trial", ["0.2 → 0.2", "30–40 times (the target length) larger"]),
    ],
)
def test_one_changed_without_the_others_is_warned_about(override: str, words: list[str]) -> None:
    (text,) = warnings("b2t24-gru", override)
    for word in (*words, "b2t24-gru", "but not"):
        assert word in text


def test_a_partial_change_of_coupled_settings_is_warned_about() -> None:
    parts = ("schedule.peak_lr=0.002", "optimizer.eps=0.03", "loss.ctc.reduction=sum_per_trial")
    for n in (1, 2):
        for overrides in combinations(parts, n):
            assert len(warnings("b2t24-gru", *overrides)) == 1, overrides
    assert warnings("b2t24-gru", *parts) == []


def test_an_eps_that_follows_the_reduction_is_fine() -> None:
    """Loss and eps scaled by the same factor give the same updates."""
    assert warnings("b2t24-gru", "loss.ctc.reduction=sum_per_trial", "optimizer.eps=3.5") == []
    assert warnings("b2t24-gru", "loss.ctc.reduction=sum_per_trial", "optimizer.eps=0.0029")
    assert (
        coupling_warnings(
            load_recipe("b2t25-gru", ["loss.ctc.reduction=mean_per_token", "optimizer.eps=0.0029"]),
            load_recipe("b2t25-gru"),
            "b2t25-gru",
        )
        == []
    )


def test_the_learning_rate_of_session_layers_is_checked_too() -> None:
    (text,) = warnings("b2t25-gru", "optimizer.session_lr_factor=10")
    assert "session layers (0.005 → 0.05)" in text
    assert len(warnings("b2t25-gru", "schedule.peak_lr=0.05")) == 1


@pytest.mark.parametrize("name", ["diary-run02", "diary-run03", "diary-run08", "diary-run12", "official-exact-test3"])
def test_the_diary_would_have_been_warned(name: str) -> None:
    assert len(warnings(name)) == 1


@pytest.mark.parametrize("name", ["diary-run01", "official-exact", "official-exact-test1", "official-exact-test2"])
def test_documented_as_official_is_not_warned_about(name: str) -> None:
    assert warnings(name) == []


def test_json_is_one_object() -> None:
    result = one_object(arcuate("recipes", "diff", "diary-run12", "diary-run13", "--json").stdout)
    assert list(result) == ["a", "b", "changes", "ancestor_a", "ancestor_b", "warnings"]
    assert (result["a"], result["b"], result["ancestor_a"]) == ("diary-run12", "diary-run13", "b2t24-gru")
    assert {"path": "augment.white_noise_sd", "before": 0.8, "after": 0.3} in result["changes"]
    assert [c["path"] for c in result["changes"]] == [
        "augment.white_noise_sd",
        "augment.offset_sd",
        "schedule",
    ]
    assert [w.split(":")[0] for w in result["warnings"]] == ["diary-run12", "diary-run13"]
    assert "no setting differs" in arcuate("recipes", "diff", "tiny", "tiny").stdout


def test_without_a_second_one_the_official_ancestor_is_used() -> None:
    result = compare_recipes("official-exact-test3").to_dict()
    assert (result["a"], result["b"]) == ("b2t25-gru", "official-exact-test3")
    assert {c["path"] for c in result["changes"]} == {
        "schedule.peak_lr",
        "train.steps",
    }
    for name, word in (("tiny", "does not extend an official"), ("b2t25-gru", "is an official")):
        with pytest.raises(UserError, match=word):
            compare_recipes(name)
