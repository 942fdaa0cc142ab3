"""Recipes of the run diary: each states only its differences, and the documented values."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from arcuate.config import merge, parse_settings, to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import (
    Recipe,
    RecipeLocation,
    diff_recipes,
    load_recipe,
    official_ancestor,
    read_tree,
    resolve_recipe,
)
from arcuate.training.config import DESCRIPTIVE_KEYS
from arcuate.training.schedule import learning_rate

RUNS = [f"diary-run{n:02d}" for n in range(1, 14)]
EXACT = ["official-exact", *(f"official-exact-test{n}" for n in (1, 2, 3))]
ATTEMPTS = ["rnn-full-4090", *(f"rnn-full-4090-attempt{n}" for n in (1, 2, 3))]


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return KeyError
        tree = tree[key]
    return tree


def without(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    less = copy.deepcopy(dict(tree))
    node = less
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return less


def is_redundant(own: Mapping[str, Any], path: tuple[str, ...], parent: str, recipe: Recipe) -> bool:
    """The parent has the same value there, and leaving the key out changes nothing."""
    if value_at(to_tree(load_recipe(parent)), path) != value_at(own, path):
        return False
    try:
        less = parse_settings(Recipe, merge(resolve_recipe(parent), without(own, path)), "less")
    except UserError:
        return False
    return diff_recipes(less, recipe) == []


@pytest.mark.parametrize("name", [*RUNS, *EXACT, *ATTEMPTS])
def test_a_recipe_states_only_its_differences(name: str) -> None:
    own, recipe = read_tree(RecipeLocation(name)), load_recipe(name)
    parent = own["extends"]
    stated = [path for path in leaves(own) if path[0] not in DESCRIPTIVE_KEYS]
    assert [".".join(p) for p in stated if is_redundant(own, p, parent, recipe)] == []
    assert bool(stated) == bool(diff_recipes(load_recipe(parent), recipe))


def test_a_redundant_setting_is_detected() -> None:
    own = {"extends": "diary-run08", "train": {"clip_norm": 5.0}, "schedule": {"kind": "constant"}}
    recipe = load_recipe("diary-run08")
    assert is_redundant(own, ("train", "clip_norm"), "diary-run08", recipe)
    assert is_redundant(own, ("schedule", "kind"), "diary-run08", recipe)


@pytest.mark.parametrize("name", [*RUNS, *EXACT, *ATTEMPTS])
def test_every_run_has_a_summary_and_notes(name: str) -> None:
    own = read_tree(RecipeLocation(name))
    assert own["summary"] and "\n" not in own["summary"]
    assert len(own["notes"]) > 100
    assert official_ancestor(name) == ("b2t24-gru" if name in RUNS else "b2t25-gru")


# Typed a second time from the diary: peak rate, clipping, dropout, input dropout, noise, offset, LayerNorm, optimizer,
# weight decay, eps (the official one unless the optimizer or the diary differs).
DOCUMENTED = {
    1: (0.02, None, 0.4, 0.0, 0.8, 0.2, False, "adam", 1e-5, 0.1),
    2: (0.01, 1.0, 0.4, 0.0, 0.8, 0.2, False, "adam", 1e-5, 0.1),
    3: (0.005, 1.0, 0.4, 0.1, 0.4, 0.1, True, "adamw", 1e-4, 1e-8),
    4: (0.002, 1.0, 0.4, 0.1, 0.4, 0.1, True, "adamw", 1e-4, 1e-8),
    5: (0.001, 1.0, 0.4, 0.1, 0.4, 0.1, True, "adamw", 1e-4, 1e-8),
    6: (0.0015, 1.0, 0.3, 0.1, 0.2, 0.1, True, "adamw", 1e-4, 1e-8),
    7: (0.0015, 1.0, 0.3, 0.1, 0.2, 0.1, True, "adamw", 1e-4, 1e-8),
    8: (0.001, 5.0, 0.4, 0.0, 0.0, 0.0, True, "adam", 0.0, 0.1),
    9: (0.001, 0.5, 0.4, 0.0, 0.0, 0.0, True, "adam", 0.0, 0.1),
    10: (0.001, 0.5, 0.4, 0.0, 0.0, 0.0, True, "adam", 0.0, 0.1),
    11: (0.0008, 1.5, 0.4, 0.0, 0.0, 0.0, True, "adamw", 1e-4, 1e-8),
    12: (0.02, 1.5, 0.4, 0.0, 0.8, 0.2, True, "adam", 1e-5, 1e-8),
    13: (0.01, 1.5, 0.4, 0.0, 0.3, 0.1, True, "adam", 1e-5, 1e-8),
}


@pytest.mark.parametrize("number", DOCUMENTED)
def test_documented_values(number: int) -> None:
    recipe = load_recipe(f"diary-run{number:02d}")
    layer, optimizer = recipe.front_end.session_layer, recipe.optimizer
    (decay,) = set(optimizer.weight_decay.model_dump().values())
    assert (
        *(recipe.schedule.peak_lr, recipe.train.clip_norm, recipe.encoder.dropout, layer.dropout),
        *(recipe.augment.white_noise_sd, recipe.augment.offset_sd, layer.layer_norm),
        *(optimizer.kind, decay, optimizer.eps),
    ) == DOCUMENTED[number]
    assert recipe.train.steps == 10_000
    assert recipe.loss.ctc.reduction == "mean_per_token"
    assert optimizer.absent_sessions == "decay"
    assert (recipe.front_end.patch.bins, recipe.front_end.patch.stride, recipe.encoder.width) == (32, 4, 1024)
    assert recipe.data.batching.batch_size == 64


def test_documented_precision_and_speed() -> None:
    recipes = {n: load_recipe(f"diary-run{n:02d}") for n in range(1, 14)}
    assert {n for n, r in recipes.items() if r.train.precision.kind == "bf16"} == {*range(2, 12)} - {8}
    assert {n for n, r in recipes.items() if r.train.precision.below_per == 0.5} == {9, 10, 11}
    assert {n for n, r in recipes.items() if r.runtime.compile and r.runtime.cudnn_benchmark} == {10, 11}
    assert {n for n, r in recipes.items() if r.data.workers == 4} == set(range(3, 14))


def test_documented_schedules() -> None:
    def rates(number: int, *steps: int) -> list[float]:
        recipe = load_recipe(f"diary-run{number:02d}")
        return [learning_rate(recipe.schedule, step, recipe.train.steps) for step in steps]

    assert rates(3, 0, 2500, 10_000) == pytest.approx([0.0, 0.005, 5e-4])
    assert rates(4, 0, 1000, 10_000) == pytest.approx([0.0, 0.002, 0.0008])
    assert rates(6, 0, 9999) == [0.0015, 0.0015]
    assert rates(13, 0, 999, 9999) == pytest.approx([0.0004, 0.01, 4e-7])
    plateau = load_recipe("diary-run11").schedule
    assert (plateau.kind, plateau.patience, plateau.factor, plateau.min_lr) == ("plateau", 8, 0.5, 1e-5)


def test_documented_masks_and_adaptive_rate() -> None:
    for number in (3, 4, 5, 6, 7):
        masks = load_recipe(f"diary-run{number:02d}").augment.time_masks
        assert (masks.n_masks, masks.probability, masks.max_bins) == (2, 0.10, 15)
    for number in (11, 12, 13):
        augment = load_recipe(f"diary-run{number:02d}").augment
        time, channels = augment.time_masks, augment.feature_masks
        assert (time.n_masks, time.probability, time.max_bins) == (2, 0.10, 40)
        assert (channels.n_masks, channels.probability, channels.max_channels) == (2, 0.10, 12)
    adaptive = load_recipe("diary-run07").guard.adaptive
    reductions = (adaptive.factor, adaptive.threshold, adaptive.min_lr, adaptive.max_reductions)
    assert reductions == (0.8, 10.0, 0.0005, 5)
    assert load_recipe("diary-run08").guard.adaptive.threshold is None


def test_official_exact_and_its_three_tests() -> None:
    exact, first, second, third = map(load_recipe, EXACT)
    assert diff_recipes(load_recipe("b2t25-gru"), exact) == []
    assert diff_recipes(load_recipe("b2t24-gru"), load_recipe("diary-run01")) == []
    assert (exact.optimizer.eps, exact.schedule.peak_lr, exact.schedule.warmup_steps) == (0.1, 0.005, 1000)
    assert (exact.augment.white_noise_sd, exact.augment.offset_sd) == (1.0, 0.2)
    assert (exact.data.batching.batch_size, exact.optimizer.fused) == (64, True)
    assert first.train.steps == second.train.steps == third.train.steps == 10_000
    assert (second.augment.white_noise_sd, second.augment.offset_sd) == (0.25, 0.05)
    assert (third.schedule.peak_lr, third.optimizer.session_lr_factor) == (0.002, 1.0)
    assert (third.augment.white_noise_sd, second.schedule.peak_lr) == (1.0, 0.005)


def test_attempts_of_the_reproduction() -> None:
    """Typed a second time from the diagnosis: its configuration, and eps in the three attempts."""
    full, *attempts = map(load_recipe, ATTEMPTS)
    assert (full.augment.white_noise_sd, full.augment.offset_sd) == (0.25, 0.05)
    assert full.optimizer.session_lr_factor == 1.0
    assert (full.schedule.peak_lr, full.schedule.warmup_steps) == (0.002, 2000)
    assert (full.data.batching.batch_size, full.optimizer.fused) == (48, False)
    assert [recipe.optimizer.eps for recipe in (full, *attempts)] == [0.1, 1e-8, 0.1, 0.1]
    official = {c.path for c in diff_recipes(load_recipe("b2t25-gru"), full)}
    assert not any(path.startswith(("train", "loss", "encoder", "front_end")) for path in official)
    assert diff_recipes(attempts[1], attempts[2]) == []


def test_run_11_validates_with_its_beam() -> None:
    searches = {n: load_recipe(f"diary-run{n:02d}").validate_ for n in range(1, 14)}
    assert [n for n, validate in searches.items() if validate.search == "beam"] == [11]
    assert searches[11].beam == 20
